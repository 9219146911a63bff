"""Region algebra: which boxes of a logical tensor a rank holds, and where they lie in its flat memory.

Every layout is, per rank, a set of boxes; every move between two layouts is the intersection of two such sets:

    Shard(0) on rank 1 of 2       unit: elements 5:14           common boxes
        . . . . . .                   . . . . . U                   . . . . . .
        . . . . . .                   U U U U U U                   . . . . . .
        S S S S S S                   U U . . . .                   x x . . . .
        S S S S S S                   . . . . . .                   . . . . . .

    placed_region(shape, mesh_shape, placements, coordinate)   what a rank holds of a DTensor
    run_region(shape, start, end)                              a flat run of the row-major tensor
    intersect(a, b)                                            the common boxes, as they lie in both memories

Plain integers: no process group, no device, and no work per element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_optim.sharding.ragged_checkpoint import flat_range_boxes
from vescale_optim.sharding.ragged_layout import RaggedShard


@dataclass(frozen=True, slots=True)
class Window:
    """A strided window of a flat memory: element (i, ...) lies at `offset + sum(i * stride)`."""

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        return self.strides == (1,)

    def view(self, flat: Tensor) -> Tensor:
        """The window of `flat`, with shape `size`; no copy."""
        if self.strides != (1,):
            return flat.as_strided(self.size, self.strides, flat.storage_offset() + self.offset)
        if self.offset == 0 and self.size == flat.shape:
            return flat
        return flat.narrow(0, self.offset, self.size[0])


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a logical tensor and where it lies in a flat local memory.

    `start` and `size` are per axis of the logical tensor; element (i, ...) of the box lies at `offset + sum(i * stride)`.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def view(self, flat: Tensor) -> Tensor:
        """The box as a view of its memory: of shape `size`, or 1-D where it is one contiguous run, in the same order."""
        (window,) = _windows(self.size, self.offset, self.strides)
        return window.view(flat) if window.is_contiguous else Window(self.offset, self.size, self.strides).view(flat)


def matching_windows(a: Part, b: Part) -> tuple[Window, Window]:
    """The same box in two memories as windows of one shape, with as few axes as both memories allow."""
    first, second = _windows(a.size, a.offset, a.strides, b.offset, b.strides)
    return first, second


def packed_window(part: Part) -> Window:
    """The box as a window whose elements, in order, are those of the row-major box: what a message holds."""
    (window,) = _windows(part.size, part.offset, part.strides)
    return window


def _windows(size: Sequence[int], *memories: int | Sequence[int]) -> list[Window]:
    """One window for each (offset, strides); axes are merged where they are one run in all memories."""
    offsets, strides = memories[::2], memories[1::2]
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(size):
        if length == 1:
            continue
        if sizes and all(merged[-1] == own[axis] * length for merged, own in zip(kept, strides, strict=True)):
            sizes[-1] *= length
            for merged, own in zip(kept, strides, strict=True):
                merged[-1] = own[axis]
        else:
            sizes.append(length)
            for merged, own in zip(kept, strides, strict=True):
                merged.append(own[axis])
    if not sizes:
        sizes, kept = [1], [[1] for _ in strides]
    return [Window(offset, tuple(sizes), tuple(own)) for offset, own in zip(offsets, kept, strict=True)]


def row_major_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this size."""
    return tuple(accumulate(reversed(size[1:]), int.__mul__, initial=1))[::-1] if len(size) else ()


def run_region(shape: Sequence[int], start: int, end: int, offset: int = 0) -> tuple[Part, ...]:
    """The elements start:end of the row-major tensor, lying one after another from `offset` on: at most 2n-1 boxes."""
    return tuple(
        Part(box.offsets, box.sizes, offset + box.start, row_major_strides(box.sizes))
        for box in flat_range_boxes(shape, start, end)
    )


def flat_extent(shape: Sequence[int], region: Sequence[Part]) -> tuple[int, int] | None:
    """(start, end) of a region that is one run of the flat tensor and lies in memory in that order; else None."""
    if not region:
        return 0, 0
    strides = row_major_strides(shape)
    position, begin = None, 0
    for part in sorted(region, key=lambda part: part.offset):
        start = sum(first * stride for first, stride in zip(part.start, strides, strict=True))
        # A box is one run where everything inside the outermost axis it cuts is whole.
        outer = next((axis for axis, size in enumerate(part.size) if size > 1), len(shape))
        if any(part.size[axis] != shape[axis] for axis in range(outer + 1, len(shape))):
            return None
        if position is None:
            position = begin = start
        if start != position or part.offset != position - begin:
            return None
        position += part.numel
    return begin, position


def placed_region(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[Part, ...]:
    """What the rank at `coordinate` of a mesh holds of a DTensor; its local tensor is flat and contiguous.

    Args:
        shape: of the logical tensor.
        placements: one for each mesh axis: Shard, _StridedShard and Replicate in any combination, or one RaggedShard among
            Replicate. Shards are those of `torch.chunk`, uneven and empty ones included.

    Raises:
        ValueError: a placement whose local tensor is no part of the tensor (Partial), or of an unknown kind.
    """
    return _placed_region(tuple(shape), tuple(mesh_shape), tuple(placements), tuple(coordinate))


def region_of(tensor: DTensor) -> tuple[Part, ...]:
    """What this rank holds of a DTensor; none of it on a rank outside its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    return placed_region(tensor.shape, tensor.device_mesh.shape, tensor.placements, coordinate)


@dataclass(frozen=True)
class PlacedRegions:
    """What each column of a grid of ranks holds of a DTensor: `regions(column)`.

    Columns count the positions along the mesh axes `column_axes` in row-major order; along the other axes all ranks hold
    the same. Tensors of one shape and placement have equal `PlacedRegions`, so that what is derived from them is shared.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    column_axes: tuple[int, ...]

    def __call__(self, column: int) -> tuple[Part, ...]:
        coordinate = [0] * len(self.mesh_shape)
        for axis in reversed(self.column_axes):
            column, coordinate[axis] = divmod(column, self.mesh_shape[axis])
        return placed_region(self.shape, self.mesh_shape, self.placements, coordinate)


@lru_cache(maxsize=1 << 14)
def _placed_region(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> tuple[Part, ...]:
    if not len(mesh_shape) == len(placements) == len(coordinate):
        raise ValueError(
            f"mesh {mesh_shape}, placements {placements} and coordinate {coordinate} differ in length; "
            "expected one entry for each mesh axis"
        )
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for placement, num_chunks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            if sum(not isinstance(other, Replicate) for other in placements) > 1:
                raise ValueError(f"placements are {placements}; beside a RaggedShard the other mesh axes must be Replicate")
            return run_region(shape, *placement.range(shape, index))
        if isinstance(placement, _StridedShard):  # before Shard, of which it is a subclass in some torch versions
            cuts[placement.dim].append(_Cut(num_chunks, index, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts[placement.dim].append(_Cut(num_chunks, index))
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"placement {placement} does not say which elements a rank holds; "
                "redistribute the tensor to Shard, Replicate or RaggedShard"
            )
    return _product_region([_cut_axis(length, axis_cuts) for length, axis_cuts in zip(shape, cuts, strict=True)])


@dataclass(frozen=True, slots=True)
class _Cut:
    """One mesh axis that shards an axis of the tensor; `split_factor` is that of _StridedShard, 1 for Shard."""

    num_chunks: int
    index: int
    split_factor: int = 1


# Part of one tensor axis, in the order in which it lies in the local tensor: (start, length) each.
_Runs = tuple[tuple[int, int], ...]


def _product_region(axes: Sequence[_Runs]) -> tuple[Part, ...]:
    """The boxes of a local tensor that holds, along each axis, these runs of the logical tensor one after another."""
    local_size = [sum(length for _, length in runs) for runs in axes]
    strides = row_major_strides(local_size)
    if 0 in local_size:
        return ()
    placed = []
    for runs in axes:
        positions = accumulate((length for _, length in runs), initial=0)
        placed.append([(start, length, position) for (start, length), position in zip(runs, positions, strict=False)])
    return tuple(
        Part(
            tuple(start for start, _, _ in box),
            tuple(length for _, length, _ in box),
            sum(position * stride for (_, _, position), stride in zip(box, strides, strict=True)),
            strides,
        )
        for box in product(*placed)
    )


def _cut_axis(length: int, cuts: Sequence[_Cut]) -> _Runs:
    """What remains of an axis once every mesh axis, left to right, has taken its chunk."""
    runs: _Runs = ((0, length),) if length else ()
    order = _chunk_order(cuts)
    if order is not None:
        for cut in order:
            runs = _chunk(runs, cut.num_chunks, cut.index)
        return runs
    for cut in cuts:
        pieces = (_chunk(runs, cut.split_factor, piece) for piece in range(cut.split_factor))
        runs = _joined(run for piece in pieces for run in _chunk(piece, cut.num_chunks, cut.index))
    return runs


def _chunk_order(cuts: Sequence[_Cut]) -> list[_Cut] | None:
    """The order in which plain chunks give this sharding; None if no order does.

    A split factor is the number of chunks that later mesh axes have made before this one cuts: FSDP2 over TP is
    (_StridedShard(0, split_factor=tp), Shard(0)), and TP's chunk is cut by FSDP2. Where chunks are uneven this order and the
    placement's own split differ, and FSDP2 and DTensor (torch 2.13) follow the order.
    """
    order: list[_Cut] = []
    for cut in reversed(cuts):
        earlier = list(accumulate((other.num_chunks for other in order), int.__mul__, initial=1))
        if cut.split_factor not in earlier:
            return None
        order.insert(earlier.index(cut.split_factor), cut)
    return order


def _chunk(runs: _Runs, num_chunks: int, index: int) -> _Runs:
    """Chunk `index` of `num_chunks` of the runs laid end to end, as torch.chunk cuts."""
    total = sum(length for _, length in runs)
    chunk = -(-total // num_chunks)
    first, last = min(chunk * index, total), min(chunk * (index + 1), total)
    taken, position = [], 0
    for start, length in runs:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            taken.append((start + low - position, high - low))
        position += length
    return tuple(taken)


def _joined(runs: Iterable[tuple[int, int]]) -> _Runs:
    """The same elements in the same order, runs that follow each other made one."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return tuple(joined)


def intersect(a: Sequence[Part], b: Sequence[Part]) -> list[tuple[Part, Part]]:
    """The common boxes of two regions, each as it lies in a's and in b's memory, in order of their start."""
    common = []
    for part in a:
        for other in b:
            start = tuple(map(max, part.start, other.start))
            ends = zip(part.start, part.size, other.start, other.size, start, strict=True)
            size = tuple([min(s + n, t + m) - low for s, n, t, m, low in ends])
            if not size or min(size) > 0:
                common.append((_narrowed(part, start, size), _narrowed(other, start, size)))
    common.sort(key=lambda pair: pair[0].start)
    return common


def _narrowed(part: Part, start: tuple[int, ...], size: tuple[int, ...]) -> Part:
    skipped = sum((low - own) * stride for low, own, stride in zip(start, part.start, part.strides, strict=True))
    return Part(start, size, part.offset + skipped, part.strides)
