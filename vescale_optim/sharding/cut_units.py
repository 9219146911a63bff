"""Cut units: which units of a parameter its storage cuts, so that no rank holds them whole, and who keeps their state.

Element-wise rules with blocks (8-bit moments) update parts of units where they lie; numbers measured of the parts are
combined over the ranks. State of units is one logical 1-D tensor. Where every rank holds one run of the flat parameter, a
unit's state belongs to the rank that holds its first element, and a rank whose run starts inside a unit has a copy:

    units          |  u0  |  u1  |  u2  |  u3  |  u4  |
    rank 0         ^^^^^^^^^^                              units u0 u1     whole u0       owned u0 u1
    rank 1                   ^^^^^^^^^^^^^^                units u1 u2 u3  whole u2       owned u2 u3     cut: u1, u3
    rank 2                                 ^^^^^^^^^^^     units u3 u4     whole u4       owned u4

Elsewhere (columns, strided shards) every rank keeps the state of all units, and all of them count as cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.regions import Part, flat_extent


@dataclass(frozen=True)
class CutUnits:
    """What a rank has to know of the units of one parameter.

    Attributes:
        num_cut: units that are cut, the same on all ranks.
        units: those whose state this rank keeps: all of which its shard holds a part.
        whole: of them, those that the shard holds whole.
        owned: of them, those whose state is this rank's part of the logical state.
        cut: of the cut units, in their order, those among `units`.
        shares: units that each column owns; None where every rank keeps all.
    """

    num_cut: int
    units: range
    whole: range
    owned: range
    cut: slice
    shares: tuple[int, ...] | None


# The layers of a model have few shapes, and at 1,024 ranks each takes 25 ms.
@lru_cache(maxsize=1 << 12)
def find_cut_units(
    blocks: Blocks, region_of: Callable[[int], Sequence[Part]], column: int, num_columns: int, *, keeps_runs: bool
) -> CutUnits:
    """Compare the units with the borders between columns.

    Args:
        region_of: what a column holds.
        column: of this rank.
        keeps_runs: whether each column can keep a run of the state; else every rank keeps all of it.
    """
    extents = [flat_extent(blocks.shape, region_of(number)) for number in range(num_columns)]
    held = [extent for extent in extents if extent is None or extent[0] < extent[1]]
    if None in held or held != sorted(held) or not keeps_runs:
        everything = range(blocks.num_units)
        return CutUnits(len(everything), everything, range(0), everything, slice(0, len(everything)), None)
    cut = sorted({blocks.unit_at(start) for start, _ in held if blocks.unit_start(blocks.unit_at(start)) != start})
    owned = [_owned(blocks, *extent) for extent in extents]
    start, end = extents[column]
    units = range(blocks.unit_at(start), blocks.unit_at(end - 1) + 1) if start < end else range(0)
    ends = [unit for unit in sorted({*units[:1], *units[-1:]}) if unit in set(cut)]
    whole = range(units.start + (units.start in ends), units.stop - (units.stop - 1 in ends)) if units else units
    first = cut.index(ends[0]) if ends else 0
    return CutUnits(
        len(cut),
        units,
        whole if whole else range(0),
        owned[column],
        slice(first, first + len(ends)),
        tuple(map(len, owned)),
    )


def _owned(blocks: Blocks, start: int, end: int) -> range:
    """The units whose first element is one of start:end."""
    if start == end:
        return range(0)
    first = blocks.unit_at(start)
    return range(first + (blocks.unit_start(first) != start), blocks.unit_at(end - 1) + 1)


def cut_rows(units: range, whole: range) -> list[slice]:
    """Positions in `units` of those that are not in `whole`."""
    if not whole:
        return [slice(0, len(units))]
    rows = [slice(0, whole.start - units.start), slice(whole.stop - units.start, len(units))]
    return [row for row in rows if row.start < row.stop]
