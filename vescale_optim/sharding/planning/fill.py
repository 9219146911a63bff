"""Fill: small tensors into the room that whole tensors leave in equal shards. Used by `arrange`.

A filler that can be cut may lie across the boundary of two shards, at the end of one and the start of the next:

    rank 0                  rank 1                  rank 2
    |jobs......|f|f|ggggg|  |ggg|jobs......|hhhh|   |hhhhh|jobs....|i|..|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vescale_optim.sharding.planning.packing import Item, round_up


@dataclass(frozen=True)
class Filling:
    """`placed`: (tensor, start in the segment), ascending; `left`: fillers that found no room."""

    shard: int
    placed: tuple[tuple[int, int], ...]
    left: tuple[int, ...]


def fill_shards(
    jobs: Sequence[Sequence[int]],
    fillers: Sequence[int],
    items: Mapping[int, Item],
    align: int,
    *,
    segment_numel: int,
) -> Filling:
    """Equal shards around each rank's jobs, of the size that wastes least.

    Args:
        jobs: the tensors that each rank holds whole.
        fillers: tensors that may go to any rank.
        segment_numel: what it costs, in elements, to leave fillers to a segment of their own.
    """
    sizes = [sum(items[index].size for index in held) for held in jobs]
    by_size = sorted(fillers, key=lambda index: (-items[index].size, index))
    total = sum(sizes) + sum(items[index].size for index in fillers)
    best: tuple[int, Filling] | None = None
    # The largest may be too large for any room; without the first few, the others may fit and leave no padding.
    for num_left in range(min(len(by_size), _MOST_LEFT) + 1):
        smallest = max(max(sizes), round_up(-(-total // len(jobs)), align))
        wider = [round_up(smallest + smallest // part, align) for part in _WIDER]
        for shard in dict.fromkeys((smallest, max(sizes), *wider)):
            if best is not None and shard * len(jobs) >= best[0]:
                continue
            filling = _fill(jobs, sizes, by_size[num_left:], by_size[:num_left], items, shard)
            price = shard * len(jobs)
            if filling.left:
                # A segment of their own has shards of at least their largest unit.
                left = [items[index] for index in filling.left]
                shard_of_left = max(-(-sum(item.size for item in left) // len(jobs)), max(i.largest_unit for i in left))
                price += shard_of_left * len(jobs) + segment_numel
            if best is None or price < best[0]:
                best = (price, filling)
        assert best is not None
        if not best[1].left and best[1].shard == smallest:
            break
        if num_left < len(by_size):
            total -= items[by_size[num_left]].size
    assert best is not None
    return best[1]


def _fill(
    jobs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    fillers: Sequence[int],
    left_out: Sequence[int],
    items: Mapping[int, Item],
    shard: int,
) -> Filling:
    waiting = sorted((items[index].size, index) for index in fillers)
    placed: list[tuple[int, int]] = []
    tail = 0
    for rank, held in enumerate(jobs):
        cursor = rank * shard + tail
        for index in held:
            placed.append((index, cursor))
            cursor += items[index].size
        end = (rank + 1) * shard
        while (fitting := bisect_right(waiting, (end - cursor, len(items)))) > 0:
            size, index = waiting.pop(fitting - 1)
            placed.append((index, cursor))
            cursor += size
        tail = 0
        if cursor < end and rank + 1 < len(jobs):
            across = _best_across(waiting, items, end - cursor, shard - sizes[rank + 1])
            if across is not None:
                position, head = across
                size, index = waiting.pop(position)
                placed.append((index, end - head))
                tail = size - head
    return Filling(shard, tuple(placed), tuple(sorted([index for _, index in waiting] + list(left_out))))


def _best_across(
    waiting: Sequence[tuple[int, int]], items: Mapping[int, Item], room: int, next_room: int
) -> tuple[int, int] | None:
    """(position in `waiting`, elements before the boundary) of the filler that leaves least room unused."""
    best: tuple[int, int] | None = None
    for position in range(max(len(waiting) - _MOST_TRIED, 0), len(waiting)):
        size, index = waiting[position]
        cut = items[index].cut
        head = room // cut * cut if cut else 0
        if head and 0 < size - head <= next_room and (best is None or head >= best[1]):
            best = (position, head)
    return best


_MOST_LEFT = 4
# Shards that are larger by these parts may save a segment for what finds no room.
_WIDER = (1024, 256, 64)
_MOST_TRIED = 16
