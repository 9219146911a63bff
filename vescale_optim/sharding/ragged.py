"""`RaggedTensor`: a DTensor whose ranks hold flat, contiguous, possibly unequal (or empty) ranges of its elements.

Gradients, optimizer state and ZeRO-3 parameters are RaggedTensors over views of a DBuffer. It is a real DTensor subclass,
so that `isinstance`, clipping, GradScaler, checkpoints and optimizers see a distributed tensor, but it has its own dispatch
(`ragged_ops`): stock DTensor ops do not know the placement `RaggedShard`.

    global tensor (3, 4)      a b c d / e f g h / i j k l
    rank 0                    [a b c d e f]       local tensors: flat views, no copy
    rank 1                    []
    rank 2                    [g h i j k l]

    grad = RaggedTensor.from_local(view, mesh, RaggedShard.from_numels((3, 4), (6, 0, 6)), (3, 4))
    grad.norm(), grad.mul_(2), grad.full_tensor(), grad.redistribute(placements=[Replicate()])
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Placement

from vescale_optim.sharding import ragged_checkpoint, ragged_ops, ragged_redistribute
from vescale_optim.sharding.ragged_full_state import takes_full_tensors
from vescale_optim.sharding.ragged_layout import RaggedLayout, RaggedShard, ragged_layout
from vescale_optim.sharding.ragged_reductions import ReducedScalar
from vescale_optim.sharding.ragged_torch_2_11 import carry
from vescale_optim.sharding.rank_shares import RankShares

__all__ = ["RaggedShard", "RaggedTensor", "ReducedScalar"]


@takes_full_tensors
@carry
class RaggedTensor(DTensor):
    """A tensor of which each rank holds a flat range; see the module's picture. Make one with `from_local` or `distribute`.

    Ops on it never communicate, except those that need all ranks: reading a norm or sum (once, see `ReducedScalar`),
    `equal`, `item`, GradScaler's check for infinities, `full_tensor` and `redistribute`.
    """

    _layout: RaggedLayout
    _before_read: _BeforeRead | None = None

    @classmethod
    def _wrap(cls, local: Tensor, layout: RaggedLayout, before_read: _BeforeRead | None = None) -> RaggedTensor:
        tensor = DTensor.__new__(cls, local, layout.spec(local.dtype), requires_grad=False)
        tensor._layout = layout
        if before_read is not None:
            tensor._before_read = before_read
        return tensor

    # Making one.

    @staticmethod
    def from_local(
        local: Tensor,
        mesh: DeviceMesh,
        placements: Placement | Sequence[Placement],
        shape: Sequence[int],
        *,
        before_read: Callable[[], None] | None = None,
    ) -> RaggedTensor:
        """The tensor of which this rank holds `local`: a view, so writes through either are seen by both.

        Args:
            local: flat tensor of this rank's elements. Gradients do not flow through this call.
            mesh: the ranks. It may have more axes than the one that shards; the tensor is replicated over the others.
            placements: a RaggedShard, or one placement per mesh axis: one RaggedShard, the others Replicate.
            shape: global shape.
            before_read: called before anything reads or writes the data, every time, possibly from within itself (then it
                is skipped): pending gradients wait for their communication here. Views (`detach`, `.data`) keep it,
                results and copies do not. Shape, dtype, device and placements are known without it.

        Raises:
            ValueError: local is not flat, has another number of elements than the placement says, or requires grad.
        """
        layout = ragged_layout(mesh, placements, shape)
        if local.dim() != 1 or local.numel() != layout.numel or not local.is_contiguous():
            raise ValueError(
                f"local has shape {tuple(local.shape)}, strides {local.stride()}; rank {layout.rank} of {layout.placements} "
                f"holds {layout.numel} elements of a {tuple(layout.shape)} tensor, flat and contiguous"
            )
        if local.requires_grad or isinstance(local, DTensor):
            raise ValueError("local must be a plain tensor without autograd history; pass local.detach()")
        return RaggedTensor._wrap(local, layout, None if before_read is None else _BeforeRead(before_read))

    @staticmethod
    def from_replicate(
        full: Tensor, mesh: DeviceMesh | None = None, placements: Placement | Sequence[Placement] = ()
    ) -> RaggedTensor:
        """This rank's range of a tensor that is whole, and equal, on every rank; nothing is communicated or compared."""
        return RaggedTensor.distribute(full, mesh, placements, source=None)

    @staticmethod
    def distribute(
        tensor: Tensor,
        mesh: DeviceMesh | None = None,
        placements: Placement | Sequence[Placement] = (),
        *,
        source: int | None = 0,
    ) -> RaggedTensor:
        """Shard a full tensor or a DTensor of any placements; the result is a copy.

        Args:
            tensor: a plain full tensor, or a DTensor (stock or ragged) on `mesh`.
            mesh: may be left out for a DTensor.
            source: for plain tensors, the rank (on every mesh axis) whose values count; it scatters them, the other ranks
                pass any tensor of that shape, dtype and device. None: each rank cuts its range out of its own tensor.
        """
        if isinstance(tensor, RaggedTensor):
            target = ragged_layout(mesh or tensor.device_mesh, placements, tensor.shape)
            moved = tensor.detach().redistribute(target.mesh, target.placements)
            return moved.clone() if moved._local_tensor.data_ptr() == tensor._local_tensor.data_ptr() else moved
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                layout = ragged_layout(mesh or tensor.device_mesh, placements, tensor.shape)
                return RaggedTensor._wrap(ragged_redistribute.local_from_dtensor(tensor, layout), layout)
            if mesh is None:
                raise ValueError("a plain tensor says nothing of a mesh; pass mesh=")
            layout = ragged_layout(mesh, placements, tensor.shape)
            if source is None:
                local = ragged_redistribute.local_from_full(tensor.detach(), layout)
            else:
                local = ragged_redistribute.local_from_source(tensor.detach(), layout, source)
            return RaggedTensor._wrap(local, layout)

    # Reading it.

    def _wait(self) -> Tensor:
        """The local tensor, once whatever it waits for has happened."""
        if self._before_read is not None:
            self._before_read.run()
        return self._local_tensor

    @property
    def before_read(self) -> Callable[[], None] | None:
        """What is called before the data is read or written; assign None when there is nothing left to wait for."""
        return self._before_read.hook if self._before_read is not None else None

    @before_read.setter
    def before_read(self, hook: Callable[[], None] | None) -> None:
        self._before_read = None if hook is None else _BeforeRead(hook)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's elements: flat, not a copy."""
        _no_grad_placements(grad_placements)
        local = self._wait()
        return _ToLocal.apply(self) if self.requires_grad and torch.is_grad_enabled() else local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor on every rank, gathered now. Its gradient, equal on all ranks, is cut back into ranges."""
        _no_grad_placements(grad_placements)
        if self.requires_grad and torch.is_grad_enabled():
            return _FullTensor.apply(self)
        return ragged_redistribute.gather_full(self._wait(), self._layout)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placement | Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor laid out otherwise: a RaggedTensor if the placements have a RaggedShard, else a stock DTensor.

        RaggedShard to RaggedShard and to Shard(0) is one all-to-all (nothing if the ranges stay; then the result shares
        memory); everything else gathers the whole tensor first. `async_op` is accepted, the call is synchronous.
        """
        mesh = self._layout.mesh
        if device_mesh is not None and device_mesh != mesh:
            raise ValueError(f"the tensor lives on {mesh} and cannot move to {device_mesh}")
        placements = _as_tuple(placements or ())
        if len(placements) != mesh.ndim or backward_dtype is not None:
            raise ValueError(
                f"redistribute needs one placement for each of the {mesh.ndim} mesh axes, and no backward_dtype; "
                f"got {placements} and {backward_dtype}"
            )
        tensor = self if forward_dtype is None else self.to(forward_dtype)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Redistribute.apply(tensor, placements)
        return _redistribute(tensor, placements)

    @property
    def data(self) -> RaggedTensor:
        return self.detach()

    @data.setter
    def data(self, value: RaggedTensor) -> None:
        # The stock setter changes dtype and device but not what Python holds: the old values would stay (torch 2.13).
        if value is self:
            return
        if not isinstance(value, RaggedTensor) or not value._layout.agrees_with(self._layout):
            raise ValueError(f".data of a RaggedTensor takes a RaggedTensor of the same layout, not {type(value).__name__}")
        Tensor.data.__set__(self, value)
        self._local_tensor = value._local_tensor
        self._spec = value._spec
        self._before_read = value._before_read

    def share_memory_(self) -> RaggedTensor:
        self._wait().share_memory_()
        return self

    def is_shared(self) -> bool:
        return self._local_tensor.is_shared()

    def data_ptr(self) -> int:
        # A wrapper has no memory, but takes over the storage offset of its local tensor (torch 2.13): by a pointer that is
        # not 0, DCP's stager took it for a tensor that has.
        return 0

    def numpy(self, *, force: bool = False) -> Any:
        raise NotImplementedError("numpy() of a RaggedTensor: use .full_tensor().numpy() or .to_local().numpy()")

    def tolist(self) -> Any:
        raise NotImplementedError("tolist() of a RaggedTensor: use .full_tensor().tolist() or .to_local().tolist()")

    def __repr__(self) -> str:
        # Never calls before_read: that may communicate, and a repr may be taken on one rank only.
        layout = self._layout
        values = self._local_tensor if self._before_read is None else "<not read yet>"
        return (
            f"RaggedTensor(shape={tuple(layout.shape)}, dtype={self.dtype}, placements={layout.placements}, "
            f"elements {layout.start}:{layout.start + layout.numel}={values})"
        )

    # Dispatch.

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ragged_ops.dispatch(RaggedTensor, func, args, kwargs or {})

    @property
    def __tensor_flatten__(self) -> Callable[[], tuple[list[str], Any]]:
        # torch.compile (2.13) fails on a plain parameter whose gradient is a subclass it can take apart, and ignores one
        # that it cannot; a tensor that waits for its values must not be taken apart behind its hook anyway.
        if self._before_read is not None:
            raise AttributeError("a RaggedTensor that waits for its values is not taken apart")
        return self._flatten

    def _flatten(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._layout, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> RaggedTensor:
        layout, requires_grad = context
        return RaggedTensor._wrap(inner["_local_tensor"], layout).requires_grad_(requires_grad)

    # Copies and checkpoints.

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The clone carries this rank's elements only, not the buffer that the view belongs to.
        local = self._wait().detach().clone()
        layout = self._layout
        is_parameter = getattr(self, "_is_param", False)
        return _rebuild, (local, layout.mesh, layout.placements, tuple(layout.shape), self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() this RaggedTensor first")
        result = RaggedTensor._wrap(self._wait().detach().clone(), self._layout)
        memo[id(self)] = result
        own = ("_layout", "_before_read")
        result.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in own})
        result.requires_grad_(self.requires_grad)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return ragged_checkpoint.create_write_items(fqn, self.detach())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return ragged_checkpoint.create_chunk_list(self)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return ragged_checkpoint.get_tensor_shard(self.detach(), index)


class _Running(threading.local):
    """The hooks this thread is in the middle of."""

    def __init__(self) -> None:
        self.hooks: set[Callable[[], None]] = set()


_running = _Running()


class _BeforeRead:
    """A hook that runs before a read, but not within itself: it may read the very tensors that wait for it."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self.hook = hook

    def run(self) -> None:
        running = _running.hooks
        if self.hook in running:
            return
        running.add(self.hook)
        try:
            self.hook()
        finally:
            running.discard(self.hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # DCP's stager (torch 2.13) copies the attributes of a tensor one by one, this one before the data.
        self.run()

    def __reduce__(self) -> Any:
        raise TypeError("what a RaggedTensor waits for cannot be pickled; pickle the tensor itself")


def _rebuild(
    local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, requires_grad: bool, is_parameter: bool
) -> RaggedTensor:
    tensor = RaggedTensor.from_local(local, mesh, placements, shape).requires_grad_(requires_grad)
    if is_parameter:
        tensor._is_param = True
    return tensor


# torch.load(weights_only=True), the default, accepts these once this module has been imported.
torch.serialization.add_safe_globals([RaggedShard, RankShares, RaggedTensor, _rebuild])


def _as_tuple(placements: Placement | Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements,) if isinstance(placements, Placement) else tuple(placements)


def _no_grad_placements(grad_placements: Any) -> None:
    if grad_placements is not None:
        raise NotImplementedError("a RaggedTensor's gradient always has its own placements; leave out grad_placements")


def _redistribute(tensor: RaggedTensor, placements: tuple[Placement, ...]) -> DTensor:
    local, layout = tensor._wait(), tensor._layout
    if not any(isinstance(placement, RaggedShard) for placement in placements):
        return ragged_redistribute.to_dtensor(local, layout, placements)
    target = ragged_layout(layout.mesh, placements, layout.shape)
    if target.axis == layout.axis:
        return RaggedTensor._wrap(ragged_redistribute.move(local, layout, target.numels), target)
    full = ragged_redistribute.gather_full(local, layout)
    return RaggedTensor._wrap(ragged_redistribute.local_from_full(full, target), target)


class _ToLocal(torch.autograd.Function):
    """A change of layout; its backward is the change back."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> Tensor:
        ctx.layout = tensor._layout
        return tensor._local_tensor.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> RaggedTensor:
        return RaggedTensor._wrap(grad.contiguous(), ctx.layout)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> Tensor:
        ctx.layout = tensor._layout
        return ragged_redistribute.gather_full(tensor._wait(), tensor._layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> RaggedTensor:
        return RaggedTensor._wrap(ragged_redistribute.local_from_full(grad, ctx.layout), ctx.layout)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.layout = tensor._layout
        result = _redistribute(tensor, placements)
        return result.detach() if isinstance(result, RaggedTensor) else result

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[RaggedTensor, None]:
        return RaggedTensor.distribute(grad, ctx.layout.mesh, ctx.layout.placements), None
