"""ShardedGroup: the parameters of a wrapped module that travel together, on their way out and back.

    shards     | this rank's shard |  --copy, cast-->  whole | shard 0 | shard 1 | ..  --all-gather in place-->  parameters
    gradients  | this rank's shard |  <--reduce-scatter--  local gradients, one global buffer  <--a hook--  autograd
               |    of the mean    |

`shards` stay; the two global buffers borrow memory for as long as they are in use. What others see, the optimizer among
them, are RaggedTensors over `shards`, with RaggedTensors over `gradients` as their `.grad`. These alone hold the memory of
the gradients from the end of backward on: where the user drops them, none is alive in the next forward.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate

from vescale_optim.sharding.collectives import GroupReference, Pending
from vescale_optim.sharding.dbuffer import DBuffer, view_in_full
from vescale_optim.sharding.eager import eager
from vescale_optim.sharding.fully_sharded.layout import ShardLayout
from vescale_optim.sharding.fully_sharded.slots import ParameterSlot
from vescale_optim.sharding.ragged import RaggedTensor
from vescale_optim.sharding.ragged_layout import RaggedShard

if TYPE_CHECKING:
    from vescale_optim.sharding.fully_sharded.schedule import Schedule


class Form(enum.Enum):
    """What the modules hold: shards, shards while a gather is under way, or whole parameters."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    WHOLE = enum.auto()


class ShardedGroup:
    """One plan, its shards, and the two global buffers.

    Args:
        slots: parameters of one dtype, in the order of the plan.
        layout: where they lie.
        mesh: (shard,) or (replicate, shard).
        group: the ranks along the shard axis, for collectives inside forward and backward.
        device: where the shards live; parameters on the meta device stay there until the module is materialised.
        policy: dtypes of gathered parameters and of gradients on their way.
        schedule: lends memory, and says when to communicate.

    Attributes:
        form: what the modules hold.
        local: global buffer of this rank's gradients; None while there are none.
        present: which parameters have a gradient that is not published yet; after the end of backward, on any rank.
        gradients: shards that a reduction writes; None once they are published.
        holds_means: a reduction wrote gradient shards that are not published yet.
        is_launched: the group took part in this backward's reductions.
    """

    group = GroupReference()

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        layout: ShardLayout,
        mesh: DeviceMesh,
        group: ProcessGroup,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        schedule: Schedule,
    ) -> None:
        self.slots = list(slots)
        self.layout = layout
        self.plan = layout.plan
        self.mesh = mesh
        self.group = group
        self.policy = policy
        self.schedule = schedule
        self._accumulates = self._adds_up = False
        params = [slot.sharded for slot in self.slots]
        self._shard(params, params[0].device if params[0].is_meta else device)

    # -- shards ------------------------------------------------------------------------------------------------------

    def _shard(self, params: Sequence[nn.Parameter], device: torch.device) -> None:
        """Copy the parameters, whole or sharded, into new shards, and register RaggedTensors over these.

        A parameter that is sharded already stays the same object: optimizers refer to it.
        """
        self.form = Form.SHARDED
        self.shards = DBuffer(self.plan, self.group, params[0].dtype, device)
        self.whole: DBuffer | None = None
        self._arriving: DBuffer | None = None
        self._gathering: list[Pending] = []
        self.forget_gradients()
        for index, (slot, param) in enumerate(zip(self.slots, params, strict=True)):
            local = self.shards.shard_view(index)
            ragged = self._ragged(index, local)
            if not param.is_meta:
                extent = self.plan.extent(index, self.shards.rank)
                is_sharded = isinstance(param, RaggedTensor)
                flat = param.detach()._local_tensor if is_sharded else param.detach().reshape(-1)
                local.copy_(flat if is_sharded else flat.narrow(0, extent.start, extent.numel))
            if isinstance(param, RaggedTensor):
                param.data = ragged
                slot.sharded = param
            else:
                slot.sharded = nn.Parameter(ragged, requires_grad=param.requires_grad)
            slot.whole, slot.is_hooked = None, False
            slot.register(slot.sharded)

    def _ragged(self, index: int, local: Tensor) -> RaggedTensor:
        return RaggedTensor.from_local(local, self.mesh, self.placements(index), self.slots[index].shape)

    def placements(self, index: int) -> tuple[Placement, ...]:
        """Placement of one parameter on the mesh."""
        shard = RaggedShard.from_numels(self.slots[index].shape, self.plan.shares(index))
        return (Replicate(),) * (self.mesh.ndim - 1) + (shard,)

    def follow_replaced(self) -> None:
        """After `to()`, `to_empty()` and `load_state_dict(assign=True)`: bring parameters that left the shards back."""
        current = [slot.registered() for slot in self.slots]
        if not all(self._is_ours(index, param) for index, param in enumerate(current)):
            self._shard(current, current[0].device)

    def _is_ours(self, index: int, param: nn.Parameter) -> bool:
        local, view = getattr(param, "_local_tensor", None), self.shards.shard_view(index)
        return (
            param is self.slots[index].sharded
            and local is not None
            and (local.device, local.dtype, local.data_ptr()) == (view.device, view.dtype, view.data_ptr())
        )

    # -- parameters --------------------------------------------------------------------------------------------------

    @property
    def gathered_dtype(self) -> torch.dtype:
        wanted = self.policy.param_dtype
        return wanted if wanted is not None and self.shards.dtype.is_floating_point else self.shards.dtype

    @property
    def gathered_bytes(self) -> int:
        return self.plan.numel * self.gathered_dtype.itemsize

    @property
    def has_large_gradient(self) -> bool:
        """Whether one gradient alone takes about as much memory as the global buffer."""
        return any(2 * slot.shape.numel() > self.plan.numel for slot in self.slots if slot.sharded.requires_grad)

    @property
    def is_trained(self) -> bool:
        return any(slot.sharded.requires_grad for slot in self.slots)

    def start_gather(self) -> None:
        """Launch the all-gather of the parameters; nothing happens where they are whole or on their way."""
        if self.form is not Form.SHARDED:
            return
        if self.shards.device.type == "meta":
            raise RuntimeError(
                f"parameter '{self.slots[0].name}' is on the meta device; materialise the module with "
                "to_empty(device=...) and initialise or load its parameters before the first forward"
            )
        with torch.inference_mode(False), torch.no_grad():
            if self.whole is None:
                self._make_whole()
            self.schedule.memory.lend(self._arriving.full)
            self._arriving.copy_(self.shards)
            self._gathering = self._arriving.all_gather()
        self.form = Form.GATHERING

    def finish_gather(self) -> None:
        """Wait for the parameters and let the modules see them."""
        if self.form is not Form.GATHERING:
            return
        self._wait_for_gather()
        self.schedule.memory.hand_over(self._arriving.full, self.whole.full)
        for index, slot in enumerate(self.slots):
            self._follow_requires_grad(index)
            slot.register(slot.whole)
        self.form = Form.WHOLE

    def reshard(self) -> None:
        """Register the shards again and give the global buffer's memory back."""
        if self.form is Form.SHARDED:
            return
        self._wait_for_gather()
        lent = self._arriving
        if self.form is Form.WHOLE:
            lent = self.whole
            for slot in self.slots:
                slot.register(slot.sharded)
        self.form = Form.SHARDED
        self.schedule.memory.reclaim(lent.full)

    def is_over_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the global buffer of the parameters."""
        return self.whole is not None and tensor.untyped_storage()._cdata == self.whole.full.untyped_storage()._cdata

    def _wait_for_gather(self) -> None:
        pending, self._gathering = self._gathering, []
        for handle in pending:
            handle.wait()

    def _make_whole(self) -> None:
        """The global buffer, without memory, and the parameters over it; made once, since autograd keeps views of them.

        A gather fills another one, whose memory the first then gets: what reads parameters too early, a backward that
        fully_shard knows nothing of, finds none and raises, instead of computing with half of them.
        """
        self.whole, self._arriving = self._make_global(), self._make_global()
        for index, slot in enumerate(self.slots):
            # .data: a version counter of its own. Gathering again is no edit of what forward saved.
            slot.whole = nn.Parameter(self.whole.full_view(index, slot.shape).data, requires_grad=False)
        self.whole.free_full()
        self._arriving.free_full()

    def _make_global(self) -> DBuffer:
        return DBuffer(self.plan, self.group, self.gathered_dtype, self.shards.device, with_full=True)

    def _follow_requires_grad(self, index: int) -> None:
        slot = self.slots[index]
        if slot.whole.requires_grad != slot.sharded.requires_grad:
            slot.whole.requires_grad_(slot.sharded.requires_grad)
        if slot.whole.requires_grad and not slot.is_hooked:
            slot.is_hooked = True
            hook = partial(eager(_take_gradient), weakref.ref(self), index)
            slot.whole.register_post_accumulate_grad_hook(hook)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop what is not published yet; what is under way must have been waited for."""
        self.local: Tensor | None = None
        self._borrowed: Tensor | None = None
        self._written = [False] * len(self.slots)
        self.present = [False] * len(self.slots)
        self._in_flight: Tensor | None = None
        self._reducing: list[Pending] = []
        self.gradients: DBuffer | None = None
        self.holds_means = False
        self.is_launched = False

    @property
    def accumulates(self) -> bool:
        """Whether this rank's gradients stay here for now, and further backwards add to them."""
        return self._accumulates

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        self._accumulates = value
        self._adds_up = self._adds_up or value

    @property
    def _wire_dtype(self) -> torch.dtype:
        """What gradients travel in, the same on all ranks whatever they have.

        Gradients of one backward travel in the dtype they have, for they are summed in fp32 or wider anyway; sums of several
        backwards are in `reduce_dtype`.
        """
        wide = self.policy.reduce_dtype or self.gathered_dtype
        is_narrow = torch.promote_types(wide, self.gathered_dtype) == wide and not self._adds_up
        return self.gathered_dtype if is_narrow else wide

    def take_gradient(self, index: int) -> None:
        """Move what autograd left in the whole parameter's `.grad` into the global gradient buffer."""
        param = self.slots[index].whole
        grad, param.grad = param.grad, None
        self.schedule.enter_backward()
        if grad is None:  # a custom Function may return no gradient: the hook fires all the same
            return
        grad = grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()
        was_written, self._written[index] = self._written[index], True
        self.present[index] = True
        if self.local is None:
            if self._is_whole_buffer(grad):
                self.local = grad.view(-1)
                return
            self.local = self._borrowed = self.schedule.take_gradient_buffer(self, self._wire_dtype)
        elif was_written:
            self._convert_local(self.policy.reduce_dtype or self.gathered_dtype)
        view = view_in_full(self.local, self.plan, index, grad.shape)
        if was_written:
            view.add_(grad)
        else:
            view.copy_(grad)

    def _is_whole_buffer(self, grad: Tensor) -> bool:
        """Whether a gradient can be the global buffer itself: of the only parameter, without padding, and ours alone."""
        is_ours = not torch.is_grad_enabled()  # with create_graph=True the graph refers to it
        is_all = grad.numel() == self.plan.numel and grad.is_contiguous() and grad.dtype == self._wire_dtype
        return is_ours and is_all

    def _convert_local(self, dtype: torch.dtype) -> None:
        """Go on in another dtype: sums in the wide one, the wire in its own."""
        if self.local.dtype == dtype:
            return
        before, borrowed = self.local, self._borrowed
        self.local = self._borrowed = self.schedule.take_gradient_buffer(self, dtype)
        self.local.copy_(before)
        if borrowed is not None:
            self.schedule.memory.give(borrowed)

    def start_reduce(self) -> None:
        """Launch the reduce-scatter of what this rank has, zeros for what is missing."""
        self.finish_reduce()
        if self.local is None:
            self.local = self._borrowed = self.schedule.take_gradient_buffer(self, self._wire_dtype)
        self._convert_local(self._wire_dtype)
        self._adds_up = False
        buffer = self.local
        for index, is_written in enumerate(self._written):
            if not is_written:
                buffer.narrow(0, self.plan.offsets[index], self.plan.tensors[index].numel).zero_()
        for start, end in self.plan.gaps():
            buffer[start:end].zero_()
        self.is_launched = True
        adds = self._prepare_gradients()
        self.holds_means = True
        self._in_flight, self.local, self._borrowed = self._borrowed, None, None
        self._written = [False] * len(self.slots)
        self._reducing = self.gradients.reduce_scatter_mean(buffer, self.schedule.memory, add=adds)

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter under way, if any."""
        pending, self._reducing = self._reducing, []
        for handle in pending:
            handle.wait()
        if self._in_flight is not None:
            self.schedule.memory.give(self._in_flight)
            self._in_flight = None

    def _prepare_gradients(self) -> bool:
        """Have gradient shards; returns whether the mean is added to what they hold: to all gradients that the user kept.

        Otherwise the mean lies apart until `publish` brings it to the gradients, wherever they are by then.
        """
        if self.holds_means:
            return True
        kept = self._kept_shards()
        self.gradients = self.shards.over(torch.empty_like(self.shards.local) if kept is None else kept)
        return kept is not None

    def _kept_shards(self) -> Tensor | None:
        """The buffer of gradient shards in which every parameter has its `.grad` still; None without one.

        Where one gradient is missing, its place is not free: whoever took it may read it still.
        """
        places = [index for index in range(len(self.slots)) if self.shards.shard_view(index).numel()]
        grads = [self.slots[index].sharded.grad for index in places]
        if not grads or not all(self._is_gradient_shard(index, grad) for index, grad in zip(places, grads, strict=True)):
            return None
        if len({grad._local_tensor.untyped_storage().data_ptr() for grad in grads}) > 1:
            return None
        return grads[0]._local_tensor.as_strided(self.shards.local.shape, (1,), 0)

    def _is_gradient_shard(self, index: int, grad: Tensor | None) -> bool:
        """Whether a gradient lies at its place in a buffer of this plan."""
        local, view = getattr(grad, "_local_tensor", None), self.shards.shard_view(index)
        return (
            isinstance(grad, RaggedTensor)
            and (local.dtype, local.device, local.shape) == (view.dtype, view.device, view.shape)
            and local.storage_offset() == view.storage_offset()
            and local.untyped_storage().nbytes() == view.untyped_storage().nbytes()
        )

    def _is_published(self, index: int) -> bool:
        """Whether `.grad` of a parameter is its view of `gradients`."""
        grad, view = self.slots[index].sharded.grad, self.gradients.shard_view(index)
        return isinstance(grad, RaggedTensor) and grad._local_tensor.data_ptr() == view.data_ptr()

    def start_average_over_replicas(self, replicas: ProcessGroup) -> list[Pending]:
        """What is published already is the same on all replicas: averaging it again leaves it."""
        return self.gradients.all_reduce_mean(replicas)

    def publish(self) -> None:
        """The mean is complete: it becomes `.grad` of every parameter that is `present`, or is added to it.

        What is there by now includes what autograd itself left for the sharded parameter, a penalty's gradient say.
        """
        are_new = all(slot.sharded.grad is None for slot in self.slots)
        for index, slot in enumerate(self.slots):
            if not self.present[index] or self._is_published(index):
                continue
            mean = self.gradients.shard_view(index)
            if slot.sharded.grad is not None:
                slot.sharded.grad.add_(self._ragged(index, mean))
            else:
                # A view would keep the whole buffer alive, next to the one in which other gradients lie.
                slot.sharded.grad = self._ragged(index, mean if are_new else mean.clone())
        self.gradients, self.holds_means = None, False
        self.present = [False] * len(self.slots)

    def drop_gradients(self) -> None:
        """An iteration failed: wait for what is under way, and forget all gradients, published ones too."""
        self.finish_reduce()
        if self._borrowed is not None:
            self.schedule.memory.give(self._borrowed)
        self.forget_gradients()
        for slot in self.slots:
            slot.sharded.grad = None
            if slot.whole is not None:
                slot.whole.grad = None


def _take_gradient(reference: weakref.ref[ShardedGroup], index: int, _: Tensor) -> None:
    # Weak: torch keeps hooks where the garbage collector does not see them.
    group = reference()
    if group is not None:
        group.take_gradient(index)
