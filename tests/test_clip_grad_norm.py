"""One promise: `clip_grad_norm_` sees the norm of one device, over any mixture of layouts, and scales by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.ranks import RankFailure, run_ranks
from tests.support.sharded_models import LAYOUTS, set_gradients, sharded, whole, world_mesh
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import ShardedMuon, clip_grad_norm_

SHAPES = {"wide": (7, 13), "row": (1, 64), "stack": (4, 6, 10), "bias": (13,), "one": (1,)}


def clipped_gradients(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return whole({name: param.grad for name, param in params.items() if param.grad is not None})


def expected(grads: Mapping[str, Tensor], max_norm: float, norm_type: float) -> tuple[float, dict[str, Tensor]]:
    params = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    for name, param in params.items():
        param.grad = grads[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm, norm_type)
    return norm.item(), {name: param.grad for name, param in params.items()}


def assert_clipped(
    result: tuple[float, dict[str, Tensor]], grads: Mapping[str, Tensor], max_norm: float, norm_type: float = 2.0
) -> None:
    norm, scaled = expected(grads, max_norm, norm_type)
    assert result[0] == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(result[1], scaled, rtol=2e-6, atol=0)


def clip(
    rank: int,
    world_size: int,
    mesh: Any,
    layout: str,
    max_norm: float,
    norm_type: float,
    lacking: Mapping[str, tuple[int, ...]],
) -> tuple[float, dict[str, Tensor]]:
    params = sharded(layout, parameter_values(SHAPES))
    set_gradients(params, layout, parameter_values(SHAPES, seed=1))
    spare = {name: param.grad for name, param in params.items()}
    for name, ranks in lacking.items():
        if rank in ranks:
            params[name].grad = None
    norm = clip_grad_norm_(params.values(), max_norm, norm_type)
    for name, ranks in lacking.items():
        if rank in ranks:  # for the comparison: the part that this rank lacks has no say
            params[name].grad = spare[name].zero_()
    return norm.item(), clipped_gradients(params)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("layout", ["fsdp_on_2", "fsdp_columns_on_2", "hsdp", "colwise", "fsdp_tensor", "experts"])
def test_the_norm_is_that_of_one_device(layout: str, norm_type: float) -> None:
    for result in run_ranks(LAYOUTS[layout][0], clip, layout, 0.5, norm_type, {}):
        assert_clipped(result, parameter_values(SHAPES, seed=1), 0.5, norm_type)
    _, untouched = run_ranks(LAYOUTS[layout][0], clip, layout, 1e9, norm_type, {})[0]
    torch.testing.assert_close(untouched, parameter_values(SHAPES, seed=1), rtol=0, atol=0)


def test_a_rank_without_a_gradient_takes_part() -> None:
    grads = parameter_values(SHAPES, seed=1)
    grads["wide"][4:] = 0  # rank 1 holds rows 4 to 6
    for result in run_ranks(2, clip, "fsdp_on_2", 0.5, 2.0, {"wide": (1,)}):
        assert_clipped(result, grads, 0.5)


def clip_on_one_replica(rank: int, world_size: int, mesh: Any) -> float:
    params = sharded("hsdp", parameter_values(SHAPES))
    set_gradients(params, "hsdp", parameter_values(SHAPES, seed=1))
    if rank in (0, 1):
        for param in params.values():
            param.grad = None
    return clip_grad_norm_(params.values(), 0.5).item()


def test_a_replica_without_gradients_counts_as_the_other() -> None:
    norm, _ = expected(parameter_values(SHAPES, seed=1), 0.5, 2.0)
    assert run_ranks(4, clip_on_one_replica) == [pytest.approx(norm, rel=1e-6)] * 4


def clip_ragged(rank: int, world_size: int, mesh: Any) -> tuple[float, dict[str, Tensor]]:
    """Plain parameters whose gradients the optimizer shards, with DTensor ones, given as an optimizer."""
    module = parameter_module(parameter_values(SHAPES))
    params = {"dense": sharded("fsdp_on_2", parameter_values({"dense": (9, 4)}))["dense"], **module}
    optimizer = ShardedMuon(params.items(), world_mesh(), lr=0.02)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    set_gradients({"dense": params["dense"]}, "fsdp_on_2", parameter_values({"dense": (9, 4)}, seed=1))
    norm = clip_grad_norm_(optimizer, 0.5)
    grads = {name: param.grad.full_tensor() for name, param in params.items()}
    optimizer.step()
    return norm.item(), grads


def test_gradients_that_the_optimizer_shards_and_those_of_fsdp_count_together() -> None:
    grads = {**parameter_values({"dense": (9, 4)}, seed=1), **rank_gradients(SHAPES, 2).mean}
    for result in run_ranks(2, clip_ragged):
        assert_clipped(result, grads, 0.5)


def clip_partial(rank: int, world_size: int, mesh: Any) -> tuple[float, dict[str, Tensor]]:
    param = nn.Parameter(distribute_tensor(torch.zeros(6, 10), world_mesh(), [Replicate()]))
    part = rank_gradients({"router": (6, 10)}, world_size).of_rank(rank)["router"]
    param.grad = DTensor.from_local(part, world_mesh(), [Partial()], run_check=False)
    return clip_grad_norm_(param, 0.5).item(), clipped_gradients({"router": param})


def test_sums_still_to_be_made_are_made_first() -> None:
    grads = {"router": 2 * rank_gradients({"router": (6, 10)}, 2).mean["router"]}
    for result in run_ranks(2, clip_partial):
        assert_clipped(result, grads, 0.5)


def clip_nan(rank: int, world_size: int, mesh: Any, norm_type: float, error: bool) -> tuple[float, bool]:
    params = sharded("experts", parameter_values(SHAPES))
    set_gradients(params, "experts", parameter_values(SHAPES, seed=1))
    if rank == 1:
        params["wide"].grad.to_local().fill_(math.nan)
    norm = clip_grad_norm_(params.values(), 0.5, norm_type, error_if_nonfinite=error)
    return norm.item(), bool(params["bias"].grad.isnan().all())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_on_one_rank_is_seen_on_all(norm_type: float) -> None:
    for norm, has_spread in run_ranks(4, clip_nan, norm_type, False):
        assert math.isnan(norm) and has_spread
    with pytest.raises(RankFailure, match="is nan, so it cannot be clipped") as caught:
        run_ranks(4, clip_nan, norm_type, True)
    assert len(caught.value.errors) == 4


def clip_odd(rank: int, world_size: int, mesh: Any, kind: str, lacking: int) -> tuple[float, Tensor]:
    """A parameter whole on all ranks, whose gradient is cut, or still to be summed; one rank has none."""
    value = rank_gradients({"w": (8, 6)}, world_size, seed=1)
    param = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Replicate()]))
    if kind == "cut":
        param.grad = distribute_tensor(value.mean["w"], mesh, [Shard(0)])
    else:
        param.grad = DTensor.from_local(value.of_rank(rank)["w"], mesh, [Partial()], run_check=False)
    if rank == lacking:
        param.grad = None
    norm = clip_grad_norm_([param], math.inf)
    return norm.item(), param.grad.full_tensor()


@pytest.mark.parametrize("kind", ["cut", "sum"])
def test_gradients_that_lie_elsewhere_and_that_a_rank_lacks(kind: str) -> None:
    value, lacking = rank_gradients({"w": (8, 6)}, 4, seed=1), 3
    if kind == "cut":
        grad = value.mean["w"].clone()
        grad[6:] = 0
    else:
        grad = torch.stack([value.of_rank(rank)["w"] for rank in range(4) if rank != lacking]).sum(0)
    for norm, found in run_ranks(4, clip_odd, kind, lacking):
        assert norm == pytest.approx(grad.norm().item(), rel=1e-6)
        assert torch.equal(found, grad)
