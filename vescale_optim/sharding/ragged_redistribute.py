"""Moves a ragged tensor's elements between layouts: what each rank has to send, and to whom.

Both layouts cut the same run of elements into ranges in rank order, so what a rank sends is its own range, cut again, and
what it receives is already in order: no packing, one all-to-all.

    from  |   rank 0    | rank 1 |      rank 2     |
    to    |rank 0|     rank 1     |     rank 2     |        rank 0 keeps its head and sends its tail to rank 1, ...

Shard(0) is such a cut too (whole rows). Every other placement goes through the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from vescale_optim.sharding import collectives
from vescale_optim.sharding.ragged_layout import RaggedLayout, RaggedShard


def gather_full(local: Tensor, layout: RaggedLayout) -> Tensor:
    """The whole tensor on every rank."""
    return collectives.all_gather_uneven(local, layout.numels, layout.group).view(layout.shape)


def move(local: Tensor, layout: RaggedLayout, target_numels: Sequence[int]) -> Tensor:
    """This rank's flat part once rank i of the layout's axis holds `target_numels[i]` elements; `local` if unchanged."""
    if tuple(target_numels) == layout.numels:
        return local
    return _exchange(local, layout.numels, target_numels, layout.rank, layout.group)


def to_dtensor(local: Tensor, layout: RaggedLayout, placements: Sequence[Placement]) -> DTensor:
    """A stock DTensor of these placements, none of which is a RaggedShard."""
    mesh = layout.mesh
    numels = _range_numels(placements, layout)
    if numels is not None:
        part = move(local, layout, numels)
        part = part.clone() if part is local else part
        rows = part.numel() // math.prod(layout.shape[1:])
        return _stock(part.view(rows, *layout.shape[1:]), layout, placements)
    full = _stock(gather_full(local, layout), layout, [Replicate()] * mesh.ndim)
    return full if all(placement.is_replicate() for placement in placements) else full.redistribute(mesh, placements)


def local_from_full(full: Tensor, layout: RaggedLayout) -> Tensor:
    """This rank's flat part of a tensor that is whole here; a copy, so that the whole one can be freed."""
    if full.shape != layout.shape:
        raise ValueError(f"the full tensor has shape {tuple(full.shape)}, the layout is for {tuple(layout.shape)}")
    # A range of a contiguous tensor needs no copy of the rest.
    return full.contiguous().view(-1)[layout.start : layout.start + layout.numel].clone()


def local_from_dtensor(tensor: DTensor, layout: RaggedLayout) -> Tensor:
    """This rank's flat part of a stock DTensor on the same mesh, whatever its placements."""
    if tensor.device_mesh != layout.mesh:
        raise ValueError(f"the tensor lives on {tensor.device_mesh}, the placements are for {layout.mesh}")
    numels = _range_numels(tensor.placements, layout)
    local = tensor._local_tensor
    if numels is not None and tensor.shape == layout.shape and local.numel() == numels[layout.rank]:
        part = _exchange(local.contiguous().view(-1), numels, layout.numels, layout.rank, layout.group)
        return part.clone() if part.data_ptr() == local.data_ptr() else part
    return local_from_full(tensor.full_tensor(), layout)


def local_from_source(full: Tensor, layout: RaggedLayout, source: int) -> Tensor:
    """This rank's flat part of the tensor that the ranks with coordinate `source` on every mesh axis hold."""
    if full.shape != layout.shape:
        raise ValueError(f"the full tensor has shape {tuple(full.shape)}, the layout is for {tuple(layout.shape)}")
    flat = full.contiguous().view(-1)
    nowhere = [0] * len(layout.numels)
    sent = flat if layout.rank == source else flat[:0]
    received = list(nowhere)
    received[source] = layout.numel
    sizes = list(layout.numels) if layout.rank == source else nowhere
    local = collectives.all_to_all_uneven(sent, sizes, received, layout.group)
    for axis in range(layout.mesh.ndim):
        if axis != layout.axis and layout.mesh.size(axis) > 1:
            # The source's replicas get the same elements, whatever they passed.
            numels = [0] * layout.mesh.size(axis)
            numels[source] = layout.numel
            sent = local if layout.coordinate[axis] == source else local[:0]
            local = collectives.all_gather_uneven(sent, numels, layout.mesh.get_group(axis))
    return local


def _exchange(local: Tensor, numels: Sequence[int], target_numels: Sequence[int], rank: int, group: ProcessGroup) -> Tensor:
    if tuple(numels) == tuple(target_numels):
        return local
    now, then = _ranges(numels), _ranges(target_numels)
    send = [_overlap(now[rank], target) for target in then]
    receive = [_overlap(source, then[rank]) for source in now]
    return collectives.all_to_all_uneven(local, send, receive, group)


def _ranges(numels: Sequence[int]) -> list[tuple[int, int]]:
    return [(stop - numel, stop) for numel, stop in zip(numels, accumulate(numels), strict=True)]


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _range_numels(placements: Sequence[Placement], layout: RaggedLayout) -> tuple[int, ...] | None:
    """Elements per rank where these placements, too, give each rank of the layout's axis one contiguous range."""
    for axis, placement in enumerate(placements):
        if axis != layout.axis and not placement.is_replicate():
            return None
    placement = placements[layout.axis]
    if isinstance(placement, RaggedShard):
        return placement.numels(layout.shape)
    ndim = len(layout.shape)
    if type(placement) is not Shard or not layout.global_numel or placement.dim not in (0, -ndim) or ndim == 0:
        return None
    rows, num_ranks = layout.shape[0], len(layout.numels)
    chunk = -(-rows // num_ranks)  # as torch.chunk: the last ranks may get fewer rows, or none
    row_numel = layout.global_numel // rows
    return tuple(max(0, min(chunk, rows - rank * chunk)) * row_numel for rank in range(num_ranks))


def _stock(local: Tensor, layout: RaggedLayout, placements: Sequence[Placement]) -> DTensor:
    spec = layout.spec(local.dtype)
    return DTensor.from_local(
        local, layout.mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=spec.stride
    )
