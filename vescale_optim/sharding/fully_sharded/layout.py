"""How the parameters of a group are cut into shards: between the optimizer's units, or between rows.

Where every unit (a matrix of Muon, a panel of Shampoo) is whole on one rank, the optimizer's step needs no communication,
but shards of equal size pad when a module has few units per rank. Rows pad next to nothing, but then units have to travel to
their owners and directions back. The choice is what moves fewer bytes per step:

    units    3 (N-1)/N padding itemsize                  two all-gathers and one reduce-scatter carry the padding along
    rows     2 (N-1)/N numel of the units 2 bytes        to the owners and back, two bytes per element

and units only where padding stays under `LARGEST_PADDING`, since parameters, gradients and optimizer states all pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.planner import BufferPlan, plan_buffer

# Elements. 16 bytes of bf16, to which NCCL aligns its fast paths.
ALIGN = 8
# Padding by elements that whole units may cost in memory.
LARGEST_PADDING = 0.25
# Bytes per element in which units travel: what Newton-Schulz reads and writes.
WIRE_ITEMSIZE = 2


@dataclass(frozen=True)
class ShardLayout:
    """What was chosen for a group, and why.

    Attributes:
        kind: "units": every unit is whole on one rank. "rows": shards cut between rows, so units have to travel.
        reason: one line for `describe`.
    """

    plan: BufferPlan
    kind: Literal["units", "rows"]
    reason: str


def choose_layout(blocks: Sequence[Blocks], num_ranks: int, itemsize: int) -> ShardLayout:
    """The cheaper of the two layouts for parameters that travel together.

    Args:
        blocks: what the optimizer needs whole, in the order of use.
        num_ranks: ranks that share the parameters.
        itemsize: bytes per element in which the parameters are gathered.
    """
    units = plan_buffer([entry.units for entry in blocks], num_ranks, align=ALIGN)
    by_rows = [_cut_by_rows(entry) for entry in blocks]
    if by_rows == list(blocks) or num_ranks == 1:
        return ShardLayout(units, "units", f"{_percent(units)} padding")
    moved = sum(entry.units.numel for entry, rows in zip(blocks, by_rows, strict=True) if rows is not entry)
    padding_bytes, exchange_bytes = bytes_per_step(units, moved, num_ranks, itemsize)
    costs = (
        f"whole units pad {_percent(units)}, {padding_bytes:,.0f} bytes more per step; "
        f"an exchange would move {exchange_bytes:,.0f} bytes"
    )
    if keeps_units(units, moved, num_ranks, itemsize):
        return ShardLayout(units, "units", costs)
    rows = plan_buffer([entry.units for entry in by_rows], num_ranks, align=ALIGN)
    return ShardLayout(rows, "rows", f"{costs}; rows pad {_percent(rows)}")


def keeps_units(units: BufferPlan, moved: int, num_ranks: int, itemsize: int) -> bool:
    """Whether a plan of whole units is worth its padding, where `moved` elements would travel otherwise."""
    padding_bytes, exchange_bytes = bytes_per_step(units, moved, num_ranks, itemsize)
    return padding_bytes <= exchange_bytes and units.padding_fraction <= LARGEST_PADDING


def bytes_per_step(units: BufferPlan, moved: int, num_ranks: int, itemsize: int) -> tuple[float, float]:
    """(what the padding of whole units adds to the traffic of a rank, what an exchange of `moved` elements would)."""
    share = (num_ranks - 1) / num_ranks
    return 3 * share * units.padding * itemsize, 2 * share * moved * WIRE_ITEMSIZE


def _cut_by_rows(blocks: Blocks) -> Blocks:
    """The same tensor cut between rows, unless its units are that small already."""
    rows = Blocks.rows(blocks.shape, 1)
    is_coarse = blocks.units.boundaries is not None or blocks.units.block > rows.units.block
    return rows if is_coarse and blocks.units.numel else blocks


def _percent(plan: BufferPlan) -> str:
    return f"{100 * plan.padding_fraction:.1f} %"
