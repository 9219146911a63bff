"""8-bit AdamW on parts of blocks, where a DTensor's storage cuts them: FSDP2 rows, columns, strided shards.

Elements stay where they are. A step goes over them twice, so that no fp32 copy of the state is needed in between:

    measure_parts   m, v of this step;  |m|, |v|: the largest on this rank of each block, at once for all parts
                    -> maximum over the ranks: the absmax of whole blocks
    update_parts    m, v of this step again;  the parameter;  codes by that absmax

Parts of many parameters go through in one batch, element by element with the number of their scale, gathered and scattered:
slower than whole blocks, which `adamw8bit.update` takes, and the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vescale_optim.optimizers.adamw8bit_step import advance_moments_, step_parameter_
from vescale_optim.optimizers.quantize import codebook, find_codes_, layout_of_blocks
from vescale_optim.optimizers.rule import Group, Shards
from vescale_optim.sharding.cut_units import cut_rows
from vescale_optim.sharding.regions import Part, run_region

SCALES = ("absmax1", "absmax2")


def measure_parts(shards: Shards, group: Group, chunk_numel: int) -> list[Tensor]:
    """Largest |m| and |v| of this step over the parts of each cut block: fp32 [units, 2 * scales of a unit] per shard."""
    scales = [torch.cat(shards.state[name]) for name in SCALES]
    # As bits, which are ordered like the values: a maximum of floats would lose NaN.
    largest = [torch.zeros_like(scale, dtype=torch.int32) for scale in scales]
    for batch in batches(shards, chunk_numel):
        for moment, found in zip(moments_of(batch, shards, scales, group), largest, strict=True):
            found.scatter_reduce_(0, batch.numbers, moment.abs_().view(torch.int32), "amax")
    sizes = [scale.numel() for scale in shards.state[SCALES[0]]]
    by_shard = zip(*(found.view(torch.float32).split(sizes) for found in largest), shards.units, strict=True)
    return [torch.stack([a.view(len(units), -1), b.view(len(units), -1)], dim=1).flatten(1) for a, b, units in by_shard]


def update_parts(shards: Shards, largest: Sequence[Tensor], group: Group, chunk_numel: int) -> None:
    """Update the parts of cut blocks, and take the scales of these blocks from `largest`, of the form of `measure_parts`."""
    scales = [torch.cat(shards.state[name]) for name in SCALES]
    by_moment = [values.unflatten(1, (2, -1)).unbind(1) for values in largest]
    new_scales = [torch.cat([pair[number].reshape(-1) for pair in by_moment]) for number in (0, 1)]
    for batch in batches(shards, chunk_numel):
        m, v = moments_of(batch, shards, scales, group)
        integers = torch.empty(2, m.numel(), dtype=torch.int32, device=m.device)
        param = batch.gather(shards.params).float()
        step_parameter_(param, m, v, integers[1].view(torch.float32), batch.step, group)
        batch.scatter(param, shards.params)
        for number, moment in enumerate((m, v)):
            book = codebook(is_signed=number == 0, device=m.device, lowest=number)
            codes = torch.empty(m.numel(), dtype=torch.uint8, device=m.device)
            find_codes_(moment.div_(new_scales[number].index_select(0, batch.numbers)), codes, book, integers.unbind())
            batch.scatter(codes, shards.state[f"state{number + 1}"])
    for number, name in enumerate(SCALES):
        for absmax, pair, units, whole in zip(shards.state[name], by_moment, shards.units, shards.whole, strict=True):
            for rows in cut_rows(units, whole):
                absmax.view(len(units), -1)[rows] = pair[number][rows]


def moments_of(batch: Batch, shards: Shards, scales: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The moments of this step, fp32; `scales` are those of the last one, of all shards one after the other."""
    grad = batch.gather(shards.grads).float()
    moments = []
    for number, scale in enumerate(scales):
        book = codebook(is_signed=number == 0, device=grad.device, lowest=number)
        codes = batch.gather(shards.state[f"state{number + 1}"]).int()
        moments.append(book.values.index_select(0, codes).mul_(scale.index_select(0, batch.numbers)))
    advance_moments_(*moments, grad, group)
    return moments


class Piece(NamedTuple):
    """A box of the part of a shard that is cut, as it lies in the shard; `shape` is that of the tensor it is a box of."""

    shard: int
    box: Part
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Pieces whose elements are updated together; of one step, since the bias corrections are numbers.

    Attributes:
        numbers: int64, of the scale of each element among those of all shards.
    """

    pieces: tuple[Piece, ...]
    step: int
    numbers: Tensor

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """The elements of the pieces one after the other, a copy; `values` are flat, one for each shard."""
        return torch.cat([piece.box.view(values[piece.shard]).reshape(-1) for piece in self.pieces])

    def scatter(self, elements: Tensor, values: Sequence[Tensor]) -> None:
        """Write what `gather` gave back to where it was."""
        parts = elements.split([piece.box.numel for piece in self.pieces])
        for piece, part in zip(self.pieces, parts, strict=True):
            view = piece.box.view(values[piece.shard])
            view.copy_(part.view(view.shape))


def batches(shards: Shards, chunk_numel: int) -> Iterator[Batch]:
    """All parts of cut blocks, about `chunk_numel` elements at a time."""
    bases = list(accumulate((scale.numel() for scale in shards.state[SCALES[0]]), initial=0))
    taken: list[Piece] = []
    numel = 0
    for piece in _pieces(shards, chunk_numel):
        is_other_step = taken and shards.steps[taken[0].shard] != shards.steps[piece.shard]
        if taken and (is_other_step or numel + piece.box.numel > chunk_numel):
            yield _batch(taken, shards, bases)
            taken, numel = [], 0
        taken.append(piece)
        numel += piece.box.numel
    if taken:
        yield _batch(taken, shards, bases)


def _batch(pieces: Sequence[Piece], shards: Shards, bases: Sequence[int]) -> Batch:
    numbers = []
    for shard, box, shape in pieces:
        layout = layout_of_blocks(shards.blocks[shard])
        first = shards.units[shard].start * layout.scales_per_unit()
        numbers.append(layout.scale_numbers(shape, box, shards.params[shard].device).add_(bases[shard] - first))
    return Batch(tuple(pieces), shards.steps[pieces[0].shard], torch.cat(numbers))


def _pieces(shards: Shards, most: int) -> Iterator[Piece]:
    """The cut parts of all shards as boxes of at most `most` elements."""
    for shard in range(len(shards.params)):
        shape, boxes = _cut_boxes(shards, shard)
        for box in boxes:
            for part in _split(box, most):
                yield Piece(shard, part, shape)


def _cut_boxes(shards: Shards, shard: int) -> tuple[tuple[int, ...], Sequence[Part]]:
    """What a shard holds of cut units, and the shape of the tensor that these are boxes of."""
    blocks, units, whole = shards.blocks[shard], shards.units[shard], shards.whole[shard]
    start = shards.starts[shard]
    if len(units) == len(whole):
        return blocks.shape, ()
    if start is None:
        return blocks.shape, shards.regions[shard]
    end = start + shards.params[shard].numel()
    runs = [(start, end)]
    if whole:
        runs = [(start, blocks.unit_start(whole.start)), (blocks.unit_start(whole.stop), end)]
    # Blocks that are runs do not know rows: one box instead of up to three.
    shape = blocks.shape if layout_of_blocks(blocks).is_rectangular else (blocks.units.numel,)
    return shape, [box for low, high in runs if low < high for box in run_region(shape, low, high, low - start)]


def _split(box: Part, most: int) -> Iterator[Part]:
    """The box in parts of at most `most` elements, in the order of its elements."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.size) if size > 1)
    length = max(1, most * box.size[axis] // box.numel)
    for low in range(0, box.size[axis], length):
        start, size = list(box.start), list(box.size)
        start[axis] += low
        size[axis] = min(length, box.size[axis] - low)
        yield from _split(Part(tuple(start), tuple(size), box.offset + low * box.strides[axis], box.strides), most)
