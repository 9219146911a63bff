"""One promise: state goes into the sharded optimizers from single-device ones and back, and both continue exactly.

And a second: state that means something else is refused by name, before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.support.checkpoints import OPTIMIZERS, SHAPES, STORAGES, Training
from tests.support.ranks import run_ranks
from tests.support.sharded_models import differences, whole
from tests.support.values import parameter_module, parameter_values, rank_gradients
from vescale_optim import ShardedMuon, join_state_dicts

MATRICES = tuple(name for name, shape in SHAPES.items() if len(shape) == 2)
OTHERS = tuple(name for name, shape in SHAPES.items() if len(shape) == 1)


class SingleDevice:
    """torch's own optimizers over the parameters by name: Muon for matrices (if asked for), AdamW for the rest."""

    def __init__(self, kind: str, values: Mapping[str, Tensor]) -> None:
        self.module = parameter_module(values)
        adamw = torch.optim.AdamW(
            [self.module[name] for name in values if kind == "adamw" or name in OTHERS], lr=1e-3, fused=True
        )
        self.optimizers: dict[str, torch.optim.Optimizer] = {"adamw": adamw}
        if kind == "muon":
            muon = torch.optim.Muon([self.module[name] for name in values if name in MATRICES], lr=0.02)
            self.optimizers = {"muon": muon, "adamw": adamw}

    def train(self, steps: range) -> None:
        shapes = {name: tuple(param.shape) for name, param in self.module.items()}
        for step in steps:
            for name, grad in rank_gradients(shapes, 1, seed=step).mean.items():
                self.module[name].grad = grad
            for optimizer in self.optimizers.values():
                optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.module.items()}


def shapes_of(kind: str) -> dict[str, tuple[int, ...]]:
    """torch.optim.Muon takes matrices alone."""
    return {name: shape for name, shape in SHAPES.items() if kind == "adamw" or len(shape) < 3}


def training(kind: str, storage: str, seed: int) -> Training:
    return Training(kind, storage, seed=seed, shapes=shapes_of(kind))


def from_torch(
    rank: int, world_size: int, mesh: Any, kind: str, storage: str, values: dict[str, Tensor], state_dict: dict[str, Any]
) -> dict[str, Tensor]:
    run = training(kind, storage, seed=7)
    set_full_parameters(run, values)
    run.optimizer.load_state_dict(state_dict)
    run.train(range(3, 6), schedules=False)
    return run.parameters()


def set_full_parameters(run: Training, values: Mapping[str, Tensor]) -> None:
    set_model_state_dict(run.module, dict(values), options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_of_torch_continues_sharded(kind: str, storage: str) -> None:
    single = SingleDevice(kind, parameter_values(shapes_of(kind)))
    single.train(range(3))
    values = single.parameters()
    state_dicts = [copy.deepcopy(optimizer.state_dict()) for optimizer in single.optimizers.values()]
    single.train(range(3, 6))
    for found in run_ranks(2, from_torch, kind, storage, values, join_state_dicts(*state_dicts)):
        assert differences(found, single.parameters()) == {}


def to_torch(
    rank: int, world_size: int, mesh: Any, kind: str, storage: str
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    run = training(kind, storage, seed=0)
    run.train(range(3), schedules=False)
    at_export = run.parameters()
    algorithms = ("muon", "adamw") if kind == "muon" else ("adamw",)
    exported = {algorithm: run.optimizer.full_state_dict(algorithm) for algorithm in algorithms}
    run.train(range(3, 6), schedules=False)
    return at_export, exported, run.parameters()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_sharded_state_continues_in_torch(kind: str, storage: str) -> None:
    results = run_ranks(2, to_torch, kind, storage)
    for at_export, exported, end in results:
        single = SingleDevice(kind, at_export)
        for algorithm, optimizer in single.optimizers.items():
            optimizer.load_state_dict(exported[algorithm])
        single.train(range(3, 6))
        assert differences(single.parameters(), end) == {}
        assert single.optimizers["adamw"].param_groups[0]["decoupled_weight_decay"] is True


def round_trip(rank: int, world_size: int, mesh: Any, kind: str, first: str, second: str) -> None:
    run = Training(kind, first, seed=0)
    run.train(range(3))
    state_dict = run.optimizer.full_state_dict()
    assert all(type(value) is Tensor for entry in state_dict["state"].values() for value in entry.values())
    other = Training(kind, second, seed=7)
    set_full_parameters(other, run.parameters())
    other.optimizer.load_state_dict(state_dict)
    assert differences(other.state(), run.state()) == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("first", "second"), zip(STORAGES, (*STORAGES[1:], STORAGES[0]), strict=True))
def test_whole_state_fits_every_storage(kind: str, first: str, second: str) -> None:
    run_ranks(2, round_trip, kind, first, second)


# -- bitsandbytes ------------------------------------------------------------------------------------------------------

EIGHT_BIT = dict(min_8bit_size=100, block_size=256)
EIGHT_BIT_SHAPES = {"tall": (41, 20), "stack": (3, 16, 24), "bias": (13,)}


def bitsandbytes_round_trip(rank: int, world_size: int, mesh: Any, storage: str) -> dict[str, Any]:
    run = Training("adamw8bit", storage, seed=0, shapes=EIGHT_BIT_SHAPES, **EIGHT_BIT)
    run.train(range(3))
    exported = run.optimizer.bitsandbytes_state_dict()
    other = Training("adamw8bit", storage, seed=7, shapes=EIGHT_BIT_SHAPES, **EIGHT_BIT)
    set_full_parameters(other, run.parameters())
    other.optimizer.load_state_dict(exported)
    expected = run.state()
    assert differences(other.state(), expected) == {}
    assert expected["tall.state1"].dtype == torch.uint8 and expected["bias.state1"].dtype == torch.float32
    return exported


@pytest.mark.parametrize("storage", STORAGES)
def test_bitsandbytes_takes_our_state_and_gives_it_back(storage: str) -> None:
    """Codes, scales, maps and step in its own layout, nested as it nests them."""
    import bitsandbytes

    exported, other = run_ranks(2, bitsandbytes_round_trip, storage)
    single = parameter_module(parameter_values(EIGHT_BIT_SHAPES))
    theirs = bitsandbytes.optim.AdamW8bit(single.parameters(), min_8bit_size=100)
    theirs.load_state_dict(copy.deepcopy(exported))
    back = theirs.state_dict()
    for number, entry in exported["state"].items():
        (nested,), (returned,) = (
            [value for value in found["state"][number].values() if isinstance(value, dict)] for found in (exported, back)
        )
        assert nested.keys() == returned.keys() and entry["step"] == back["state"][number]["step"] == 3
        for key, value in nested.items():
            assert torch.equal(returned[key], value) and value.dtype == returned[key].dtype, key
            (same,) = [v[key] for v in other["state"][number].values() if isinstance(v, dict)]
            assert torch.equal(same, value)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusals(rank: int, world_size: int, mesh: Any, storage: str, changes: dict[str, Any]) -> tuple[str, bool]:
    """Load state under changed options; the message, and whether nothing changed."""
    run = Training(changes["kind"], storage, seed=0, **changes["before"])
    run.train(range(2))
    state_dict = run.optimizer.full_state_dict()
    if "version" in changes:
        for group in state_dict["param_groups"]:
            group["rule_version"] = changes["version"]
    other = Training(changes.get("other", changes["kind"]), storage, seed=0, **changes["after"])
    before = other.state()
    with pytest.raises(ValueError) as error:
        other.optimizer.load_state_dict(state_dict)
    return str(error.value), differences(other.state(), before) == {}


def with_splits(sizes: tuple[int, ...] | None) -> dict[str, Any]:
    return {"groups": {"tall": {} if sizes is None else {"splits": sizes}}}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rule version": (
        dict(kind="muon", before={}, after={}, version=0),
        ("'wide'", "(3, 10)", "rule_version is 0", "and 1 here"),
    ),
    "splits": (
        dict(kind="muon", before=with_splits((12, 8)), after=with_splits((8, 12))),
        ("'tall'", "splits is (12, 8)", "(8, 12) here"),
    ),
    "no splits": (
        dict(kind="muon", before=with_splits(None), after=with_splits((8, 12))),
        ("'tall'", "splits is None", "(8, 12) here"),
    ),
    "block size of shampoo": (
        dict(kind="shampoo", before={}, after=dict(max_preconditioner_dim=4)),
        ("'wide'", "max_preconditioner_dim is 8", "4 here"),
    ),
    "grafting": (
        dict(kind="shampoo", before={}, after=dict(grafting="sgd")),
        ("'wide'", "grafting is 'adam'", "'sgd' here"),
    ),
    "block size of soap": (
        dict(kind="soap", before={}, after=dict(max_precond_dim=4)),
        ("'wide'", "max_precond_dim is 8", "4 here"),
    ),
    "algorithm": (
        dict(kind="soap", before={}, after={}, other="shampoo"),
        ("'wide'", "algorithm is 'soap'", "'shampoo' here"),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_means_something_else_is_refused_by_name_and_both_values(what: str) -> None:
    changes, texts = REFUSED[what]
    for message, is_unchanged in run_ranks(2, refusals, "replicated", changes):
        assert is_unchanged
        for text in texts:
            assert text in message


def another_optimizer(rank: int, world_size: int, mesh: Any) -> str:
    single = parameter_module(parameter_values(SHAPES))
    sgd = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for param in single.parameters():
        param.grad = torch.ones_like(param)
    sgd.step()
    adamw = Training("adamw", "replicated", seed=0)
    with pytest.raises(ValueError) as error:
        adamw.optimizer.load_state_dict(sgd.state_dict())
    return str(error.value)


def test_state_with_other_names_is_refused() -> None:
    for message in run_ranks(2, another_optimizer):
        assert "'wide'" in message and "['momentum_buffer']" in message and "['exp_avg', 'exp_avg_sq']" in message


@pytest.mark.parametrize("kind", ["adamw", "muon", "soap"])
def test_names_stay_those_of_the_parameters_that_are_here(kind: str) -> None:
    """Names of the model that saved, or of parameters that are gone, must not come with its groups."""
    for names, before in run_ranks(2, load_other_names, kind):
        assert names == before


def load_other_names(rank: int, world_size: int, mesh: Any, kind: str) -> tuple[list[Any], list[Any]]:
    run, other = Training(kind, "replicated", seed=0), Training(kind, "replicated", seed=0)
    run.train(range(2))
    state_dict = run.optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]] + ["gone"]
    before = [list(group["param_names"]) for group in other.optimizer.param_groups]
    other.optimizer.load_state_dict(state_dict)
    other.train(range(2, 4))
    return [list(group["param_names"]) for group in other.optimizer.param_groups], before


def free_changes(rank: int, world_size: int, mesh: Any) -> tuple[list[float], dict[str, float]]:
    """Hyperparameters travel, as in torch; buckets and owners are nobody's business."""
    run = Training("muon", "replicated", seed=0)
    run.train(range(2))
    other = Training("muon", "replicated", seed=0, bucket_mib=0.001, momentum=0.5, lr=0.5)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    return [group["lr"] for group in other.optimizer.param_groups], differences(
        whole({name: other.optimizer.state[param]["step"] for name, param in other.module.named_parameters()}),
        whole({name: run.optimizer.state[param]["step"] for name, param in run.module.named_parameters()}),
    )


def test_placement_and_hyperparameters_change_freely() -> None:
    for rates, differing in run_ranks(2, free_changes):
        assert differing == {} and rates[0] == pytest.approx(0.02 / 3)


def unnamed(rank: int, world_size: int, mesh: Any) -> str:
    optimizer = ShardedMuon([nn.Parameter(torch.zeros(4, 4))], mesh)
    with pytest.raises(ValueError) as error:
        optimizer.full_state_dict(algorithm="soap")
    return str(error.value)


def test_an_algorithm_that_no_group_has_is_named() -> None:
    assert "'soap'" in run_ranks(1, unnamed)[0] and "['muon']" in run_ranks(1, unnamed)[0]
