"""plan_buffer: where each tensor lies in a bucket's global buffer, and where the ranks' shards cut it.

The global buffer is a row of *segments*; a segment is a row of shards, one per rank; a tensor lies in one segment:

    global buffer   | segment 0                      | segment 1            |
                    | rank 0 | rank 1 | rank 2       | rank 0 | rank 1 | .. |
    tensors         |AAAA|BBB|BBBB|...|CCCCCC|       |DDDDDDDDDDDDDDDDDDD|..|

    local shard of rank 1 = its part of segment 0, then its part of segment 1

Pure Python: no process group, no device, no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm

from vescale_optim.sharding.planning.arrange import Draft, even_drafts, uneven_drafts
from vescale_optim.sharding.planning.bounds import smallest_local_numel
from vescale_optim.sharding.planning.packing import Item, make_item
from vescale_optim.sharding.rank_shares import RankShares


@dataclass(frozen=True)
class TensorBlocks:
    """Where one tensor may be cut: its units, as one size or as a list of boundaries.

    Args:
        numel: elements of the tensor, >= 0.
        block: size of every unit in elements, >= 1; the last unit may be short. Ignored where `boundaries` is given.
        boundaries: ends of uneven units, ascending, the last equal to `numel`; None for units of one size.
        cost: FLOPs of the rule on the whole tensor, spread over its units by size; 0 for element-wise rules.
    """

    numel: int
    block: int = 1
    boundaries: tuple[int, ...] | None = None
    cost: float = 0.0


@dataclass(frozen=True)
class Segment:
    """One run of N shards of the global buffer.

    Args:
        tensors: indices of the tensors in it, in the order of their offsets.
        start: first element of the segment in the global buffer.
        shard_numels: elements of each rank's shard; all equal unless the plan is uneven.
        local_start: first element of the segment in each rank's local buffer, one entry per rank.
    """

    tensors: tuple[int, ...]
    start: int
    shard_numels: tuple[int, ...]
    local_start: tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """The part of one tensor that one rank holds: `numel` elements from `start` of the flat tensor.

    They lie at `local` of the rank's local buffer. `numel` is 0 where the rank holds nothing of the tensor.
    """

    start: int
    numel: int
    local: int


@dataclass(frozen=True)
class BufferPlan:
    """The answer of `plan_buffer`. Sizes and positions are in elements.

    Attributes:
        tensors: what was planned, in the caller's order.
        num_ranks: shards of each segment.
        align: S and every offset are multiples of this.
        segments: at least one where there is any tensor.
        offsets: position of each tensor in the global buffer, in the caller's order.
        lower_bound: no plan with equal shards has a smaller global buffer.
        driver: one line: which tensor or lcm forces the shard size above the ideal; empty where nothing does.
    """

    tensors: tuple[TensorBlocks, ...]
    num_ranks: int
    align: int
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]
    lower_bound: int
    driver: str

    @cached_property
    def numel(self) -> int:
        """Elements of the global buffer, padding included."""
        return sum(sum(segment.shard_numels) for segment in self.segments)

    @property
    def padding(self) -> int:
        """Elements of the global buffer that belong to no tensor."""
        return self.numel - sum(tensor.numel for tensor in self.tensors)

    @property
    def padding_fraction(self) -> float:
        """Padding by the elements of the tensors; 0.0 where there are none."""
        total = sum(tensor.numel for tensor in self.tensors)
        return (self.numel - total) / total if total else 0.0

    @cached_property
    def is_even(self) -> bool:
        """Every segment has equal shards."""
        return all(len(set(segment.shard_numels)) <= 1 for segment in self.segments)

    def driver_by(self, names: Sequence[str]) -> str:
        """`driver`, with the names of the tensors in the place of their numbers."""
        return re.sub(r"tensor (\d+)", lambda found: names[int(found[1])], self.driver)

    def shard_numel(self, rank: int) -> int:
        """Elements of the rank's local buffer, over all segments."""
        self._check_rank(rank)
        return sum(segment.shard_numels[rank] for segment in self.segments)

    def extent(self, tensor: int, rank: int) -> Extent:
        """The part of a tensor that a rank holds; costs a few comparisons, whatever the number of ranks."""
        segment, begins, uniform = self._places[self._segment_of[tensor]]
        # Positions from here on count from the first element of the segment.
        position = self.offsets[tensor] - segment.start
        shard_start = rank * uniform if uniform is not None else begins[rank]
        shard_end = shard_start + segment.shard_numels[rank]
        numel = self.tensors[tensor].numel
        start = min(max(shard_start - position, 0), numel)
        end = min(max(shard_end - position, 0), numel)
        local = min(max(position - shard_start, 0), segment.shard_numels[rank])
        return Extent(start, end - start, segment.local_start[rank] + local)

    def shares(self, tensor: int) -> RankShares:
        """Elements of the tensor on every rank."""
        ranks = self.ranks_of(tensor)
        return RankShares.from_first(self.num_ranks, ranks.start, [self.extent(tensor, rank).numel for rank in ranks])

    def ranks_of(self, tensor: int) -> range:
        """The ranks that may hold a part of the tensor: all others hold nothing of it."""
        numel = self.tensors[tensor].numel
        if not numel:
            return range(0)
        segment, begins, uniform = self._places[self._segment_of[tensor]]
        position = self.offsets[tensor] - segment.start
        if uniform is not None:
            return range(position // uniform, (position + numel - 1) // uniform + 1)
        return range(bisect_right(begins, position) - 1, bisect_left(begins, position + numel))

    def unit_range(self, tensor: int, rank: int) -> tuple[int, int]:
        """First unit and number of units of the tensor on the rank; the number is 0 where it holds none."""
        extent = self.extent(tensor, rank)
        units = self.tensors[tensor]
        if units.boundaries is not None:
            first = bisect_right(units.boundaries, extent.start)
            last = bisect_left(units.boundaries, extent.start + extent.numel)
            return (first, last + 1 - first) if extent.numel else (first, 0)
        first = -(-extent.start // units.block)
        return first, -(-(extent.start + extent.numel) // units.block) - first

    def gaps(self) -> list[tuple[int, int]]:
        """(start, end) of every run of padding in the global buffer, ascending."""
        gaps = []
        for segment in self.segments:
            cursor = segment.start
            for tensor in segment.tensors:
                if self.offsets[tensor] > cursor:
                    gaps.append((cursor, self.offsets[tensor]))
                cursor = max(cursor, self.offsets[tensor] + self.tensors[tensor].numel)
            end = segment.start + sum(segment.shard_numels)
            if end > cursor:
                gaps.append((cursor, end))
        return gaps

    def rank_costs(self) -> list[float]:
        """FLOPs per rank: the cost of the units it holds, without the `loads` it was planned for."""
        costs = [0.0] * self.num_ranks
        for index, tensor in enumerate(self.tensors):
            if tensor.cost and tensor.numel:
                for rank in self.ranks_of(index):
                    costs[rank] += tensor.cost * (self.extent(index, rank).numel / tensor.numel)
        return costs

    @cached_property
    def _segment_of(self) -> dict[int, int]:
        return {tensor: index for index, segment in enumerate(self.segments) for tensor in segment.tensors}

    @cached_property
    def _places(self) -> list[tuple[Segment, tuple[int, ...], int | None]]:
        """Per segment: where each shard begins, and S where all shards are equal and not empty."""
        places = []
        for segment in self.segments:
            sizes = set(segment.shard_numels)
            uniform = segment.shard_numels[0] if len(sizes) == 1 and segment.shard_numels[0] else None
            begins = () if uniform else tuple(accumulate(segment.shard_numels, initial=0))
            places.append((segment, begins, uniform))
        return places

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of a plan for {self.num_ranks} ranks")


def plan_buffer(
    tensors: Sequence[TensorBlocks],
    num_ranks: int,
    *,
    align: int = 8,
    loads: Sequence[float] | None = None,
    padding_tolerance: float = 0.03,
    even: bool = True,
) -> BufferPlan:
    """Pack tensors into one buffer that the shards of `num_ranks` ranks cut only between units.

    Finds segments, the order of the tensors and the shard sizes, with as little padding as the search can find and,
    where tensors have a cost, with the least busy busiest rank among the plans of little padding.

        rank 0          rank 1          rank 2
        |AAAAAAAA|AAAA..|BBBBBB|CCCCCC..|      A is cut between its blocks, B and C are not cut;
                  ^ padding, only between tensors

    The same arguments give the same plan on every rank and machine.

    Args:
        tensors: what to pack, in the order of use; the plan keeps that order where it costs nothing.
        num_ranks: shards of every segment, >= 1.
        align: shard sizes and offsets are multiples of this many elements (16 bytes for NCCL), so a tensor can be cut
            only at multiples of lcm(block, align), or at those `boundaries` that are multiples of `align`.
        loads: FLOPs that each rank has already from other buckets; None for none.
        padding_tolerance: padding, as a fraction of the elements of the tensors, that may be spent on the balance of
            the FLOPs; a plan that must pad more than this pads as little as it can.
        even: all shards of a segment have the same size. If not, there is no padding beyond alignment; the busiest rank
            is made least busy first, then the bytes are levelled, as far as the units allow.

    Raises:
        ValueError: num_ranks < 1, align < 1, a tensor with numel < 0 or block < 1, boundaries that do not ascend to
            numel, or loads that are not one per rank.

    Source: the problem is that of veScale-FSDP (arXiv 2602.22437); segments, costs and uneven shards are ours.
    """
    tensors = tuple(tensors)
    _check(tensors, num_ranks, align, loads)
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel]
    items = {
        index: make_item(tensors[index].numel, tensors[index].block, tensors[index].boundaries, align)
        for index in filled
    }
    costs = {index: tensors[index].cost for index in filled}
    start_loads = [0.0] * num_ranks if loads is None else [float(load) for load in loads]
    if even:
        drafts = even_drafts(items, costs, num_ranks, align, start_loads, padding_tolerance)
    else:
        drafts = uneven_drafts(items, costs, num_ranks, align, start_loads)
    drafts = _with_empty_tensors(drafts, tensors, num_ranks)
    segments, offsets = _laid_out(drafts, len(tensors), num_ranks)
    largest = sum(max(draft.shards) for draft in drafts)
    bound = smallest_local_numel(list(items.values()), num_ranks, align, known=largest) * num_ranks
    return BufferPlan(tensors, num_ranks, align, segments, offsets, bound, _driver(drafts, items, num_ranks, align))


def _check(tensors: Sequence[TensorBlocks], num_ranks: int, align: int, loads: Sequence[float] | None) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; give at least 1")
    if align < 1:
        raise ValueError(f"align is {align} elements; give at least 1")
    if loads is not None and len(loads) != num_ranks:
        raise ValueError(f"loads has {len(loads)} entries; give one for each of the {num_ranks} ranks")
    for index, tensor in enumerate(tensors):
        if tensor.numel < 0:
            raise ValueError(f"tensor {index} has numel {tensor.numel}; give at least 0")
        if tensor.boundaries is None:
            if tensor.block < 1:
                raise ValueError(f"tensor {index} has blocks of {tensor.block} elements; give at least 1")
            continue
        ends = tensor.boundaries
        for position, (before, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end <= before:
                raise ValueError(
                    f"tensor {index}: boundary {position} is {end}, after {before}; "
                    f"give the ends of the units, ascending"
                )
        if (ends[-1] if ends else 0) != tensor.numel:
            raise ValueError(
                f"tensor {index} has {tensor.numel} elements, but its boundaries end at {ends[-1] if ends else 0}; "
                f"give boundaries whose last is the number of elements"
            )


def _with_empty_tensors(drafts: list[Draft], tensors: Sequence[TensorBlocks], num_ranks: int) -> list[Draft]:
    """Tensors of no elements lie at the start of the first segment."""
    empty = tuple(index for index, tensor in enumerate(tensors) if not tensor.numel)
    if not empty:
        return drafts
    first = drafts[0] if drafts else Draft((), (), (0,) * num_ranks)
    return [Draft(empty + first.tensors, (0,) * len(empty) + first.starts, first.shards), *drafts[1:]]


def _laid_out(drafts: Sequence[Draft], num_tensors: int, num_ranks: int) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """The drafts one after the other in the global buffer and in every local buffer."""
    segments, offsets = [], [0] * num_tensors
    start, local = 0, (0,) * num_ranks
    for draft in drafts:
        segments.append(Segment(draft.tensors, start, draft.shards, local))
        for tensor, position in zip(draft.tensors, draft.starts, strict=True):
            offsets[tensor] = start + position
        start += sum(draft.shards)
        local = tuple(held + numel for held, numel in zip(local, draft.shards, strict=True))
    return tuple(segments), tuple(offsets)


def _driver(drafts: Sequence[Draft], items: dict[int, Item], num_ranks: int, align: int) -> str:
    """What forces the segment with the most padding above its ideal size."""
    worst, most = None, 0
    for draft in drafts:
        padding = sum(draft.shards) - sum(items[tensor].size for tensor in draft.tensors if tensor in items)
        if padding > most:
            worst, most = draft, padding
    if worst is None:
        return ""
    shard = max(worst.shards)
    inside = [tensor for tensor in worst.tensors if tensor in items]
    ideal = -(-sum(items[tensor].size for tensor in inside) // num_ranks)
    found = f"shards of {shard} elements, {ideal} if they could be cut anywhere"
    by_unit = max(inside, key=lambda tensor: (items[tensor].largest_unit, -tensor))
    unit = items[by_unit].largest_unit
    if shard == unit:
        kind = "block" if items[by_unit].cut else "unit"
        return f"tensor {by_unit}: its {kind} of {unit} elements must lie in one shard; {found}"
    blocks: dict[int, int] = {}
    for tensor in inside:
        # Two boundaries or more cut a tensor of two shards: the shard is a multiple of its block.
        if items[tensor].cut and items[tensor].size >= 2 * shard:
            blocks.setdefault(items[tensor].cut, tensor)
    multiple = lcm(align, *blocks)
    if len(blocks) > 1:
        named = ", ".join(f"{block} (tensor {tensor})" for block, tensor in blocks.items())
        return f"shards are a multiple of {multiple} elements, the lcm of the blocks {named}; {found}"
    if blocks:
        ((block, tensor),) = blocks.items()
        return f"tensor {tensor}: shards are a multiple of its block of {block} elements; {found}"
    if unit <= align:
        return f"cuts are at multiples of {align} elements; {found}"
    return f"tensor {by_unit}: no better place was found for units of up to {unit} elements; {found}"
