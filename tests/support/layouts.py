"""What the ranks of a mesh hold of a tensor, worked out on index tensors by torch.chunk: the oracle of regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_optim.sharding.ragged import RaggedShard
from vescale_optim.sharding.regions import Part

# Few empty axes: one makes the whole tensor empty.
shapes = st.lists(st.sampled_from([5, 2, 3, 4, 7, 8, 6, 1, 3, 5, 4, 0]), max_size=4).map(tuple)
meshes = st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (1, 2), (2, 1, 2), (2, 2, 3)])


def indices(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(tuple(shape))


def chunk(tensor: Tensor, dim: int, num_chunks: int, index: int) -> Tensor:
    """torch.chunk, which leaves out the chunks that get nothing."""
    chunks = tensor.chunk(num_chunks, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def local_indices(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Tensor:
    """Flat indices of the elements of a rank's local tensor, every mesh axis taking its part in turn, left to right."""
    local = indices(shape)
    for placement, size, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            numels = placement.numels(shape)
            local = local.flatten()[sum(numels[:index]) : sum(numels[: index + 1])]
        elif isinstance(placement, _StridedShard):
            pieces = [chunk(local, placement.dim, placement.split_factor, j) for j in range(placement.split_factor)]
            local = torch.cat([chunk(piece, placement.dim, size, index) for piece in pieces], placement.dim)
        elif isinstance(placement, Shard):
            local = chunk(local, placement.dim, size, index)
    return local.flatten()


def read_region(parts: Sequence[Part], full: Tensor) -> Tensor:
    """The local memory of a region of the tensor `full`, -1 where no part says what lies there."""
    local = full.new_full((sum(part.numel for part in parts),), -1)
    for part in parts:
        box = full
        for dim, (start, size) in enumerate(zip(part.start, part.size, strict=True)):
            box = box.narrow(dim, start, size)
        view = part.view(local)
        view.copy_(box.reshape(view.shape))
    return local


@st.composite
def placements_over(draw: st.DrawFn, shape: Sequence[int], mesh: Sequence[int]) -> tuple[Placement, ...]:
    """Any mixture of Shard and Replicate, or one RaggedShard."""
    if not shape or draw(st.integers(0, 3)) == 3:
        axis = draw(st.integers(0, len(mesh) - 1))
        numel = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=mesh[axis] - 1, max_size=mesh[axis] - 1)))
        numels = [end - start for start, end in zip([0, *cuts], [*cuts, numel], strict=True)]
        ragged = RaggedShard.from_numels(shape, numels)
        return tuple(ragged if a == axis else Replicate() for a in range(len(mesh)))
    kinds = [*map(Shard, range(len(shape))), Replicate()]
    return tuple(draw(st.sampled_from(kinds)) for _ in mesh)
