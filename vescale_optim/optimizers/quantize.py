"""Block-wise 8-bit codes in the format of bitsandbytes: what 8-bit optimizers keep their moments in.

A block of values is stored as its largest absolute value (fp32) and, for each element, the index of the nearest of the
256 values of a codebook:

    values   0.02  -0.5  0.003 ..  |  block of 256         absmax 0.5
    codes     202     0    164 ..  |  uint8                value = codebook[code] * absmax

    quantize_    absmax = max |x|;  code = nearest codebook value to x / absmax, the lower one where two are as near
    dequantize_  x = codebook[code] * absmax

Every operation works element by element or within one block, so a slice of whole blocks gives the same bits as the whole.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), with bitsandbytes' "dynamic"
codebooks. The search is ours and exact: bitsandbytes' on CPU (0.50) loses everything below 1.5e-5 of a block's maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from vescale_optim.sharding.blocks import Blocks, Tiles
from vescale_optim.sharding.regions import Part, row_major_strides


@dataclass(frozen=True, eq=False)
class Codebook:
    """256 ascending values, and the table that finds the nearest one.

    The table is indexed by the upper 16 bits of a float. So few floats share them that at most one midpoint of the
    codebook lies among them, and adding the float's bits to the entry carries into the code exactly beyond it:

        table[upper(x)] = (code << 16) + carry - (upper(x) << 16)
        code of x       = (table[upper(x)] + bits(x)) >> 16       = (code << 16 + carry + lower(x)) >> 16

    For negative x of a signed codebook, where codes fall as bits rise, entries and result are negative: -code. NaN has
    the code of 0.

    Attributes:
        values: fp32[256]; never to be edited.
        table: int32[65536], first the negative floats.
        zero: the code of 0.
    """

    values: Tensor
    table: Tensor
    zero: int

    @property
    def is_signed(self) -> bool:
        return self.zero > 0


@cache
def codebook(*, is_signed: bool, device: torch.device, lowest: int = 0) -> Codebook:
    """The dynamic codebook for values in (-1, 1] or, unsigned, [0, 1]; `lowest` is the smallest code given out."""
    with torch.device("cpu"):  # whatever the user's default device is
        values = dynamic_map(is_signed=is_signed)
        table = _nearest_table(values, lowest)
    return Codebook(values.to(device), table.to(device), 127 if is_signed else 0)


def dynamic_map(*, is_signed: bool) -> Tensor:
    """The values of `bitsandbytes.functional.create_dynamic_map`: fp32[256], ascending.

    Seven decades, each cut into twice as many equal parts as the one below; the values are the middles of the parts.
    Here with the roundings that bitsandbytes sees on CPUs with fused multiply-add, whatever the CPU: without, up to 42
    values differ in the last two bits, and checkpoints would not mean the same everywhere.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + (not is_signed))
        low, high = _rounded(0.1), _rounded(1.0)
        width = _rounded((high - low) / parts)
        index = torch.arange(parts + 1, dtype=torch.float64)
        # fp64 holds these products and sums exactly, so there is one rounding, as in a fused multiply-add.
        edges = _rounded(torch.where(index < (parts + 1) // 2, low + width * index, high - width * (parts - index)))
        middles = _rounded(_rounded(10.0 ** (decade - 6)) * _rounded((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-middle for middle in middles if is_signed]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _rounded(value: Tensor | float) -> Tensor:
    """The nearest fp32 value, in fp64."""
    return torch.as_tensor(value, dtype=torch.float64).float().double()


def _nearest_table(values: Tensor, lowest: int) -> Tensor:
    wide = values.double()
    # Exact: 2 x 24 bits over 21 binary orders of magnitude fit into 53.
    midpoints = (wide[:-1] + wide[1:]) / 2
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16

    def codes_of(bits: Tensor) -> Tensor:
        floats = bits.view(torch.float32).nan_to_num(0.0, posinf=1.0, neginf=-1.0)
        return torch.bucketize(floats.double(), midpoints).clamp(min=lowest)

    first, last = codes_of(upper), codes_of(upper + 0xFFFF)
    # Where the code changes within an entry, the number of floats from 0 outward that still have the first code.
    count, step = torch.zeros_like(upper), 1 << 15
    while step:
        count = torch.where(codes_of(upper + count + step - 1) == first, count + step, count)
        step >>= 1
    carry = torch.where(first != last, (1 << 16) - count, 0)
    falls = (upper < 0) & (values[0] < 0)
    base = torch.where(falls, -first, first) << 16
    return (base + carry - upper).int()


class QuantizationLayout(Protocol):
    """Which elements share an absmax.

    Attributes:
        is_rectangular: whether blocks are boxes of the tensor rather than runs of the flat one.
    """

    is_rectangular: bool

    def blocks(self, shape: Sequence[int]) -> Blocks:
        """Units of the tensor, each of whole quantisation blocks."""
        ...

    def scales_per_unit(self) -> int: ...

    def views(self, values: Tensor, absmax: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Whole units and their scales as pairs that broadcast; a scale has size 1 along the axes of its block."""
        ...

    def scale_numbers(self, shape: Sequence[int], box: Part, device: torch.device) -> Tensor:
        """Which scale of the whole tensor each element of a box of it has: int64, flat, row-major over the box."""
        ...


@dataclass(frozen=True)
class FlatLayout:
    """Runs of `numel` elements of the flat tensor, the last may be short: bitsandbytes' layout."""

    numel: int
    is_rectangular: ClassVar[bool] = False

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks.flat(shape, self.numel)

    def scales_per_unit(self) -> int:
        return 1

    def views(self, values: Tensor, absmax: Tensor) -> list[tuple[Tensor, Tensor]]:
        whole = values.numel() // self.numel
        split = whole * self.numel
        views = [(values[:split].view(whole, self.numel), absmax[:whole].unsqueeze(1))] if whole else []
        return views + ([(values[split:].unsqueeze(0), absmax[whole:].unsqueeze(1))] if split < values.numel() else [])

    def scale_numbers(self, shape: Sequence[int], box: Part, device: torch.device) -> Tensor:
        strides = row_major_strides(shape)
        places = [place * stride for place, stride in zip(_places(box, device), strides, strict=True)]
        return _sums(places, device) // self.numel


@dataclass(frozen=True)
class TileLayout:
    """Tiles of `size` x `size` of a matrix, or of each matrix of a stack; tiles at the edge may be smaller.

    Scales go panel by panel, a panel being `size` rows:   (5, 7), tiles of 3:   0 0 0 1 1 1 2
                                                                                 0 0 0 1 1 1 2
                                                                                 0 0 0 1 1 1 2
                                                                                 3 3 3 4 4 4 5
                                                                                 3 3 3 4 4 4 5
    """

    columns: int
    size: int
    is_rectangular: ClassVar[bool] = True

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks.tiles(shape, self.size)

    def scales_per_unit(self) -> int:
        return -(-self.columns // self.size)

    def views(self, values: Tensor, absmax: Tensor) -> list[tuple[Tensor, Tensor]]:
        matrix = values.view(-1, self.columns)
        scales = absmax.view(-1, 1, self.scales_per_unit(), 1)
        return [
            (matrix[rows, columns].unflatten(1, (-1, width)).unflatten(0, (-1, height)), scales[panels, :, tiles])
            for rows, panels, height in _parts(matrix.size(0), self.size)
            for columns, tiles, width in _parts(self.columns, self.size)
        ]

    def scale_numbers(self, shape: Sequence[int], box: Part, device: torch.device) -> Tensor:
        *leading, rows, columns = _places(box, device)
        tiles = self.scales_per_unit()
        panels = -(-shape[-2] // self.size) * tiles
        matrices = [place * (stride * panels) for place, stride in zip(leading, row_major_strides(shape[:-2]), strict=True)]
        return _sums([*matrices, rows // self.size * tiles, columns // self.size], device)


def _sums(axes: Sequence[Tensor], device: torch.device) -> Tensor:
    """For every place of a box the sum of one number for each axis, flat and row-major."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for numbers in axes:
        total = total.unsqueeze(-1) + numbers
    return total.reshape(-1)


def _places(box: Part, device: torch.device) -> list[Tensor]:
    return [torch.arange(start, start + size, device=device) for start, size in zip(box.start, box.size, strict=True)]


def _parts(length: int, size: int) -> list[tuple[slice, slice, int]]:
    """The whole runs of `size` along an axis, and the short one: (elements, runs, length of a run)."""
    whole = length // size
    parts = [(slice(0, whole * size), slice(0, whole), size)] if whole else []
    return parts + ([(slice(whole * size, length), slice(whole, whole + 1), length % size)] if length % size else [])


def quantization_layout(
    shape: Sequence[int], block_size: int, block_shape: tuple[int, int] | None
) -> FlatLayout | TileLayout:
    """The layout for a tensor of this logical shape; `block_shape`, where given, replaces `block_size`.

    What is narrower than a tile, or no matrix, gets runs of as many elements: small tiles would need too many scales.
    """
    if block_shape is None:
        return FlatLayout(block_size)
    if len(shape) < 2 or min(shape[-2:]) < block_shape[0]:
        return FlatLayout(prod(block_shape))
    return TileLayout(shape[-1], block_shape[0])


def layout_of(shape: Sequence[int], group: Mapping[str, Any]) -> QuantizationLayout | None:
    """How a group has the moments of a parameter of this logical shape quantised; None for fp32 moments."""
    if group["bits"] == 32 or prod(shape) < group["min_8bit_size"]:
        return None
    return quantization_layout(shape, group["block_size"], group["block_shape"])


def layout_of_blocks(blocks: Blocks) -> FlatLayout | TileLayout:
    """The layout that gave these blocks."""
    if isinstance(blocks.layout, Tiles):
        return TileLayout(blocks.layout.columns, blocks.layout.size)
    return FlatLayout(blocks.units.block)


def chunks(
    layout: QuantizationLayout, blocks: Blocks, start: int, end: int, numel: int
) -> Iterator[tuple[slice, slice]]:
    """The units in `start`:`end` of a flat tensor, about `numel` elements at a time: what the functions below take.

    Yields:
        (elements, scales), counted from `start`.
    """
    if start == end:
        return
    first, last, scales = blocks.unit_at(start), blocks.unit_at(end - 1) + 1, layout.scales_per_unit()
    # Panels of a stack may differ in height, and only equal ones are viewed together.
    step = max(1, numel // blocks.units.block) if blocks.units.boundaries is None else 1
    for unit in range(first, last, step):
        stop = min(unit + step, last)
        elements = slice(blocks.unit_start(unit) - start, blocks.unit_start(stop) - start)
        yield elements, slice((unit - first) * scales, (stop - first) * scales)


def dequantize_(
    values: Tensor, codes: Tensor, absmax: Tensor, layout: QuantizationLayout, lookup: Tensor, index: Tensor
) -> Tensor:
    """Write the values of whole units into `values`, and return it.

    Args:
        values: fp32, flat, to be overwritten.
        codes, absmax: uint8 and fp32, flat.
        lookup: fp32[256], the codebook's values.
        index: int32 scratch of the size of `values`.
    """
    # A gather: faster than bitsandbytes' kernel on one thread, the same bits, and for every layout and device.
    torch.index_select(lookup, 0, index.copy_(codes), out=values)
    for block, scale in layout.views(values, absmax):
        block.mul_(scale)
    return values


def quantize_(
    values: Tensor, codes: Tensor, absmax: Tensor, layout: QuantizationLayout, book: Codebook, scratch: Sequence[Tensor]
) -> None:
    """Write the codes and scales of whole units; `values` is destroyed.

    Args:
        values: fp32, flat and contiguous.
        codes, absmax: uint8 and fp32, flat, to be overwritten.
        scratch: two int32 tensors of the size of `values`.
    """
    _, found = scratch
    largest = torch.abs(values, out=found.view(torch.float32)) if book.is_signed else values
    for (block, scale), (magnitude, _) in zip(layout.views(values, absmax), layout.views(largest, absmax), strict=True):
        torch.amax(magnitude, dim=tuple(range(1, magnitude.ndim, 2)), keepdim=True, out=scale)
        # Not the reciprocal: of a subnormal it is infinite. A block of zeros becomes NaN, which has the code of 0.
        block.div_(scale)
    find_codes_(values, codes, book, scratch)


def find_codes_(ratios: Tensor, codes: Tensor, book: Codebook, scratch: Sequence[Tensor]) -> None:
    """Write the codes of the nearest codebook values.

    Args:
        ratios: fp32, flat and contiguous: values divided by their scale.
        codes: uint8, flat, to be overwritten.
        scratch: two int32 tensors of the size of `ratios`.
    """
    index, found = scratch
    bits = ratios.view(torch.int32)
    torch.bitwise_right_shift(bits, 16, out=index).add_(1 << 15)
    torch.index_select(book.table, 0, index, out=found)
    found.add_(bits).bitwise_right_shift_(16)
    codes.copy_(found.abs_() if book.is_signed else found)
