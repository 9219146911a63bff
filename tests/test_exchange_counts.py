"""One promise: a step over sharded parameters computes every matrix once, and sends what describe() says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.sharded_models import LAYOUTS, differences, set_gradients, sharded, whole, world_mesh
from tests.support.values import parameter_values
from vescale_optim import ShardedMuon
from vescale_optim.optimizers import muon
from vescale_optim.sharding import agreement, exchange
from vescale_optim.sharding.buffer_pool import BufferPool

SHAPES = {f"matrix{index}": (64, 96) for index in range(24)}
NUMEL = sum(rows * columns for rows, columns in SHAPES.values())


@dataclass
class Counts:
    """What one rank did in one step; bytes of buffers: the most that were in use at a time, and kept."""

    matrices: int = 0
    all_to_alls: int = 0
    gathers: int = 0
    agreements: int = 0
    sent_bytes: int = 0
    broadcast_bytes: int = 0
    held_bytes: int = 0
    buffer_bytes: int = 0
    kept_bytes: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()

    def orthogonalize(matrices: Any, **arguments: Any) -> Any:
        counts.matrices += len(matrices)
        return original["orthogonalize"](matrices, **arguments)

    def all_to_all(*arguments: Any, **keywords: Any) -> Any:
        counts.all_to_alls += 1
        return original["all_to_all"](*arguments, **keywords)

    def all_gather(*arguments: Any) -> Any:
        counts.gathers += 1
        return original["all_gather"](*arguments)

    def all_reduce(*arguments: Any, **keywords: Any) -> Any:
        counts.agreements += 1
        return original["all_reduce"](*arguments, **keywords)

    def isend(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        counts.sent_bytes += tensor.nbytes
        return original["isend"](tensor, *arguments, **keywords)

    def broadcast(tensor: Tensor, *, group: Any, group_src: int, async_op: bool) -> Any:
        counts.broadcast_bytes += tensor.nbytes * (group_src == group.rank())
        return original["broadcast"](tensor, group=group, group_src=group_src, async_op=async_op)

    def take(pool: BufferPool, *arguments: Any) -> Tensor:
        buffer = original["take"](pool, *arguments)
        counts.held_bytes += buffer.nbytes
        counts.buffer_bytes = max(counts.buffer_bytes, counts.held_bytes)
        return buffer

    def give(pool: BufferPool, buffer: Tensor) -> None:
        counts.held_bytes -= buffer.nbytes
        original["give"](pool, buffer)

    replaced = [
        (muon, orthogonalize),
        (exchange, all_to_all),
        (exchange, all_gather),
        (agreement, all_reduce),
        (dist, isend),
        (dist, broadcast),
        (BufferPool, take),
        (BufferPool, give),
    ]
    original = {function.__name__: getattr(owner, function.__name__) for owner, function in replaced}
    patches = [patch.object(owner, function.__name__, function) for owner, function in replaced]
    for one in patches:
        one.start()
    try:
        yield counts
    finally:
        for one in patches:
            one.stop()


def step(
    rank: int, world_size: int, mesh: Any, layout: str, shapes: dict[str, tuple[int, ...]], exchange_mib: float
) -> tuple[Counts, str, int, dict[str, Tensor]]:
    params = sharded(layout, parameter_values(shapes))
    optimizer = ShardedMuon(params.items(), world_mesh(), lr=0.02, exchange_mib=exchange_mib)
    for _ in range(2):
        set_gradients(params, layout, parameter_values(shapes, seed=1))
        with counted() as counts:
            optimizer.step()
    (storage,) = optimizer._storages.values()
    counts.kept_bytes = sum(buffer.nbytes for buffer in storage._pool._free)
    return counts, optimizer.describe(), len(storage.buckets), whole(params)


def formula_bytes(described: str) -> float:
    """The column of the table that describe() prints, summed over buckets."""
    lines = described.splitlines()
    (header,) = [line for line in lines if "formula, MiB" in line]
    column = re.split(r"\s{2,}", header).index("formula, MiB")
    rows = [re.split(r"\s{2,}", line) for line in lines if re.match(r"\d+ ", line)]
    return sum(float(row[column]) for row in rows) * 2**20


@pytest.mark.parametrize(("layout", "replicas"), [("fsdp_on_2", 1), ("fsdp_on_4", 1), ("hsdp", 2), ("fsdp_columns_on_4", 1)])
def test_each_matrix_is_computed_once_and_the_bytes_are_those_of_the_formula(layout: str, replicas: int) -> None:
    world_size = LAYOUTS[layout][0]
    columns = world_size // replicas
    results = run_ranks(world_size, step, layout, SHAPES, 256)
    assert sum(counts.matrices for counts, *_ in results) == len(SHAPES)
    # bf16 to owners and back: each replica handles its share of the units, and sends all but what stays.
    expected = 2 * 2 * NUMEL * (columns - 1) / (replicas * columns**2)
    for counts, described, num_buckets, _ in results:
        assert formula_bytes(described) == pytest.approx(expected, rel=0.01)
        assert counts.sent_bytes == pytest.approx(expected, rel=0.05)
        gathered = 2 * NUMEL / world_size if replicas > 1 else 0
        assert counts.broadcast_bytes == pytest.approx(gathered, rel=0.05)
        assert counts.all_to_alls == 2 * num_buckets and counts.gathers == (replicas > 1) * num_buckets
        assert counts.agreements == 1


@pytest.mark.parametrize("layout", ["fsdp_on_4", "hsdp"])
def test_a_small_budget_makes_several_buckets_stays_within_it_and_changes_nothing(layout: str) -> None:
    budget_mib = 0.15
    large = run_ranks(4, step, layout, SHAPES, 256)
    small = run_ranks(4, step, layout, SHAPES, budget_mib)
    for (_, _, one, expected), (counts, _, several, found) in zip(large, small, strict=True):
        assert one == 1 < several
        assert 0 < counts.buffer_bytes <= counts.kept_bytes <= budget_mib * 2**20
        assert counts.all_to_alls == 2 * several
        assert differences(found, expected) == {}


def test_buckets_whose_owners_are_all_in_one_row_gather_in_the_order_of_the_others() -> None:
    """One matrix in a bucket: one row exchanges nothing for it, and the gathers of the rows must not cross."""
    shapes = {f"matrix{index}": (64, 64) for index in range(7)}
    large = run_ranks(4, step, "hsdp", shapes, 256)
    small = run_ranks(4, step, "hsdp", shapes, 0.01)
    for (_, _, one, expected), (_, _, several, found) in zip(large, small, strict=True):
        assert (one, several) == (1, 7)
        assert differences(found, expected) == {}


def test_messages_do_not_grow_with_the_number_of_parameters() -> None:
    few = {f"matrix{index}": (8, 6) for index in range(4)}
    many = {f"matrix{index}": (8, 6) for index in range(40)}
    for shapes in (few, many):
        for counts, *_ in run_ranks(2, step, "fsdp_on_2", shapes, 256):
            assert (counts.all_to_alls, counts.agreements) == (2, 1)


def test_whole_units_stay_where_they_are() -> None:
    """Stacks of whole experts: nothing is sent, whatever the rule needs whole."""
    results = run_ranks(2, step, "fsdp_on_2", {"stack": (4, 16, 24), "experts": (2, 8, 8)}, 256)
    assert [counts.matrices for counts, *_ in results] == [3, 3]
    for counts, *_ in results:
        assert counts.all_to_alls == counts.sent_bytes == counts.gathers == 0
