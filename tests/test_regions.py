"""Regions: what a rank holds of a DTensor, and what two layouts have in common, as boxes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.layouts import chunk, indices, local_indices, meshes, placements_over, read_region, shapes
from tests.support.ranks import run_ranks
from vescale_optim.sharding.regions import PlacedRegions, intersect, matching_windows, placed_region, run_region


@given(st.data())
def test_placed_region_is_what_torch_chunks(data: st.DataObject) -> None:
    shape, mesh = data.draw(shapes), data.draw(meshes)
    placements = data.draw(placements_over(shape, mesh))
    for coordinate in product(*map(range, mesh)):
        held = read_region(placed_region(shape, mesh, placements, coordinate), indices(shape))
        assert torch.equal(held, local_indices(shape, mesh, placements, coordinate))


@given(st.data())
def test_strided_shards_that_say_an_order_are_chunked_in_that_order(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([(2, 2), (3, 2), (2, 3), (2, 2, 3), (3, 2, 2)]))
    shape = data.draw(st.tuples(st.integers(0, 30), st.integers(1, 3)))
    order = data.draw(st.permutations(range(len(mesh))))
    # An axis that cuts after `earlier` axes interleaves with those of them that come later in the mesh.
    factors = [
        math.prod(mesh[other] for other in order[: order.index(axis)] if other > axis) for axis in range(len(mesh))
    ]
    placements = tuple(_StridedShard(0, split_factor=f) if f > 1 else Shard(0) for f in factors)
    for coordinate in product(*map(range, mesh)):
        expected = indices(shape)
        for axis in order:
            expected = chunk(expected, 0, mesh[axis], coordinate[axis])
        held = read_region(placed_region(shape, mesh, placements, coordinate), indices(shape))
        assert torch.equal(held, expected.flatten())


@given(st.data())
def test_other_strided_shards_are_split_as_the_placement_splits(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(0, 20), st.integers(1, 3)))
    placements, mesh = data.draw(
        st.sampled_from(
            [
                ((_StridedShard(0, split_factor=3), Replicate()), (2, 2)),
                ((_StridedShard(1, split_factor=2),), (2,)),
                ((_StridedShard(0, split_factor=5), Shard(0)), (2, 2)),
                ((Shard(0), _StridedShard(0, split_factor=2)), (2, 2)),
                ((Shard(1), _StridedShard(0, split_factor=7)), (3, 2)),
            ]
        )
    )
    for coordinate in product(*map(range, mesh)):
        held = read_region(placed_region(shape, mesh, placements, coordinate), indices(shape))
        assert torch.equal(held, local_indices(shape, mesh, placements, coordinate))


def test_a_column_counts_the_sharded_axes_only() -> None:
    regions = PlacedRegions((12, 5), (2, 3, 2), (Shard(0), Replicate(), Shard(0)), (0, 2))
    assert [[part.start for part in regions(column)] for column in range(4)] == [[(0, 0)], [(3, 0)], [(6, 0)], [(9, 0)]]
    assert regions == PlacedRegions((12, 5), (2, 3, 2), (Shard(0), Replicate(), Shard(0)), (0, 2))


@pytest.mark.parametrize(
    ("placements", "message"),
    [((Partial(), Replicate()), "does not say which elements"), ((Shard(0),), "one entry for each mesh axis")],
)
def test_what_is_no_part_of_the_tensor_raises(placements: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed_region((4, 4), (2, 2), placements, (0, 0))


@given(st.data())
def test_a_run_is_few_boxes_that_lie_one_after_another(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    parts = run_region(shape, start, end)
    assert torch.equal(read_region(parts, indices(shape)), torch.arange(start, end))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert [part.offset + 5 for part in parts] == [part.offset for part in run_region(shape, start, end, offset=5)]


@given(st.data())
def test_intersections_are_the_common_elements(data: st.DataObject) -> None:
    shape, mesh = data.draw(shapes), data.draw(meshes)
    placements = data.draw(placements_over(shape, mesh))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    for coordinate in product(*map(range, mesh)):
        common = intersect(placed_region(shape, mesh, placements, coordinate), run_region(shape, start, end))
        local, flat = local_indices(shape, mesh, placements, coordinate), torch.arange(start, end)
        copied = torch.full_like(flat, -1)
        for held, owned in common:
            assert (held.start, held.size) == (owned.start, owned.size)
            source, target = matching_windows(held, owned)
            target.view(copied).copy_(source.view(local))
        assert torch.equal(copied, torch.where(torch.isin(flat, local), flat, -1))
        assert sum(held.numel for held, _ in common) == int(torch.isin(flat, local).sum())
        assert [held.start for held, _ in common] == sorted(held.start for held, _ in common)


def test_whole_rows_are_one_contiguous_run() -> None:
    ((held, owned),) = intersect(
        placed_region((8, 3, 4), (2,), (Shard(0),), (1,)), run_region((8, 3, 4), 5 * 12, 7 * 12)
    )
    source, target = matching_windows(held, owned)
    assert source.is_contiguous and target.is_contiguous and (source.offset, target.offset) == (12, 0)


def test_columns_of_a_run_are_strided_in_it() -> None:
    ((held, owned),) = intersect(placed_region((8, 3, 4), (2,), (Shard(1),), (0,)), run_region((8, 3, 4), 12, 60))
    source, target = matching_windows(held, owned)
    assert (source.size, source.strides, source.offset) == ((4, 8), (8, 1), 8)
    assert (target.size, target.strides, target.offset) == ((4, 8), (12, 1), 0)


def assert_regions_are_local_tensors(tensor: DTensor, full: torch.Tensor) -> None:
    mesh = tensor.device_mesh
    parts = placed_region(tensor.shape, mesh.shape, tensor.placements, mesh.get_coordinate())
    assert torch.equal(tensor.to_local().detach().flatten(), read_region(parts, full)), (tensor.placements, tensor.shape)


def check_stock_dtensors(rank: int, world_size: int, mesh: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2))
    for shape in [(8, 6), (7, 5), (3, 2), (1, 9), (2, 3, 5), (5,)]:
        full = indices(shape).float()
        for placements in product([Replicate(), *map(Shard, range(len(shape)))], repeat=2):
            assert_regions_are_local_tensors(distribute_tensor(full, grid, placements, src_data_rank=None), full)
        assert_regions_are_local_tensors(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), full)


def test_stock_dtensors_lie_as_regions_say() -> None:
    run_ranks(4, check_stock_dtensors)


def check_fully_shard(rank: int, world_size: int, mesh: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (8, 7, 5, 2):
        for how in ("fsdp", "hsdp", "colwise", "rowwise"):
            linear = nn.Linear(3, rows, bias=False) if how != "rowwise" else nn.Linear(rows, 3, bias=False)
            full = indices(linear.weight.shape).float()
            linear.weight.data.copy_(full)
            model = nn.Sequential(linear)
            if how in ("colwise", "rowwise"):
                plan = ColwiseParallel() if how == "colwise" else RowwiseParallel()
                parallelize_module(model, grid["tp"], {"0": plan})
            fully_shard(model, mesh={"fsdp": mesh, "hsdp": grid}.get(how, grid["dp"]))
            weight = model[0].weight
            if how == "colwise":
                assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
            assert_regions_are_local_tensors(weight, full)


def test_fully_shard_parameters_lie_as_regions_say() -> None:
    run_ranks(4, check_fully_shard)
