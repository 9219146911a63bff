"""What the tests of Shampoo and SOAP share: shapes, a training run on ranks, and how its results are compared."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim.optimizers.base import ShardedOptimizer

SHAPES = {
    "wide": (7, 13),
    "even": (96, 64),
    "tall": (300, 50),
    "row": (1, 64),
    "stack": (3, 40, 24),
    "bias": (13,),
    "scalar": (),
}
SMALL = {name: SHAPES[name] for name in ("wide", "even", "stack", "bias")}
STEPS = 10


def train(
    rank: int,
    world_size: int,
    mesh: Any,
    kind: type[ShardedOptimizer],
    arguments: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    unused: dict[str, tuple[int, ...]] | None = None,
    frozen: tuple[str, ...] = (),
    steps: int = STEPS,
    wants_state: bool = False,
    layouts: dict[str, dict[str, Any]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    module = parameter_module(parameter_values(shapes, dtype=dtype))
    for name in frozen:
        module[name].requires_grad_(False)
    groups = [{"params": [named], **(layouts or {}).get(named[0], {})} for named in module.named_parameters()]
    params = groups if layouts else module.named_parameters()
    optimizer = kind(params, mesh, bucket_mib=0.02, **arguments)
    for step in range(steps):
        grads = rank_gradients(shapes, world_size, seed=step, dtype=dtype, unused=unused)
        backward(module.named_parameters(), {n: g for n, g in grads.of_rank(rank).items() if n not in frozen})
        optimizer.step()
        optimizer.zero_grad()
    return values_of(module), state_of(module, optimizer) if wants_state else {}


def values_of(module: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def state_of(module: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """All state, whole, on every rank."""
    return {
        name: {key: v if key == "step" else v.full_tensor() for key, v in optimizer.state[param].items()}
        for name, param in module.named_parameters()
        if param in optimizer.state
    }


def means(shapes: Any, world_size: int, dtype: torch.dtype = torch.float32, unused: Any = None, steps: int = STEPS) -> Any:
    return [dict(rank_gradients(shapes, world_size, seed=s, dtype=dtype, unused=unused).mean) for s in range(steps)]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        worst = (found[name].float() - value.float()).abs().max().item() if value.numel() else 0.0
        assert torch.equal(found[name], value), f"{name}: off by {worst}"


def resume_under_other_names(
    rank: int, world_size: int, mesh: Any, kind: type[ShardedOptimizer], arguments: dict[str, Any], size: str
) -> None:
    """A run resumed by an optimizer that calls its parameters otherwise continues; an edit of its `size` option does not."""

    def run(module: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            backward(module.named_parameters(), rank_gradients(SMALL, world_size, seed=step).of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()

    module = parameter_module(parameter_values(SMALL))
    optimizer = kind([(f"module.{name}", param) for name, param in module.named_parameters()], mesh, **arguments)
    run(module, optimizer, range(5))
    state = optimizer.full_state_dict()
    for named in (True, False):
        other = parameter_module(values_of(module))
        resumed = kind(other.named_parameters() if named else other.parameters(), mesh, **arguments)
        resumed.load_state_dict(state)
        kept, resumed.param_groups[0][size] = resumed.param_groups[0][size], 5
        with pytest.raises(ValueError, match=rf"{size} is 5 now and was {kept} when the optimizer was made"):
            resumed.step()
        resumed.param_groups[0][size] = kept
        run(other, resumed, range(5, STEPS))
        expected = parameter_module(values_of(module))
        again = kind(expected.named_parameters(), mesh, **arguments)
        again.load_state_dict({**state, "param_groups": again.state_dict()["param_groups"]})
        run(expected, again, range(5, STEPS))
        assert_equal(values_of(other), values_of(expected))


def train_while_groups_come_and_go(
    rank: int, world_size: int, mesh: Any, kind: type[ShardedOptimizer], arguments: dict[str, Any]
) -> dict[str, Tensor]:
    """Unnamed groups, whose position is their name: the first one leaves, then another comes."""
    shapes = {"first": (9, 9), "second": (12, 7), "third": (6, 11)}
    module = parameter_module(parameter_values(shapes))
    first, second, third = module.parameters()
    optimizer = kind([{"params": [first]}, {"params": [second]}], mesh, **arguments)
    for step in range(STEPS):
        if step == 4:
            del optimizer.param_groups[0]
            optimizer.add_param_group({"params": [third]})
            optimizer.zero_grad()
        trained = ("first", "second") if step < 4 else ("second", "third")
        grads = rank_gradients(shapes, world_size, seed=step).of_rank(rank)
        backward(module.named_parameters(), {name: grads[name] for name in trained})
        optimizer.step()
        optimizer.zero_grad()
    return values_of(module)


def train_with_bad_gradient(
    rank: int,
    world_size: int,
    mesh: Any,
    kind: type[ShardedOptimizer],
    arguments: dict[str, Any],
    bad: float,
    where: str,
    bad_step: int,
) -> tuple[dict[str, Tensor], list[str]]:
    """Train on SMALL with one bad entry in one gradient of the last rank; values at the end, and the warnings."""
    module = parameter_module(parameter_values(SMALL))
    optimizer = kind(module.named_parameters(), mesh, bucket_mib=0.02, **arguments)
    messages: list[str] = []
    for step in range(STEPS + 1):
        grads = rank_gradients(SMALL, world_size, seed=step - (step > bad_step)).of_rank(rank)
        if step == bad_step and rank == world_size - 1:
            grads[where].view(-1)[3] = bad
        before = values_of(module), state_of(module, optimizer)
        backward(module.named_parameters(), grads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [str(warning.message) for warning in caught]
        if step == bad_step:
            assert_equal(values_of(module), before[0])
            for name, state in state_of(module, optimizer).items():
                assert_equal(state, before[1][name])
        optimizer.zero_grad()
    return values_of(module), messages
