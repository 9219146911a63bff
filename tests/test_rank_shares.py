"""RankShares stands for a tuple of one number per rank, and stays small where most ranks hold nothing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_optim import RaggedShard, TensorBlocks, plan_buffer
from vescale_optim.sharding.rank_shares import RankShares

numbers = st.lists(st.sampled_from([0, 0, 0, 1, 5, 7]), max_size=40).map(tuple)


@given(numbers, st.data())
def test_it_reads_as_the_tuple(values: tuple[int, ...], data: st.DataObject) -> None:
    shares = RankShares.of(values)
    assert (tuple(shares), len(shares), shares.total, hash(shares)) == (values, len(values), sum(values), hash(values))
    assert shares == values and values == shares and repr(values) in (repr(shares), repr(tuple(shares)))
    assert [shares[rank] for rank in range(-len(values), len(values))] == [*values, *values]
    start, stop = data.draw(st.integers(-50, 50)), data.draw(st.integers(-50, 50))
    assert shares[start:stop] == values[start:stop]
    assert [shares.before(rank) for rank in range(len(values) + 1)] == [sum(values[:r]) for r in range(len(values) + 1)]
    assert shares.times(3) == tuple(3 * value for value in values)
    assert shares.times(3).over(3) == shares
    with pytest.raises(IndexError):
        shares[len(values)]


@given(numbers, numbers)
def test_it_is_equal_where_the_tuples_are(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (RankShares.of(first) == RankShares.of(second)) == (first == second)
    assert (RankShares.of(first) == second) == (first == second)


@given(st.integers(0, 20), numbers, st.integers(0, 20))
def test_only_neighbours_need_be_given(before: int, held: tuple[int, ...], after: int) -> None:
    num_ranks = before + len(held) + after
    assert RankShares.from_first(num_ranks, before, held) == (0,) * before + held + (0,) * after
    assert RankShares.from_first(num_ranks, before, held) == RankShares.of((0,) * before + held + (0,) * after)


def test_a_placement_is_the_same_however_its_units_are_given() -> None:
    given_as_tuple = RaggedShard((0,), (0, 2, 1, 0))
    given_as_shares = RaggedShard((0,), RankShares(4, 1, (2, 1)))
    assert given_as_tuple == given_as_shares and hash(given_as_tuple) == hash(given_as_shares)
    assert given_as_tuple.local_units == (0, 2, 1, 0)
    assert given_as_tuple != RaggedShard((0,), (0, 2, 1)) and given_as_tuple != RaggedShard((0,), (2, 1, 0, 0))
    assert "(0, 2, 1, 0)" in repr(given_as_tuple)
    saved = io.BytesIO()
    torch.save(given_as_tuple, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    for other in (copy.deepcopy(given_as_tuple), pickle.loads(pickle.dumps(given_as_tuple)), loaded):
        assert other == given_as_tuple and hash(other) == hash(given_as_tuple)


def test_placements_on_thousands_of_ranks_are_small() -> None:
    num_ranks = 10_240
    plan = plan_buffer([TensorBlocks(1000, 1000)] * 50, num_ranks, even=False)
    for tensor in (0, 49):
        placement = RaggedShard.from_numels((10, 100), plan.shares(tensor))
        assert sum(placement.local_units) == 1 and len(placement.local_units) == num_ranks
        assert len(pickle.dumps(placement)) < 500 and len(repr(placement)) < 200
        # A tuple of all ranks would be 80 kB.
        assert len(placement.local_units.held) == 1
