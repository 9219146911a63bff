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
from typing import NamedTuple

# Bounds on the work, so that planning for thousands of ranks takes a fraction of a second.
_MOST_TRADES = 2_000
_MOST_COMPARISONS = 60_000
_NUM_PARTNERS = 12
_MOST_PASSED = 64


@dataclass(frozen=True)
class Job:
    """Something that goes to one rank as a whole."""

    size: float
    cost: float


class _Bundle(NamedTuple):
    """Jobs that change hands together."""

    size: float
    cost: float
    jobs: tuple[Job, ...]


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
    every = range(len(jobs))
    by_cost = sorted(every, key=lambda index: (-jobs[index].cost, -jobs[index].size, index))
    starts = [_in_turn(jobs, by_cost, sizes, loads, largest_size)]
    if largest_size is not None:
        # Job by job of one density, cost and size level out together.
        by_density = sorted(by_cost, key=lambda index: -jobs[index].cost / max(jobs[index].size, 1))
        starts.append(_in_turn(jobs, by_density, sizes, loads, largest_size))
    fitting = [owners for owners in starts if owners is not None]
    if not fitting and largest_size is not None:
        # Placing by cost ran out of room: place by size, then trade for cost.
        by_size = [Job(job.size, job.size) for job in jobs]
        order = sorted(every, key=lambda index: (-jobs[index].size, -jobs[index].cost, index))
        owners = _in_turn(by_size, order, sizes, sizes, None)
        assert owners is not None
        owners = _improve(by_size, owners, sizes, sizes, None)
        if max(_totals(sizes, [job.size for job in jobs], owners)) <= largest_size:
            fitting.append(owners)
    if not fitting:
        return None
    costs = [job.cost for job in jobs]
    owners = min(fitting, key=lambda owners: max(_totals(loads, costs, owners)))
    owners = _improve(jobs, owners, sizes, loads, largest_size)
    # Then the same with the roles exchanged: less size on the fullest rank, at no more cost on the busiest.
    exchanged = [Job(job.cost, job.size) for job in jobs]
    return _improve(exchanged, owners, loads, sizes, max(_totals(loads, costs, owners)) * (1 + 1e-9))


def smallest_size(jobs: Sequence[Job], sizes: Sequence[int]) -> int:
    """The smallest maximal size found for any assignment."""
    owners = assign_jobs([Job(job.size, job.size) for job in jobs], sizes, sizes)
    assert owners is not None
    return int(max(_totals(sizes, [job.size for job in jobs], owners)))


def _totals(start: Sequence[float], amounts: Sequence[float], owners: Sequence[int]) -> list[float]:
    totals = list(start)
    for amount, owner in zip(amounts, owners, strict=True):
        totals[owner] += amount
    return totals


def _in_turn(
    jobs: Sequence[Job],
    order: Sequence[int],
    sizes: Sequence[float],
    loads: Sequence[float],
    largest_size: float | None,
) -> list[int] | None:
    """Each job to the rank with the least load that has room; None where none has."""
    heap = [(load, size, rank) for rank, (load, size) in enumerate(zip(loads, sizes, strict=True))]
    heapify(heap)
    smallest = min((job.size for job in jobs), default=0)
    owners = [0] * len(jobs)
    for index in order:
        job = jobs[index]
        passed: list[tuple[float, float, int]] = []
        while heap and len(passed) < _MOST_PASSED:
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
    jobs: Sequence[Job],
    owners: Sequence[int],
    sizes: Sequence[float],
    loads: Sequence[float],
    largest_size: float | None,
) -> list[int]:
    """Trades between the busiest rank and less busy ones, each of which makes the busier of the two less busy."""
    held: list[defaultdict[Job, list[int]]] = [defaultdict(list) for _ in sizes]
    size, load = _totals(sizes, [job.size for job in jobs], owners), list(loads)
    for index, owner in enumerate(owners):
        held[owner][jobs[index]].append(index)
        load[owner] += jobs[index].cost
    ranking = sorted((load[rank], size[rank], rank) for rank in range(len(sizes)))
    enough, comparisons = sum(load) / len(load) * (1 + 1e-4), 0
    for _ in range(_MOST_TRADES):
        busiest = ranking[-1][2]
        if load[busiest] <= enough or comparisons > _MOST_COMPARISONS:
            break
        others = [rank for _, _, rank in ranking[:_NUM_PARTNERS] if rank != busiest]
        best = None
        # One job for one or none; where no such trade helps, up to two for two.
        for most_jobs in (1, 2):
            for other in others:
                taken_choices = [_Bundle(0, 0.0, ()), *_bundles(held[other], most_jobs)]
                given_choices = _bundles(held[busiest], most_jobs)
                comparisons += len(taken_choices) * len(given_choices)
                if comparisons > _MOST_COMPARISONS:
                    break
                for given in given_choices:
                    for taken in taken_choices:
                        cost = given.cost - taken.cost
                        after = max(load[busiest] - cost, load[other] + cost)
                        # A relative margin: rounding must not make two equal ranks trade for ever.
                        if after >= load[busiest] * (1 - 1e-9):
                            continue
                        larger = max(size[busiest] - given.size + taken.size, size[other] + given.size - taken.size)
                        if largest_size is not None and larger > largest_size:
                            continue
                        if best is None or (after, larger) < best[:2]:
                            best = (after, larger, other, given, taken)
            if best is not None:
                break
        if best is None:
            break
        _, _, other, given, taken = best
        for giver, taker, bundle in ((busiest, other, given), (other, busiest, taken)):
            for job in bundle.jobs:
                _hand_over(held, job, giver, taker)
        for rank, sign in ((busiest, -1), (other, 1)):
            del ranking[bisect_left(ranking, (load[rank], size[rank], rank))]
            load[rank] += sign * (given.cost - taken.cost)
            size[rank] += sign * (given.size - taken.size)
            insort(ranking, (load[rank], size[rank], rank))
    result = [0] * len(jobs)
    for rank, kinds in enumerate(held):
        for indices in kinds.values():
            for index in indices:
                result[index] = rank
    return result


def _bundles(held: dict[Job, list[int]], most_jobs: int) -> list[_Bundle]:
    bundles = [_Bundle(job.size, job.cost, (job,)) for job in held]
    if most_jobs == 2:
        kinds = list(held)
        for position, job in enumerate(kinds):
            for other in kinds[position + (len(held[job]) == 1) :]:
                bundles.append(_Bundle(job.size + other.size, job.cost + other.cost, (job, other)))
    return bundles


def _hand_over(held: list[defaultdict[Job, list[int]]], job: Job, giver: int, taker: int) -> None:
    index = held[giver][job].pop()
    if not held[giver][job]:
        del held[giver][job]
    held[taker][job].append(index)
