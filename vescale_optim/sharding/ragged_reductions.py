"""Norms, sums and the like of RaggedTensors: reduced here first, and over the ranks when the result is first read.

    torch.linalg.vector_norm(ragged)  ->  ReducedScalar, pending: this rank's norm; no communication
    torch.stack([...]), then its norm ->  still pending: what clip_grad_norm_ does for hundreds of gradients
    anything else                     ->  one all-reduce, once; from then on an ordinary number, equal on all ranks

In stock DTensor (torch 2.13) `float(norm)`, `norm.item()` and `bool(x)` give the local part of a pending result, silently.
Here every read completes it. As with any collective, all ranks must read, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial

from vescale_optim.sharding import collectives
from vescale_optim.sharding.ragged_layout import RaggedLayout
from vescale_optim.sharding.ragged_torch_2_11 import carry

aten = torch.ops.aten


@dataclass(frozen=True)
class Combine:
    """How the ranks' parts make the global result.

    Attributes:
        placement: stock DTensor's name for a tensor pending this reduction.
        over_ranks: (parts of this rank, group) -> global values.
        norm_order: p where the parts are p-norms; the p-norm of several of them is again a part.
    """

    placement: Placement
    over_ranks: Callable[[Tensor, ProcessGroup], Tensor]
    norm_order: float | None = None


def _all_reduced(values: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    # float64, so that half-precision parts are rounded once, and one rank gets back exactly what it put in.
    kind = values.dtype
    wide = torch.float64 if kind.is_floating_point else torch.complex128 if kind.is_complex else torch.int64
    values = values.to(wide, copy=True)
    if group.size() > 1:
        collectives.all_reduce(values, group=group, op=op)
    return values


def _sum_over_ranks(parts: Tensor, group: ProcessGroup) -> Tensor:
    return _all_reduced(parts, ReduceOp.SUM, group).to(parts.dtype)


def _product_over_ranks(parts: Tensor, group: ProcessGroup) -> Tensor:
    return _all_reduced(parts, ReduceOp.PRODUCT, group).to(parts.dtype)


def _max_over_ranks(parts: Tensor, group: ProcessGroup) -> Tensor:
    if not parts.dtype.is_floating_point:
        return _all_reduced(parts, ReduceOp.MAX, group).to(parts.dtype)
    # What a MAX all-reduce makes of NaN depends on the backend and the order of ranks; torch.max returns NaN.
    has_nan = parts.isnan()
    both = torch.stack([parts.masked_fill(has_nan, -math.inf), has_nan.to(parts.dtype)])
    values, nans = _all_reduced(both, ReduceOp.MAX, group)
    return values.masked_fill(nans > 0, math.nan).to(parts.dtype)


def _min_over_ranks(parts: Tensor, group: ProcessGroup) -> Tensor:
    if not parts.dtype.is_floating_point:
        return _all_reduced(parts, ReduceOp.MIN, group).to(parts.dtype)
    return -_max_over_ranks(-parts, group)


SUM = Combine(Partial("sum"), _sum_over_ranks)
PRODUCT = Combine(Partial("product"), _product_over_ranks)
MAX = Combine(Partial("max"), _max_over_ranks)
MIN = Combine(Partial("min"), _min_over_ranks)


@lru_cache(maxsize=64)
def norm_combine(order: float) -> Combine:
    """How the ranks' norms of this order make the global norm."""
    if order == math.inf:
        return Combine(Partial("max"), _max_over_ranks, order)
    if order == -math.inf:
        return Combine(Partial("min"), _min_over_ranks, order)
    if order == 0:
        return SUM  # a count of nonzeros

    def over_ranks(parts: Tensor, group: ProcessGroup) -> Tensor:
        powers = parts.double().pow_(order)  # a float16 norm of 300 overflows when squared
        return _all_reduced(powers, ReduceOp.SUM, group).pow_(1.0 / order).to(parts.dtype)

    return Combine(_NormPartial(order), over_ranks, order)


@carry
class ReducedScalar(DTensor):
    """The result of a reduction over a RaggedTensor (or a 1-D stack of such results); complete when it is first read.

    Ops other than stack, norms and copies complete it and return plain tensors, equal on all ranks. `full_tensor()` and
    `to_local()` both give the complete value.
    """

    _combine: Combine | None = None
    _layout: RaggedLayout

    @classmethod
    def pending(cls, part: Tensor, combine: Combine, layout: RaggedLayout) -> ReducedScalar:
        result = DTensor.__new__(cls, part, _spec(layout, combine.placement, part.shape, part.dtype), requires_grad=False)
        result._combine = combine
        result._layout = layout
        return result

    @classmethod
    def complete(cls, value: Tensor, layout: RaggedLayout) -> ReducedScalar:
        result = DTensor.__new__(cls, value, _spec(layout, Replicate(), value.shape, value.dtype), requires_grad=False)
        result._layout = layout
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) and kind is not cls and kind is not DTensor for kind in types):
            return NotImplemented  # a RaggedTensor is among the operands; its rules hold
        handler = _STAYS_REDUCED.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        values = torch.utils._pytree.tree_map_only(ReducedScalar, ReducedScalar._value, (tuple(args), kwargs or {}))
        return func(*values[0], **values[1])

    def _value(self) -> Tensor:
        """The complete value as a plain tensor; communicates the first time."""
        if self._combine is not None:
            value = self._combine.over_ranks(self._local_tensor, self._layout.group)
            self._local_tensor = value
            self._spec = _spec(self._layout, Replicate(), value.shape, value.dtype)
            self._combine = None
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        return self.view(self.shape)  # an op, so that autograd sees it

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        return self.full_tensor()

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> ReducedScalar:
        if placements is None or not all(placement.is_replicate() for placement in placements):
            raise NotImplementedError(f"a reduced scalar can only become Replicate, not {placements}")
        self._value()
        return self

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        return self.full_tensor().numpy(**kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor(), spec)

    def __repr__(self) -> str:
        # Never communicates: a repr may be taken on one rank only, for instance by a debugger.
        if self._combine is not None:
            return f"ReducedScalar(pending {self._combine.placement}, part of this rank {self._local_tensor})"
        return f"ReducedScalar({self._local_tensor})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_tensor().detach().clone()


def _spec(layout: RaggedLayout, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    return _cached_spec(layout, placement, shape, dtype)


@lru_cache(maxsize=1 << 15)
def _cached_spec(layout: RaggedLayout, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    placements[layout.axis] = placement
    return DTensorSpec(layout.mesh, tuple(placements), TensorMeta(shape, (1,) * len(shape), dtype))


def _stack(func: Any, args: Any, kwargs: Any) -> ReducedScalar:
    scalars = args[0]
    if not all(isinstance(scalar, ReducedScalar) for scalar in scalars):
        raise ValueError(
            "a stack mixes results of RaggedTensors with plain tensors, which may differ between ranks; take "
            ".full_tensor() of the former if the plain ones are equal on all ranks"
        )
    first = scalars[0]
    combine, mesh, axis = first._combine, first._layout.mesh, first._layout.axis
    if combine is not None and all(
        s._combine is combine and s._layout.axis == axis and s._layout.mesh == mesh for s in scalars
    ):
        return ReducedScalar.pending(func([s._local_tensor for s in scalars], *args[1:], **kwargs), combine, first._layout)
    return ReducedScalar.complete(func([s._value() for s in scalars], *args[1:], **kwargs), first._layout)


def _norm_of_parts(func: Any, args: Any, kwargs: Any) -> ReducedScalar:
    scalars, order = args[0], args[1] if len(args) > 1 else 2
    combine = scalars._combine
    if combine is not None and combine.norm_order == order and len(args) <= 2 and not kwargs:
        return ReducedScalar.pending(func(scalars._local_tensor, order), combine, scalars._layout)
    return ReducedScalar.complete(func(scalars._value(), *args[1:], **kwargs), scalars._layout)


def _copy(func: Any, args: Any, kwargs: Any) -> ReducedScalar:
    scalar = args[0]
    if scalar._combine is not None and not kwargs:
        return ReducedScalar.pending(func(scalar._local_tensor), scalar._combine, scalar._layout)
    return ReducedScalar.complete(func(scalar._value(), **kwargs), scalar._layout)


_STAYS_REDUCED = {
    aten.stack.default: _stack,
    aten.linalg_vector_norm.default: _norm_of_parts,
    aten.clone.default: _copy,
    aten.detach.default: _copy,
    aten._to_copy.default: _copy,
}


# Local parts. Each function takes the flat local tensor and the layout, and gives this rank's part and how to combine.


def _sum(local: Tensor, layout: RaggedLayout, dtype: torch.dtype | None = None) -> tuple[Tensor, Combine]:
    return torch.sum(local, dtype=dtype), SUM


def _nansum(local: Tensor, layout: RaggedLayout, dtype: torch.dtype | None = None) -> tuple[Tensor, Combine]:
    return torch.nansum(local, dtype=dtype), SUM


def _mean(local: Tensor, layout: RaggedLayout, dtype: torch.dtype | None = None) -> tuple[Tensor, Combine]:
    dtype = dtype or local.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean of a RaggedTensor of {local.dtype}: give a floating point or complex dtype")
    # A half-precision sum can overflow where the mean does not.
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    return (torch.sum(local, dtype=wide) / layout.global_numel).to(dtype), SUM


def _prod(local: Tensor, layout: RaggedLayout, dtype: torch.dtype | None = None) -> tuple[Tensor, Combine]:
    return torch.prod(local, dtype=dtype), PRODUCT


def _count_nonzero(local: Tensor, layout: RaggedLayout) -> tuple[Tensor, Combine]:
    return torch.count_nonzero(local), SUM


def _any(local: Tensor, layout: RaggedLayout) -> tuple[Tensor, Combine]:
    return torch.any(local), MAX


def _all(local: Tensor, layout: RaggedLayout) -> tuple[Tensor, Combine]:
    return torch.all(local), MIN


def _amax(local: Tensor, layout: RaggedLayout) -> tuple[Tensor, Combine]:
    if local.numel() == 0 and layout.global_numel:
        return local.new_full((), _bounds(local.dtype)[0]), MAX
    return torch.max(local), MAX


def _amin(local: Tensor, layout: RaggedLayout) -> tuple[Tensor, Combine]:
    if local.numel() == 0 and layout.global_numel:
        return local.new_full((), _bounds(local.dtype)[1]), MIN
    return torch.min(local), MIN


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    info = torch.iinfo(dtype)
    return info.min, info.max


def _norm(local: Tensor, layout: RaggedLayout, ord: float = 2, dtype: torch.dtype | None = None) -> tuple[Tensor, Combine]:
    order = 2.0 if ord is None else float(ord)
    if local.numel() == 0 and layout.global_numel:
        # torch has no norm of nothing for some orders; 0, or infinity where a small entry makes the norm small.
        empty = torch.linalg.vector_norm(local, 2, dtype=dtype)
        return empty if order >= 0 else empty.fill_(math.inf), norm_combine(order)
    return torch.linalg.vector_norm(local, order, dtype=dtype), norm_combine(order)


REDUCTIONS: dict[Any, Callable[..., tuple[Tensor, Combine]]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.nansum.default: _nansum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.prod.default: _prod,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.any.default: _any,
    aten.any.dims: _any,
    aten.all.default: _all,
    aten.all.dims: _all,
    aten.max.default: _amax,
    aten.amax.default: _amax,
    aten.min.default: _amin,
    aten.amin.default: _amin,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: lambda local, layout, p=2: _norm(local, layout, p),
    aten.norm.ScalarOpt_dtype: lambda local, layout, p=2, dtype=None: _norm(local, layout, p, dtype),
}
