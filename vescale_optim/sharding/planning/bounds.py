"""Bounds: what no plan with equal shards can beat, whatever its order and its segments. Used by the planner.

All segments together give each rank L = S_1 + S_2 + ... elements. Every unit lies whole on one rank, so L is at least
the optimum of the scheduling problem "units to ranks, smallest maximum":

    average      the elements divided by the ranks
    pigeonhole   of the k*N + 1 largest units, one rank holds k + 1
    steps        units that are all multiples of G give every rank a multiple of G

Tensors are contiguous, which says more. A tensor of at least 2 S elements is cut by two boundaries of its segment or
more, so S is a multiple of its block. If L is at most half of a tensor, this holds in whichever segment it lies:

    contiguity   segments are multiples of the lcm of the blocks of the long tensors they hold, and all together hold
                 every block class: the least sum of such multiples
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import gcd, lcm

from vescale_optim.sharding.planning.packing import Item, Run, as_runs, round_up
from vescale_optim.sharding.planning.segment_partitions import least_partitions


def smallest_local_numel(items: Sequence[Item], num_ranks: int, align: int, *, known: int) -> int:
    """A lower bound on the elements of one rank's shards, over all plans with equal shards.

    Args:
        known: elements of one rank's shards in some plan: the bound never needs to exceed them.
    """
    if not items:
        return 0
    bound = scheduling_bound(as_runs(items), num_ranks, align)
    by_size = sorted(items, key=lambda item: (-item.size, -item.cut, item.cuts))
    # While L is at most half of a tensor, S respects its block and those of all longer ones: the more tensors, the
    # larger the bound, but the smaller the L up to which it holds. Sought is the last `half` up to which it reaches.
    halves = sorted({item.size // 2 for item in by_size if item.cut and item.size // 2 >= bound})
    first, last = 0, len(halves)
    while first < last and bound < known:
        middle = (first + last) // 2
        enough = min(halves[middle] + 1, known)
        bound = max(bound, _contiguity_bound(by_size, num_ranks, align, 2 * halves[middle], bound, enough))
        if bound >= enough:
            first = middle + 1
        else:
            last = middle
    return bound


def _contiguity_bound(
    by_size: Sequence[Item], num_ranks: int, align: int, long_from: int, bound: int, enough: int
) -> int:
    """The least sum of shard sizes, up to `enough`, if tensors of `long_from` elements or more are all cut often."""
    partitions, is_complete = least_partitions(
        by_size[:_MOST_TENSORS], num_ranks, align, long_from=long_from, below=enough, enough=bound
    )
    if is_complete:
        bound = max(bound, partitions[0].sum_of_shards if partitions else enough)
    classes: defaultdict[int, int] = defaultdict(int)
    for item in by_size:
        if item.cut and item.size >= long_from:
            classes[item.cut] += item.size
    if len(by_size) > _MOST_TENSORS or not is_complete:
        bound = max(bound, _class_bound(dict(classes), num_ranks, bound, enough))
    return bound


def scheduling_bound(runs: Sequence[Run], num_ranks: int, align: int) -> int:
    """The part of the bound that looks at units alone: average, pigeonhole and steps."""
    units = _units(runs)
    total = sum(size * count for size, count in units)
    best = round_up(-(-total // num_ranks), align)
    held = 0
    for index, (_, count) in enumerate(units):
        held += count
        depth = (held - 1) // num_ranks
        best = max(best, _smallest_of_largest(units[: index + 1], held - depth * num_ranks - 1, depth + 1))
        if index == _MOST_SIZES:
            break
    sizes = [size for size, _ in units[:_MOST_SIZES]]
    for step in {gcd(a, b) for a in sizes for b in sizes} if len(units) <= _MOST_SIZES else sizes:
        inside = sum(size * count for size, count in units if size % step == 0)
        best = max(best, round_up(-(-inside // num_ranks), step))
    return best


def _units(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """(size, count), the largest first."""
    counts: defaultdict[int, int] = defaultdict(int)
    for item, number in runs:
        if item.cuts:
            start = 0
            for end in (*item.cuts, item.size):
                counts[end - start] += number
                start = end
        elif item.cut:
            counts[item.cut] += item.size // item.cut * number
            if item.size % item.cut:
                counts[item.size % item.cut] += number
        else:
            counts[item.size] += number
    return sorted(counts.items(), reverse=True)


def _smallest_of_largest(units: Sequence[tuple[int, int]], skip: int, take: int) -> int:
    """Sum of `take` units, from the smallest up, after leaving out the `skip` smallest."""
    total = 0
    for size, count in reversed(units):
        left_out = min(skip, count)
        skip -= left_out
        taken = min(take, count - left_out)
        total += taken * size
        take -= taken
        if not take:
            break
    return total


def _class_bound(classes: dict[int, int], num_ranks: int, bound: int, enough: int) -> int:
    """The same for many tensors, given as elements by block, which may be spread over segments at will.

    A segment holds the classes whose blocks divide its S. Unknown are the elements of the segments of each such set of
    classes: those of two classes or more are enumerated, what is then missing is bounded class by class and for sets of
    classes together, by the greatest common divisor of their blocks.
    """
    # To leave a class out only lowers the bound; small blocks say least.
    blocks = sorted(classes, reverse=True)[:_MOST_BLOCKS]
    size = len(blocks)
    sets = range(1 << size)
    need = [-(-sum(classes[blocks[k]] for k in range(size) if chosen >> k & 1) // num_ranks) for chosen in sets]
    divisor = [gcd(*(blocks[k] for k in range(size) if chosen >> k & 1)) for chosen in sets]
    shared: dict[int, int] = {}
    for chosen in sets:
        multiple = lcm(*(blocks[k] for k in range(size) if chosen >> k & 1))
        members = sum(1 << k for k in range(size) if multiple % blocks[k] == 0)
        if multiple < enough and members & (members - 1):
            shared[multiple] = members
    multiples = sorted(shared, reverse=True)
    best, tries = enough, 0

    def missing(given: Sequence[int]) -> int:
        least = [0] * len(sets)
        for chosen in sets[1:]:
            lowest, rest = chosen & -chosen, chosen & (chosen - 1)
            part = rest
            while True:
                together = part | lowest
                left = max(need[together] - given[together], 0)
                least[chosen] = max(least[chosen], round_up(left, divisor[together]) + least[rest & ~part])
                if not part:
                    break
                part = (part - 1) & rest
        return least[-1]

    def search(depth: int, spent: int, given: list[int]) -> None:
        nonlocal best, tries
        tries += 1
        if tries > _MOST_TRIES or best <= bound:
            return
        if depth == len(multiples):
            if spent + need[-1] - given[-1] < best:
                best = min(best, spent + missing(given))
            return
        step, members = multiples[depth], shared[multiples[depth]]
        for taken in range(0, enough, step):
            if spent + taken >= best:
                break
            widened = [value + taken * bool(chosen & members) for chosen, value in enumerate(given)] if taken else given
            search(depth + 1, spent + taken, widened)
            if all(value <= widened[chosen] for chosen, value in enumerate(need)):
                break

    search(0, 0, [0] * len(sets))
    if tries <= _MOST_TRIES:
        return best
    return (
        _class_bound({block: classes[block] for block in blocks[:-1]}, num_ranks, bound, enough) if size > 1 else bound
    )


# Limits of the search for a bound; beyond them the bound is lower, never wrong.
_MOST_SIZES = 48
_MOST_TENSORS = 16
_MOST_BLOCKS = 5
_MOST_TRIES = 1500
