"""GradientReduction: from autograd's local gradients to the shards of their mean, during backward.

Hooks copy each finished gradient into its bucket's global buffer and free it; a bucket that is complete leaves in an
asynchronous reduce-scatter. Afterwards `p.grad` is a RaggedTensor over the shard, which waits on its first read.

    backward          A A A | B B | C C C          buckets in the order of backward, one fixed launch order on all ranks
    reduce-scatter          |==A==|==B==|==C==|    on a private group, overlapped with the rest of backward
    end of backward                      ^ buckets with missing gradients leave too, zeros for what is missing
    first read, or step()                      ^ flush: agree, wait, add into the shards

Between two flushes at most one *round* (one reduce-scatter of every bucket) is launched during backward, by the first
backward that synchronises. What comes later (further micro-batches, a second firing of a tied weight, a backward under
`no_sync`) is added up locally, the *rest*, and leaves in the flush. So no hook ever waits for another rank, at most two
global buffers per bucket are alive, ranks may run different numbers of backwards, and sums do not depend on timing.

The flush agrees with one small maximum over ranks: whether a round was launched anywhere, whether any rank holds a
rest, who has gradients, whether a backward failed. Ranks whose backward touched nothing join with zeros.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.dbuffer import view_in_full
from vescale_optim.sharding.eager import eager
from vescale_optim.sharding.gradient_bucket import GradientBucket
from vescale_optim.sharding.live_modules import DDP_MESSAGE, is_wrapped_by_ddp
from vescale_optim.sharding.ragged import RaggedTensor


class FlushKind(enum.IntEnum):
    """What asked for the flush; ranks that disagree would wait for each other in different collectives."""

    READ = 1
    STEP = 2


class Outlook(NamedTuple):
    """What a rank has to say in a flush; the ranks' maximum decides how all go on.

    Attributes:
        has_round: a round was launched during backward, so every rank must take part in it.
        keeps_round, drops_round: its gradients are wanted, or zero_grad() came after the launch.
        has_rest: gradients came for buckets that had left already.
        has_unsent: gradients wait in buckets that have not left.
        has_failed: a backward raised.
        has_fault: the user did something that cannot be followed.
        largest_kind, negated_smallest_kind: `FlushKind`, and its negative, to see whether the ranks agree.
    """

    has_round: int
    keeps_round: int
    drops_round: int
    has_rest: int
    has_unsent: int
    has_failed: int
    has_fault: int
    largest_kind: int
    negated_smallest_kind: int


class GradientReduction:
    """Hooks, rounds and flushes over a growing list of buckets.

    Args:
        agreement: control channel of the ranks.
        find_fault: says what became of the parameters that makes their gradients useless, or None; `checks_hooks` is
            False inside a read, where autograd cannot be asked.
    """

    def __init__(self, agreement: Agreement, find_fault: Callable[..., str | None]) -> None:
        self.buckets: list[GradientBucket] = []
        self._agreement = agreement
        # Weak: hooks must not keep the optimizer that owns them alive.
        self._find_fault = weakref.WeakMethod(find_fault)
        self._pool = BufferPool()
        self._tasks: list[int] = []
        self._is_retired = False
        self._is_synchronizing = True
        self._is_pending = False
        self._has_failed = False
        self._keeps_round = False
        self._is_flushing = False
        self._num_launched = 0
        self._has_checked_ddp = False
        self._nodes: list[object] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        weakref.finalize(self, _remove_handles, self._handles)

    # -- construction ------------------------------------------------------------------------------------------------

    def add_bucket(self, bucket: GradientBucket) -> None:
        """Take charge of a bucket: hook its parameters and take in the local gradients they already have."""
        index = len(self.buckets)
        self.buckets.append(bucket)
        for slot, param in enumerate(bucket.params):
            earlier = _owners.get(param)
            if earlier is not None and earlier() is not None:
                earlier().retire()
            _owners[param] = weakref.ref(self)
            grad, param.grad = param.grad, None
            param.grad_dtype = bucket.shards.dtype
            # A sharded gradient belongs to an optimizer before this one.
            if grad is not None and not isinstance(grad, RaggedTensor):
                self._write(bucket, slot, grad)
                self._is_pending = True
            self._hook(param, index, slot)
        self._arm(bucket)

    def retire(self) -> None:
        """Another optimizer takes the parameters over: two would take each other's gradients away."""
        self._is_retired = True
        _remove_handles(self._handles)
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is view:
                    param.grad = None

    def _hook(self, param: nn.Parameter, bucket: int, slot: int) -> None:
        # A pre-hook on the tensor would also fire under torch.autograd.grad. The node must be kept alive: a node that
        # nobody holds is made anew, without the hook.
        node = torch.autograd.graph.get_gradient_edge(param).node
        self._nodes.append(node)
        before = partial(eager(_before_accumulation), weakref.ref(self), bucket, slot)
        after = partial(eager(_after_accumulation), weakref.ref(self), bucket, slot)
        self._handles.append(node.register_prehook(before))
        self._handles.append(param.register_post_accumulate_grad_hook(after))

    def has_lost_hooks(self, bucket: int, slot: int) -> bool:
        """Whether autograd replaced the parameter's accumulation node (`param.data = other dtype` does)."""
        position = sum(len(earlier.params) for earlier in self.buckets[:bucket]) + slot
        param = self.buckets[bucket].params[slot]
        return torch.autograd.graph.get_gradient_edge(param).node is not self._nodes[position]

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _before_accumulation(self, index: int, slot: int) -> None:
        """Make room for autograd: a shard is no place to accumulate a whole local gradient into."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if not self._tasks:
                self._follow_zero_grad()
            self._tasks.append(task)
            queue_callback = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(partial(_end_backward, weakref.ref(self), task))
        self._is_pending = True
        bucket = self.buckets[index]
        self._take_in_grad(bucket, slot)
        bucket.params[slot].grad = None
        bucket.is_published[slot] = False

    def _after_accumulation(self, index: int, slot: int) -> None:
        if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            raise RuntimeError(
                "compiled autograd never runs the end-of-backward callback that gradient reduction needs; "
                "run backward without it, or synchronise gradients yourself and pass grad_sync='none'"
            )
        bucket = self.buckets[index]
        param = bucket.params[slot]
        # A custom Function may return no gradient: the hooks fire all the same.
        if param.grad is not None:
            self._write(bucket, slot, param.grad.detach())
            param.grad = None
        bucket.fired[slot] = True
        if self._is_synchronizing:
            while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].is_complete():
                self._launch_next()

    def _write(self, bucket: GradientBucket, slot: int, grad: Tensor) -> None:
        """Add a local gradient to the bucket's global buffer."""
        plan = bucket.shards.plan
        if bucket.full is None:
            bucket.full = self._take_buffer(bucket)
        view = view_in_full(bucket.full, plan, slot, grad.shape)
        dense = grad.to_dense() if grad.layout != torch.strided else grad
        if bucket.written[slot]:
            bucket.add(view, dense)
        else:
            bucket.put(view, dense)
        bucket.written[slot] = True
        bucket.present[slot] = True

    def _finish_backward(self, task: int) -> None:
        """The end of one backward. Reentrant checkpoints run backwards inside others: the outermost one closes the round.

        A backward that raised never ends: its task stays, and the flush or `zero_grad` takes notice.
        """
        self._tasks.remove(task)
        if not self._tasks:
            if self._is_synchronizing:
                self._close_round()
            else:
                self._reset_fired()
        for bucket in self.buckets:
            self._arm(bucket)

    def _abandon_backward(self) -> None:
        """A backward ended with an exception: peers may wait for its buckets, and its gradients are incomplete."""
        self._tasks.clear()
        self._has_failed = True
        self._close_round()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _launch_next(self) -> None:
        bucket = self.buckets[self._num_launched]
        self._launch(bucket)
        bucket.is_launched = True
        self._num_launched += 1
        self._keeps_round = True
        # Where waiting only orders streams, the buffer of the bucket before the last is free for the next one.
        if self._num_launched > 2:
            earlier = self.buckets[self._num_launched - 3]
            if all(not pending.blocks_host for pending in earlier.pending):
                self._collect(earlier)

    def _launch(self, bucket: GradientBucket) -> None:
        """Reduce-scatter what the bucket holds, zeros for what is missing."""
        plan = bucket.shards.plan
        full, written = bucket.full, bucket.written
        bucket.full, bucket.written = None, [False] * len(bucket.params)
        if full is None:
            full = self._take_buffer(bucket)
        for slot, is_written in enumerate(written):
            if not is_written:
                full.narrow(0, plan.offsets[slot], plan.tensors[slot].numel).zero_()
        for start, end in plan.gaps():
            full[start:end].zero_()
        bucket.in_flight = full
        bucket.adds = bucket.holds_sum
        bucket.pending = bucket.shards.reduce_scatter_mean(
            full, self._pool, add=bucket.adds, is_divided=bucket.factor is not None
        )
        bucket.holds_sum = True

    def _close_round(self) -> None:
        while self._num_launched < len(self.buckets):
            self._launch_next()
        self._reset_fired()

    def _reset_fired(self) -> None:
        for bucket in self.buckets:
            bucket.fired = [False] * len(bucket.params)

    def _collect(self, bucket: GradientBucket) -> None:
        pending, bucket.pending = bucket.pending, []
        for handle in pending:
            handle.wait()
        if bucket.in_flight is not None:
            self._give_buffer(bucket, bucket.in_flight)
            bucket.in_flight = None
        for slot in bucket.dropped:
            bucket.shards.shard_view(slot).zero_()
        bucket.dropped.clear()

    def _take_buffer(self, bucket: GradientBucket) -> Tensor:
        """A global buffer: the bucket's own, whose shards then receive the mean in place, or one of the pool."""
        shards = bucket.shards
        if shards.full is not None and not bucket.holds_sum and not bucket.pending:
            return shards.full
        return self._pool.take(shards.plan.numel, shards.dtype, shards.device)

    def _give_buffer(self, bucket: GradientBucket, buffer: Tensor) -> None:
        if buffer is not bucket.shards.full:
            self._pool.give(buffer)

    # -- flush -------------------------------------------------------------------------------------------------------

    def before_read(self) -> None:
        """Called by the gradients themselves before anyone reads or edits them."""
        if self._is_flushing:
            return
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "gradients were read while backward runs; the sharded mean exists after it (a tensor hook, "
                "`param.register_hook`, sees this rank's local gradient)"
            )
        if self._is_pending:
            self.flush(FlushKind.READ)

    def flush(self, kind: FlushKind, facts: Sequence[int] = (), fault: str | None = None) -> list[int]:
        """Make every rank's gradients complete and known to all.

        Args:
            kind: what asks.
            facts: `NUM_STEP_FACTS` further integers of a step; the maximum over ranks of each is returned.
            fault: what the caller found wrong on this rank; raised on every rank.

        Returns:
            The maximum over ranks of `facts`.

        Raises:
            RuntimeError: on all ranks, where one reports a fault, where a backward failed on one (all gradients are
                dropped), or where some ranks read gradients while others step.
        """
        if self._is_retired:
            raise RuntimeError(
                "a later optimizer was made over the same parameters and took their gradients over; use that one, or give "
                "each optimizer parameters of its own"
            )
        self._is_flushing = True
        try:
            return self._flush(kind, facts, fault)
        finally:
            self._is_flushing = False

    def _flush(self, kind: FlushKind, facts: Sequence[int], fault: str | None) -> list[int]:
        if self._tasks:
            self._abandon_backward()
        find_fault = self._find_fault()
        fault = fault or find_fault(checks_hooks=kind == FlushKind.STEP) or self._look_for_fault()
        mine = Outlook(
            has_round=self._num_launched > 0,
            keeps_round=self._keeps_round,
            drops_round=self._num_launched > 0 and not self._keeps_round,
            has_rest=any(bucket.full is not None and bucket.is_launched for bucket in self.buckets),
            has_unsent=any(bucket.full is not None and not bucket.is_launched for bucket in self.buckets),
            has_failed=self._has_failed,
            has_fault=fault is not None,
            largest_kind=kind,
            negated_smallest_kind=-kind,
        )
        present = [flag for bucket in self.buckets for flag in bucket.present]
        # A reader has no facts; padding keeps the messages of readers and steppers equally long.
        facts = list(facts) or [0] * NUM_STEP_FACTS
        wait = self._agreement.start_maximum([int(value) for value in (*mine, *present, *facts)])
        if mine.keeps_round and not mine.has_unsent:
            # Peers get this rank's message whether it waits or not, so its own round can be completed meanwhile. If a
            # peer dropped the round, a result that nothing was added to is simply overwritten.
            for bucket in self.buckets:
                if not bucket.adds:
                    self._collect(bucket)
        agreed = iter(wait())
        outlook = Outlook(*islice(agreed, len(mine)))
        self._complete(outlook)
        present = iter(list(islice(agreed, len(present))))
        self._start_stretch()
        for bucket in self.buckets:
            bucket.present = [bool(next(present)) for _ in bucket.params]
            if not bucket.holds_sum:
                bucket.shards.zero_()
                bucket.holds_sum = True
            self._publish(bucket, keeps_zeros=kind == FlushKind.READ)
        self._remember_seen()
        if outlook.has_fault:
            self._agreement.raise_fault(fault)
        if outlook.drops_round and outlook.keeps_round:
            self.clear()
            raise RuntimeError(
                "gradients from before and after zero_grad() met: one rank ran its first backward only after the ranks had "
                "cleared those of another; all ranks dropped them, parameters and state are untouched: repeat the iteration"
            )
        if outlook.has_failed and outlook.keeps_round:
            self.clear()
            raise RuntimeError(
                "backward raised on at least one rank, so the gradients are incomplete; all ranks dropped them, "
                "parameters and state are untouched: repeat the iteration"
            )
        if outlook.largest_kind != -outlook.negated_smallest_kind:
            raise RuntimeError(
                "some ranks read gradients (clipping, logging, GradScaler) while others called step(); every rank must "
                "run the same loop: read gradients on all ranks or none, and clear them with optimizer.zero_grad(), "
                "which keeps a rank whose backward touches no parameter in step with the others"
            )
        return list(agreed)

    def _complete(self, outlook: Outlook) -> None:
        """Send what is still to be sent, in the same order on every rank, and wait for everything."""
        needs_rest = outlook.has_rest
        if outlook.has_round and outlook.drops_round:
            # The round was forgotten by zero_grad() after it had left: ranks still in it finish it with zeros.
            held = [(bucket.full, bucket.written) for bucket in self.buckets]
            for bucket in self.buckets:
                if not bucket.is_launched:
                    bucket.full, bucket.written = None, [False] * len(bucket.params)
            self._close_round()
            for bucket, (full, written) in zip(self.buckets, held, strict=True):
                bucket.full, bucket.written = full, written
                for handle in bucket.pending:
                    handle.drop_result()
                bucket.holds_sum = False
            needs_rest = needs_rest or outlook.has_unsent
        elif outlook.has_round:
            self._close_round()
        else:
            needs_rest = needs_rest or outlook.has_unsent
        for bucket in self.buckets:
            self._collect(bucket)
        if needs_rest:
            for bucket in self.buckets:
                self._launch(bucket)
            for bucket in self.buckets:
                self._collect(bucket)

    def _look_for_fault(self) -> str | None:
        """Follow what the user did to the gradients; what cannot be followed is told to every rank."""
        if not self._has_checked_ddp:
            self._has_checked_ddp = True
            if is_wrapped_by_ddp([param for bucket in self.buckets for param in bucket.params]):
                return DDP_MESSAGE
        try:
            self._follow_zero_grad()
            for bucket in self.buckets:
                for slot in range(len(bucket.params)):
                    self._take_in_grad(bucket, slot)
                    self._notice_filled_zeros(bucket, slot)
        except RuntimeError as error:
            return str(error)
        return None

    def _start_stretch(self) -> None:
        """Nothing is under way any more."""
        self._num_launched = 0
        self._is_pending = self._has_failed = self._keeps_round = False
        for bucket in self.buckets:
            bucket.is_launched = False

    def _remember_seen(self) -> None:
        if not any(any(bucket.present) for bucket in self.buckets):
            return
        for bucket in self.buckets:
            seen = bucket.seen or [False] * len(bucket.params)
            bucket.seen = [a or b for a, b in zip(seen, bucket.present, strict=True)]

    def _follow_zero_grad(self) -> None:
        """`model.zero_grad()` sets every `p.grad` to None without telling us: then everything is to be forgotten."""
        published = [
            param.grad
            for bucket in self.buckets
            for param, is_published in zip(bucket.params, bucket.is_published, strict=True)
            if is_published
        ]
        if published and all(grad is None for grad in published):
            self._forget()

    def _take_in_grad(self, bucket: GradientBucket, slot: int) -> None:
        """Follow what the user did to `p.grad` since it was published: dropped, replaced, or left alone."""
        grad, view = bucket.params[slot].grad, bucket.views[slot]
        if grad is view or (grad is None and not bucket.is_published[slot]):
            return
        if grad is None:
            self._clear_range(bucket, slot)
        elif isinstance(grad, RaggedTensor) and grad.shape == view.shape and grad.placements == view.placements:
            # p.grad = p.grad * 2 and the like. After zero_grad() the shards hold nothing yet.
            if not bucket.holds_sum and bucket.full is None and not bucket.pending:
                bucket.shards.zero_()
                bucket.holds_sum = True
            bucket.shards.shard_view(slot).copy_(grad._local_tensor)
            bucket.present[slot] = True
            bucket.params[slot].grad = view
            bucket.is_published[slot] = True
        else:
            raise RuntimeError(
                f"parameter '{bucket.names[slot]}' of shape {tuple(view.shape)} was given a plain .grad, which is "
                "neither this rank's contribution nor the mean; let loss.backward() produce it, edit the sharded .grad "
                "in place, or synchronise gradients yourself and pass grad_sync='none'"
            )

    def _notice_filled_zeros(self, bucket: GradientBucket, slot: int) -> None:
        """A zero gradient that a reader kept, and that was written to since (p.grad.copy_(...)), is a gradient."""
        is_zero_view = bucket.is_published[slot] and not bucket.present[slot] and bucket.holds_sum
        if is_zero_view and not bucket.pending and bool(bucket.shards.shard_view(slot).any()):
            bucket.present[slot] = True

    def _clear_range(self, bucket: GradientBucket, slot: int) -> None:
        bucket.shards.shard_view(slot).zero_()
        bucket.present[slot] = bucket.is_published[slot] = bucket.written[slot] = False
        if bucket.pending:
            bucket.dropped.add(slot)

    def _publish(self, bucket: GradientBucket, *, keeps_zeros: bool) -> None:
        """After a flush: `p.grad` is its shard where any rank has a gradient; elsewhere None.

        A reader keeps the zero gradients: it holds them already, and `module.to()` insists that reading one leaves it.
        """
        for slot, param in enumerate(bucket.params):
            self._set_grad(bucket, slot, param, keeps_zeros or bucket.present[slot])

    def _arm(self, bucket: GradientBucket) -> None:
        """Before a flush: every `p.grad` is its shard, whose first read flushes; also on ranks without a gradient."""
        self._is_pending = True
        for slot, param in enumerate(bucket.params):
            self._set_grad(bucket, slot, param, True)

    def _set_grad(self, bucket: GradientBucket, slot: int, param: nn.Parameter, is_published: bool) -> None:
        view = bucket.views[slot]
        if not is_published:
            param.grad = None
        elif param.grad is not view and param.grad_dtype in (None, view.dtype):
            # Another dtype: module.to(dtype) reads the gradient in the middle of its conversion; the next step reports.
            param.grad = view
        bucket.is_published[slot] = param.grad is view

    # -- the optimizer's side ----------------------------------------------------------------------------------------

    def clear(self, *, set_to_none: bool = True) -> None:
        """`zero_grad`: forget gradients, those under way included. Nothing is waited for."""
        if self._tasks:
            self._abandon_backward()
        present = [bucket.present for bucket in self.buckets]
        self._forget()
        for bucket, flags in zip(self.buckets, present, strict=True):
            if not set_to_none:
                bucket.present = flags
            self._arm(bucket)

    def _forget(self) -> None:
        self._keeps_round = False
        for bucket in self.buckets:
            for handle in bucket.pending:
                handle.drop_result()
            if bucket.full is not None:
                self._give_buffer(bucket, bucket.full)
                bucket.full = None
            bucket.written = [False] * len(bucket.params)
            bucket.present = [False] * len(bucket.params)
            bucket.is_published = [False] * len(bucket.params)
            bucket.holds_sum = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up locally; the first backward outside, or `step()`, communicates."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before


NUM_STEP_FACTS = 4

# Which reduction has its hooks on a parameter.
_owners = WeakTensorKeyDictionary()


def _before_accumulation(
    reference: Callable[[], GradientReduction | None], bucket: int, slot: int, *_: object
) -> None:
    reduction = reference()
    if reduction is not None:
        reduction._before_accumulation(bucket, slot)


def _after_accumulation(
    reference: Callable[[], GradientReduction | None], bucket: int, slot: int, _: Tensor
) -> None:
    reduction = reference()
    if reduction is not None:
        reduction._after_accumulation(bucket, slot)


def _end_backward(reference: Callable[[], GradientReduction | None], task: int) -> None:
    reduction = reference()
    if reduction is not None and task in reduction._tasks:
        reduction._finish_backward(task)


def _remove_handles(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
