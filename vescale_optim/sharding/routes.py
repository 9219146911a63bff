"""Routes: which boxes of a bucket's tensors travel between the rank that stores them and the owners of their units.

Ranks form a grid. Its columns hold different parts of every tensor, its rows are replicas; each unit has one owner
(row, column). A rank finds its own routes: its parts met by all units, and its units met by the parts of all columns.
Both ends of a message list its boxes by tensor, unit and start, so a message needs no header, and the way back is the same
list read the other way. `exchange` moves data along them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vescale_optim.sharding.regions import Part, Window, intersect, packed_window, run_region


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """Consecutive units with one owner: elements start:end of the row-major tensor."""

    start: int
    end: int
    row: int
    column: int


@dataclass(frozen=True, eq=False)
class RoutedTensor:
    """A tensor of the bucket.

    Attributes:
        shape: of the logical tensor.
        region_of: what a column holds of it, alike in all rows. Columns must not overlap and must cover the tensor.
            Hashable; equal callables share what is derived from them (see `regions.PlacedRegions`).
        runs: in order, covering the tensor. On their owner they lie in one flat memory, run after run.
    """

    shape: tuple[int, ...]
    region_of: Callable[[int], tuple[Part, ...]]
    runs: tuple[OwnedRun, ...]


@dataclass(frozen=True)
class Grid:
    row: int
    column: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of tensor `tensor` in a memory of this rank; in messages it is packed, row-major."""

    tensor: int
    numel: int
    window: Window


@dataclass(frozen=True, slots=True)
class Stay:
    """A box that this rank both holds and owns, in its shard and in the owner memory."""

    tensor: int
    held: Part
    owned: Part


@dataclass(frozen=True)
class Routes:
    """All boxes that concern this rank, in the order in which they are packed."""

    grid: Grid
    shard_numels: tuple[int | None, ...]  # of this rank's memories; None where the tensor is absent
    owner_numels: tuple[int | None, ...]  # None also where this rank owns nothing
    moves: tuple[bool, ...]  # whether any rank of this row sends any of it
    shard_pieces: dict[tuple[int, int], list[Piece]]  # what owner (row, column) gets of this rank's shards
    owner_pieces: dict[int, list[Piece]]  # what column c holds of this rank's units
    stays: list[Stay]

    def to_owner(self, row: int, column: int) -> list[Piece]:
        """What the owner gets of this rank's shards; the own place included."""
        return self.shard_pieces.get((row, column), [])

    def to_peer_owners(self, row: int) -> dict[int, list[Piece]]:
        """By column, ascending, what its owner in this row gets of this rank's shards; this rank's own column left out."""
        columns = sorted(column for other, column in self.shard_pieces if other == row and column != self.grid.column)
        return {column: self.shard_pieces[row, column] for column in columns}

    def from_peer_columns(self) -> dict[int, list[Piece]]:
        """By column, ascending, where what it holds of this rank's units lies in the owner memories."""
        return dict(sorted(self.owner_pieces.items()))

    def only(self, present: Sequence[bool]) -> Routes:
        return Routes(
            self.grid,
            tuple(n if here else None for n, here in zip(self.shard_numels, present, strict=True)),
            tuple(n if here else None for n, here in zip(self.owner_numels, present, strict=True)),
            tuple(moves and here for moves, here in zip(self.moves, present, strict=True)),
            {peer: [p for p in pieces if present[p.tensor]] for peer, pieces in self.shard_pieces.items()},
            {peer: [p for p in pieces if present[p.tensor]] for peer, pieces in self.owner_pieces.items()},
            [stay for stay in self.stays if present[stay.tensor]],
        )


def find_routes(tensors: Sequence[RoutedTensor], grid: Grid) -> Routes:
    routes = Routes(
        grid,
        tuple(sum(part.numel for part in tensor.region_of(grid.column)) for tensor in tensors),
        tuple(_owned_numel(tensor, grid) or None for tensor in tensors),
        tuple(not _stays_whole(tensor, grid.row) for tensor in tensors),
        defaultdict(list),
        defaultdict(list),
        [],
    )
    for index, tensor in enumerate(tensors):
        offsets = _offsets_at_owners(tensor.runs)
        _route_shard(routes, index, tensor, offsets)
        _route_units(routes, index, tensor, offsets)
    return routes


def _owned_numel(tensor: RoutedTensor, grid: Grid) -> int:
    return sum(run.end - run.start for run in tensor.runs if (run.row, run.column) == (grid.row, grid.column))


def _offsets_at_owners(runs: Sequence[OwnedRun]) -> list[int]:
    """Where each run begins in the memory of its owner."""
    filled: dict[tuple[int, int], int] = {}
    offsets = []
    for run in runs:
        owner = run.row, run.column
        offsets.append(filled.get(owner, 0))
        filled[owner] = offsets[-1] + run.end - run.start
    return offsets


def _route_shard(routes: Routes, index: int, tensor: RoutedTensor, offsets: Sequence[int]) -> None:
    """This rank's part of the tensor, met by the units of all owners."""
    grid, mine = routes.grid, tensor.region_of(routes.grid.column)
    low, high = _span(tensor.shape, mine)
    for position in range(max(bisect_right(tensor.runs, low, key=_start_of) - 1, 0), len(tensor.runs)):
        run = tensor.runs[position]
        if run.start >= high:
            break
        for held, owned in intersect(mine, run_region(tensor.shape, run.start, run.end, offsets[position])):
            if (run.row, run.column) == (grid.row, grid.column):
                routes.stays.append(Stay(index, held, owned))
            # In the all-gather over rows a unit that stays is one of the pieces, too.
            routes.shard_pieces[run.row, run.column].append(Piece(index, held.numel, packed_window(held)))


def _start_of(run: OwnedRun) -> int:
    return run.start


def _route_units(routes: Routes, index: int, tensor: RoutedTensor, offsets: Sequence[int]) -> None:
    """This rank's units of the tensor, met by the parts of all other columns."""
    grid = routes.grid
    for run, offset in zip(tensor.runs, offsets, strict=True):
        if (run.row, run.column) != (grid.row, grid.column):
            continue
        units = run_region(tensor.shape, run.start, run.end, offset)
        for column in _columns_that_hold(tensor, grid.num_columns, run.start, run.end):
            if column == grid.column:
                continue
            for _, owned in intersect(tensor.region_of(column), units):
                routes.owner_pieces[column].append(Piece(index, owned.numel, packed_window(owned)))


def _stays_whole(tensor: RoutedTensor, row: int) -> bool:
    """Whether the owners of this row's units hold all of them: the same answer on all its ranks."""
    for run in tensor.runs:
        if run.row == row:
            common = intersect(tensor.region_of(run.column), run_region(tensor.shape, run.start, run.end))
            if sum(held.numel for held, _ in common) < run.end - run.start:
                return False
    return True


def _span(shape: Sequence[int], region: Sequence[Part]) -> tuple[int, int]:
    """The flat range of the row-major tensor within which the region lies."""
    low, high = [], []
    for part in region:
        first = last = 0
        for length, start, size in zip(shape, part.start, part.size, strict=True):
            first, last = first * length + start, last * length + start + size - 1
        low.append(first)
        high.append(last + 1)
    return min(low, default=0), max(high, default=0)


def _columns_that_hold(tensor: RoutedTensor, num_columns: int, start: int, end: int) -> list[int]:
    """Columns that may hold elements of start:end, in order."""
    low, high = _spans_of_columns(tensor.shape, tensor.region_of, num_columns)
    return ((low < end) & (high > start)).nonzero().flatten().tolist()


@lru_cache(maxsize=256)
def _spans_of_columns(
    shape: tuple[int, ...], region_of: Callable[[int], tuple[Part, ...]], num_columns: int
) -> tuple[Tensor, Tensor]:
    spans = torch.tensor([_span(shape, region_of(column)) for column in range(num_columns)]).view(num_columns, 2)
    return spans[:, 0], spans[:, 1]
