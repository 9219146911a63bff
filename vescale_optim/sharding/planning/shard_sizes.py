"""Shard sizes: combinations of S_1, S_2, ... for the segments of a bucket, the smallest sum first. Used by `partition`.

Long tensors are cut by many boundaries, so the S of their segment is a multiple of their block. A *class* is all long
tensors of one block; a segment may hold the classes whose blocks divide its S. A combination is worth a try where

    the sum is at least the average        S_1 + S_2 + ... >= elements / ranks
    every set of classes has room          the segments that may hold any of them have as many elements as they have

Rows of 8 elements, 400 of them, and rows of 12, 200 of them, all in long tensors, for 16 ranks (350 per rank):

    one segment     24 k                         360, 2.9 % padding
    two segments    8 i + 12 j                   200 + 156 = 356
    shared          24 k for both, 8 i for some  336 + 16  = 352
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, combinations_with_replacement
from math import comb, lcm


def shard_size_combinations(
    classes: Mapping[int, int], average: int, num_ranks: int, *, below: int, most_segments: int, segment_numel: int
) -> Iterator[tuple[int, ...]]:
    """Combinations with a price under `below`, the cheapest first.

    Args:
        classes: elements of the long tensors, by their block.
        average: elements of all tensors by the ranks, which the shard sizes must reach.
        below: the price to beat: the sum of the shard sizes plus `segment_numel` for every segment.
        most_segments: segments of one combination.
        segment_numel: what a segment costs, in elements of one rank.
    """
    blocks = sorted(classes, reverse=True)
    groups = [
        (mask, -(-sum(classes[block] for position, block in enumerate(blocks) if mask >> position & 1) // num_ranks))
        for mask in range(1, 1 << len(blocks))
    ]
    multiples = sorted(
        {
            multiple
            for size in range(1, len(blocks) + 1)
            for chosen in combinations(blocks, size)
            if (multiple := lcm(*chosen)) < below
        }
    )
    masks: dict[int, int] = {}

    def classes_held(shard: int) -> int:
        if shard not in masks:
            masks[shard] = sum(1 << position for position, block in enumerate(blocks) if shard % block == 0)
        return masks[shard]

    likely = _likely_sizes(multiples, [dict(groups)[classes_held(multiple)] for multiple in multiples], below)
    found: set[tuple[int, ...]] = set()
    for num_chosen in range(most_segments):
        for chosen in combinations_with_replacement(_affordable(likely, num_chosen), num_chosen):
            # The last segment takes what the others leave.
            left = average - sum(chosen)
            room = below - sum(chosen) - segment_numel * (num_chosen + 1)
            if room <= left:
                continue
            for multiple in multiples:
                last = -(-left // multiple) * multiple if left > 0 else multiple
                while last < room and last <= left + 2 * multiple:
                    found.add(tuple(sorted((*chosen, last), reverse=True)))
                    last += multiple
    for shards in sorted(found, key=lambda shards: (sum(shards) + segment_numel * len(shards), shards)):
        held = [(classes_held(shard), shard) for shard in shards]
        if all(sum(shard for mask, shard in held if mask & group) >= least for group, least in groups):
            yield shards


def _likely_sizes(multiples: list[int], needs: list[int], below: int) -> list[int]:
    """Sizes for all segments but the last, the likeliest first: about what its classes need, or few blocks."""
    factors = []
    for multiple, need in zip(multiples, needs, strict=True):
        own = -(-need // multiple)
        others = [-(-other // multiple) - change for other in needs for change in (0, 1)]
        factors.append([own, 1, own - 1, 2, own + 1, 3, 4, *others])
    sizes: dict[int, None] = {}
    for rank in range(max((len(row) for row in factors), default=0)):
        for row, multiple in zip(factors, multiples, strict=True):
            if 0 < row[rank] * multiple < below:
                sizes[row[rank] * multiple] = None
    return list(sizes)


def _affordable(sizes: list[int], num_chosen: int) -> list[int]:
    """As many of the likeliest sizes as can be combined in a bounded number of ways."""
    count = len(sizes)
    while num_chosen and count > 1 and comb(count + num_chosen - 1, num_chosen) > _MOST_CHOICES:
        count -= 1
    return sizes[:count]


_MOST_CHOICES = 1500
