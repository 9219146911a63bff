"""Faults that users of other sharded optimizers met, by the id of the report; the smallest input that showed each.

Ids a..g: wrong numerics, crashes, hangs, checkpoints, memory, performance, wishes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale_optim.optimizers.muon as muon_module
from tests.support.ranks import run_ranks
from tests.support.reference import after_steps, muon
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import ShardedMuon

MUON = dict(lr=0.02, weight_decay=0.1, momentum=0.95)


def step_once(
    rank: int, world_size: int, mesh: Any, shapes: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> dict[str, Tensor]:
    module = parameter_module(parameter_values(shapes))
    groups = [{"params": list(module.named_parameters()), **options}]
    optimizer = ShardedMuon(groups, mesh, **MUON)
    backward(module.named_parameters(), rank_gradients(shapes, world_size).of_rank(rank))
    optimizer.step()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def assert_like_one_device(world_size: int, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
    rule = muon(**MUON, **options)
    mean = dict(rank_gradients(shapes, world_size).mean)
    expected = after_steps(parameter_values(shapes), [mean], lambda name, value: rule)
    for result in run_ranks(world_size, step_once, shapes, options):
        for name, value in expected.items():
            assert torch.equal(result[name], value), name


def test_a01_a_weight_over_the_border_of_two_ranks_is_updated_from_its_whole_mean() -> None:
    assert_like_one_device(2, {"small": (10, 10), "straddles": (30, 20)})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a03_splits_depend_on_the_logical_shape_not_on_the_shard(world_size: int) -> None:
    assert_like_one_device(world_size, {"qkv": (48, 8), "other": (16, 8)}, **{})
    assert_like_one_device(world_size, {"qkv": (48, 8)}, splits=(32, 8, 8))


@pytest.mark.parametrize("shape", [(6, 4), (13, 8), (20, 8)])
def test_a04_padding_does_not_change_the_step_length(shape: tuple[int, int]) -> None:
    assert_like_one_device(2, {"weight": shape})
    assert_like_one_device(4, {"weight": shape})


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a06_each_split_steps_as_its_own_parameter(adjust: str) -> None:
    assert_like_one_device(2, {"qkv": (48, 16)}, splits=(32, 8, 8), adjust_lr_fn=adjust)


def count_orthogonalizations(rank: int, world_size: int, mesh: Any, micro_batches: int) -> tuple[int, dict[str, Tensor]]:
    shapes = {"first": (6, 8), "second": (8, 6)}
    module = parameter_module(parameter_values(shapes))
    optimizer = ShardedMuon(module.named_parameters(), mesh, **MUON)
    original, counted = muon_module.orthogonalize, 0

    def counting(matrices: Tensor, **arguments: Any) -> Tensor:
        nonlocal counted
        counted += len(matrices)
        return original(matrices, **arguments)

    muon_module.orthogonalize = counting
    try:
        for step in range(2):
            grads = rank_gradients(shapes, world_size, seed=step, micro_batches=4)
            per_backward = 4 // micro_batches
            for start in range(0, 4, per_backward):
                parts = [grads.of_rank(rank, m) for m in range(start, start + per_backward)]
                backward(module.named_parameters(), {n: sum(part[n] for part in parts) for n in shapes})
            optimizer.step()
            optimizer.zero_grad()
    finally:
        muon_module.orthogonalize = original
    return counted, {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a08_f01_each_matrix_is_orthogonalised_once_per_step_over_all_ranks(world_size: int) -> None:
    once = run_ranks(world_size, count_orthogonalizations, 1)
    often = run_ranks(world_size, count_orthogonalizations, 4)
    for results in (once, often):
        assert sum(counted for counted, _ in results) == 4
    for _, values in often:
        assert all(torch.equal(values[name], once[0][1][name]) for name in values)


def clipped_step(rank: int, world_size: int, mesh: Any, max_norm: float) -> dict[str, Tensor]:
    shapes = {"w128": (128, 128), "w256": (256, 256)}
    module = parameter_module(parameter_values(shapes))
    optimizer = ShardedMuon(module.named_parameters(), mesh, lr=0.02, weight_decay=0.0)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    backward(module.named_parameters(), rank_gradients(shapes, world_size).of_rank(rank))
    if max_norm:
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    optimizer.step()
    return {n: p.detach() - before[n] for n, p in module.named_parameters()}


def test_a09_clipping_acts_on_gradients_and_does_not_shrink_the_orthogonalised_step() -> None:
    free, clipped = run_ranks(2, clipped_step, 0.0)[0], run_ranks(2, clipped_step, 1.0)[0]
    for name in free:
        # The direction of a scaled gradient is the same up to bf16 rounding of its entries.
        assert clipped[name].norm() == pytest.approx(free[name].norm().item(), rel=0.02)


def flat_parameter(rank: int, world_size: int, mesh: Any) -> str:
    class FlatParameter(nn.Parameter):
        pass

    flat = FlatParameter(torch.zeros(12))
    with pytest.raises(ValueError) as error:
        ShardedMuon([("flat", flat)], mesh)
    return str(error.value)


def test_a12_flat_parameters_are_refused_instead_of_routed_by_their_one_dimension() -> None:
    message = run_ranks(1, flat_parameter)[0]
    assert "'flat' of shape (12,) is flattened by FSDP1" in message and "fully_shard" in message


def fsdp1(rank: int, world_size: int, mesh: Any, use_orig_params: bool) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(6, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with pytest.raises(ValueError) as error:
        ShardedMuon(model.parameters(), mesh)
    return str(error.value)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a12_fsdp1_is_refused(use_orig_params: bool) -> None:
    assert all("is flattened by FSDP1" in text for text in run_ranks(2, fsdp1, use_orig_params))


def test_b02_ranks_that_hold_nothing_construct_and_step() -> None:
    assert_like_one_device(4, {"weight": (2, 4)})


def one_side_frozen(rank: int, world_size: int, mesh: Any, trained: str) -> list[bool]:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    for param in model.parameters():
        param.requires_grad_((param.ndim == 2) == (trained == "matrices"))
    optimizer = ShardedMuon(model, mesh, lr=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return [not torch.equal(before[n], p) for n, p in model.named_parameters()]


@pytest.mark.parametrize("trained", ["matrices", "others", "nothing but an empty group"])
def test_b06_groups_of_frozen_parameters_only(trained: str) -> None:
    if trained == "nothing but an empty group":
        assert run_ranks(2, empty_groups) == [True, True]
        return
    moved = [trained == "matrices", trained == "others", trained == "others", trained == "others"]
    assert run_ranks(2, one_side_frozen, trained) == [moved, moved]


def empty_groups(rank: int, world_size: int, mesh: Any) -> bool:
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    optimizer = ShardedMuon([{"params": []}, {"params": [frozen]}], mesh)
    optimizer.step()
    optimizer.zero_grad()
    return "0 parameters" in optimizer.describe()


def test_b07_any_list_of_splits_and_a_clear_error_for_a_wrong_one() -> None:
    assert_like_one_device(2, {"gated": (18, 6)}, splits=(8, 8, 1, 1))
    message = run_ranks(1, wrong_splits)[0]
    assert "parameter 'layers.3.attn.qkv'" in message
    for text in ("(18, 6)", "(8, 1, 1)", "10 rows", "sum to 18"):
        assert text in message


def wrong_splits(rank: int, world_size: int, mesh: Any) -> str:
    group = {"params": [("layers.3.attn.qkv", nn.Parameter(torch.zeros(18, 6)))], "splits": [8, 1, 1]}
    with pytest.raises(ValueError) as error:
        ShardedMuon([group], mesh)
    return str(error.value)


def one_unused_layer(rank: int, world_size: int, mesh: Any) -> bool:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = ShardedMuon(model, mesh, lr=0.1)
    before = model[1].weight.detach().clone()
    for _ in range(3):
        model[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.equal(before, model[1].weight)


def test_c01_an_unused_layer_neither_hangs_nor_moves() -> None:
    assert run_ranks(2, one_unused_layer) == [True, True]


def bytes_beyond_parameters(rank: int, world_size: int, mesh: Any) -> tuple[int, int]:
    model = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(32)])
    optimizer = ShardedMuon(model.parameters(), mesh, bucket_mib=0.125)
    for _ in range(3):
        torch.stack([p.square().sum() for p in model]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    storage = optimizer._storages["replicated"]
    pool = sum(buffer.numel() * buffer.element_size() for buffer in storage.reduction._pool._free)
    return pool, sum(p.numel() * p.element_size() for p in model)


def test_e01_gradient_buffers_stay_within_one_copy_of_the_gradients() -> None:
    for pool, total in run_ranks(2, bytes_beyond_parameters):
        assert 0 < pool <= 1.03 * total


def test_f01_ranks_share_the_matrices() -> None:
    counts = run_ranks(4, owned_matrices)
    assert counts == [2, 2, 2, 2]


def owned_matrices(rank: int, world_size: int, mesh: Any) -> int:
    model = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(8)])
    optimizer = ShardedMuon(model.parameters(), mesh)
    return sum(value["momentum_buffer"].to_local().numel() // 256 for value in optimizer.state.values())


def mixed_groups(rank: int, world_size: int, mesh: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = ShardedMuon(model.parameters(), mesh)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    other = ShardedMuon(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).parameters(), mesh)
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [5e-4, 5e-4]
    return [group["algorithm"] for group in optimizer.param_groups]


def test_g01_one_torch_optimizer_holds_muon_and_adamw() -> None:
    assert run_ranks(2, mixed_groups) == [["muon", "adamw"]] * 2


def test_g03_convolutions_and_expert_stacks() -> None:
    assert_like_one_device(2, {"conv": (16, 8, 3, 3)}, flatten="conv")
    assert_like_one_device(2, {"experts": (4, 8, 12)})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_g04_heads_and_interleaved_rows(world_size: int) -> None:
    heads = (8 + 2 * 2) * 4
    assert_like_one_device(world_size, {"gqa": (heads, 16)}, splits=(4,) * 12)
    assert_like_one_device(world_size, {"w1w3": (24, 10)}, interleave=2)
