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
from functools import cached_property, lru_cache

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

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(row, column) of every rank, ascending by rank."""
        pairs = [(row, column) for row in range(self.num_rows) for column in range(self.num_columns)]
        return tuple(sorted(pairs, key=lambda place: self.rank_at[place[0]][place[1]]))


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
    return _balanced(blocks, cost, range(len(grid.places)), grid, loads, range(blocks.num_units))


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
        ranks = sorted(row[column] for row in grid.rank_at)
        owned += _balanced(blocks, 1.0, ranks, grid, loads, units)
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
    blocks: Blocks, cost: float, ranks: Sequence[int], grid: GridShape, loads: Sequence[float], units: range
) -> tuple[OwnedUnits, ...]:
    """Consecutive units to the `ranks` in order, so that the loads come out as level as whole units allow."""
    if len(units) == 1:
        return (OwnedUnits(units[0], 1, *grid.places[min(ranks, key=loads.__getitem__)]),)

    def cost_of(start: int, end: int) -> float:
        return cost * (blocks.unit_start(end) - blocks.unit_start(start)) / max(blocks.units.numel, 1)

    loads_here = [loads[rank] for rank in ranks]
    room = _room_below(_level(loads_here, cost_of(units.start, units.stop)), loads_here)
    owned: list[OwnedUnits] = []
    unit, given, budget = units.start, 0.0, 0.0
    share = cost_of(unit, unit + 1)
    for number, rank in enumerate(ranks):
        budget += room[number]
        first = unit
        # A unit goes where more than half of it has room; the last rank takes what is left.
        while unit < units.stop and (given + share / 2 <= budget or number == len(ranks) - 1):
            given += share
            unit += 1
            share = cost_of(unit, unit + 1) if unit < units.stop else 0.0
        if unit > first:
            owned.append(OwnedUnits(first, unit - first, *grid.places[rank]))
    return tuple(owned)


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
