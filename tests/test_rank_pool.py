"""The rank pool itself: order of results, failures with their traceback, hangs that end soon, ranks that are reused."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_ranks


def describe(rank, world_size, mesh, *args):
    return rank, world_size, mesh.mesh_dim_names, mesh.size(), dist.get_rank(), torch.get_num_threads(), args


def sum_over_ranks(rank, world_size, mesh, start):
    x = torch.tensor([start + rank])
    dist.all_reduce(x)
    return x


def process_id(rank, world_size, mesh):
    return os.getpid()


def draw(rank, world_size, mesh):
    return torch.rand(3), random.random()


def views_of_a_large_buffer(rank, world_size, mesh):
    buffer = torch.zeros(1_000_000, dtype=torch.bfloat16)
    buffer[10:16] = torch.arange(6)
    return {
        "view": buffer[10:16].view(2, 3).T,
        "empty": buffer[:0],
        "scalar": torch.tensor(True),
        "parameter": torch.nn.Parameter(buffer[10:12]),
    }


def fail_on(rank, world_size, mesh, failing, how):
    if rank in failing:
        if how == "raise":
            raise ValueError(f"broken on purpose, on rank {rank}")
        if how == "assert":
            secret = 40 + rank
            assert secret == 0
        if how == "exit":
            os._exit(7)
        if how == "unpicklable":
            return lambda: None
    dist.barrier()


def wait_for_a_peer_that_never_comes(rank, world_size, mesh):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def wait_in_a_private_group(rank, world_size, mesh):
    group = dist.new_group()
    if rank == 1:
        dist.barrier(group)


def spin(rank, world_size, mesh):
    while rank == 0:
        pass


def make_groups(rank, world_size, mesh, count):
    for _ in range(count):
        dist.new_group()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size):
    results = run_ranks(world_size, describe, "a", 1)
    assert results == [(r, world_size, ("dp",), world_size, r, 1, ("a", 1)) for r in range(world_size)]
    total = sum(10 + r for r in range(world_size))
    assert run_ranks(world_size, sum_over_ranks, 10) == [torch.tensor([total])] * world_size


def test_ranks_are_reused_and_calls_are_cheap():
    pids = run_ranks(2, process_id)
    seconds = []
    for _ in range(51):
        start = time.monotonic()
        assert run_ranks(2, process_id) == pids
        seconds.append(time.monotonic() - start)
    # A millisecond or two on an idle machine; starting a pool takes two seconds and more.
    assert sorted(seconds)[25] < 0.5


def test_every_call_starts_from_the_same_seed():
    first, second = run_ranks(2, draw), run_ranks(2, draw)
    assert [(a.tolist(), b) for a, b in first] == [(a.tolist(), b) for a, b in second]
    assert first[0][1] == first[1][1]


def test_tensors_travel_as_values_of_their_own():
    for result in run_ranks(2, views_of_a_large_buffer):
        assert torch.equal(result["view"], torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.bfloat16))
        assert result["view"].untyped_storage().nbytes() == 12
        assert result["empty"].shape == (0,) and result["empty"].dtype == torch.bfloat16
        assert result["scalar"].item() is True
        assert type(result["parameter"]) is torch.Tensor and result["parameter"].tolist() == [0, 1]


def test_a_failing_rank_shows_its_traceback_and_the_pool_is_replaced():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, fail_on, [1], "raise")
    text = str(failure.value)
    assert list(failure.value.errors) == [1] and failure.value.stuck == [0]
    assert "on rank 1 of 2" in text and "ValueError: broken on purpose, on rank 1" in text
    assert "in fail_on" in text and "rank 0 had not finished" in text
    assert run_ranks(2, sum_over_ranks, 0) == [torch.tensor([1])] * 2


def test_ranks_that_fail_alike_are_reported_once():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, fail_on, [0, 1], "unpicklable")
    assert "on ranks 0, 1 of 2" in str(failure.value).replace("1, 0", "0, 1")


def test_a_failed_assert_shows_the_values():
    with pytest.raises(RankFailure, match=r"assert secret == 0[\s\S]*secret = 41"):
        run_ranks(2, fail_on, [1], "assert")


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailure, match=r"on rank 1 of 2:\nthe process ended with exit code 7"):
        run_ranks(2, fail_on, [1], "exit")
    assert run_ranks(2, sum_over_ranks, 0) == [torch.tensor([1])] * 2


@pytest.mark.parametrize(
    ("fn", "stuck"),
    [(wait_for_a_peer_that_never_comes, 0), (wait_in_a_private_group, 1)],
    ids=["default group", "private group"],
)
def test_a_hang_ends_within_seconds_and_shows_where(fn, stuck):
    run_ranks(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, fn)
    assert time.monotonic() - start < 18.0  # gloo's own time-out is 20 s
    assert stuck in failure.value.stuck or stuck in failure.value.errors
    assert f"in {fn.__name__}" in str(failure.value)
    assert run_ranks(2, sum_over_ranks, 0) == [torch.tensor([1])] * 2


def test_an_endless_loop_ends_at_the_time_limit():
    run_ranks(2, process_id)
    with pytest.raises(RankFailure, match=r"no result after 2 s[\s\S]*rank 0 is stuck[\s\S]*in spin"):
        run_ranks(2, spin, timeout=2.0)


def test_a_pool_with_many_groups_left_over_is_replaced():
    pids = run_ranks(2, process_id)
    run_ranks(2, make_groups, 80)
    assert set(run_ranks(2, process_id)).isdisjoint(pids)
