"""How torch.distributed.checkpoint sees a RaggedTensor: as boxes of the global tensor, each contiguous in the shard.

DCP stores boxes (offsets and sizes in n dimensions) and reads any box from any others. A flat range of a row-major tensor
of n dimensions is at most 2n - 1 boxes, each a zero-copy view of the shard, so nothing is communicated to save it, and it
loads at any world size, into any placement, or as a full tensor:

    range 9:44 of a (10, 7) tensor              row 1   . . x x x x x      box (1, 2) of 1 x 5
                                                row 2   x x x x x x x  \\
                                                ...                     >  box (2, 0) of 4 x 7
                                                row 5   x x x x x x x  /
                                                row 6   x x . . . . .      box (6, 0) of 1 x 2

Ranks that hold nothing emit nothing: DCP identifies boxes by offset, so empty ones would collide. Replicas all emit the
same boxes, as all ranks do for a tensor without elements; DCP removes duplicates and spreads the writing over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from vescale_optim.sharding.ragged_layout import RaggedLayout

if TYPE_CHECKING:
    from vescale_optim.sharding.ragged import RaggedTensor


class Box(NamedTuple):
    """A box of the global tensor and the flat range, relative to the first element of the shard, where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start:stop of a row-major tensor as boxes, in memory order: at most max(1, 2 * len(shape) - 1)."""
    return _cached_boxes(tuple(shape), start, stop)


@lru_cache(maxsize=4096)
def _cached_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    boxes, position = [], 0
    for offsets, sizes in _boxes(shape, start, stop):
        numel = math.prod(sizes)
        boxes.append(Box(offsets, sizes, position, position + numel))
        position += numel
    return tuple(boxes)


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of start:stop within the subtensor at index `prefix`, whose own shape is `shape`."""
    ones = (1,) * len(prefix)
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (*prefix, start), (*ones, stop - start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows first:last are whole
    if first > last:  # begins and ends inside one row
        yield from _boxes(shape[1:], start % row, stop % row, (*prefix, last))
        return
    if start % row:
        yield from _boxes(shape[1:], start % row, row, (*prefix, first - 1))
    if last > first:
        yield (*prefix, first, *(0,) * (len(shape) - 1)), (*ones, last - first, *shape[1:])
    yield from _boxes(shape[1:], 0, stop % row, (*prefix, last))


def shard_boxes(layout: RaggedLayout) -> tuple[Box, ...]:
    """The boxes of this rank's shard. A tensor without elements is one box, so that it is in the checkpoint at all."""
    if layout.global_numel == 0:
        return (Box((0,) * len(layout.shape), tuple(layout.shape), 0, 0),)
    return flat_range_boxes(layout.shape, layout.start, layout.start + layout.numel)


def create_write_items(fqn: str, tensor: RaggedTensor) -> list[WriteItem]:
    """What this rank writes."""
    layout = tensor._layout
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=box.chunk, properties=properties, size=layout.shape),
        )
        for box in shard_boxes(layout)
    ]


def create_chunk_list(tensor: RaggedTensor) -> list[ChunkStorageMetadata]:
    """What this rank needs to read."""
    return [box.chunk for box in shard_boxes(tensor._layout)]


def get_tensor_shard(tensor: RaggedTensor, index: MetadataIndex) -> Tensor:
    """The view of the shard that holds the box at `index.offset`; DCP reads from it and writes into it."""
    for box in shard_boxes(tensor._layout):
        if index.offset is not None and tuple(index.offset) == box.offsets:
            return tensor.to_local()[box.start : box.stop].view(box.sizes)
    raise ValueError(f"{index.fqn}: no box of this rank's shard starts at {index.offset} ({tensor._layout})")
