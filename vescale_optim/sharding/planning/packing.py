"""Packing: tensors into equal shards of one segment, cut only between blocks. Used by the planner.

Everything is counted in elements, and every size is a multiple of the alignment: an `Item` is a tensor with its size
rounded up and its block raised to the lcm of block and alignment, so that a shard boundary, itself aligned, can lie
inside a tensor only at a multiple of that.

    shard size S = 8            |........|........|........|
    items  A: 10, cut every 2   |AAAAAAAA|AA......|            A starts at 0, a boundary cuts it at 8
           B: 9, cut every 3    |AAAAAAAA|AA...BBB|BBBBBB..|   B starts at 13, so that it is cut at 3

For a fixed order and a fixed S, the earliest start of each item after the one before is exact: starting later is
always allowed by the padding before the next item and never helps it. `smallest_shard` searches S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm


@dataclass(frozen=True)
class Item:
    """A tensor as packing sees it.

    Args:
        size: elements, a multiple of the alignment, > 0.
        cut: a boundary inside must lie at a multiple of this; 0 for an item that may not be cut.
        cuts: where `cut` is 0: the only positions inside where a boundary may lie, ascending.
    """

    size: int
    cut: int
    cuts: tuple[int, ...] = ()

    @property
    def largest_unit(self) -> int:
        """Elements that must lie in one shard."""
        if self.cuts:
            ends = (*self.cuts, self.size)
            return max(end - start for start, end in zip((0, *self.cuts), ends, strict=True))
        return self.cut or self.size


Run = tuple[Item, int]
"""An item and how many of it follow each other."""


def make_item(numel: int, block: int, boundaries: Sequence[int] | None, align: int) -> Item:
    """The item of a tensor with units of `block` elements, or that end at `boundaries`."""
    size = round_up(numel, align)
    if boundaries is None:
        cut = lcm(block, align)
        return Item(size, cut if cut < size else 0)
    return Item(size, 0, tuple(end for end in boundaries if 0 < end < size and end % align == 0))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def earliest_start(item: Item, cursor: int, shard: int) -> int:
    """The first position, not before `cursor`, where the item may start; -1 where no position will do."""
    size = item.size
    room = shard - cursor % shard
    if size <= room:
        return cursor
    if item.cuts:
        return _earliest_start_between(item, cursor, shard)
    boundary = cursor + room
    cut = item.cut
    if cut:
        start = boundary - room // cut * cut
        if shard % cut == 0:
            return start
        # Shards that are no multiple of the block: at most one boundary may lie inside.
        if start < boundary and start + size <= boundary + shard:
            return start
        if size > shard:
            start = boundary + shard - shard // cut * cut
            return start if cut <= shard and start + size <= boundary + 2 * shard else -1
    return boundary if size <= shard else -1


def _earliest_start_between(item: Item, cursor: int, shard: int) -> int:
    allowed = frozenset(item.cuts)
    end = cursor - cursor % shard + shard
    # It may start in the rest of this shard or in the next one; after a whole shard of tries the pattern repeats.
    for end_of_shard in (end, end + shard):
        first = max(cursor, end_of_shard - shard)
        if first + item.size <= end_of_shard:
            return first
        for position in reversed(item.cuts):
            start = end_of_shard - position
            if start >= first and all(inside in allowed for inside in range(position, item.size, shard)):
                return start
    return -1


def end_of_run(item: Item, count: int, cursor: int, shard: int) -> int:
    """Where `count` of the item end when each starts at its earliest position; -1 where that is impossible."""
    size, cut = item.size, item.cut
    if item.cuts or count <= 2:
        for _ in range(count):
            start = earliest_start(item, cursor, shard)
            if start < 0:
                return -1
            cursor = start + size
        return cursor
    room = shard - cursor % shard
    fit_here = min(room // size, count)
    cursor += fit_here * size
    count -= fit_here
    if not count:
        return cursor
    room -= fit_here * size
    if not cut:
        full, last = divmod(count - 1, shard // size) if size <= shard else (-1, 0)
        return cursor + room + full * shard + (last + 1) * size if full >= 0 else -1
    if shard % cut == 0 and size % cut == 0:
        # Once a boundary cuts one of them, the others follow without a gap: all are whole blocks.
        return cursor + room % cut + count * size
    return _end_of_cut_run(size, cut, count, cursor, shard)


def _end_of_cut_run(size: int, cut: int, count: int, cursor: int, shard: int) -> int:
    """The same where one boundary after the other must be looked at; `earliest_start`, written out for speed."""
    is_multiple = shard % cut == 0
    # The position in the shard decides all that follows, and takes few values where blocks are large: once one returns,
    # jump over whole rounds.
    seen: dict[int, tuple[int, int]] | None = {} if shard < 1000 * cut else None
    while True:
        rest = cursor % shard
        if seen is not None:
            count_before, cursor_before = seen.setdefault(rest, (count, cursor))
            if count_before > count:
                rounds = count // (count_before - count)
                cursor += rounds * (cursor - cursor_before)
                count -= rounds * (count_before - count)
                seen = None
        room = shard - rest
        fit_here = room // size
        if fit_here >= count:
            return cursor + count * size
        cursor += fit_here * size
        room -= fit_here * size
        count -= fit_here + 1
        before = room // cut * cut
        if is_multiple or (before and size <= before + shard):
            cursor += room - before + size
        elif size <= shard:
            cursor += room + size
        else:
            before = shard // cut * cut
            if not before or size > before + shard:
                return -1
            cursor += room + shard - before + size


def end_of_order(order: Iterable[Run], shard: int, limit: int) -> int:
    """Where the last item ends; -1 where an item cannot be placed or ends after `limit`."""
    cursor = 0
    for item, count in order:
        if count == 1:
            # The common case in a fast lane: an item that fits into the rest of the shard starts at once.
            if item.size > shard - cursor % shard:
                cursor = earliest_start(item, cursor, shard)
                if cursor < 0:
                    return -1
            cursor += item.size
        else:
            cursor = end_of_run(item, count, cursor, shard)
        if cursor < 0 or cursor > limit:
            return -1
    return cursor


def starts_in_order(items: Iterable[Item], shard: int, limit: int) -> list[int] | None:
    """Start of every item; None where the order does not fit."""
    cursor, starts = 0, []
    for item in items:
        start = earliest_start(item, cursor, shard)
        cursor = start + item.size
        if start < 0 or cursor > limit:
            return None
        starts.append(start)
    return starts


def as_runs(items: Iterable[Item]) -> list[Run]:
    """Consecutive equal items counted together."""
    runs: list[Run] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return runs


def smallest_shard(
    order: Sequence[Run],
    num_shards: int,
    align: int,
    *,
    at_most: int | None = None,
    resolution: int = 0,
    fits: Callable[[int], bool] | None = None,
) -> int | None:
    """The smallest S found for which the items fit in this order; None where it would exceed `at_most`.

    S is exact up to `resolution` elements, to save trials while many orders are compared. `fits(S)` replaces the
    question whether the given order fits, for a search over orders.

    An item that holds a whole shard forces S to be a multiple of its cut. Which items do is not known before S is, so
    prefixes of the items sorted by size are tried as the set of those that do: for each, S is searched among the
    multiples of the lcm of their cuts (the idea of veScale-FSDP, arXiv 2602.22437).
    """
    total = sum(item.size * count for item, count in order)
    if total == 0:
        return 0
    if fits is None:

        def fits(shard: int) -> bool:
            return end_of_order(order, shard, num_shards * shard) >= 0

    bound = max(-(-total // num_shards), max(item.largest_unit for item, _ in order))
    below = (total if at_most is None else at_most) + 1
    found: int | None = None
    by_size = sorted({item for item, _ in order}, key=lambda item: (-item.size, -item.cut, item.cuts))
    multiple = 0
    for index in range(len(by_size) + 1):
        raised = _raised(multiple, by_size[index - 1]) if index else align
        if raised == multiple:
            continue
        multiple = raised
        if round_up(bound, multiple) >= below:
            break
        # An item of more than two shards holds a whole one, wherever it starts.
        if any(item.size > 2 * below and _raised(multiple, item) != multiple for item in by_size[index:]):
            continue
        shard = _smallest_multiple(fits, bound, below, multiple, resolution)
        if shard is not None:
            found = below = shard
    return found


def _raised(multiple: int, item: Item) -> int:
    if item.cut:
        return lcm(multiple, item.cut)
    if item.cuts:
        return lcm(multiple, gcd(*item.cuts))
    return multiple


def _smallest_multiple(
    fits: Callable[[int], bool], bound: int, below: int, multiple: int, resolution: int
) -> int | None:
    """The smallest multiple of `multiple` from `bound` up to `below` that fits: by doubling, then bisection."""
    first, last = -(-bound // multiple), (below - 1) // multiple
    tolerated = max(resolution // multiple, 1)
    failed, factor, step = first - 1, first, tolerated
    while factor <= last and not fits(factor * multiple):
        failed, factor, step = factor, factor + step, step * 2
    if factor > last:
        factor = last
        if last <= failed or not fits(last * multiple):
            return None
    while factor - failed > tolerated:
        middle = (factor + failed) // 2
        if fits(middle * multiple):
            factor = middle
        else:
            failed = middle
    return factor * multiple
