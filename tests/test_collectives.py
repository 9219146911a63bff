"""Collectives: the mean is summed in rank order in fp32, in place or not, added or not, for equal and unequal shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.collectives import (
    all_gather,
    all_gather_uneven,
    all_to_all_uneven,
    control_group,
    new_tag,
    reduce_scatter_mean,
    shard_slices,
)

SHARDS = {"equal": (5, 5, 5, 5), "unequal": (7, 0, 4, 9), "one holds all": (0, 20, 0, 0)}


def local_values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def mean_in_rank_order(parts: list[Tensor]) -> Tensor:
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total / len(parts)).to(parts[0].dtype)


def scatter(rank: int, world_size: int, mesh: Any, numels: tuple[int, ...], dtype: torch.dtype, how: str) -> list[Tensor]:
    group, pool = control_group(mesh.get_group()), BufferPool()
    buffer = local_values(rank, sum(numels), dtype)
    before = torch.full((numels[rank],), 2.0, dtype=dtype)
    out = shard_slices(buffer, numels)[rank] if how == "in place" else before.clone()
    reduce_scatter_mean(buffer, numels, out, group, pool, add=how == "add", tag=new_tag(group)).wait()
    result = out.clone()
    # Scratch that comes back to the pool serves the next call.
    again = before.clone()
    buffer = local_values(rank, sum(numels), dtype)
    reduce_scatter_mean(buffer, numels, again, group, pool, tag=new_tag(group)).wait()
    return [result, again]


@pytest.mark.parametrize("how", ["in place", "apart", "add"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_reduce_scatter_mean(world_size: int, shards: str, dtype: torch.dtype, how: str) -> None:
    numels = SHARDS[shards][:world_size]
    everyone = [local_values(rank, sum(numels), dtype) for rank in range(world_size)]
    expected = shard_slices(mean_in_rank_order(everyone), numels)
    for rank, (result, again) in enumerate(run_ranks(world_size, scatter, numels, dtype, how)):
        assert torch.equal(result, expected[rank] + 2 if how == "add" else expected[rank])
        assert torch.equal(again, expected[rank])


def any_order(rank: int, world_size: int, mesh: Any) -> list[Tensor]:
    """Two reductions under way at once, launched in another order on each rank."""
    group, pool = control_group(mesh.get_group()), BufferPool()
    tags = [new_tag(group), new_tag(group)]
    outs = [torch.zeros(3), torch.zeros(3)]
    pending = {}
    for which in (0, 1) if rank % 2 else (1, 0):
        buffer = torch.full((3 * world_size,), float(rank + 10 * which))
        pending[which] = reduce_scatter_mean(buffer, (3,) * world_size, outs[which], group, pool, tag=tags[which])
    for which in (0, 1):
        pending[which].wait()
    return outs


def test_tags_keep_reductions_apart() -> None:
    for first, second in run_ranks(3, any_order):
        assert torch.equal(first, torch.full((3,), 1.0)) and torch.equal(second, torch.full((3,), 11.0))


def gather(rank: int, world_size: int, mesh: Any, numels: tuple[int, ...]) -> list[Tensor]:
    group = mesh.get_group()
    buffer = torch.full((sum(numels),), -1.0)
    shard_slices(buffer, numels)[rank].fill_(rank)
    all_gather(buffer, numels, group).wait()
    apart = all_gather_uneven(torch.full((numels[rank],), float(rank)), numels, group)
    sends = [(rank + other) % 3 for other in range(world_size)]
    receives = [(other + rank) % 3 for other in range(world_size)]
    exchanged = all_to_all_uneven(torch.full((sum(sends),), float(rank)), sends, receives, group)
    return [buffer, apart, exchanged]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathers_and_uneven_exchange(world_size: int, shards: str) -> None:
    numels = SHARDS[shards][:world_size]
    expected = torch.cat([torch.full((numel,), float(rank)) for rank, numel in enumerate(numels)])
    for rank, (buffer, apart, exchanged) in enumerate(run_ranks(world_size, gather, numels)):
        assert torch.equal(buffer, expected) and torch.equal(apart, expected)
        parts = [torch.full(((other + rank) % 3,), float(other)) for other in range(world_size)]
        assert torch.equal(exchanged, torch.cat(parts))
