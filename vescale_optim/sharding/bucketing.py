"""form_buckets: which tensors travel in one collective.

Buckets follow the order in which gradients finish. Boundaries are chosen by dynamic programming along that order. A bucket
is priced in elements: what its fullest shard makes all ranks wait for beyond an equal share (padding, or unequal shards),
what it keeps from overlapping with backward, and a collective's latency:

    price(i, j) = waste + OVERLAP * numel^2 / numel of all + latency          cuts  0 --- i ------- j --- ... --- end
    best(i)     = min over j > i of price(i, j) + best(j)                                 one bucket

The waste is estimated by a bound: of c units of u elements or more, some rank holds ceil(c / N). Walking forward, the best
few choices are planned in truth, and the cheapest one is taken. Small models are searched in several ways, and the whole
result with the lowest price is kept, the balance of the FLOPs included.

Shards are equal where that pads at most `max_padding`; else (fewer matrices than ranks) they are unequal.

Pure Python, like the planner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vescale_optim.sharding.planner import BufferPlan, TensorBlocks, plan_buffer

# One bucket with everything in it overlaps with nothing: as bad as this fraction of padding.
_OVERLAP = 0.1
# Unequal shards are sent rank by rank or in one all-to-all, which is slower than the collectives of equal ones.
_UNEQUAL = 0.05
# The busiest rank's FLOPs above the mean, as a fraction of the mean, are as bad as this fraction of that padding.
_BALANCE = 0.5
# A collective of a bucket's size spends this fraction of its time on starting.
_LATENCY = 2.0**-14
# Bounds on the work, whatever the model.
_MOST_CUTS = 1500
_MANY_TENSORS = 1000
_MOST_TRIES = 6
_MOST_PLANNED_TENSORS = 20_000
_MOST_REFUSALS = 3
_MOST_KINDS = 12
# Small models are searched several times: the least distance of boundaries in buckets, and the weight of overlap.
_SEARCHES = ((0.0, 1.0), (1.0, 1.0), (0.0, 0.2), (1.0, 0.2))
# Lengths of which a boundary is looked for: how many units every rank gets.
_ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Bucket:
    """Tensors `tensors` (indices into the caller's list, in plan order) and the plan of their buffer."""

    tensors: tuple[int, ...]
    plan: BufferPlan


def form_buckets(
    tensors: Sequence[TensorBlocks],
    num_ranks: int,
    *,
    bucket_numel: int,
    align: int,
    max_padding: float = 0.03,
    loads: list[float],
) -> list[Bucket]:
    """Cut `tensors`, in the order of use, into buckets and plan each.

    Args:
        bucket_numel: elements a bucket has at least; a remainder under half of that joins the last one.
        max_padding: padding as a fraction of the elements that equal shards may cost.
        loads: FLOPs already given to each rank; updated with the FLOPs of these buckets.
    """
    if not tensors:
        return []
    found = None
    for spacing, patience in _SEARCHES if len(tensors) <= _MANY_TENSORS else _SEARCHES[:1]:
        prices = _Prices(tensors, num_ranks, bucket_numel, max_padding, spacing, patience)
        after = list(loads)
        buckets = _formed(tensors, prices, align, after)
        # Searches differ in what they prefer on the way, not in what they are judged by.
        prices.patience = 1.0
        price = sum(prices.of_plan(bucket.plan) for bucket in buckets) + prices.unbalanced(loads, after)
        if found is None or price < found[0] - 1e-6 * prices.total:
            found = price, buckets, after
    _, buckets, loads[:] = found
    return buckets


def _formed(tensors: Sequence[TensorBlocks], prices: _Prices, align: int, loads: list[float]) -> list[Bucket]:
    """Bucket by bucket; `loads` are updated."""
    buckets: list[Bucket] = []
    start = 0
    while start < prices.end:
        end, plan = _next_bucket(tensors, prices, start, align, loads)
        loads[:] = _with_plan(loads, plan)
        buckets.append(Bucket(tuple(range(prices.cuts[start], prices.cuts[end])), plan))
        start = end
    return buckets


def _with_plan(loads: Sequence[float], plan: BufferPlan) -> list[float]:
    return [load + cost for load, cost in zip(loads, plan.rank_costs(), strict=True)]


def _next_bucket(
    tensors: Sequence[TensorBlocks], prices: _Prices, start: int, align: int, loads: Sequence[float]
) -> tuple[int, BufferPlan]:
    """The end of the bucket that begins at a cut, and its plan."""
    found: tuple[float, int, BufferPlan] | None = None
    tried: set[tuple[int, bool]] = set()
    shortest_even = 0.0
    while True:
        # Estimates are bounds, so what was planned and is still the cheapest is the choice.
        waiting = [choice for choice in prices.choices_from(start, shortest_even) if choice[1:] not in tried]
        is_enough = len(tried) >= (_MOST_TRIES if prices.num_planned < _MOST_PLANNED_TENSORS else 1)
        if found is None and is_enough:
            waiting = [choice for choice in waiting if not choice.is_even]
        least = min(waiting, default=None)
        if found is not None and (least is None or is_enough or least.price >= found[0]):
            return found[1:]
        assert least is not None
        tried.add(least[1:])
        members = tensors[prices.cuts[start] : prices.cuts[least.end]]
        prices.num_planned += len(members)
        options = {"padding_tolerance": prices.max_padding} if least.is_even else {"even": False}
        plan = plan_buffer(members, prices.num_ranks, align=align, loads=loads, **options)
        if least.is_even and plan.padding_fraction > prices.max_padding:
            # Longer buckets pad less, but not by a little more length.
            shortest_even = 1.5 * prices.numel(start, least.end)
            prices.refuse(start, least.end)
            continue
        price = prices.of_plan(plan) + prices.unbalanced(loads, _with_plan(loads, plan)) + prices.best[least.end]
        if found is None or price < found[0]:
            found = price, least.end, plan


class _Choice(NamedTuple):
    """A bucket from some cut on, with what follows it; sorted by price."""

    price: float
    end: int
    is_even: bool


class _Prices:
    """Prices of buckets between cuts, in elements. Buckets are named by two positions in `cuts`.

    Attributes:
        cuts: where a bucket may begin or end: positions in the list of tensors.
        end: the last position in `cuts`.
        best: the price of all that follows each cut.
        total: elements of all tensors.
        patience: weight of the overlap.
        num_planned: tensors planned so far; past `_MOST_PLANNED_TENSORS` the likeliest choice is taken.
    """

    def __init__(
        self,
        tensors: Sequence[TensorBlocks],
        num_ranks: int,
        bucket_numel: int,
        max_padding: float,
        spacing: float,
        patience: float,
    ) -> None:
        self.num_ranks, self.max_padding, self.num_planned, self.patience = num_ranks, max_padding, 0, patience
        total = sum(tensor.numel for tensor in tensors)
        self.cuts = _cuts(tensors, max(-(-total // _MOST_CUTS), int(spacing * bucket_numel)))
        self.end = len(self.cuts) - 1
        self.total, self._bucket_numel = max(total, 1), bucket_numel
        self._latency = _LATENCY * bucket_numel
        self._mean_cost = sum(tensor.cost for tensor in tensors) / num_ranks
        parts = [tensors[first:last] for first, last in zip(self.cuts, self.cuts[1:], strict=False)]
        self._numels = list(accumulate((sum(tensor.numel for tensor in part) for part in parts), initial=0))
        self._kinds = self._counted_units(parts)
        self._choices = [self._choices_between(start, self._ends_from(start)) for start in range(self.end)]
        self._shortest_even, self._refused, self._is_large = 0, [], len(tensors) > _MANY_TENSORS
        self.best = [0.0] * (self.end + 1)
        self._find_best(0)

    def _counted_units(self, parts: Sequence[Sequence[TensorBlocks]]) -> list[tuple[int, list[int]]]:
        """(elements of a unit, number of such units before each cut), the largest units first."""
        # Small units fill gaps: they force nothing.
        smallest = self._bucket_numel // (64 * self.num_ranks)
        counts: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            for tensor in part:
                for numel, count in _units(tensor):
                    if numel > smallest:
                        counts.setdefault(numel, [0] * len(parts))[number] += count
        weighty = sorted(counts, key=lambda numel: -numel * sum(counts[numel]))[:_MOST_KINDS]
        return [(numel, list(accumulate(counts[numel], initial=0))) for numel in sorted(weighty, reverse=True)]

    def numel(self, start: int, end: int) -> int:
        """Elements between two cuts."""
        return self._numels[end] - self._numels[start]

    def _ends_from(self, start: int) -> list[int]:
        """Ends worth a look: the next few, lengths that grow by a half, and where the commonest unit fills all ranks."""
        shortest = bisect_left(self._numels, self._numels[start] + self._bucket_numel)
        last = bisect_right(self._numels, self._numels[-1] - self._bucket_numel // 2) - 1
        ends = set(range(shortest, shortest + 8))
        length = max(shortest - start, 1)
        while start + length <= last:
            ends.add(start + length)
            length = max(length + 1, length * 3 // 2)
        if self._kinds:
            _, counts = max(self._kinds, key=lambda kind: kind[0] * kind[1][-1])
            ends |= {bisect_right(counts, counts[start] + rounds * self.num_ranks) - 1 for rounds in _ROUNDS}
        return [*sorted(end for end in ends if shortest <= end <= last and start < end < self.end), self.end]

    def _choices_between(self, start: int, ends: Sequence[int]) -> list[tuple[float, int, bool, int]]:
        """(lower bound on the price, end, equal shards, elements that must be refused to rule it out) of some buckets."""
        choices = []
        for end in ends:
            numel = self.numel(start, end)
            shard, count = -(-numel // self.num_ranks), 0
            for unit, counts in self._kinds:
                held = counts[end] - counts[start]
                if held:
                    count += held
                    shard = max(shard, -(-count // self.num_ranks) * unit)
            waste = shard * self.num_ranks - numel
            price = waste + self._exposed(numel)
            choices.append((price + _UNEQUAL * numel, end, False, 0))
            if waste <= self.max_padding * numel + self.num_ranks:
                choices.append((price, end, True, numel if count else self.total + 1))
        return choices

    def choices_from(self, start: int, shortest_even: float) -> list[_Choice]:
        """All buckets from a cut on that are worth a look; those with equal shards from so many elements on."""
        least = max(shortest_even, self._shortest_even)
        return [
            _Choice(price + self.best[end], end, is_even)
            for price, end, is_even, numel in self._choices[start]
            if not is_even or numel >= least
        ]

    def refuse(self, start: int, end: int) -> None:
        """Equal shards padded a bucket too much: after a few of them no shorter one is expected to do anywhere."""
        self._refused = sorted([*self._refused, self.numel(start, end) + 1])[-_MOST_REFUSALS:]
        enough = 1 if self._is_large else _MOST_REFUSALS
        if len(self._refused) >= enough and self._refused[-enough] > self._shortest_even:
            self._shortest_even = self._refused[-enough]
            self._find_best(start)

    def _find_best(self, first: int) -> None:
        best, least = self.best, self._shortest_even
        for start in range(self.end - 1, first - 1, -1):
            best[start] = min(
                price + best[end]
                for price, end, is_even, numel in self._choices[start]
                if not is_even or numel >= least
            )

    def of_plan(self, plan: BufferPlan) -> float:
        """The price of a bucket that was planned."""
        numel = sum(tensor.numel for tensor in plan.tensors)
        largest = plan.shard_numel(0) if plan.is_even else max(map(plan.shard_numel, range(self.num_ranks)))
        waste = largest * self.num_ranks - numel + (0.0 if plan.is_even else _UNEQUAL * numel)
        return waste + self._exposed(numel) + self._latency * (len(plan.segments) - 1)

    def _exposed(self, numel: int) -> float:
        return self.patience * _OVERLAP * numel * (numel / self.total) + self._latency

    def unbalanced(self, before: Sequence[float], after: Sequence[float]) -> float:
        """The price of the busiest rank's being further above the mean than before."""
        if not self._mean_cost:
            return 0.0
        above = [max(loads) - sum(loads) / len(loads) for loads in (before, after)]
        return _BALANCE * self.total * (above[1] - above[0]) / self._mean_cost


def _cuts(tensors: Sequence[TensorBlocks], least_numel: int) -> list[int]:
    """Positions between tensors, `least_numel` elements or more apart."""
    cuts, numel = [0], 0
    for index, tensor in enumerate(tensors[:-1]):
        numel += tensor.numel
        if numel >= max(least_numel, 1):
            cuts.append(index + 1)
            numel = 0
    return [*cuts, len(tensors)]


def _units(tensor: TensorBlocks) -> list[tuple[int, int]]:
    """(elements, number) of the units of a tensor."""
    if tensor.boundaries is None:
        full, short = divmod(tensor.numel, tensor.block)
        return [(tensor.block, full)] * (full > 0) + [(short, 1)] * (short > 0)
    counts: dict[int, int] = {}
    for start, end in zip((0, *tensor.boundaries), tensor.boundaries, strict=False):
        counts[end - start] = counts.get(end - start, 0) + 1
    return list(counts.items())
