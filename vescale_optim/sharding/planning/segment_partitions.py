"""Segment partitions: which tensors share a segment, the smallest sum of shard sizes first.

For few tensors, by branch and bound. The S of a segment is at least the elements it holds by the ranks, at least every
unit it holds, and a multiple of the block of every *long* tensor in it: one cut so often that no other S will do.
Whether the tensors then also fit is for the caller to see; long tensors always do, and without a gap. Used by
`partition` to find segments, by `bounds` to prove that none are better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import lcm

from vescale_optim.sharding.planning.packing import Item, round_up


@dataclass(frozen=True, order=True)
class SegmentPartition:
    """The tensors `members[i]`, positions in the list, lie in a segment of shards of `shards[i]` elements."""

    sum_of_shards: int
    shards: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def least_partitions(
    items: Sequence[Item],
    num_ranks: int,
    align: int,
    *,
    long_from: int,
    below: int,
    enough: int,
    most_segments: int | None = None,
    num_kept: int = 1,
    most_tries: int = 20_000,
) -> tuple[list[SegmentPartition], bool]:
    """The partitions with the smallest sums, ascending, and whether all that matter were looked at.

    Args:
        items: tensors; the largest first is fastest.
        long_from: items of this size or more, if they can be cut everywhere, are long.
        below: only sums under this.
        enough: sums up to this are as good as each other; the search ends once all `num_kept` are.
    """
    kept: list[tuple[int, int, SegmentPartition]] = []
    segments: list[tuple[int, int, int, tuple[int, ...]]] = []
    limit, tries = below, 0

    def search(position: int, spent: int) -> None:
        nonlocal limit, tries
        tries += 1
        if tries > most_tries or spent >= limit or limit <= enough:
            return
        if position == len(items):
            ordered = sorted(segments, key=lambda segment: segment[3])
            found = SegmentPartition(spent, tuple(entry[2] for entry in ordered), tuple(entry[3] for entry in ordered))
            # A heap of the worst kept so far; `tries` makes the entries comparable and the result the same everywhere.
            entry = (-max(spent, enough), tries, found)
            if len(kept) < num_kept:
                heappush(kept, entry)
            else:
                heapreplace(kept, entry)
            if len(kept) == num_kept:
                limit = -kept[0][0]
            return
        item = items[position]
        needed = item.cut if item.cut and item.size >= long_from else align
        room_for_more = most_segments is None or len(segments) < most_segments
        for index in range(len(segments) + room_for_more):
            is_new = index == len(segments)
            before = (align, 0, 0, ()) if is_new else segments[index]
            # A segment like an earlier one would only repeat its tries.
            if any(before[:3] == other[:3] for other in segments[:index]):
                continue
            multiple, held = lcm(before[0], needed), before[1] + item.size
            shard = round_up(max(-(-held // num_ranks), before[2], item.largest_unit), multiple)
            after = (multiple, held, shard, (*before[3], position))
            if is_new:
                segments.append(after)
            else:
                segments[index] = after
            search(position + 1, spent + shard - before[2])
            if is_new:
                segments.pop()
            else:
                segments[index] = before

    search(0, 0)
    return sorted(entry[2] for entry in kept), tries <= most_tries
