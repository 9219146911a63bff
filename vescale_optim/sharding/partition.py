"""Partition: which tensors share a segment, so that all segments together need the fewest elements. Used by the planner.

One segment pads much when row lengths mix, because its S must be a multiple of the block of every tensor that holds a
whole shard. Tensors of equal blocks in a segment of their own pad by less than a block per rank, and small tensors fill
what is left:

    one segment     S is a multiple of lcm(A, B)       |AAAAAAAA|AA..BBBB|BBBBBB..|
    two segments    a multiple of A, a multiple of B   |AAAA|AAAA|AAcc|   |BBBB|BBBB|BB..|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm

from vescale_optim.sharding.best_order import num_orders_states, order_that_fits
from vescale_optim.sharding.bounds import scheduling_bound
from vescale_optim.sharding.packing import Item, Run, as_runs, end_of_order, round_up, smallest_shard
from vescale_optim.sharding.segment_partitions import least_partitions
from vescale_optim.sharding.shard_sizes import shard_size_combinations

Counts = tuple[int, ...]
"""How many items of each kind."""


@dataclass(frozen=True)
class Part:
    """One segment: how many items of each kind it holds, its S, and an order that fits."""

    counts: Counts
    shard: int
    order: tuple[Run, ...]


class Partitioner:
    """Searches the kinds of items of one bucket for good segments. `items` come in the caller's order."""

    def __init__(self, items: Sequence[Item], num_ranks: int, align: int, *, max_segments: int, segment_numel: int):
        self.num_ranks, self.align = num_ranks, align
        self.max_segments, self.segment_numel = max_segments, segment_numel
        self.runs = as_runs(items)
        self.kinds: list[Item] = list(dict.fromkeys(item for item, _ in self.runs))
        index = {kind: position for position, kind in enumerate(self.kinds)}
        totals = [0] * len(self.kinds)
        for item, count in self.runs:
            totals[index[item]] += count
        self.totals: Counts = tuple(totals)
        self.average = -(-sum(item.size * count for item, count in self.runs) // num_ranks)
        bound = scheduling_bound(self.runs, num_ranks, align) * num_ranks
        self.enough = bound + bound // _GOOD_ENOUGH + segment_numel
        self._parts: dict[Counts, Part] = {}
        self._work = 0

    def best(self) -> list[Part]:
        """The parts found with the fewest elements, a further segment counted as `segment_numel` elements."""
        best = [self.part(self.totals)]
        for search in (self._from_one_segment, self._from_block_classes, self._by_tensors, self._by_shard_sizes):
            if self._price(best) <= self.enough or self._work > _MOST_WORK:
                break
            found = search(self._price(best))
            if found is not None:
                best = min(best, found, self._improved([part.counts for part in found]), key=self._price)
        best = [self._refined(part) for part in best]
        if sum(self.totals) <= _FEW_TENSORS:
            best = self._by_every_partition(best)
        # One segment, exact: the caller's order is never beaten by less, nor is any order that few states can try.
        if [part.order for part in best] != [tuple(self.runs)]:
            best = self._cheaper(best, self._in_order(self.totals, self.runs, self._price(best)))
        return self._cheaper(best, self._in_any_order(self.totals, self._price(best)))

    def _cheaper(self, parts: list[Part], single: Part | None) -> list[Part]:
        return [single] if single is not None and self._price([single]) <= self._price(parts) else parts

    def _refined(self, part: Part) -> Part:
        """The same segment with its S exact, and the best over all orders where they are few."""
        price = part.shard * self.num_ranks
        part = self._in_order(part.counts, part.order, price) or part
        return self._in_any_order(part.counts, part.shard * self.num_ranks - 1) or part

    def _in_order(self, counts: Counts, order: Sequence[Run], price: int) -> Part | None:
        shard = smallest_shard(order, self.num_ranks, self.align, at_most=price // self.num_ranks)
        return None if shard is None else Part(counts, shard, tuple(order))

    def _in_any_order(self, counts: Counts, price: int) -> Part | None:
        kinds = [(kind, count) for kind, count in zip(self.kinds, counts, strict=True) if count]
        if num_orders_states(kinds) > _MOST_STATES:
            return None

        def fits(shard: int) -> bool:
            return order_that_fits(kinds, shard, shard * self.num_ranks) is not None

        at_most = price // self.num_ranks
        shard = smallest_shard(
            kinds, self.num_ranks, self.align, at_most=at_most, resolution=self.average // _RESOLUTION, fits=fits
        )
        if shard is None:
            return None
        order = order_that_fits(kinds, shard, shard * self.num_ranks)
        assert order is not None
        return self._in_order(counts, order, shard * self.num_ranks) or Part(counts, shard, tuple(order))

    def _from_one_segment(self, price: int) -> list[Part] | None:
        return [self.part(self.totals)]

    def _from_block_classes(self, price: int) -> list[Part] | None:
        """A segment for each block, then the best merges."""
        classes: dict[int, list[int]] = {}
        for position, kind in enumerate(self.kinds):
            classes.setdefault(kind.cut or kind.largest_unit, []).append(position)
        if len(classes) == 1:
            return None
        groups = sorted(classes.values(), key=lambda members: -self._numel(members))
        rest = [position for members in groups[_MOST_CLASSES:] for position in members]
        groups = groups[:_MOST_CLASSES] + ([rest] if rest else [])
        return [self.part(counts) for counts in self._merged([self._only(members) for members in groups])]

    def _by_tensors(self, price: int) -> list[Part] | None:
        """The best way found to share out the largest tensors, if all others fit in beside them and it beats the price."""
        each = [position for position, total in enumerate(self.totals) for _ in range(total)]
        each = sorted(each, key=lambda position: (-self.kinds[position].size, position))[:_MOST_TENSORS]
        partitions, _ = least_partitions(
            [self.kinds[position] for position in each],
            self.num_ranks,
            self.align,
            long_from=-(-self.average // 2),
            below=(price - self.segment_numel) // self.num_ranks,
            enough=self.average,
            most_segments=self.max_segments,
            num_kept=_MOST_PARTITIONS,
            most_tries=_MOST_PARTITION_TRIES,
        )
        best: list[Part] | None = None
        for partition in partitions:
            fixed = [self._counts(each[member] for member in members) for members in partition.members]
            for shards in self._reaching_average(partition.shards):
                if self._shards_price(shards) >= price:
                    continue
                parts = self._filled(shards, [*fixed, *[(0,) * len(self.kinds)] * (len(shards) - len(fixed))])
                if parts is not None:
                    best, price = parts, self._price(parts)
        return best

    def _by_every_partition(self, best: list[Part]) -> list[Part]:
        """Few tensors: every partition that could be cheaper, each part in its best order."""
        each = [position for position, total in enumerate(self.totals) for _ in range(total)]
        each.sort(key=lambda position: (-self.kinds[position].size, position))
        limit = (self._price(best) - self.segment_numel) // self.num_ranks
        partitions, _ = least_partitions(
            [self.kinds[position] for position in each],
            self.num_ranks,
            self.align,
            long_from=2 * limit,
            below=limit,
            enough=0,
            most_segments=self.max_segments,
            num_kept=_MOST_PARTITIONS,
        )
        exact: dict[Counts, Part] = {}
        for partition in partitions:
            if self._shards_price(partition.shards) >= self._price(best):
                continue
            parts = []
            for members in partition.members:
                counts = self._counts(each[member] for member in members)
                if counts not in exact:
                    exact[counts] = self._refined(self.part(counts))
                parts.append(exact[counts])
            best = min(best, parts, key=self._price)
        return best

    def _reaching_average(self, shards: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shard sizes, with one of them raised or one added where they are too small for all items."""
        missing = self.average - sum(shards)
        if missing <= 0:
            return [shards]
        blocks = [kind.cut for kind in self.kinds if kind.cut]
        ways = []
        for index, shard in enumerate(shards):
            step = lcm(*(block for block in blocks if shard % block == 0))
            ways.append((*shards[:index], shard + round_up(missing, step), *shards[index + 1 :]))
        if len(shards) < self.max_segments:
            ways += [(*shards, round_up(missing, block)) for block in sorted(set(blocks))]
        return sorted(ways, key=sum)

    def _by_shard_sizes(self, price: int) -> list[Part] | None:
        """The first combination of shard sizes that all items fit into, if it beats the price."""
        classes: dict[int, int] = {}
        for kind, count in zip(self.kinds, self.totals, strict=True):
            if kind.cut and 2 * kind.size >= self.average:
                classes[kind.cut] = classes.get(kind.cut, 0) + kind.size * count
        if not classes or len(classes) > _MOST_CLASSES:
            return None
        combinations = shard_size_combinations(
            classes,
            self.average,
            self.num_ranks,
            below=price // self.num_ranks,
            most_segments=self.max_segments,
            segment_numel=-(-self.segment_numel // self.num_ranks),
        )
        for shards in islice(combinations, _MOST_COMBINATIONS):
            parts = self._filled(shards, [(0,) * len(self.kinds)] * len(shards))
            if parts is not None:
                return parts
        return None

    def _filled(self, shards: Sequence[int], fixed: Sequence[Counts]) -> list[Part] | None:
        """All items in segments of these shard sizes, beside those that are there; None where no way was found."""
        self._work += len(self.kinds)
        if self._work > _MOST_WORK:
            return None
        counts = [list(held) for held in fixed]
        room = [
            shard * self.num_ranks - sum(kind.size * count for kind, count in zip(self.kinds, held, strict=True))
            for shard, held in zip(shards, fixed, strict=True)
        ]
        suits = [[self._fit(kind, shard) for kind in self.kinds] for shard in shards]
        # A segment that suits few kinds is filled first with those.
        width = [sum(fit == 2 for fit in row) for row in suits]
        order = sorted(
            range(len(self.kinds)),
            key=lambda kind: (sum(row[kind] == 2 for row in suits) or 99, -self.kinds[kind].size, kind),
        )
        for kind in order:
            left, size = self.totals[kind] - sum(held[kind] for held in fixed), self.kinds[kind].size
            for fit in (2, 1):
                candidates = [position for position, row in enumerate(suits) if row[kind] == fit]
                for position in sorted(candidates, key=lambda position: (width[position], -room[position])):
                    taken = min(left, max(room[position], 0) // size)
                    counts[position][kind] += taken
                    room[position] -= taken * size
                    left -= taken
            if left:
                return None
        parts = []
        for shard, held in zip(shards, counts, strict=True):
            if any(held):
                order_found = self._order_that_fits(tuple(held), shard)
                if order_found is None:
                    return None
                parts.append(Part(tuple(held), shard, tuple(order_found)))
        return parts

    def _fit(self, kind: Item, shard: int) -> int:
        """2: lies in such shards without loss; 1: perhaps with padding before it; 0: not at all."""
        if kind.cut and shard % kind.cut == 0:
            return 2
        if kind.largest_unit > shard or (kind.cut and kind.size >= 2 * shard):
            return 0
        return 1

    def _order_that_fits(self, counts: Counts, shard: int) -> list[Run] | None:
        for order in self._orders(counts):
            self._work += len(order) // 8
            if end_of_order(order, shard, shard * self.num_ranks) >= 0:
                return order
        return None

    def part(self, counts: Counts) -> Part:
        """The smallest S found for these items in one segment."""
        known = self._parts.get(counts)
        if known is not None:
            return known
        best: Part | None = None
        for order in self._orders(counts):
            self._work += len(order)
            at_most = None if best is None else best.shard - self.align
            shard = smallest_shard(
                order, self.num_ranks, self.align, at_most=at_most, resolution=self.average // _RESOLUTION
            )
            if shard is not None:
                best = Part(counts, shard, tuple(order))
        assert best is not None
        self._parts[counts] = best
        return best

    def _orders(self, counts: Counts) -> list[list[Run]]:
        present = [(self.kinds[k], count) for k, count in enumerate(counts) if count]
        orders = [self.runs] if counts == self.totals else []
        orders.append(present)
        if self._work < _MOST_WORK:
            orders.append(sorted(present, key=lambda run: (-(run[0].cut or run[0].largest_unit), -run[0].size)))
            orders.append(sorted(present, key=lambda run: (-run[0].size, -run[0].cut)))
        return [order for position, order in enumerate(orders) if order not in orders[:position]]

    def _numel(self, members: Sequence[int]) -> int:
        return sum(self.kinds[position].size * self.totals[position] for position in members)

    def _only(self, members: Sequence[int]) -> Counts:
        chosen = set(members)
        return tuple(total if position in chosen else 0 for position, total in enumerate(self.totals))

    def _counts(self, positions: Iterable[int]) -> Counts:
        counts = [0] * len(self.kinds)
        for position in positions:
            counts[position] += 1
        return tuple(counts)

    def _price(self, parts: Sequence[Part]) -> int:
        return self._shards_price([part.shard for part in parts])

    def _shards_price(self, shards: Sequence[int]) -> int:
        return sum(shards) * self.num_ranks + self.segment_numel * len(shards)

    def _merged(self, groups: list[Counts]) -> list[Counts]:
        """Merges the two groups whose union costs least, until none gains and few enough are left."""
        while len(groups) > 1:
            best: tuple[int, int, int] | None = None
            for i in range(len(groups)):
                for j in range(i):
                    apart = self.part(groups[i]).shard + self.part(groups[j]).shard
                    together = self.part(_sum(groups[i], groups[j])).shard
                    change = (together - apart) * self.num_ranks - self.segment_numel
                    if best is None or change < best[0]:
                        best = (change, i, j)
            assert best is not None
            change, i, j = best
            if change > 0 and len(groups) <= self.max_segments:
                break
            if self._work > _MOST_WORK:
                return [self.totals]
            joined = _sum(groups[i], groups[j])
            groups = [group for position, group in enumerate(groups) if position not in (i, j)] + [joined]
        return groups

    def _improved(self, groups: list[Counts]) -> list[Part]:
        """Moves kinds, whole or a single item, between groups while that lowers the price."""
        parts = [self.part(group) for group in groups]
        price = self._price(parts)
        improved = True
        while improved and self._work < _MOST_WORK:
            improved = False
            for kind, total in enumerate(self.totals):
                for moved in dict.fromkeys((total, 1)):
                    for giver in range(len(parts)):
                        for taker in range(self.max_segments):
                            # The number of parts changes with every move that is kept.
                            if giver >= len(parts) or taker > len(parts) or taker == giver:
                                continue
                            if not parts[giver].counts[kind] or self._work > _MOST_WORK:
                                continue
                            self._work += len(self.kinds) // 8
                            groups = self._moved(parts, kind, min(moved, parts[giver].counts[kind]), giver, taker)
                            if self._least_price(groups, price) >= price:
                                continue
                            trial = [self.part(group) for group in groups]
                            if self._price(trial) < price:
                                parts, price, improved = trial, self._price(trial), True
        return parts

    def _moved(self, parts: list[Part], kind: int, count: int, giver: int, taker: int) -> list[Counts]:
        groups = [part.counts for part in parts]
        if taker == len(groups):
            groups.append((0,) * len(self.kinds))
        for position, change in ((giver, -count), (taker, count)):
            counts = list(groups[position])
            counts[kind] += change
            groups[position] = tuple(counts)
        return [group for group in groups if any(group)]

    def _least_price(self, groups: Sequence[Counts], price: int) -> int:
        """A price that the groups cannot beat, if it is under `price`; without packing anything."""
        shards = 0
        for counts in groups:
            known = self._parts.get(counts)
            if known is not None:
                shards += known.shard
                continue
            held = [(kind, count) for kind, count in zip(self.kinds, counts, strict=True) if count]
            shard = max(
                -(-sum(kind.size * count for kind, count in held) // self.num_ranks),
                max(kind.largest_unit for kind, _ in held),
            )
            # Tensors of twice the largest shard that would still pay are cut often.
            often = 2 * (price // self.num_ranks)
            shards += round_up(shard, lcm(self.align, *(kind.cut for kind, _ in held if kind.cut and kind.size >= often)))
        return shards * self.num_ranks + self.segment_numel * len(groups)


def _sum(a: Counts, b: Counts) -> Counts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


# Items placed in trial packings after which only the cheapest steps go on: about a third of a second.
_MOST_WORK = 10_000
_MOST_CLASSES = 7
# Padding of this fraction above what any plan needs is not worth a further search.
_GOOD_ENOUGH = 4096
_RESOLUTION = 4096
_MOST_STATES = 400
_FEW_TENSORS = 7
_MOST_COMBINATIONS = 400
_MOST_TENSORS = 16
_MOST_PARTITIONS = 40
_MOST_PARTITION_TRIES = 8_000
