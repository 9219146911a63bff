"""Balance: whole jobs to ranks, so that the busiest rank is as little busy as can be found. Used by the planner.

A job has a size (elements) and a cost (FLOPs); a rank may start with a load. This is machine scheduling: the longest
job first to the least loaded rank, then moves and swaps that take from the busiest rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

# Bounds on the work, so that planning for thousands of ranks takes a fraction of a second.
_MOST_TRADES = 2_000
_MOST_COMPARISONS = 60_000
_NUM_PARTNERS = 12


@dataclass(frozen=True)
class Job:
    """Something that goes to one rank as a whole."""

    size: int
    cost: float


def assign_jobs(
    jobs: Sequence[Job], sizes: Sequence[int], loads: Sequence[float], *, largest_size: int | None = None
) -> list[int] | None:
    """A rank for every job: the smallest maximal cost found, then the smallest maximal size.

    Args:
        jobs: what to place.
        sizes: elements that each rank holds already; one entry per rank.
        loads: cost that each rank has already.
        largest_size: no rank may exceed this many elements; None for no limit.

    Returns:
        One rank per job; None where no assignment within `largest_size` was found.
    """
    owners = _longest_first(jobs, sizes, loads, largest_size)
    if owners is None and largest_size is not None:
        # Placing by cost ran out of room: place by size, then trade for cost.
        by_size = [Job(job.size, job.size) for job in jobs]
        owners = _longest_first(by_size, sizes, [float(size) for size in sizes], None)
        assert owners is not None
        owners = _improve(by_size, owners, sizes, [float(size) for size in sizes], None)
        if max(_totals(jobs, owners, sizes)) > largest_size:
            return None
    assert owners is not None
    return _improve(jobs, owners, sizes, loads, largest_size)


def smallest_size(jobs: Sequence[Job], sizes: Sequence[int]) -> int:
    """The smallest maximal size found for any assignment."""
    by_size = [Job(job.size, float(job.size)) for job in jobs]
    owners = assign_jobs(by_size, sizes, [float(size) for size in sizes])
    assert owners is not None
    return max(_totals(jobs, owners, sizes))


def _totals(jobs: Sequence[Job], owners: Sequence[int], sizes: Sequence[int]) -> list[int]:
    totals = list(sizes)
    for job, owner in zip(jobs, owners, strict=True):
        totals[owner] += job.size
    return totals


def _longest_first(
    jobs: Sequence[Job], sizes: Sequence[int], loads: Sequence[float], largest_size: int | None
) -> list[int] | None:
    heap = [(load, size, rank) for rank, (load, size) in enumerate(zip(loads, sizes, strict=True))]
    heapify(heap)
    smallest = min((job.size for job in jobs), default=0)
    owners = [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda index: (-jobs[index].cost, -jobs[index].size, index)):
        job = jobs[index]
        passed = []
        while heap:
            load, size, rank = heappop(heap)
            if largest_size is None or size + job.size <= largest_size:
                break
            if size + smallest <= largest_size:
                passed.append((load, size, rank))
        else:
            return None
        owners[index] = rank
        for entry in (*passed, (load + job.cost, size + job.size, rank)):
            heappush(heap, entry)
    return owners


def _improve(
    jobs: Sequence[Job], owners: Sequence[int], sizes: Sequence[int], loads: Sequence[float], largest_size: int | None
) -> list[int]:
    """Moves and swaps from the busiest rank to less busy ones, each of which makes the busier of the two less busy."""
    held: list[defaultdict[Job, list[int]]] = [defaultdict(list) for _ in sizes]
    size, load = _totals(jobs, owners, sizes), list(loads)
    for index, owner in enumerate(owners):
        held[owner][jobs[index]].append(index)
        load[owner] += jobs[index].cost
    ranking = sorted((load[rank], size[rank], rank) for rank in range(len(sizes)))
    enough, comparisons = sum(load) / len(load) * (1 + 1e-4), 0
    for _ in range(_MOST_TRADES):
        busiest = ranking[-1][2]
        if load[busiest] <= enough or comparisons > _MOST_COMPARISONS:
            break
        others = [rank for _, _, rank in ranking[:_NUM_PARTNERS]]
        best = None
        for other in others:
            if other == busiest:
                continue
            for given in held[busiest]:
                comparisons += 1 + len(held[other])
                for taken in (None, *held[other]):
                    cost = given.cost - (taken.cost if taken else 0.0)
                    numel = given.size - (taken.size if taken else 0)
                    after = max(load[busiest] - cost, load[other] + cost)
                    # A relative margin: rounding must not make two equal ranks trade for ever.
                    if after >= load[busiest] * (1 - 1e-9):
                        continue
                    if largest_size is not None and (
                        size[other] + numel > largest_size or size[busiest] - numel > largest_size
                    ):
                        continue
                    largest = max(size[busiest] - numel, size[other] + numel)
                    if best is None or (after, largest) < best[:2]:
                        best = (after, largest, other, given, taken, cost, numel)
        if best is None:
            break
        _, _, other, given, taken, cost, numel = best
        _hand_over(held, given, busiest, other)
        if taken is not None:
            _hand_over(held, taken, other, busiest)
        for rank, sign in ((busiest, -1), (other, 1)):
            del ranking[bisect_left(ranking, (load[rank], size[rank], rank))]
            load[rank] += sign * cost
            size[rank] += sign * numel
            insort(ranking, (load[rank], size[rank], rank))
    result = [0] * len(jobs)
    for rank, kinds in enumerate(held):
        for indices in kinds.values():
            for index in indices:
                result[index] = rank
    return result


def _hand_over(held: list[defaultdict[Job, list[int]]], job: Job, giver: int, taker: int) -> None:
    index = held[giver][job].pop()
    if not held[giver][job]:
        del held[giver][job]
    held[taker][job].append(index)
