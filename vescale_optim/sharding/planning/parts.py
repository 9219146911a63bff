"""Parts: the smallest S for any choice of a bucket's items in one segment. Used by `partition`, which chooses.

Items of one size and block are one *kind*; a choice is how many of each kind. Every answer is kept, since searches come
back to the same choices again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from vescale_optim.sharding.planning.best_order import num_order_states, order_that_fits
from vescale_optim.sharding.planning.packing import Item, Run, as_runs, end_of_order, round_up, smallest_shard

Counts = tuple[int, ...]
"""How many items of each kind, the kinds in the order of the caller's first of each."""


@dataclass(frozen=True)
class Part:
    """One segment: what it holds, its S, and an order that fits."""

    counts: Counts
    shard: int
    order: tuple[Run, ...]


class PartFinder:
    """Answers for the items of one bucket, given in the caller's order.

    Attributes:
        kinds, totals: the kinds of items, and how many there are of each.
        average: all elements by the number of ranks: what the S of all segments sum to at least.
        work: items handled in trials so far; searches stop when it passes `MOST_WORK`.
    """

    def __init__(self, items: Sequence[Item], num_ranks: int, align: int, segment_numel: int) -> None:
        self.num_ranks, self.align, self.segment_numel = num_ranks, align, segment_numel
        self.runs = as_runs(items)
        self.kinds = list(dict.fromkeys(item for item, _ in self.runs))
        index = {kind: position for position, kind in enumerate(self.kinds)}
        totals = [0] * len(self.kinds)
        for item, count in self.runs:
            totals[index[item]] += count
        self.totals: Counts = tuple(totals)
        self.average = -(-sum(item.size * count for item, count in self.runs) // num_ranks)
        self.work = 0
        self._known: dict[Counts, Part] = {}
        self._too_large: dict[Counts, int] = {}

    @property
    def is_exhausted(self) -> bool:
        return self.work > MOST_WORK

    def price(self, parts: Iterable[Part]) -> int:
        """Elements of the segments, and what each segment costs."""
        return self.price_of_shards([part.shard for part in parts])

    def price_of_shards(self, shards: Sequence[int]) -> int:
        return sum(shards) * self.num_ranks + self.segment_numel * len(shards)

    def counts(self, positions: Iterable[int]) -> Counts:
        """The choice of one item per position in `kinds`, which may repeat."""
        counts = [0] * len(self.kinds)
        for position in positions:
            counts[position] += 1
        return tuple(counts)

    def held(self, counts: Counts) -> list[Run]:
        return [(kind, count) for kind, count in zip(self.kinds, counts, strict=True) if count]

    def part(self, counts: Counts) -> Part:
        """The smallest S found, up to a small resolution, for a choice in one segment."""
        part = self.part_within(counts, sum(kind.size * count for kind, count in self.held(counts)))
        assert part is not None
        return part

    def part_within(self, counts: Counts, at_most: int) -> Part | None:
        """The same if S is at most `at_most`, else None, which is faster to find out."""
        if counts in self._known:
            return self._known[counts] if self._known[counts].shard <= at_most else None
        if self._too_large.get(counts, -1) >= at_most:
            return None
        best: Part | None = None
        for order in self._orders(counts):
            self.work += len(order)
            limit = at_most if best is None else best.shard - self.align
            resolution = self.average // _RESOLUTION
            shard = smallest_shard(order, self.num_ranks, self.align, at_most=limit, resolution=resolution)
            if shard is not None:
                best = Part(counts, shard, tuple(order))
        if best is None:
            self._too_large[counts] = at_most
        else:
            self._known[counts] = best
        return best

    def least_shard(self, counts: Counts, below: int) -> int:
        """A bound that S cannot beat if it is under `below`, without packing anything."""
        if counts in self._known:
            return self._known[counts].shard
        held = self.held(counts)
        size = sum(kind.size * count for kind, count in held)
        shard = max(-(-size // self.num_ranks), max(kind.largest_unit for kind, _ in held))
        # Tensors of twice the largest S that matters are cut often, so S is a multiple of their blocks.
        return round_up(shard, lcm(self.align, *(kind.cut for kind, _ in held if kind.cut and kind.size >= 2 * below)))

    def refined(self, part: Part) -> Part:
        """The same choice with its S exact for its order, and the best over all orders where they are few."""
        part = self.in_order(part.counts, part.order, part.shard) or part
        return self.in_any_order(part.counts, part.shard - self.align) or part

    def in_order(self, counts: Counts, order: Sequence[Run], at_most: int) -> Part | None:
        shard = smallest_shard(order, self.num_ranks, self.align, at_most=at_most)
        return None if shard is None else Part(counts, shard, tuple(order))

    def in_any_order(self, counts: Counts, at_most: int) -> Part | None:
        """The best over all orders, if it is at most `at_most` and the dynamic program is small."""
        kinds = self.held(counts)
        if num_order_states(kinds) > _MOST_STATES:
            return None

        def fits(shard: int) -> bool:
            return order_that_fits(kinds, shard, shard * self.num_ranks) is not None

        resolution = self.average // _RESOLUTION
        shard = smallest_shard(kinds, self.num_ranks, self.align, at_most=at_most, resolution=resolution, fits=fits)
        if shard is None:
            return None
        order = order_that_fits(kinds, shard, shard * self.num_ranks)
        assert order is not None
        return self.in_order(counts, order, shard) or Part(counts, shard, tuple(order))

    def part_of_size(self, counts: Counts, shard: int) -> Part | None:
        """The choice in shards of exactly this size, if one of the likely orders fits."""
        for order in self._orders(counts):
            self.work += len(order) // 8
            if end_of_order(order, shard, shard * self.num_ranks) >= 0:
                return Part(counts, shard, tuple(order))
        return None

    def _orders(self, counts: Counts) -> list[list[Run]]:
        """Orders that do well: the caller's, by block, by size."""
        present = self.held(counts)
        orders = [self.runs] if counts == self.totals else []
        orders.append(present)
        if not self.is_exhausted:
            orders.append(sorted(present, key=lambda run: (-(run[0].cut or run[0].largest_unit), -run[0].size)))
            orders.append(sorted(present, key=lambda run: (-run[0].size, -run[0].cut)))
        return [order for position, order in enumerate(orders) if order not in orders[:position]]


# Bounds on the work of one bucket: a fraction of a second, whatever its tensors.
MOST_WORK = 10_000
_RESOLUTION = 4096
_MOST_STATES = 400
