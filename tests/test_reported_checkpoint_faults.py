"""Faults of saving and resuming that users of other sharded optimizers met, by the id of the report (d01 to d14)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.support.checkpoints import OPTIMIZERS, STORAGES, Training
from tests.support.ranks import run_ranks
from tests.support.sharded_models import differences
from tests.test_resume_is_exact import assert_resumes, load_into, state_dict_of
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon


def keys_and_shapes(run: Training) -> list[tuple[str, str, tuple[int, ...]]]:
    state = get_optimizer_state_dict(run.module, run.optimizer)["state"]
    return [(name, key, tuple(value.shape)) for name, entry in state.items() for key, value in entry.items()]


def placements(rank: int, world_size: int, mesh: Any, storage: str, path: str) -> Any:
    run = Training("muon", storage, seed=0)
    run.train(range(1))
    model, state = get_state_dict(run.module, run.optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    for param in run.module.parameters():
        for key, value in run.optimizer.state[param].items():
            if key == "step":
                continue
            assert isinstance(value, DTensor) and value.shape == param.shape
            if storage != "replicated":
                assert value.device_mesh == param.device_mesh and value.placements == param.placements
    return keys_and_shapes(run)


@pytest.mark.parametrize("storage", STORAGES)
def test_d01_state_is_laid_out_like_its_parameter_and_alike_on_every_rank(storage: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, placements, storage, str(tmp_path))
    assert first == second and {key for _, key, _ in first} == {"step", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def unrouted(rank: int, world_size: int, mesh: Any, kind: str, storage: str, path: str) -> Any:
    fresh, run = Training(kind, storage, seed=0), Training(kind, storage, seed=0)
    before = keys_and_shapes(run)
    run.train(range(1), {0: ("unused",)})
    assert keys_and_shapes(run) == before == keys_and_shapes(fresh)
    dcp.save(state_dict_of(run), checkpoint_id=path)
    state = state_dict_of(fresh)
    dcp.load(state, checkpoint_id=path)
    load_into(fresh, state)
    assert differences(fresh.state(), run.state()) == {}
    return run.state()["unused.step"].item()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_d02_state_exists_before_the_first_gradient_and_changes_nothing(kind: str, storage: str, tmp_path: Path) -> None:
    assert run_ranks(2, unrouted, kind, storage, str(tmp_path)) == [0.0, 0.0]


THREE_MATRICES = {"first": (12, 8), "second": (8, 12), "third": (10, 10)}


@pytest.mark.parametrize("change", [(2, 2), (2, 1), (2, 4)])
def test_d03_three_matrices_on_two_owners_load_again(change: tuple[int, int], tmp_path: Path) -> None:
    shapes = {**THREE_MATRICES, "unused": (3, 3)}
    assert_resumes(tmp_path, change, "muon", "replicated", "replicated", shapes=shapes)


def replicas_after_load(rank: int, world_size: int, mesh: Any, path: str) -> dict[str, Tensor]:
    run = Training("muon", "replicated", seed=0)
    run.train(range(3))
    dcp.save(state_dict_of(run), checkpoint_id=path)
    resumed = Training("muon", "replicated", seed=7)
    state = state_dict_of(resumed)
    dcp.load(state, checkpoint_id=path)
    load_into(resumed, state)
    for other in (run, resumed):
        other.train(range(3, 5))
    # What this rank itself computes with, not what the owners have.
    held = {name: param.detach().clone() for name, param in resumed.module.named_parameters()}
    assert differences(held, {name: param.detach() for name, param in run.module.named_parameters()}) == {}
    return held


def test_d04_every_rank_goes_on_from_the_loaded_parameters(tmp_path: Path) -> None:
    first, second = run_ranks(2, replicas_after_load, str(tmp_path))
    assert differences(first, second) == {}


def loaded_from_cpu(rank: int, world_size: int, mesh: Any, kind: str) -> None:
    run = Training(kind, "replicated", seed=0)
    run.train(range(2))
    stream = io.BytesIO()
    torch.save(run.optimizer.full_state_dict(), stream)
    stream.seek(0)
    run.optimizer.load_state_dict(torch.load(stream, map_location="cpu"))
    for param, state in run.optimizer.state.items():
        assert all(value.device == param.device for key, value in state.items() if key != "step")
    run.train(range(2, 3))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_d06_state_stays_on_the_device_of_its_parameter(kind: str) -> None:
    """No rank has another device here; that values go through map_location, and weights_only, is what shows."""
    run_ranks(2, loaded_from_cpu, kind)


def quantised(rank: int, world_size: int, mesh: Any, storage: str, path: str) -> None:
    run = Training("adamw8bit", storage, seed=0, dtype=torch.bfloat16)
    run.train(range(2))
    state = state_dict_of(run)
    dcp.save(state, checkpoint_id=path)
    resumed = Training("adamw8bit", storage, seed=7, dtype=torch.bfloat16)
    state = state_dict_of(resumed)
    dcp.load(state, checkpoint_id=path)
    load_into(resumed, state)
    for entry in resumed.optimizer.state.values():
        if "absmax1" in entry:
            assert {entry[name].dtype for name in ("state1", "state2")} == {torch.uint8}
            assert {entry[name].dtype for name in ("absmax1", "absmax2")} == {torch.float32}
    # d10: codes and scales are the same, so the next losses are.
    assert resumed.train(range(2, 22)) == run.train(range(2, 22))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_d08_d09_d10_quantised_state_of_bf16_parameters_resumes(world_size: int, storage: str, tmp_path: Path) -> None:
    run_ranks(world_size, quantised, storage, str(tmp_path))


def frozen_later(rank: int, world_size: int, mesh: Any, path: str) -> None:
    def pair() -> tuple[nn.Module, ShardedAdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, ShardedAdamW(model, mesh, lr=0.1)

    def step_first(model: nn.Module, optimizer: ShardedAdamW) -> None:
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = pair()
    step_first(model, optimizer)
    model[0].requires_grad_(False)
    saved = get_optimizer_state_dict(model, optimizer)
    assert sorted(saved["state"]) == sorted(name for name, _ in model.named_parameters())
    dcp.save({"model": get_model_state_dict(model), "optimizer": saved}, checkpoint_id=path)
    for is_frozen in (False, True):
        other, resumed = pair()
        other[0].requires_grad_(not is_frozen)
        state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, resumed, state["optimizer"])
        for before, after in zip(model.parameters(), other.parameters(), strict=True):
            for key, value in optimizer.state[before].items():
                found = resumed.state[after][key]
                assert torch.equal(*(v.to_local() if isinstance(v, RaggedTensor) else v for v in (found, value))), key
    # Unfrozen again, both go on alike.
    for each in (model, other):
        each[0].requires_grad_(True)
    step_first(model, optimizer)
    step_first(other, resumed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_d11_state_of_frozen_and_unfrozen_parameters_survives_the_helpers(tmp_path: Path) -> None:
    run_ranks(2, frozen_later, str(tmp_path))


def swapped(rank: int, world_size: int, mesh: Any) -> list[list[str]]:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = ShardedMuon(model.parameters(), mesh, lr=0.1)
    optimizer.param_groups[0]["params"] = [other.weight]
    optimizer.param_groups[1]["params"] = [other.bias]
    try:
        optimizer.state_dict()
        optimizer.zero_grad()
    except KeyError as error:
        return [[repr(error)]]
    other(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    dist.barrier()
    return [sorted(entry) for _, entry in sorted(state["state"].items())]


def test_d14_state_follows_parameters_that_are_swapped_after_construction() -> None:
    for entries in run_ranks(2, swapped):
        assert entries == [["momentum_buffer", "step"], ["exp_avg", "exp_avg_sq", "step"]]
