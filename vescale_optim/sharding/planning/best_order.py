"""Best order: whether any order of the items fits into shards of a given size, by dynamic programming.

What matters of the items placed so far is only how many of each kind they are and how early the last one ends, and an
earlier end is never worse. So f(counts placed) = the earliest end, over all ways to place the last item:

    f(0, 0) = 0      f(i, j) = min( end of an A after f(i-1, j),  end of a B after f(i, j-1) )

Exact over all orders, for as many states as the product of (count + 1) over the kinds: 162 for the nine tensors of a
LLaMA layer. Used by `partition` where the states are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_optim.sharding.planning.packing import Item, Run, as_runs, earliest_start


def num_order_states(kinds: Sequence[Run]) -> int:
    """States of the dynamic program for so many items of each kind."""
    states = 1
    for _, count in kinds:
        states *= count + 1
    return states


def order_that_fits(kinds: Sequence[Run], shard: int, limit: int) -> list[Run] | None:
    """An order in which all items end within `limit`, None where there is none."""
    weights, states = [], 1
    for _, count in kinds:
        weights.append(states)
        states *= count + 1
    ends, last = [0] * states, [-1] * states
    for state in range(1, states):
        earliest, chosen = -1, -1
        for kind, (item, count) in enumerate(kinds):
            weight = weights[kind]
            if state // weight % (count + 1) == 0:
                continue
            before = ends[state - weight]
            start = earliest_start(item, before, shard) if before >= 0 else -1
            end = start + item.size
            if start >= 0 and end <= limit and (earliest < 0 or end < earliest):
                earliest, chosen = end, kind
        ends[state], last[state] = earliest, chosen
    if ends[-1] < 0:
        return None
    order: list[Item] = []
    state = states - 1
    while state:
        order.append(kinds[last[state]][0])
        state -= weights[last[state]]
    return as_runs(reversed(order))
