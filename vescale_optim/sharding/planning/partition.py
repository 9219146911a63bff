"""Partition: which tensors share a segment, so that all segments together need the fewest elements. Used by `arrange`.

One segment pads much when row lengths mix, because its S must be a multiple of the block of every tensor that holds a
whole shard. Tensors of equal blocks in a segment of their own pad by less than a block per rank, and small tensors fill
what is left:

    one segment     S is a multiple of lcm(A, B)       |AAAAAAAA|AA..BBBB|BBBBBB..|
    two segments    a multiple of A, a multiple of B   |AAAA|AAAA|AAcc|   |BBBB|BBBB|BB..|

Several searches start from what the last one found, until the padding is about what any plan must have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import lcm

from vescale_optim.sharding.planning.bounds import scheduling_bound
from vescale_optim.sharding.planning.packing import Item, round_up
from vescale_optim.sharding.planning.parts import Counts, Part, PartFinder
from vescale_optim.sharding.planning.segment_partitions import least_partitions
from vescale_optim.sharding.planning.shard_sizes import shard_size_combinations


@lru_cache(maxsize=32)
def best_parts(
    items: tuple[Item, ...], num_ranks: int, align: int, *, max_segments: int, segment_numel: int
) -> tuple[Part, ...]:
    """The segments found for the items, in the caller's order, with the fewest elements.

    `segment_numel`: what a further segment costs, in elements. Layers of a model are alike, so answers are kept.
    """
    finder = PartFinder(items, num_ranks, align, segment_numel)
    bound = scheduling_bound(finder.runs, num_ranks, align) * num_ranks
    enough = bound + bound // _GOOD_ENOUGH + segment_numel
    best = [finder.part(finder.totals)]
    for search in (_from_block_classes, _by_shard_sizes, _by_tensors, _from_one_segment):
        if finder.price(best) <= enough or finder.is_exhausted:
            break
        found = search(finder, finder.price(best), max_segments)
        if found:
            improved = _improved(finder, [part.counts for part in found], max_segments)
            best = min(best, found, improved, key=finder.price)
    best = [finder.refined(part) for part in best]
    if sum(finder.totals) <= _FEW_TENSORS and finder.price(best) > enough:
        best = _by_every_partition(finder, best, max_segments)
    # One segment, exact: the caller's order is never beaten by less, nor is any order that few states can try.
    limit = (finder.price(best) - segment_numel) // num_ranks
    single = finder.in_order(finder.totals, finder.runs, limit) or finder.in_any_order(finder.totals, limit)
    return tuple(best) if single is None else (single,)


def _from_one_segment(finder: PartFinder, price: int, max_segments: int) -> list[Part]:
    return [finder.part(finder.totals)]


def _from_block_classes(finder: PartFinder, price: int, max_segments: int) -> list[Part]:
    """A segment for each block, then merges of two, the one that costs least first."""
    classes: dict[int, list[int]] = {}
    for position, kind in enumerate(finder.kinds):
        classes.setdefault(kind.cut or kind.largest_unit, []).append(position)
    by_size = sorted(classes.values(), key=lambda members: -_numel(finder, members))
    rest = [position for members in by_size[_MOST_CLASSES:] for position in members]
    members_of = by_size[:_MOST_CLASSES] + ([rest] if rest else [])
    groups = [_all_of(finder, members) for members in members_of]
    while len(groups) > 1:
        best: tuple[int, int, int] | None = None
        for i in range(len(groups)):
            for j in range(i):
                apart = finder.part(groups[i]).shard + finder.part(groups[j]).shard
                together = _sum(groups[i], groups[j])
                # Only a union that beats the best so far needs to be known.
                limit = apart + (best[0] - 1 if best else finder.segment_numel) // finder.num_ranks
                part = finder.part_within(together, limit) if finder.least_shard(together, limit) <= limit else None
                if part is not None:
                    change = (part.shard - apart) * finder.num_ranks
                    if best is None or change < best[0]:
                        best = (change, i, j)
        if best is None and len(groups) <= max_segments:
            break
        if finder.is_exhausted:
            return []
        _, i, j = best or (0, len(groups) - 1, len(groups) - 2)
        joined = _sum(groups[i], groups[j])
        groups = [group for position, group in enumerate(groups) if position not in (i, j)] + [joined]
    return [finder.part(group) for group in groups]


def _by_tensors(finder: PartFinder, price: int, max_segments: int) -> list[Part]:
    """The best way found to share out the largest tensors, if all others fit in beside them and it beats the price."""
    each = _one_by_one(finder)[:_MOST_TENSORS]
    partitions, _ = least_partitions(
        [finder.kinds[position] for position in each],
        finder.num_ranks,
        finder.align,
        long_from=-(-finder.average // 2),
        below=(price - finder.segment_numel) // finder.num_ranks,
        enough=finder.average,
        most_segments=max_segments,
        num_kept=_MOST_PARTITIONS,
        most_tries=_MOST_PARTITION_TRIES,
    )
    best: list[Part] = []
    for partition in partitions:
        fixed = [finder.counts(each[member] for member in members) for members in partition.members]
        for shards in _reaching_average(finder, partition.shards, max_segments):
            if finder.price_of_shards(shards) < price:
                none = [(0,) * len(finder.kinds)] * (len(shards) - len(fixed))
                parts = _filled(finder, shards, fixed + none)
                if parts:
                    best, price = parts, finder.price(parts)
    return best


def _reaching_average(finder: PartFinder, shards: tuple[int, ...], max_segments: int) -> list[tuple[int, ...]]:
    """The shard sizes, with one of them raised or one added where they are too small for all items."""
    missing = finder.average - sum(shards)
    if missing <= 0:
        return [shards]
    blocks = sorted({kind.cut for kind in finder.kinds if kind.cut})
    ways = []
    for index, shard in enumerate(shards):
        step = lcm(finder.align, *(block for block in blocks if shard % block == 0))
        ways.append((*shards[:index], shard + round_up(missing, step), *shards[index + 1 :]))
    if len(shards) < max_segments:
        ways += [(*shards, round_up(missing, block)) for block in blocks]
    return sorted(ways, key=sum)


def _by_shard_sizes(finder: PartFinder, price: int, max_segments: int) -> list[Part]:
    """The first combination of shard sizes that all items fit into, if it beats the price."""
    classes: dict[int, int] = {}
    for kind, count in zip(finder.kinds, finder.totals, strict=True):
        if kind.cut and 2 * kind.size >= finder.average:
            classes[kind.cut] = classes.get(kind.cut, 0) + kind.size * count
    if not classes or len(classes) > _MOST_CLASSES:
        return []
    combinations = shard_size_combinations(
        classes,
        finder.average,
        finder.num_ranks,
        below=price // finder.num_ranks,
        most_segments=max_segments,
        segment_numel=-(-finder.segment_numel // finder.num_ranks),
    )
    for shards in islice(combinations, _MOST_COMBINATIONS):
        parts = _filled(finder, shards, [(0,) * len(finder.kinds)] * len(shards))
        if parts:
            return parts
    return []


def _filled(finder: PartFinder, shards: Sequence[int], fixed: Sequence[Counts]) -> list[Part]:
    """All items in segments of these shard sizes, beside those fixed there; empty where no way was found."""
    finder.work += len(finder.kinds)
    if finder.is_exhausted:
        return []
    counts = [list(held) for held in fixed]
    room = [
        shard * finder.num_ranks - sum(kind.size * count for kind, count in finder.held(held))
        for shard, held in zip(shards, fixed, strict=True)
    ]
    suits = [[_fit(kind, shard) for kind in finder.kinds] for shard in shards]
    # A segment that suits few kinds is filled first with those.
    width = [sum(fit == 2 for fit in row) for row in suits]
    choosiest_first = sorted(
        range(len(finder.kinds)),
        key=lambda kind: (sum(row[kind] == 2 for row in suits) or len(suits) + 1, -finder.kinds[kind].size, kind),
    )
    for kind in choosiest_first:
        left, size = finder.totals[kind] - sum(held[kind] for held in fixed), finder.kinds[kind].size
        for fit in (2, 1):
            candidates = [position for position, row in enumerate(suits) if row[kind] == fit]
            for position in sorted(candidates, key=lambda position: (width[position], -room[position])):
                taken = min(left, max(room[position], 0) // size)
                counts[position][kind] += taken
                room[position] -= taken * size
                left -= taken
        if left:
            return []
    parts = []
    for shard, held in zip(shards, counts, strict=True):
        if any(held):
            part = finder.part_of_size(tuple(held), shard)
            if part is None:
                return []
            parts.append(part)
    return parts


def _fit(kind: Item, shard: int) -> int:
    """2: lies in such shards without loss; 1: perhaps with padding before it; 0: not at all."""
    if kind.cut and shard % kind.cut == 0:
        return 2
    return 0 if kind.largest_unit > shard or (kind.cut and kind.size >= 2 * shard) else 1


def _improved(finder: PartFinder, groups: list[Counts], max_segments: int) -> list[Part]:
    """Moves kinds, whole or, of few, a single item, between groups while that lowers the price."""
    parts = [finder.part(group) for group in groups]
    improved = True
    while improved and not finder.is_exhausted:
        improved = False
        for kind, total in enumerate(finder.totals):
            for moved in (total, 1) if 1 < total <= _FEW_OF_A_KIND else (total,):
                for giver in range(max_segments):
                    for taker in range(max_segments):
                        # The number of parts changes with every move that is kept.
                        is_move = giver < len(parts) and taker <= len(parts) and taker != giver
                        if not is_move or not parts[giver].counts[kind] or finder.is_exhausted:
                            continue
                        finder.work += len(finder.kinds) // 8
                        count = min(moved, parts[giver].counts[kind])
                        trial = _cheaper(finder, _moved(finder, parts, kind, count, giver, taker), finder.price(parts))
                        if trial:
                            parts, improved = trial, True
    return parts


def _moved(finder: PartFinder, parts: list[Part], kind: int, count: int, giver: int, taker: int) -> list[Counts]:
    groups = [part.counts for part in parts]
    if taker == len(groups):
        groups.append((0,) * len(finder.kinds))
    for position, change in ((giver, -count), (taker, count)):
        counts = list(groups[position])
        counts[kind] += change
        groups[position] = tuple(counts)
    return [group for group in groups if any(group)]


def _cheaper(finder: PartFinder, groups: Sequence[Counts], price: int) -> list[Part]:
    """The parts of the groups if they beat the price; each is packed only while that is possible."""
    limit = (price - 1 - finder.segment_numel * len(groups)) // finder.num_ranks
    least = [finder.least_shard(group, price // finder.num_ranks) for group in groups]
    parts: list[Part] = []
    for position, group in enumerate(groups):
        at_most = limit - sum(part.shard for part in parts) - sum(least[position + 1 :])
        part = finder.part_within(group, at_most) if least[position] <= at_most else None
        if part is None:
            return []
        parts.append(part)
    return parts


def _by_every_partition(finder: PartFinder, best: list[Part], max_segments: int) -> list[Part]:
    """Few tensors: every partition that could be cheaper, each part in its best order."""
    each = _one_by_one(finder)
    limit = (finder.price(best) - finder.segment_numel) // finder.num_ranks
    partitions, _ = least_partitions(
        [finder.kinds[position] for position in each],
        finder.num_ranks,
        finder.align,
        long_from=2 * limit,
        below=limit,
        enough=0,
        most_segments=max_segments,
        num_kept=_ALL_PARTITIONS,
    )
    exact: dict[Counts, Part] = {}
    for partition in partitions:
        if finder.price_of_shards(partition.shards) >= finder.price(best):
            continue
        groups = [finder.counts(each[member] for member in members) for members in partition.members]
        for group in groups:
            if group not in exact:
                exact[group] = finder.refined(finder.part(group))
        best = min(best, [exact[group] for group in groups], key=finder.price)
    return best


def _one_by_one(finder: PartFinder) -> list[int]:
    """The kind of every single item, the largest first."""
    each = [position for position, total in enumerate(finder.totals) for _ in range(total)]
    return sorted(each, key=lambda position: (-finder.kinds[position].size, position))


def _all_of(finder: PartFinder, members: Sequence[int]) -> Counts:
    chosen = set(members)
    return tuple(total if position in chosen else 0 for position, total in enumerate(finder.totals))


def _numel(finder: PartFinder, members: Sequence[int]) -> int:
    return sum(finder.kinds[position].size * finder.totals[position] for position in members)


def _sum(a: Counts, b: Counts) -> Counts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


# Padding of this fraction above what any plan needs is not worth a further search.
_GOOD_ENOUGH = 16384
# Bounds on the width of each search.
_MOST_CLASSES = 7
_MOST_COMBINATIONS = 400
_MOST_TENSORS = 16
_MOST_PARTITIONS = 40
_MOST_PARTITION_TRIES = 8_000
_FEW_TENSORS = 6
# All there are of so few tensors.
_ALL_PARTITIONS = 203
_FEW_OF_A_KIND = 16
