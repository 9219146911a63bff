"""Arrange: which tensors lie in which segment, where, and how large the shards are. The heart of `plan_buffer`.

Three ways, each a list of segments (`Draft`):

    least padding    all tensors by their blocks alone (`partition`)
    even cost        whole tensors to ranks as jobs (`balance`), tensors that can be cut in segments of equal cost per
                     element, tensors of no cost in the room that is left, then in a segment of their own
    uneven           as above, but every rank's shard is as large as what it holds

Among the ways with little padding, the one with the least busy busiest rank is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from vescale_optim.sharding.planning.balance import Job, assign_jobs, smallest_size
from vescale_optim.sharding.planning.fill import fill_shards
from vescale_optim.sharding.planning.packing import Item, starts_in_order
from vescale_optim.sharding.planning.partition import best_parts
from vescale_optim.sharding.planning.parts import Part

# A further segment is worth this many elements of padding: the latency of one more collective in the group.
_SEGMENT_NUMEL = 1 << 16
_MOST_SEGMENTS = 4
_MANY_KINDS = 500


@dataclass(frozen=True)
class Draft:
    """One segment: its tensors and where they start in it, and the shard of every rank."""

    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    shards: tuple[int, ...]


def even_drafts(
    items: Mapping[int, Item],
    costs: Mapping[int, float],
    num_ranks: int,
    align: int,
    loads: Sequence[float],
    tolerance: float,
) -> list[Draft]:
    """Segments of equal shards."""
    if not items:
        return []
    best = _least_padding(items, list(items), num_ranks, align)
    total = sum(item.size for item in items.values())
    has_lumps = any(not _can_be_cut(item) and item.size * num_ranks * 64 > total for item in items.values())
    if num_ranks == 1 or not (has_lumps or any(costs.values())):
        return best
    ways = [best]
    # Many different tensors are slow to arrange and easy to balance.
    has_choice = any(costs[index] and _can_be_cut(item) for index, item in items.items()) and not _is_many(items)
    choices = (True, False) if has_choice else (True,)
    for jobs_may_be_cut in choices:
        for drafts in _by_jobs(items, costs, num_ranks, align, loads, tolerance, jobs_may_be_cut=jobs_may_be_cut):
            if drafts not in ways:
                ways.append(drafts)
    numels = [sum(sum(draft.shards) for draft in drafts) for drafts in ways]
    allowed = max(min(numels), int(total * (1 + tolerance)))
    close = [
        (_busiest(drafts, items, costs, loads), numel + _SEGMENT_NUMEL * len(drafts), index)
        for index, (drafts, numel) in enumerate(zip(ways, numels, strict=True))
        if numel <= allowed
    ]
    least = min(close)[0]
    # Within a thousandth of the best balance, less padding is worth more.
    return ways[min(entry[1:] for entry in close if entry[0] <= least * 1.001)[-1]]


def uneven_drafts(
    items: Mapping[int, Item], costs: Mapping[int, float], num_ranks: int, align: int, loads: Sequence[float]
) -> list[Draft]:
    """Segments whose shards are as large as what each rank holds: first cost is levelled, then bytes."""
    average = sum(item.size for item in items.values()) / num_ranks
    ways = []
    # Costly tensors that can be cut are cut where the level wants it, or go to one rank each if they are small.
    for largest_job in (0.0, average / 2):
        whole = [i for i, item in items.items() if not _can_be_cut(item) or (costs[i] and item.size <= largest_job)]
        drafts = _uneven_way(whole, items, costs, num_ranks, loads)
        if drafts not in ways:
            ways.append(drafts)
    return min(ways, key=lambda drafts: (_busiest(drafts, items, costs, loads), _largest_rank(drafts), len(drafts)))


def _uneven_way(
    whole: Sequence[int], items: Mapping[int, Item], costs: Mapping[int, float], num_ranks: int, loads: Sequence[float]
) -> list[Draft]:
    """Whole tensors to ranks, then costly ones cut to level cost, then the others cut to level bytes."""
    drafts: list[Draft] = []
    load, size = list(loads), [0] * num_ranks
    placed = set(whole)
    costly = [index for index in items if index not in placed and costs[index]]
    free = [index for index in items if index not in placed and not costs[index]]
    if whole:
        owners = _owners(whole, items, costs, size, load)
        drafts.append(_stacked_by_rank(whole, owners, items, num_ranks))
        for index, owner in zip(whole, owners, strict=True):
            load[owner] += costs[index]
            size[owner] += items[index].size
    if costly:
        draft = _stream(costly, items, costs, load)
        drafts.append(draft)
        size = [a + b for a, b in zip(size, draft.shards, strict=True)]
    if free:
        weights = {index: float(items[index].size) for index in free}
        drafts.append(_stream(free, items, weights, [float(numel) for numel in size]))
    return drafts


def _largest_rank(drafts: Sequence[Draft]) -> int:
    return max(map(sum, zip(*(draft.shards for draft in drafts), strict=True)), default=0)


def _is_many(items: Mapping[int, Item]) -> bool:
    return len(set(items.values())) > _MANY_KINDS


def _can_be_cut(item: Item) -> bool:
    return bool(item.cut or item.cuts)


def _least_padding(items: Mapping[int, Item], chosen: Sequence[int], num_ranks: int, align: int) -> list[Draft]:
    """Segments for the chosen tensors, by their blocks alone."""
    if not chosen:
        return []
    parts = best_parts(
        tuple(items[index] for index in chosen),
        num_ranks,
        align,
        max_segments=_MOST_SEGMENTS,
        segment_numel=_SEGMENT_NUMEL,
    )
    waiting: dict[Item, deque[int]] = defaultdict(deque)
    for index in chosen:
        waiting[items[index]].append(index)
    drafts = []
    for part in parts:
        taken = sorted(waiting[item].popleft() for item, count in part.order for _ in range(count))
        drafts.append(_placed(taken, part, items, num_ranks))
    return sorted(drafts, key=lambda draft: min(draft.tensors))


def _placed(taken: list[int], part: Part, items: Mapping[int, Item], num_ranks: int) -> Draft:
    """The tensors of one segment in the caller's order where that fits, else in the order that was found."""
    limit = part.shard * num_ranks
    starts = starts_in_order([items[index] for index in taken], part.shard, limit)
    if starts is None:
        by_item: dict[Item, deque[int]] = defaultdict(deque)
        for index in taken:
            by_item[items[index]].append(index)
        taken = [by_item[item].popleft() for item, count in part.order for _ in range(count)]
        starts = starts_in_order([items[index] for index in taken], part.shard, limit)
        assert starts is not None
    return Draft(tuple(taken), tuple(starts), (part.shard,) * num_ranks)


def _by_jobs(
    items: Mapping[int, Item],
    costs: Mapping[int, float],
    num_ranks: int,
    align: int,
    loads: Sequence[float],
    tolerance: float,
    *,
    jobs_may_be_cut: bool,
) -> list[list[Draft]]:
    """Whole tensors as jobs, costly cut tensors in segments of equal density, the rest as filler.

    `jobs_may_be_cut`: tensors that could be cut are jobs too, where they are small enough.
    """
    total = sum(item.size for item in items.values())
    average = total / num_ranks
    jobs, lumps, streams, fillers = [], [], [], []
    for index, item in items.items():
        if costs[index]:
            is_job = not _can_be_cut(item) or (jobs_may_be_cut and item.size <= average)
            (jobs if is_job else streams).append(index)
        else:
            is_job = item.largest_unit * 16 > average and (item.size <= average or not _can_be_cut(item))
            (lumps if is_job else fillers).append(index)
    drafts: list[Draft] = []
    for members in _equal_density(streams, items, costs):
        drafts += _least_padding(items, members, num_ranks, align)
    load = [a + b for a, b in zip(loads, _rank_costs(drafts, items, costs, num_ranks), strict=True)]
    if not jobs and not lumps:
        return [drafts + _least_padding(items, fillers, num_ranks, align)]
    # Lumps of no cost level the sizes first; then the costly jobs level the cost in the room that is left.
    sizes = [0] * num_ranks
    lump_owners = assign_jobs([Job(items[index].size, items[index].size) for index in lumps], sizes, sizes)
    assert lump_owners is not None
    for index, owner in zip(lumps, lump_owners, strict=True):
        sizes[owner] += items[index].size
    job_list = [Job(items[index].size, costs[index]) for index in jobs]
    tightest = 0 if _is_many(items) else smallest_size(job_list, sizes)
    placed_numel = sum(sizes) + sum(items[index].size for index in jobs)
    spent = sum(sum(draft.shards) - sum(items[index].size for index in draft.tensors) for draft in drafts)
    allowance = max(int(tolerance * total) - spent, 0)
    filler_numel = sum(items[index].size for index in fillers if items[index].size <= average / 2)
    # Room for the jobs beyond their average: what may be padded, and what fillers take.
    rooms = (filler_numel, 0, allowance, filler_numel + allowance)
    if _is_many(items):
        rooms = rooms[:1]
    found = []
    for largest in sorted({max(tightest, (placed_numel + room) // num_ranks // align * align) for room in rooms}):
        owners = assign_jobs(job_list, sizes, load, largest_size=largest)
        if owners is not None:
            held = _by_rank([*lumps, *jobs], [*lump_owners, *owners], num_ranks)
            filling = fill_shards(held, fillers, items, align, segment_numel=_SEGMENT_NUMEL)
            tensors, starts = zip(*filling.placed, strict=True)
            draft = Draft(tensors, starts, (filling.shard,) * num_ranks)
            found.append([*drafts, draft, *_least_padding(items, filling.left, num_ranks, align)])
    return found


def _equal_density(members: Sequence[int], items: Mapping[int, Item], costs: Mapping[int, float]) -> list[list[int]]:
    """Tensors that cost the same per element and are cut alike; all but the costliest groups are put together."""
    groups: dict[tuple[float, int], list[int]] = {}
    for index in members:
        density = float(f"{costs[index] / items[index].size:.3g}")
        groups.setdefault((density, items[index].largest_unit), []).append(index)
    ordered = sorted(groups.values(), key=lambda group: (-sum(costs[index] for index in group), group[0]))
    rest = sorted(index for group in ordered[_MOST_SEGMENTS - 2 :] for index in group)
    return ordered[: _MOST_SEGMENTS - 2] + ([rest] if rest else [])


def _owners(
    whole: Sequence[int],
    items: Mapping[int, Item],
    costs: Mapping[int, float],
    size: Sequence[int],
    load: Sequence[float],
) -> list[int]:
    """Owners of whole tensors: those with a cost by cost, then the others by size."""
    owners: dict[int, int] = {}
    held = list(size)
    for members, by_cost in (
        ([index for index in whole if costs[index]], True),
        ([index for index in whole if not costs[index]], False),
    ):
        jobs = [Job(items[index].size, costs[index] if by_cost else float(items[index].size)) for index in members]
        chosen = assign_jobs(jobs, held, load if by_cost else [float(numel) for numel in held])
        assert chosen is not None
        for index, owner in zip(members, chosen, strict=True):
            owners[index] = owner
            held[owner] += items[index].size
    return [owners[index] for index in whole]


def _by_rank(members: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, owner in zip(members, owners, strict=True):
        held[owner].append(index)
    return [sorted(indices) for indices in held]


def _stacked_by_rank(members: Sequence[int], owners: Sequence[int], items: Mapping[int, Item], num_ranks: int) -> Draft:
    held = _by_rank(members, owners, num_ranks)
    tensors = [index for indices in held for index in indices]
    starts = list(accumulate((items[index].size for index in tensors), initial=0))[:-1]
    shards = tuple(sum(items[index].size for index in indices) for indices in held)
    return Draft(tuple(tensors), tuple(starts), shards)


def _stream(
    members: Sequence[int], items: Mapping[int, Item], weights: Mapping[int, float], loads: Sequence[float]
) -> Draft:
    """Tensors one after the other, cut between ranks so that loads plus weights are as level as the units allow."""
    ends = list(accumulate(items[index].size for index in members))
    heavy = list(accumulate(weights[index] for index in members))
    wanted = accumulate(_level(loads, heavy[-1]))
    cuts, cursor = [], 0
    for target in wanted:
        position = min(bisect_right(heavy, target), len(members) - 1)
        index = members[position]
        before = heavy[position] - weights[index]
        size = items[index].size
        inside = min(max((target - before) / weights[index], 0.0), 1.0) * size
        cursor = max(cursor, ends[position] - size + _nearest_cut(items[index], inside))
        cuts.append(cursor)
    cuts[-1] = ends[-1]
    shards = tuple(end - start for start, end in zip([0, *cuts[:-1]], cuts, strict=True))
    return Draft(
        tuple(members), tuple(end - items[index].size for index, end in zip(members, ends, strict=True)), shards
    )


def _level(loads: Sequence[float], amount: float) -> list[float]:
    """How much of `amount` each rank takes so that the largest sum with its load is least."""
    level, taken = 0.0, 0.0
    ascending = sorted(loads)
    for count, load in enumerate(ascending, start=1):
        taken += load
        level = (amount + taken) / count
        if count == len(ascending) or level <= ascending[count]:
            break
    return [max(level - load, 0.0) for load in loads]


def _nearest_cut(item: Item, position: float) -> int:
    if item.cuts:
        return min((0, *item.cuts, item.size), key=lambda cut: (abs(cut - position), cut))
    return min(round(position / item.cut) * item.cut, item.size)


def _busiest(
    drafts: Sequence[Draft], items: Mapping[int, Item], costs: Mapping[int, float], loads: Sequence[float]
) -> float:
    return max(a + b for a, b in zip(loads, _rank_costs(drafts, items, costs, len(loads)), strict=True))


def _rank_costs(
    drafts: Sequence[Draft], items: Mapping[int, Item], costs: Mapping[int, float], num_ranks: int
) -> list[float]:
    totals = [0.0] * num_ranks
    for draft in drafts:
        begins = list(accumulate(draft.shards, initial=0))
        for index, start in zip(draft.tensors, draft.starts, strict=True):
            cost, size = costs[index], items[index].size
            if not cost:
                continue
            rank = bisect_right(begins, start) - 1
            position = start
            while position < start + size:
                while begins[rank + 1] <= position:
                    rank += 1
                end = min(begins[rank + 1], start + size)
                totals[rank] += cost * ((end - position) / size)
                position = end
    return totals
