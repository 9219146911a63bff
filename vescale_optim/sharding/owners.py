"""Owners: which rank computes which units of a DTensor parameter, so that all ranks are equally busy.

Ranks form a grid as in `exchange`: columns hold different parts of a tensor, rows are replicas. A unit that lies whole on
one column stays there, and the rows share such units. Everything else goes to the ranks with the smallest load so far,
over the whole sequence of parameters: per-layer balance was measured 6 to 16 times off ideal at 64 to 256 ranks.

Where owners keep state for their units, the units of a parameter are given to ranks in ascending order, so that the state
of all units is one logical tensor cut into one run per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.exchange import OwnedRun
from vescale_optim.sharding.regions import Part, flat_extent


@dataclass(frozen=True)
class GridShape:
    """rank_at[row][column]: the position of each rank of the grid in the group of all its ranks."""

    rank_at: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        return len(self.rank_at)

    @property
    def num_columns(self) -> int:
        return len(self.rank_at[0])

    def places(self) -> list[tuple[int, int]]:
        """(row, column) of every rank, ascending by rank."""
        pairs = [(row, column) for row in range(self.num_rows) for column in range(self.num_columns)]
        return sorted(pairs, key=lambda place: self.rank_at[place[0]][place[1]])


@dataclass(frozen=True)
class OwnedUnits:
    """Units first to first + count - 1 of a parameter, on the rank at (row, column)."""

    first: int
    count: int
    row: int
    column: int

    def run(self, blocks: Blocks) -> OwnedRun:
        return OwnedRun(blocks.unit_start(self.first), blocks.unit_start(self.first + self.count), self.row, self.column)


def choose_owners(
    blocks: Blocks,
    cost: float,
    region_of: Callable[[int], tuple[Part, ...]],
    grid: GridShape,
    loads: Sequence[float],
    *,
    ascending: bool,
) -> tuple[OwnedUnits, ...]:
    """Owners of all units of one parameter, in the order of units, at most one run per rank.

    Args:
        cost: FLOPs of the whole parameter, spread over its units by size.
        region_of: what a column holds.
        loads: FLOPs given to each rank so far.
        ascending: later units must have later ranks.
    """
    if blocks.num_units == 0:
        return ()
    kept = _holders(blocks, region_of, grid, loads)
    if kept is not None and (not ascending or _is_ascending(kept, grid)):
        return kept
    return _balanced(blocks, cost, grid.places(), grid, loads, range(blocks.num_units))


def _is_ascending(owned: Sequence[OwnedUnits], grid: GridShape) -> bool:
    ranks = [grid.rank_at[entry.row][entry.column] for entry in owned]
    return ranks == sorted(ranks)


def _holders(
    blocks: Blocks, region_of: Callable[[int], tuple[Part, ...]], grid: GridShape, loads: Sequence[float]
) -> tuple[OwnedUnits, ...] | None:
    """The columns that hold the units whole, the rows of each sharing them; None where some unit is cut."""
    held = whole_units_of_columns(blocks, region_of, grid.num_columns)
    if held is None:
        return None
    owned: list[OwnedUnits] = []
    for column, units in held:
        rows = sorted(range(grid.num_rows), key=lambda row: (grid.rank_at[row][column]))
        owned += _balanced(blocks, 1.0, [(row, column) for row in rows], grid, loads, units)
    return tuple(owned)


@lru_cache(maxsize=1024)
def whole_units_of_columns(
    blocks: Blocks, region_of: Callable[[int], tuple[Part, ...]], num_columns: int
) -> tuple[tuple[int, range], ...] | None:
    """(column, its units) in the order of units, where every column holds whole units; None as soon as one does not."""
    held = []
    for column in range(num_columns):
        extent = flat_extent(blocks.shape, region_of(column))
        if extent is None:
            return None
        start, end = extent
        if start == end:
            continue
        units = blocks.whole_units(start, end)
        if units is None:
            return None
        held.append((column, units))
    return tuple(sorted(held, key=lambda entry: entry[1].start))


def _balanced(
    blocks: Blocks,
    cost: float,
    places: Sequence[tuple[int, int]],
    grid: GridShape,
    loads: Sequence[float],
    units: range,
) -> list[OwnedUnits] | tuple[OwnedUnits, ...]:
    """Consecutive units to the `places` in order, so that the loads come out as level as whole units allow."""
    ranks = [grid.rank_at[row][column] for row, column in places]
    if len(units) == 1:
        row, column = min(places, key=lambda place: loads[grid.rank_at[place[0]][place[1]]])
        return (OwnedUnits(units[0], 1, row, column),)
    numel = blocks.unit_start(units[-1] + 1) - blocks.unit_start(units[0])
    total = cost * numel / max(blocks.units.numel, 1)
    room = _room_below(_level([loads[rank] for rank in ranks], total), [loads[rank] for rank in ranks])
    owned: list[OwnedUnits] = []
    unit, given, budget = units[0], 0.0, 0.0
    for number, (row, column) in enumerate(places):
        budget += room[number]
        first = unit
        while unit < units[-1] + 1:
            share = cost * blocks.unit_numel(unit) / max(blocks.units.numel, 1)
            # A unit goes where more than half of it has room; the last rank takes what is left.
            if number < len(places) - 1 and given + share / 2 > budget:
                break
            given += share
            unit += 1
        if unit > first:
            owned.append(OwnedUnits(first, unit - first, row, column))
    return owned


def _level(loads: Sequence[float], total: float) -> float:
    """The load that all ranks below it reach when `total` is poured onto them."""
    ordered = sorted(loads)
    poured = 0.0
    for count, load in enumerate(ordered, 1):
        following = ordered[count] if count < len(ordered) else float("inf")
        if poured + (following - load) * count >= total:
            return load + (total - poured) / count
        poured += (following - load) * count
    return ordered[-1]


def _room_below(level: float, loads: Sequence[float]) -> list[float]:
    return [max(level - load, 0.0) for load in loads]
