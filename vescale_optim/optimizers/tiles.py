"""Tiles: the matrices that Shampoo and SOAP precondition, and where the state of each lies.

A parameter is a matrix, or a stack of them. A matrix with a dimension above `size` is cut into panels of `size` rows, the
units, and each panel into tiles. Tiles are counted over the whole logical parameter, so nothing about a tile depends on
the rank that owns it:

    (5, 7) by 3:    | tile 0 3x3 | tile 1 3x3 | tile 2 3x1 |     unit 0
                    | tile 3 2x3 | tile 4 2x3 | tile 5 2x1 |     unit 1

State lies with the owner of the unit, tile after tile, nothing padded; of every tile either one number per element, or a
square matrix per side:

    "exp_avg"       | rows * columns | rows * columns | ...
    "factors"       | rows * rows | columns * columns | rows * rows | columns * columns | ...
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod
from numbers import Integral

import torch
from einops import rearrange
from torch import Tensor

from vescale_optim.optimizers.rule import Group, StateSpec, Units
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.planner import TensorBlocks

# How the matrices of a parameter lie in it (see `Blocks.matrices`), with the values of a group that does not say.
MATRIX_LAYOUT = {"flatten": None, "splits": None, "interleave": 1, "matrix_layout": "out_in"}

# Elements of the tiles that one batch takes, on devices that take batches.
BATCH_NUMEL = 1 << 24

# Rows of a gram that one product computes; fewer make it slower than what mirroring saves (fp32 on CPU, n of 512 to 2048).
GRAM_ROWS = 256

# Bytes to which torch aligns what it allocates on CPU; products and decompositions of other memory round differently.
ALIGNMENT = 64

# The squares of a matrix of 1e8 such entries still have a finite sum in fp32.
MAX_GRADIENT = 1e15


@dataclass(frozen=True)
class Tile:
    """One tile on its owner.

    Attributes:
        gradient: view [rows, columns] of what `prepare` returned; not to be written.
        direction: view [rows, columns] to be filled.
        pairs: views [rows, rows] and [columns, columns] of state that has a matrix per side, by name.
        moments: views [rows, columns] of state that has one number per element, by name.
        index: position among the tiles of the logical parameter.
        turn: position among the tiles of the whole optimizer, see `turns_of`.
        step: number of the current step of the parameter, from 1.
        name: of the parameter, for messages.
    """

    gradient: Tensor
    direction: Tensor
    pairs: dict[str, tuple[Tensor, Tensor]]
    moments: dict[str, Tensor]
    index: int
    turn: int
    step: int
    name: str


def tile_blocks(shape: Sequence[int], size: int, group: Group) -> Blocks:
    """Whole matrices where they fit into size x size, else panels of `size` rows cut into tiles.

    Tiles lie as they are stored: transposing one only exchanges its two factors.
    """
    options = {name: group[name] for name in MATRIX_LAYOUT}
    whole = Blocks.matrices(shape, **options)
    if all(max(piece) <= size for unit in range(whole.num_units) for piece in whole.piece_shapes(unit)):
        return whole
    shape = whole.shape
    stored = (shape[0], prod(shape[1:])) if options["flatten"] == "conv" else shape
    splits, interleave = options["splits"], options["interleave"]
    if splits is None and interleave == 1:
        return replace(Blocks.tiles(stored, size), shape=shape)
    is_transposed = options["matrix_layout"] == "in_out"
    num_matrices, rows, columns = prod(stored[:-2]), stored[-2], stored[-1]
    row_splits, widths = (rows,), (columns,)
    if interleave > 1 and is_transposed:
        widths = (columns // interleave,) * interleave
    elif interleave > 1:
        # Matrices that alternate row by row lie side by side in rows that are as much longer.
        row_splits, widths = (rows // interleave,), (columns,) * interleave
    elif is_transposed:
        widths = tuple(splits)
    else:
        row_splits = tuple(splits)
    heights = [min(size, part - start) for part in row_splits for start in range(0, part, size)]
    ends = tuple(accumulate(height * sum(widths) for height in heights * num_matrices))
    layout = SideBySide(widths, size, is_interleaved=interleave > 1 and is_transposed)
    return Blocks(shape, TensorBlocks(prod(shape), boundaries=ends), layout)


@dataclass(frozen=True)
class SideBySide:
    """Units are panels of rows of several matrices, `widths` columns each, one after the other or column by column in
    turn (`is_interleaved`); pieces are their tiles of at most `size` columns."""

    widths: tuple[int, ...]
    size: int
    is_interleaved: bool = False

    def shapes(self, unit_numel: int) -> tuple[tuple[int, int], ...]:
        rows = unit_numel // sum(self.widths)
        return tuple(
            (rows, min(self.size, width - start)) for width in self.widths for start in range(0, width, self.size)
        )

    def views(self, values: Tensor, num_units: int) -> list[Tensor]:
        panels = rearrange(values, "(u r c) -> u r c", u=num_units, c=sum(self.widths))
        if self.is_interleaved:
            matrices = rearrange(panels, "u r (c k) -> k u r c", k=len(self.widths)).unbind(0)
        else:
            matrices = panels.split(self.widths, dim=2)
        return [tile for matrix in matrices for tile in matrix.split(self.size, dim=2)]


def tile_shapes(blocks: Blocks) -> list[tuple[int, int]]:
    """(rows, columns) of every tile of a parameter, in the order of their indices."""
    return [shape for unit in range(blocks.num_units) for shape in blocks.piece_shapes(unit)]


def moment_state(name: str, blocks: Blocks) -> StateSpec:
    """fp32 state of one number per element, tile after tile."""
    numels = tuple(blocks.unit_numel(unit) for unit in range(blocks.num_units))
    return StateSpec(name, where="unit", dtype=torch.float32, unit_numels=numels)


def pair_state(name: str, blocks: Blocks) -> StateSpec:
    """fp32 state of a matrix [rows, rows] and a matrix [columns, columns] per tile, tile after tile."""
    numels = tuple(
        sum(rows * rows + columns * columns for rows, columns in blocks.piece_shapes(unit))
        for unit in range(blocks.num_units)
    )
    return StateSpec(name, where="unit", dtype=torch.float32, unit_numels=numels)


def turns_of(parameters: Sequence[Blocks]) -> list[tuple[int, ...]]:
    """When the tiles of all parameters are recomputed: tile after tile, those of one shape after each other.

    Recomputing costs the cube of the shape, so each step then gets its share of the work: with `frequency` steps to go
    round, the tiles whose turns are equal modulo `frequency` come together. Ranks and layouts play no part.

        (5, 7) and (3, 6) by 3:     | 4 3x3 | 5 3x3 | 3 3x1 |     | 6 3x3 | 7 3x3 |
                                    | 1 2x3 | 2 2x3 | 0 2x1 |
    """
    tiles = [
        (shape, number, index) for number, blocks in enumerate(parameters) for index, shape in enumerate(tile_shapes(blocks))
    ]
    turns: list[dict[int, int]] = [{} for _ in parameters]
    for turn, (_, number, index) in enumerate(sorted(tiles)):
        turns[number][index] = turn
    return [tuple(turn for _, turn in sorted(of_parameter.items())) for of_parameter in turns]


def tiles_of(
    units: Iterable[Units],
    directions: Iterable[Tensor],
    turns: Iterable[Sequence[int]],
    pair_names: Iterable[str],
    moment_names: Iterable[str],
) -> list[Tile]:
    """Every tile of the units, with views of its gradient, direction and the state of these names.

    Args:
        turns: for each entry of `units`, the turns of all tiles of its parameter.
    """
    tiles = []
    for entry, direction, entry_turns in zip(units, directions, turns, strict=True):
        gradients, targets = _matrices(entry, entry.values), _matrices(entry, direction)
        shapes = [tuple(gradient.shape) for gradient in gradients]
        pairs = {name: _pair_views(entry.state[name], shapes) for name in pair_names}
        moments = {name: _moment_views(entry.state[name], shapes) for name in moment_names}
        first = _first_indices(entry.blocks)[entry.first]
        for position, (gradient, target) in enumerate(zip(gradients, targets, strict=True)):
            tiles.append(
                Tile(
                    gradient,
                    target,
                    {name: views[position] for name, views in pairs.items()},
                    {name: views[position] for name, views in moments.items()},
                    first + position,
                    entry_turns[first + position],
                    entry.step,
                    entry.name,
                )
            )
    return tiles


def _pair_views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    parts = iter(flat.split([side * side for shape in shapes for side in shape]))
    return [(next(parts).view(rows, rows), next(parts).view(columns, columns)) for rows, columns in shapes]


def _moment_views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _matrices(entry: Units, values: Tensor) -> list[Tensor]:
    """Views of the tiles in the order of their indices: unit by unit, where `pieces` goes piece by piece over units."""
    blocks, base = entry.blocks, entry.blocks.unit_start(entry.first)
    matrices = []
    for unit in range(entry.first, entry.first + entry.count):
        part = values[blocks.unit_start(unit) - base : blocks.unit_start(unit + 1) - base]
        matrices += [matrix for view in blocks.pieces(part, unit, 1) for matrix in view.unbind(0)]
    return matrices


@cache
def _first_indices(blocks: Blocks) -> tuple[int, ...]:
    """Index of the first tile of every unit."""
    return tuple(accumulate((len(blocks.piece_shapes(unit)) for unit in range(blocks.num_units)), initial=0))


def batches_of(tiles: Sequence[Tile], kind: Callable[[Tile], Hashable]) -> list[list[Tile]]:
    """Tiles that go through the same kernels together: of one shape and `kind`; one by one on CPU."""
    if tiles and tiles[0].gradient.device.type == "cpu":
        return [[tile] for tile in tiles]
    return grouped(tiles, kind)


def grouped(tiles: Sequence[Tile], kind: Callable[[Tile], Hashable]) -> list[list[Tile]]:
    """Batches of tiles of one shape and `kind`, of at most `BATCH_NUMEL` elements of the larger factor."""
    kinds: dict[Hashable, list[Tile]] = {}
    for tile in tiles:
        kinds.setdefault((tile.gradient.shape, kind(tile)), []).append(tile)
    batches = []
    for same in kinds.values():
        size = max(1, BATCH_NUMEL // max(max(same[0].gradient.shape) ** 2, 1))
        batches += [same[start : start + size] for start in range(0, len(same), size)]
    return batches


def stacked(views: Sequence[Tensor]) -> Tensor:
    """[rows, columns] of a single view, else [batch, rows, columns]; contiguous and aligned.

    A single view that lies as a fresh tensor would is taken as it is: write only to what is stored back.
    """
    if len(views) > 1:
        return torch.stack(list(views))
    (view,) = views
    # Not is_contiguous(), which ignores the strides of dimensions of size 1; products do not.
    if view.stride() == (view.size(1), 1) and view.data_ptr() % ALIGNMENT == 0:
        return view
    return torch.empty(view.shape, dtype=view.dtype, device=view.device).copy_(view)


def each(values: Tensor) -> list[Tensor]:
    """The matrices of what `stacked` returned."""
    return [values] if values.ndim == 2 else list(values.unbind(0))


def store(views: Sequence[Tensor], values: Tensor) -> None:
    """Write the matrices of a batch back into the views they came from."""
    for view, value in zip(views, each(values), strict=True):
        # What was changed in place is there already.
        if view.data_ptr() != value.data_ptr():
            view.copy_(value)


def add_grams(batch: Sequence[Tile], gradients: Tensor, decay: float) -> None:
    """factors <- decay * factors + (1 - decay) * (G G^T, G^T G); plain sums where `decay` is 1."""
    for side, rows in enumerate((gradients, gradients.mT)):
        views = [tile.pairs["factors"][side] for tile in batch]
        factors = stacked(views)
        add_gram(factors, rows, decay)
        store(views, factors)


def add_gram(factors: Tensor, rows: Tensor, decay: float) -> None:
    """In place: F <- decay * F + (1 - decay) * A A^T, or F + A A^T where `decay` is 1; A is [..., n, k] and F [..., n, n].

    Panel by panel up to the diagonal, and the rest mirrored: less than two thirds of the products where n is large.

        | 1 . . |
        | 2 2 . |       panel 2 is one product of its rows with all rows up to its last one
        | 3 3 3 |
    """
    new = 1 - decay if decay < 1 else 1.0
    for start in range(0, rows.shape[-2], GRAM_ROWS):
        stop = min(start + GRAM_ROWS, rows.shape[-2])
        panel, left, right = factors[..., start:stop, :stop], rows[..., start:stop, :], rows[..., :stop, :].mT
        (panel.addmm_ if panel.ndim == 2 else panel.baddbmm_)(left, right, beta=decay, alpha=new)
        factors[..., :start, start:stop] = panel[..., :start].mT


def has_values(matrices: Sequence[Tensor]) -> list[bool]:
    """Whether each matrix is not all zero; waits for the device once."""
    return [norm > 0 for norm in torch.stack(torch._foreach_norm(matrices)).tolist()] if matrices else []


def is_positive_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
