"""What a storage manages, and what it can tell of a parameter before it touches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.live_modules import ParameterOwners


@dataclass(frozen=True, eq=False)
class ManagedParameter:
    """One parameter of the user, with what the optimizer declared about it.

    Args:
        name: for messages and checkpoints.
        param: the user's object.
        blocks: what must be whole.
        cost: FLOPs of the rule on the whole tensor.
        is_elementwise: whether the rule never needs a unit whole on one rank.
        has_unit_state: whether the owner of a unit keeps state for it.
        wire_dtype: dtype in which units travel; None for what the rule returns.
        num_measured: numbers that an element-wise rule measures of each unit where units are cut; 0: it needs them whole.
    """

    name: str
    param: nn.Parameter
    blocks: Blocks
    cost: float = 0.0
    is_elementwise: bool = True
    has_unit_state: bool = False
    wire_dtype: torch.dtype | None = None
    num_measured: int = 0


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor: of all elements, and of every second one."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    bits = tensor.detach().reshape(-1).view(integer)
    sums = torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])
    first, second = (value & (2**62 - 1) for value in sums.tolist())
    return first, second


def check_plain(parameters: Sequence[ManagedParameter], mesh: DeviceMesh) -> None:
    """Raise ValueError, naming the parameter, where one cannot live as a view of a flat buffer."""
    spans: list[tuple[int, int, str]] = []
    for managed in parameters:
        param, where = managed.param, f"parameter '{managed.name}' of shape {tuple(managed.param.shape)}"
        if param.device.type != mesh.device_type:
            raise ValueError(
                f"{where} is on {param.device}, but the mesh is of {mesh.device_type} devices; move the model before "
                "constructing the optimizer, or give a mesh of its device type"
            )
        if not param.dtype.is_floating_point or param.dtype.itemsize < 2:
            raise ValueError(f"{where} has dtype {param.dtype}; parameters must be floating point of 16 bits or more")
        if param.numel():
            start = param.untyped_storage().data_ptr() + param.storage_offset() * param.element_size()
            extent = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.append((start, start + (extent + 1) * param.element_size(), managed.name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters '{name}' and '{other}' are different objects over the same memory; tie weights by assigning "
                "the same Parameter to both modules"
            )


def check_dtensor(managed: ManagedParameter) -> None:
    """Raise ValueError, naming the parameter, where the local tensor of a DTensor cannot be updated flat."""
    param, where = managed.param, f"parameter '{managed.name}' of shape {tuple(managed.param.shape)}"
    if not param.dtype.is_floating_point or param.dtype.itemsize < 2:
        raise ValueError(f"{where} has dtype {param.dtype}; parameters must be floating point of 16 bits or more")
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{where} has placements {param.placements}; a parameter must be sharded or replicated, not a sum")
    if param._local_tensor.is_meta:
        raise ValueError(
            f"{where} is on the meta device; materialise the model with to_empty(device=...) and initialise or load it "
            "first, then construct the optimizer"
        )
    if not param._local_tensor.is_contiguous():
        raise ValueError(
            f"{where} has a local tensor of strides {param._local_tensor.stride()}; give parameters whose local tensors are "
            "contiguous"
        )


def find_orphan(owners: ParameterOwners, parameters: Sequence[ManagedParameter]) -> str | None:
    """What to say about a parameter that its module let go; None where there is none."""
    index = owners.find_orphan([managed.param for managed in parameters])
    if index is None:
        return None
    managed = parameters[index]
    return (
        f"parameter '{managed.name}' of shape {tuple(managed.param.shape)} is no longer part of its module (torch's "
        "fully_shard and load_state_dict(assign=True) replace parameters); shard the model, load without assign, and "
        "construct the optimizer afterwards"
    )


def sparse_gradient(managed: ManagedParameter) -> str:
    """What to say about a gradient that is no dense tensor."""
    return (
        f"the gradient of parameter '{managed.name}' of shape {tuple(managed.param.shape)} is sparse; make the embedding "
        "with sparse=False, or give its gradient as grad.to_dense()"
    )


def forget_gradient(param: Tensor, *, set_to_none: bool) -> None:
    """What `Optimizer.zero_grad` does to one parameter."""
    if param.grad is None:
        return
    if set_to_none:
        param.grad = None
    else:
        param.grad.detach_().requires_grad_(False).zero_()
