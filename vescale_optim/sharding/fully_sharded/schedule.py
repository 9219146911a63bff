"""Schedule: what the wrapped modules under one root share.

It remembers the order of the last forward, so that the next module is gathered while one computes; lends memory; counts
the calls of a pass, so that a module's gradients leave as soon as the backward of its last one is through; and closes it.

    forward     gather 1 | compute 0        gather 2 | compute 1        ...
    backward    gather 1 | compute 2        reduce 2, gather 0 | compute 1        ...      (gloo: gather 1 after compute 2)
    end                                                                  agree who has gradients, publish `.grad`

Every decision to communicate depends on which modules ran, never on which parameters got a gradient on this rank, nor on
how long a rank keeps an output: all ranks make the same collectives in the same order, provided they run the same modules.
So every pass sends its gradients by itself, also where one backward goes through several.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.collectives import is_host_backend
from vescale_optim.sharding.fully_sharded.memory import BufferMemory
from vescale_optim.sharding.meshes import mesh_group

if TYPE_CHECKING:
    from vescale_optim.sharding.fully_sharded.group import ShardedGroup
    from vescale_optim.sharding.fully_sharded.module_state import ModuleState


class ForwardPass:
    """One forward from the outermost wrapped module; held by its autograd graph, and gone with it.

    Attributes:
        started, finished: modules in the order in which their calls began and ended.
        calls: of each module, those that a backward will go through.
    """

    def __init__(self) -> None:
        self.started: list[ModuleState] = []
        self.finished: list[ModuleState] = []
        self.calls: Counter[ModuleState] = Counter()


class Schedule:
    """Made for every wrapped module; wrapping a module that contains others gives all of them one.

    Args:
        mesh: (shard,) or (replicate, shard).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.memory = BufferMemory()
        self._agreement = Agreement(mesh_group(mesh), "end of a backward")
        # gloo moves data with the processor that computes: overlap saves little there, and every buffer more costs memory.
        # So a backward keeps two, parameters and gradients of one module; elsewhere four, those of the next in flight too.
        self.saves_memory = is_host_backend(mesh.get_group(mesh.ndim - 1), torch.device(mesh.device_type))
        # In the order of named_modules(). Weak: modules own their states, and these own the schedule.
        self._states: list[weakref.ref[ModuleState]] = []
        self._current: ForwardPass | None = None
        self._depth = 0
        self._last_order: list[weakref.ref[ModuleState]] = []
        self._tasks: list[int] = []
        self._reducing: deque[ShardedGroup] = deque()

    @property
    def states(self) -> list[ModuleState]:
        return [state for reference in self._states if (state := reference()) is not None]

    def set_states(self, states: list[ModuleState]) -> None:
        self._states = [weakref.ref(state) for state in states]
        self.memory.usual_bytes = max((g.gathered_bytes for state in states for g in state.groups), default=0)

    # -- forward -----------------------------------------------------------------------------------------------------

    def enter_forward(self, state: ModuleState) -> ForwardPass:
        """A module's forward begins; that of the outermost module begins a pass."""
        if not is_in_backward() and (self._depth == 0 or state.is_root):
            self._depth = 0
            if self._tasks:
                self.abandon()
        if self._depth == 0:
            self._current = ForwardPass()
        self._depth += 1
        self._current.started.append(state)
        return self._current

    def prefetch_following(self, forward: ForwardPass) -> None:
        """Gather the module that came next in the last pass."""
        here = len(forward.started) - 1
        if is_in_backward() or here + 1 >= len(self._last_order):
            return
        if self._last_order[here]() is forward.started[here]:
            following = self._last_order[here + 1]()
            if following is not None:
                following.start_gather()

    def leave_forward(self, state: ModuleState, forward: ForwardPass) -> bool:
        """A module's forward ended, perhaps by an exception. Returns whether it was the outermost."""
        self._depth = max(self._depth - 1, 0)
        forward.finished.append(state)
        if self._depth:
            return False
        self._current = None
        if not is_in_backward():
            self._last_order = [weakref.ref(state) for state in forward.started]
            for other in self.states:
                other.drop_unused_gather()
        return True

    # -- backward ----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Called by every hook inside backward, so that the end of this backward is noticed."""
        if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            raise RuntimeError(
                "compiled autograd never runs the end-of-backward callback that fully_shard needs; run backward without it"
            )
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._tasks:
            self._tasks.append(task)
            queue_callback = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(partial(_end_backward, weakref.ref(self), task))

    def make_room(self) -> None:
        """Wait for reductions under way, so that few global buffers are alive; one may stay where that costs no overlap."""
        most = 0 if self.saves_memory else 1
        while len(self._reducing) > most:
            self._reducing.popleft().finish_reduce()

    def make_room_for_large_gradient(self) -> None:
        """Autograd is about to allocate a gradient as large as a global buffer."""
        self.make_room()
        if self.saves_memory:
            self.memory.release()

    def take_gradient_buffer(self, group: ShardedGroup, dtype: torch.dtype) -> Tensor:
        """Memory for the gradients of a group."""
        self.make_room()
        return self.memory.take(group.plan.numel, dtype, group.shards.device)

    def start_reduce(self, group: ShardedGroup) -> None:
        group.start_reduce()
        self._reducing.append(group)

    def _finish_reduces(self) -> None:
        while self._reducing:
            self._reducing.popleft().finish_reduce()

    def end_backward(self, task: int) -> None:
        """Reentrant checkpoints run backwards inside others: the outermost one closes."""
        if task in self._tasks:
            self._tasks.remove(task)
            if not self._tasks:
                self._close_backward()

    def _close_backward(self) -> None:
        """Send what has not left yet, agree who has gradients, and publish the means."""
        synced = [state for state in self.states if state.syncs_gradients]
        groups = [(state, group) for state in synced for group in state.groups if group.is_trained]
        for state, group in groups:
            if state.is_touched and not group.is_launched:
                self.start_reduce(group)
        self._finish_reduces()
        if groups:
            self._reduce_late([group for _, group in groups])
            complete = [g for state, g in groups if g.holds_means and (self.mesh.ndim == 1 or state.averages_replicas)]
            self._publish(complete)
        for state in self.states:
            state.end_backward()

    def _reduce_late(self, groups: list[ShardedGroup]) -> None:
        """Agree who has gradients, and send what came after its group had left, on any rank: gradients of parameters that
        are used outside of their module, or in several reentrant checkpoints."""
        late = [int(group.local is not None) for group in groups]
        present = [int(flag) for group in groups for flag in group.present]
        agreed = self._agreement.maximum(late + present)
        flags = iter(agreed[len(late) :])
        for group, is_late in zip(groups, agreed, strict=False):
            group.present = [bool(next(flags)) for _ in group.present]
            if is_late:
                self.start_reduce(group)
        self._finish_reduces()

    def _publish(self, groups: list[ShardedGroup]) -> None:
        if self.mesh.ndim == 2:
            replicas = self.mesh.get_group(0)
            pending = [handle for group in groups for handle in group.start_average_over_replicas(replicas)]
            for handle in pending:
                handle.wait()
        for group in groups:
            group.publish()

    def abandon(self) -> None:
        """A backward raised: its gradients are incomplete, and so are those of earlier micro-batches they were added to."""
        self._tasks.clear()
        self._reducing.clear()
        for state in self.states:
            for group in state.groups:
                group.drop_gradients()
            state.end_backward()
            state.reshard()

    def reset(self) -> None:
        """Before anything but forward and backward: an iteration that failed leaves nothing behind."""
        if self._tasks and not is_in_backward():
            self.abandon()


def is_in_backward() -> bool:
    """Whether this thread runs inside of autograd's backward, as recomputations do."""
    return torch._C._current_graph_task_id() != -1


def _end_backward(reference: weakref.ref[Schedule], task: int) -> None:
    schedule = reference()
    if schedule is not None:
        schedule.end_backward(task)
