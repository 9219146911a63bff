"""Blocks: what an optimizer needs whole, for one tensor.

A tensor is seen on two levels. *Units* are contiguous runs of elements of the row-major tensor; each lives whole on
one rank while the optimizer works on it, and they are all that the planner sees (`TensorBlocks`). *Pieces* are what
the rule computes on inside units: matrices, tiles, heads, rows; views of the flat units, contiguous or not.

    shape (4, 6), tiles(2):      unit 0 = rows 0-1 = 12 elements     pieces of unit 0: three 2x2 tiles
                                 unit 1 = rows 2-3 = 12 elements     pieces of unit 1: three 2x2 tiles

Nothing here knows a process group or a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal, Protocol

from einops import rearrange
from torch import Tensor

from vescale_optim.sharding.planner import TensorBlocks

Shape = tuple[int, ...]
MatrixLayout = Literal["out_in", "in_out"]


@dataclass(frozen=True)
class Blocks:
    """Units and pieces of one tensor. Make one with a constructor, the shape first:

        Blocks.elements(shape)            unit: one element                     element-wise rules
        Blocks.flat(shape, 256)           unit: 256 elements                    8-bit optimizers
        Blocks.rows(shape, 16)            unit: 16 rows (a row is the last dimension)
        Blocks.matrices(shape)            unit: one matrix of the stack         Muon
        Blocks.splits(shape, (8, 4, 4))   unit: 8, 4 and 4 rows                 fused QKV, heads, gate/up
        Blocks.tiles(shape, 1024)         unit: 1024 rows, pieces: 1024 x 1024  Shampoo, SOAP
        Blocks.whole(shape)               unit: the whole tensor

    Attributes:
        shape: shape of the logical tensor, never of a shard.
        units: what the planner sees; its `cost` is 0, the optimizer sets it with `dataclasses.replace`.
        layout: how pieces lie inside a unit.
    """

    shape: Shape
    units: TensorBlocks
    layout: PieceLayout

    @classmethod
    def elements(cls, shape: Sequence[int]) -> Blocks:
        """Every element by itself. Pieces: one view [count, 1, 1]."""
        return cls.flat(shape, 1)

    @classmethod
    def flat(cls, shape: Sequence[int], numel: int) -> Blocks:
        """Runs of `numel` elements, the last may be short. Pieces: [count, 1, numel], then [1, 1, short]."""
        shape = _checked_shape(shape)
        if numel < 1:
            raise ValueError(f"shape {shape}: flat blocks of {numel} elements; give at least 1")
        return cls(shape, TensorBlocks(prod(shape), numel), Rows(numel))

    @classmethod
    def rows(cls, shape: Sequence[int], num_rows: int) -> Blocks:
        """Runs of `num_rows` rows, a row being the last dimension; the last run may be short.

        Rows are counted over all leading dimensions: a run may go from one matrix of a stack into the next. A 1-D
        tensor is one row, a 0-D tensor one element. Pieces: [count, num_rows, columns], then [1, short, columns].
        """
        shape = _checked_shape(shape)
        if num_rows < 1:
            raise ValueError(f"shape {shape}: blocks of {num_rows} rows; give at least 1")
        columns = shape[-1] if shape else 1
        return cls(shape, TensorBlocks(prod(shape), max(num_rows * columns, 1)), Rows(columns))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Blocks:
        """The whole tensor as one unit. Its piece: [1, all leading dimensions, last dimension]."""
        shape = _checked_shape(shape)
        return cls(shape, TensorBlocks(prod(shape), max(prod(shape), 1)), Rows(shape[-1] if shape else 1))

    @classmethod
    def splits(cls, shape: Sequence[int], sizes: Sequence[int]) -> Blocks:
        """Matrices whose out rows are cut into separate matrices of `sizes` rows; see `matrices`."""
        return cls.matrices(shape, splits=sizes)

    @classmethod
    def matrices(
        cls,
        shape: Sequence[int],
        *,
        flatten: Literal["conv"] | None = None,
        splits: Sequence[int] | None = None,
        interleave: int = 1,
        matrix_layout: MatrixLayout = "out_in",
    ) -> Blocks:
        """The trailing two dimensions are a matrix; the leading ones count the matrices of a stack (experts).

        A piece is always (out, in), whatever the storage:

            stored (out, in)                     units                       pieces
            nothing else                         each matrix                 the matrix
            splits=(8, 4, 4)                     8, 4, 4 rows of each        the same rows as three matrices
            interleave=2                         each matrix                 its even rows, its odd rows
            stored (in, out): matrix_layout="in_out"
            any of the above                     each matrix                 columns, transposed to (out, in)

        Args:
            flatten: "conv" reads the first dimension as out and all others, flattened, as in.
            splits: out rows of each separate matrix; they sum to the out dimension.
            interleave: this many matrices share the out dimension in turn: row r belongs to matrix r % interleave.
            matrix_layout: "out_in" as in torch.nn.Linear, "in_out" as in Hugging Face experts and Conv1D.

        Raises:
            ValueError: fewer than two dimensions, splits that do not sum to the out dimension, an out dimension that
                `interleave` does not divide, or both splits and interleave.
        """
        shape = _checked_shape(shape)
        if flatten not in (None, "conv"):
            raise ValueError(f"shape {shape}: flatten={flatten!r}; give None or 'conv'")
        if matrix_layout not in ("out_in", "in_out"):
            raise ValueError(f"shape {shape}: matrix_layout={matrix_layout!r}; give 'out_in' or 'in_out'")
        _, first, second = _matrix_stack(shape, flatten)
        transposed = matrix_layout == "in_out"
        out_axis = (len(shape) - 1 if transposed else len(shape) - 2) if flatten is None else int(transposed)
        out_rows, in_columns = (second, first) if transposed else (first, second)
        if splits is not None:
            if interleave != 1:
                raise ValueError(f"shape {shape}: both splits and interleave={interleave}; give only one of them")
            sizes = _checked_splits(shape, splits, out_rows, out_axis)
            if not transposed:
                return cls._split_rows(shape, sizes, in_columns)
            layout: PieceLayout = SplitColumns(first, sizes)
        elif interleave < 1 or out_rows % interleave:
            raise ValueError(
                f"shape {shape}: interleave={interleave} does not divide the {out_rows} out rows (axis {out_axis}); "
                f"give the number of matrices whose rows alternate"
            )
        else:
            layout = Interleaved(first, second, interleave, transposed)
        return cls(shape, TensorBlocks(prod(shape), max(first * second, 1)), layout)

    @classmethod
    def tiles(cls, shape: Sequence[int], size: int) -> Blocks:
        """Panels of `size` rows as units, cut into tiles of `size` x `size` as pieces.

        The trailing two dimensions are a matrix; no panel crosses from one matrix of a stack into the next, so the last
        panel of each matrix may be short. The last tile of a panel may be narrow.

            shape (5, 7), tiles(3):   unit 0: 3 rows: tiles 3x3 3x3 3x1      unit 1: 2 rows: tiles 2x3 2x3 2x1
        """
        shape = _checked_shape(shape)
        if size < 1:
            raise ValueError(f"shape {shape}: tiles of {size}; give at least 1")
        num_matrices, rows, columns = _matrix_stack(shape, None)
        heights = [size] * (rows // size) + [rows % size] * (rows % size > 0)
        if num_matrices == 1 or rows % size == 0:
            units = TensorBlocks(prod(shape), max(size * columns, 1))
        else:
            units = _uneven_units([height * columns for height in heights] * num_matrices)
        return cls(shape, units, Tiles(columns, size))

    @classmethod
    def _split_rows(cls, shape: Shape, sizes: Shape, columns: int) -> Blocks:
        numel = prod(shape)
        if len(set(sizes)) == 1:
            return cls(shape, TensorBlocks(numel, max(sizes[0] * columns, 1)), Rows(columns))
        if numel == 0:
            return cls(shape, TensorBlocks(0), Rows(columns))
        num_matrices = numel // (sum(sizes) * columns)
        return cls(shape, _uneven_units([size * columns for size in sizes] * num_matrices), Rows(columns))

    @property
    def out_axis(self) -> int:
        """The axis of the tensor along which `matrices` with `splits` lie one after the other."""
        if isinstance(self.layout, SplitColumns):
            return len(self.shape) - 1
        columns = self.layout.columns
        return next(axis for axis in range(len(self.shape)) if prod(self.shape[axis + 1 :]) == columns)

    @property
    def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the matrices along `out_axis`, in order."""
        if isinstance(self.layout, SplitColumns):
            return self.piece_shapes(0)
        shapes: list[tuple[int, int]] = []
        rows = self.shape[self.out_axis]
        for unit in range(self.num_units):
            if sum(height for height, _ in shapes) == rows:
                break
            shapes += self.piece_shapes(unit)
        return tuple(shapes)

    @property
    def num_units(self) -> int:
        if self.units.boundaries is not None:
            return len(self.units.boundaries)
        return -(-self.units.numel // self.units.block)

    def unit_start(self, unit: int) -> int:
        """First element of a unit in the flat tensor; `unit_start(num_units)` is the end of the tensor."""
        if not 0 <= unit <= self.num_units:
            raise IndexError(f"shape {self.shape}: unit {unit} of {self.num_units}")
        if self.units.boundaries is not None:
            return self.units.boundaries[unit - 1] if unit else 0
        return min(unit * self.units.block, self.units.numel)

    def unit_numel(self, unit: int) -> int:
        """Elements of a unit."""
        if not 0 <= unit < self.num_units:
            raise IndexError(f"shape {self.shape}: unit {unit} of {self.num_units}")
        return self.unit_start(unit + 1) - self.unit_start(unit)

    def unit_at(self, element: int) -> int:
        """The unit that holds an element of the flat tensor."""
        if not 0 <= element < self.units.numel:
            raise IndexError(f"shape {self.shape}: element {element} of {self.units.numel}")
        if self.units.boundaries is not None:
            return bisect_right(self.units.boundaries, element)
        return element // self.units.block

    def whole_units(self, start: int, end: int) -> range | None:
        """The units that the elements `start` to `end - 1` are, at least one; None where some unit is cut."""
        first, last = self.unit_at(start), self.unit_at(end - 1)
        is_whole = self.unit_start(first) == start and self.unit_start(last + 1) == end
        return range(first, last + 1) if is_whole else None

    def piece_shapes(self, unit: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every piece of one unit, in the order of `pieces`."""
        return self.layout.shapes(self.unit_numel(unit))

    def pieces(self, values: Tensor, first: int, count: int) -> list[Tensor]:
        """Views [batch, rows, columns] of the pieces of units `first` to `first + count - 1`.

        Never copies: what is written into a view is written into `values`. Every element of `values` is in exactly one
        view. Consecutive units of one size make one run; run after run, there is one view per piece of a unit, with the
        units of the run as its batch:

            three matrices (in, 8+4):      [3, 8, in], [3, 4, in]
            rows 8, 4, 4 of one matrix:    [1, 8, in], [2, 4, in]
            one panel of three tiles:      [3, b, b]                  several equal pieces of a single unit stack too

        Args:
            values: the flat, contiguous tensor that holds exactly those units.
            first: the first unit.
            count: number of units; 0 gives no views.
        """
        if not 0 <= first <= first + count <= self.num_units:
            raise IndexError(f"shape {self.shape}: units {first} to {first + count} of {self.num_units}")
        expected = self.unit_start(first + count) - self.unit_start(first)
        if values.shape != (expected,) or not values.is_contiguous():
            raise ValueError(
                f"shape {self.shape}: units {first} to {first + count} need a flat contiguous tensor of {expected} "
                f"elements, found shape {tuple(values.shape)}, strides {values.stride()}; pass the flat local shard"
            )
        views: list[Tensor] = []
        position = 0
        for length, numel in self._runs(first, count):
            views.extend(self.layout.views(values[position : position + length * numel], length))
            position += length * numel
        return views

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """(number of units, elements of each) for consecutive units of one size."""
        if self.units.boundaries is None:
            is_short = count > 0 and self.unit_numel(first + count - 1) < self.units.block
            if count > is_short:
                yield count - is_short, self.units.block
            if is_short:
                yield 1, self.unit_numel(first + count - 1)
            return
        unit, end = first, first + count
        while unit < end:
            numel, length = self.unit_numel(unit), 1
            while unit + length < end and self.unit_numel(unit + length) == numel:
                length += 1
            yield length, numel
            unit += length


class PieceLayout(Protocol):
    """How pieces lie inside a unit: their shapes from its size, their views from equal units one after the other."""

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]: ...

    def views(self, values: Tensor, num_units: int) -> list[Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """One piece per unit: its rows of `columns` elements. A unit that is not of whole rows is one row."""

    columns: int

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]:
        columns = self.columns if self.columns and unit_numel % self.columns == 0 else unit_numel
        return ((unit_numel // columns, columns),)

    def views(self, values: Tensor, num_units: int) -> list[Tensor]:
        ((rows, columns),) = self.shapes(values.numel() // num_units)
        return [rearrange(values, "(u r c) -> u r c", u=num_units, r=rows, c=columns)]


@dataclass(frozen=True)
class Interleaved:
    """`count` matrices per unit, their out rows in turn; count 1 is one matrix. Stored `rows` x `columns`.

    count 2, stored (out, in):  | row 0 -> piece 0 | row 1 -> piece 1 | row 2 -> piece 0 | row 3 -> piece 1 |
    """

    rows: int
    columns: int
    count: int
    is_transposed: bool

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]:
        out_rows, in_columns = (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)
        return ((out_rows // self.count, in_columns),) * self.count

    def views(self, values: Tensor, num_units: int) -> list[Tensor]:
        pattern = "(u i o k) -> u k o i" if self.is_transposed else "(u o k i) -> u k o i"
        inputs = self.rows if self.is_transposed else self.columns
        return _stacked(rearrange(values, pattern, u=num_units, i=inputs, k=self.count))


@dataclass(frozen=True)
class SplitColumns:
    """Matrices stored (in, out) = `rows` x sum(`sizes`), one per unit, whose columns are separate matrices."""

    rows: int
    sizes: Shape

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]:
        return tuple((size, self.rows) for size in self.sizes)

    def views(self, values: Tensor, num_units: int) -> list[Tensor]:
        transposed = rearrange(values, "(u i o) -> u o i", u=num_units, i=self.rows)
        if len(set(self.sizes)) == 1:
            return _stacked(rearrange(transposed, "u (k o) i -> u k o i", k=len(self.sizes)))
        return list(transposed.split(self.sizes, dim=1))


@dataclass(frozen=True)
class Tiles:
    """Units are panels of rows; pieces are tiles of `size` columns, the last one may be narrow."""

    columns: int
    size: int

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]:
        rows = unit_numel // self.columns
        narrow = self.columns % self.size
        return ((rows, self.size),) * (self.columns // self.size) + ((rows, narrow),) * (narrow > 0)

    def views(self, values: Tensor, num_units: int) -> list[Tensor]:
        panels = rearrange(values, "(u r c) -> u r c", u=num_units, c=self.columns)
        full = self.columns // self.size * self.size
        views = _stacked(rearrange(panels[:, :, :full], "u r (t b) -> u t r b", b=self.size)) if full else []
        return views + ([panels[:, :, full:]] if full < self.columns else [])


def _stacked(pieces: Tensor) -> list[Tensor]:
    """[unit, piece, row, column] as 3-D views: one where a view can hold all, else one per piece."""
    num_units, num_pieces = pieces.shape[:2]
    if num_pieces > 1 and num_units == 1:
        return [pieces[0]]
    return list(pieces.unbind(1))


def _uneven_units(numels: Sequence[int]) -> TensorBlocks:
    boundaries = tuple(accumulate(numels))
    numel = boundaries[-1] if boundaries else 0
    return TensorBlocks(numel, boundaries=boundaries if numel else ())


def _checked_shape(shape: Sequence[int]) -> Shape:
    sizes = tuple(int(size) for size in shape)
    for axis, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"shape {sizes}: axis {axis} has {size} elements; give sizes of at least 0")
    return sizes


def _matrix_stack(shape: Shape, flatten: str | None) -> tuple[int, int, int]:
    """(matrices, rows, columns) of the stored tensor."""
    if len(shape) < 2:
        raise ValueError(
            f"shape {shape}: a matrix needs two axes, found {len(shape)}; use rows, flat or elements for this tensor"
        )
    if flatten == "conv":
        return 1, shape[0], prod(shape[1:])
    return prod(shape[:-2]), shape[-2], shape[-1]


def _checked_splits(shape: Shape, splits: Sequence[int], out_rows: int, axis: int) -> Shape:
    sizes = tuple(int(size) for size in splits)
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"shape {shape}: splits {sizes} of axis {axis}; give sizes of at least 1")
    if sum(sizes) != out_rows:
        raise ValueError(
            f"shape {shape}: splits {sizes} sum to {sum(sizes)} rows; give splits that sum to {out_rows} (axis {axis})"
        )
    return sizes
