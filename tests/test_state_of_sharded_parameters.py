"""One promise: state lies with the parameters (or with the owners of their units), and a checkpoint keeps every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.sharded_models import Holder, differences, mesh_of, set_gradients, whole, world_mesh
from tests.support.values import parameter_values
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon, ShardedOptimizer, ShardedShampoo, ShardedSOAP

SHAPES = {"wide": (7, 13), "row": (1, 64), "tall": (40, 20), "stack": (3, 16, 24), "experts": (4, 8, 8), "bias": (13,)}
OPTIMIZERS: dict[str, tuple[type[ShardedOptimizer], dict[str, Any]]] = {
    "muon": (ShardedMuon, dict(lr=0.02)),
    "adamw": (ShardedAdamW, dict(lr=1e-3)),
    "shampoo": (ShardedShampoo, dict(lr=0.01, max_preconditioner_dim=32, precondition_frequency=2)),
    "soap": (ShardedSOAP, dict(lr=0.01, max_precond_dim=32, precondition_frequency=2)),
}
WORLD_SIZE = {"fsdp_on_2": 2, "hsdp": 4}


def build(layout: str, kind: str, seed: int) -> tuple[Holder, ShardedOptimizer]:
    mesh = mesh_of((2, 2), ("replicate", "shard")) if layout == "hsdp" else world_mesh()
    module = fully_shard(Holder(parameter_values(SHAPES, seed=seed)), mesh=mesh)
    optimizer, arguments = OPTIMIZERS[kind]
    return module, optimizer(module.named_parameters(), world_mesh(), **arguments)


def train(module: Holder, optimizer: ShardedOptimizer, layout: str, steps: range) -> None:
    for step in steps:
        set_gradients(dict(module.named_parameters()), layout, parameter_values(SHAPES, seed=1000 + step))
        optimizer.step()
        optimizer.zero_grad()


def state_of(module: Holder, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """All state, whole, by the names of parameter and state."""
    state = {
        f"{name}.{key}": value
        for name, param in module.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return whole(state)


def save_and_load(rank: int, world_size: int, mesh: Any, layout: str, kind: str, directory: str) -> None:
    module, optimizer = build(layout, kind, seed=0)
    train(module, optimizer, layout, range(3))
    saved = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.save(saved, checkpoint_id=directory)
    others = build(layout, kind, seed=7)
    loaded = {"model": others[0].state_dict(), "optimizer": get_optimizer_state_dict(*others)}
    dcp.load(loaded, checkpoint_id=directory)
    set_optimizer_state_dict(*others, loaded["optimizer"])
    state = state_of(module, optimizer)
    assert differences(state_of(*others), state) == {}
    assert any(value.any() for key, value in state.items() if not key.endswith("step"))
    train(module, optimizer, layout, range(3, 6))
    train(*others, layout, range(3, 6))
    expected = whole(dict(module.named_parameters()))
    assert differences(whole(dict(others[0].named_parameters())), expected) == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", WORLD_SIZE)
def test_a_checkpoint_of_torch_keeps_every_bit(layout: str, kind: str, tmp_path: Any) -> None:
    run_ranks(WORLD_SIZE[layout], save_and_load, layout, kind, str(tmp_path))


def check_placements(rank: int, world_size: int, mesh: Any, layout: str, kind: str) -> set[str]:
    """State of the parameter's shape is checked here; the names of the other kinds are returned."""
    module, optimizer = build(layout, kind, seed=0)
    per_unit = set()
    for param in module.parameters():
        for key, value in optimizer.state[param].items():
            if key == "step":
                continue
            assert isinstance(value, DTensor)
            if isinstance(value, RaggedTensor):
                per_unit.add(key)
                assert value.ndim == 1 and value.device_mesh.size() == world_size and value.device_mesh.ndim == 1
            else:
                assert value.placements == param.placements and value.device_mesh == param.device_mesh
                assert value.shape == param.shape and value.to_local().shape == param.to_local().shape
    return per_unit


@pytest.mark.parametrize("layout", WORLD_SIZE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_has_the_placement_of_its_parameter_or_lies_with_the_owners(layout: str, kind: str) -> None:
    for per_unit in run_ranks(WORLD_SIZE[layout], check_placements, layout, kind):
        assert bool(per_unit) == (kind in ("shampoo", "soap"))


def save_with_ranks(rank: int, world_size: int, mesh: Any, kind: str, directory: str) -> dict[str, Tensor]:
    layout = "hsdp" if world_size == 4 else "fsdp_on_2"
    module, optimizer = build(layout, kind, seed=0)
    train(module, optimizer, layout, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=directory)
    return state_of(module, optimizer)


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_state_of_units_is_in_the_order_of_units_on_any_mesh(kind: str, tmp_path: Any) -> None:
    (expected, _), (found, *_) = (run_ranks(size, save_with_ranks, kind, str(tmp_path / str(size))) for size in (2, 4))
    assert differences(found, expected) == {}


def load_with_ranks(rank: int, world_size: int, mesh: Any, kind: str, directory: str) -> dict[str, Tensor]:
    module, optimizer = build("hsdp" if world_size == 4 else "fsdp_on_2", kind, seed=7)
    loaded = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(loaded, checkpoint_id=directory)
    set_optimizer_state_dict(module, optimizer, loaded["optimizer"])
    return state_of(module, optimizer)


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_a_checkpoint_of_hsdp_on_4_ranks_loads_into_fsdp_on_2(kind: str, tmp_path: Any) -> None:
    saved = run_ranks(4, save_with_ranks, kind, str(tmp_path))[0]
    for state in run_ranks(2, load_with_ranks, kind, str(tmp_path)):
        assert differences(state, saved) == {}
