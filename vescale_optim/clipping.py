"""clip_grad_norm_: the norm of all gradients, however they are stored.

torch's own takes one mesh at a time (torch 2.13: "must have the same mesh", "mixed torch.Tensor and DTensor"). Here every
rank takes norms of what it holds, and two vectors per kind of gradient travel, whatever the number of gradients, after one
message for each mesh that tells whose gradients do not lie like their parameters:

    maximum over the ranks that hold the same   one of them may have no gradient, which counts as zeros
    sum over the ranks that hold different parts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.collectives import all_reduce
from vescale_optim.sharding.gradient_placements import GradientPlacements, lowest_of, placement_mark
from vescale_optim.sharding.meshes import axes_group, mesh_group


@torch.no_grad()
def clip_grad_norm_(
    optimizer_or_params: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm, as of one vector, is at most `max_norm`; collective.

    As `torch.nn.utils.clip_grad_norm_`, over DTensors of several meshes, RaggedTensors and plain tensors together. Norms of
    low-precision gradients are taken in fp32.

    Args:
        optimizer_or_params: whose `.grad` are scaled in place; every rank gives the same ones. A plain gradient is taken
            as equal on all ranks. A gradient that some ranks lack counts as what the others have.
        max_norm: the largest norm; infinity to measure only.
        norm_type: > 0, or infinity.

    Returns:
        Tensor: the norm before scaling, a plain fp32 or fp64 scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, where `error_if_nonfinite`; gradients are untouched then.
    """
    params = _params_of(optimizer_or_params)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be > 0 or infinity")
    _lay_like_parameters(params)
    kinds: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor | None]] = {}
    for param in params:
        grad = param.grad
        # A rank without a gradient takes part all the same: others may have one.
        laid_out = param if grad is None else grad
        if grad is not None or (param.requires_grad and isinstance(param, DTensor)):
            kind = (laid_out.device_mesh, _cut_axes(laid_out)) if isinstance(laid_out, DTensor) else None
            kinds.setdefault(kind, []).append(grad)
    totals = [_total(grads, norm_type, kind) for kind, grads in kinds.items()] or [torch.zeros(())]
    # Scalars of several devices, where some parameters are offloaded.
    total = _combined(torch.stack([value.to(totals[0].device) for value in totals]), norm_type)
    grads = [grad for members in kinds.values() for grad in members if grad is not None]
    norm = (total if norm_type == math.inf else total ** (1 / norm_type)).to(_result_dtype(grads))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be clipped; with "
            "error_if_nonfinite=False they are scaled by it all the same"
        )
    _scale(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _params_of(optimizer_or_params: torch.optim.Optimizer | Iterable[Tensor] | Tensor) -> list[Tensor]:
    if isinstance(optimizer_or_params, torch.optim.Optimizer):
        return [param for group in optimizer_or_params.param_groups for param in group["params"]]
    return [optimizer_or_params] if isinstance(optimizer_or_params, Tensor) else list(optimizer_or_params)


def _lay_like_parameters(params: Sequence[Tensor]) -> None:
    """Bring gradients to where their parameters are, on all ranks: one small message for each mesh tells whose are not."""
    by_mesh: dict[DeviceMesh, list[DTensor]] = {}
    for param in params:
        if isinstance(param, DTensor) and param.requires_grad and param.device_mesh.size() > 1:
            by_mesh.setdefault(param.device_mesh, []).append(param)
    for mesh, members in by_mesh.items():
        agreement = Agreement(mesh_group(mesh), "clip_grad_norm_")
        marks = [placement_mark(param) for param in members]
        agreed = agreement.maximum([*marks, *lowest_of(marks)])
        marks, lowest = agreed[: len(members)], agreed[len(members) :]
        placements = GradientPlacements()
        placements.learn(marks, lowest, members, [f"number {index}" for index in range(len(members))], agreement)
        for param, mark in zip(members, marks, strict=True):
            if mark > 0:
                param.grad = placements.like_parameter(param, mark)


def _cut_axes(tensor: DTensor) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))


def _total(grads: Sequence[Tensor | None], norm_type: float, kind: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """norm ** norm_type of all gradients of one kind over all ranks; for infinity the norm itself."""
    powers = _local_powers(grads, norm_type)
    if kind is None:
        return _combined(powers, norm_type)
    mesh, cut = kind
    if powers.device.type != mesh.device_type:  # CPU offload
        powers = powers.to(mesh.device_type)
    alike = tuple(axis for axis in range(mesh.ndim) if axis not in cut)
    if alike:
        powers = _maximum(powers, axes_group(mesh, alike))
    total = _combined(powers, norm_type)
    if cut and norm_type == math.inf:
        total = _maximum(total, axes_group(mesh, cut))
    elif cut:
        all_reduce(total, axes_group(mesh, cut))
    return total


def _local_powers(grads: Sequence[Tensor | None], norm_type: float) -> Tensor:
    """The same of the part of each gradient on this rank, in fp64; zero where there is nothing."""
    parts = {slot: _local(grad) for slot, grad in enumerate(grads) if grad is not None}
    parts = {slot: part for slot, part in parts.items() if part.numel()}
    device = next((part.device for part in parts.values()), None)
    powers = torch.zeros(len(grads), dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for slot, part in parts.items():
        by_dtype.setdefault(part.dtype, []).append(slot)
    for dtype, slots in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm([parts[slot] for slot in slots], norm_type, dtype=wide)).double()
        powers[slots] = norms if norm_type == math.inf else norms**norm_type
    return powers


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _combined(powers: Tensor, norm_type: float) -> Tensor:
    return powers.amax() if norm_type == math.inf else powers.sum()


def _maximum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Maximum over the ranks of a group, NaN where any has NaN: backends lose it or not, depending on the order."""
    message = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values.dtype)])
    all_reduce(message, group, ReduceOp.MAX)
    return torch.where(message[1] > 0, math.nan, message[0])


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32


def _scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in map(_local, grads):
        by_kind.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), parts in by_kind.items():
        torch._foreach_mul_(parts, factor.to(device))
