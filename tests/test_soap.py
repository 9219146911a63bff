"""One promise: N ranks give the SOAP of one device, bit for bit, and that is the SOAP of its authors."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.reference_shampoo import after_steps
from tests.support.reference_soap import SOAP, authors_soap
from tests.support.tiled_training import (
    SHAPES,
    SMALL,
    STEPS,
    assert_equal,
    means,
    resume_under_other_names,
    state_of,
    train,
    train_while_groups_come_and_go,
    train_with_bad_gradient,
    values_of,
)
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim.optimizers import matrix_roots, soap
from vescale_optim.optimizers.soap import ShardedSOAP
from vescale_optim.optimizers.tiles import batches_of, grouped

ARGUMENTS = dict(lr=0.01, max_precond_dim=32, precondition_frequency=3)
REFERENCE = dict(lr=0.01, block=32, frequency=3)


# -- the same as one device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 10000], ids=["tiles", "whole matrices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_device_in_parameters_and_state(dtype: torch.dtype, block: int) -> None:
    reference = SOAP(parameter_values(SHAPES, dtype=dtype), **{**REFERENCE, "block": block})
    after_steps(reference, means(SHAPES, 1, dtype))
    for world_size in (1, 2, 3, 4):
        arguments = {**ARGUMENTS, "max_precond_dim": block}
        for values, state in run_ranks(world_size, train, ShardedSOAP, arguments, SHAPES, dtype, None, (), STEPS, True):
            assert_equal(values, reference.params)
            for name in reference.tiles:
                expected = {
                    "factors": reference.state(name, "left", "right"),
                    "bases": reference.state(name, "left basis", "right basis"),
                    "exp_avg": reference.state(name, "first"),
                    "exp_avg_sq": reference.state(name, "second"),
                }
                # fp32 also where parameters and gradients are bf16.
                assert_equal({key: state[name][key] for key in expected}, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_unused_somewhere_or_everywhere_and_frozen_ones(world_size: int) -> None:
    unused = {"tall": (world_size - 1,), "row": tuple(range(world_size)), "bias": (0,)}
    frozen = ("wide",)
    results = run_ranks(world_size, train, ShardedSOAP, ARGUMENTS, SHAPES, torch.float32, unused, frozen)
    # Frozen parameters take turns as unused ones do: freezing one does not shift when others are recomputed.
    steps = [mean | dict.fromkeys(frozen) for mean in means(SHAPES, world_size, unused=unused)]
    expected = after_steps(SOAP(parameter_values(SHAPES), **REFERENCE), steps)
    for values, _ in results:
        assert_equal(values, expected)
    for name in ("row", *frozen):
        assert torch.equal(expected[name], parameter_values(SHAPES)[name])


def test_g07_one_matrix_on_two_ranks_steps_as_on_one_device() -> None:
    shapes = {"weight": (8, 6)}
    expected = after_steps(SOAP(parameter_values(shapes), **REFERENCE), means(shapes, 2))
    for values, _ in run_ranks(2, train, ShardedSOAP, ARGUMENTS, shapes):
        assert_equal(values, expected)


def train_in_batches(rank: int, world_size: int, mesh: Any, arguments: Any, shapes: Any) -> dict[str, Tensor]:
    soap.batches_of = grouped
    try:
        return train(rank, world_size, mesh, ShardedSOAP, arguments, shapes)[0]
    finally:
        soap.batches_of = batches_of


def test_batches_of_tiles_step_like_single_ones() -> None:
    """The form that runs on devices with batched kernels, which round differently."""
    shapes = {"stack": (3, 16, 16), "even": (48, 32)}
    arguments = {**ARGUMENTS, "max_precond_dim": 16}
    expected = run_ranks(1, train, ShardedSOAP, arguments, shapes)[0][0]
    for values in run_ranks(2, train_in_batches, arguments, shapes):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-4)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": (dict(lr=0.02), dict(lr=0.02)),
    "betas": (dict(betas=(0.5, 0.9)), dict(betas=(0.5, 0.9))),
    "shampoo_beta": (dict(shampoo_beta=0.5), dict(shampoo_beta=0.5)),
    "eps": (dict(eps=0.1), dict(eps=0.1)),
    "weight_decay": (dict(weight_decay=0.5), dict(weight_decay=0.5)),
    "precondition_frequency": (dict(precondition_frequency=1), dict(frequency=1)),
    "max_precond_dim": (dict(max_precond_dim=20), dict(block=20)),
    "adamw_lr": (dict(adamw_lr=0.5), dict(adamw=dict(lr=0.5))),
    "adamw_betas": (dict(adamw_betas=(0.1, 0.2)), dict(adamw=dict(betas=(0.1, 0.2)))),
    "adamw_eps": (dict(adamw_eps=0.3), dict(adamw=dict(eps=0.3))),
    "adamw_weight_decay": (dict(adamw_weight_decay=0.4), dict(adamw=dict(weight_decay=0.4))),
}


@pytest.fixture(scope="module")
def small_results() -> dict[str, dict[str, Tensor]]:
    variants = {"default": {}, **{name: keywords for name, (_, keywords) in VARIANTS.items()}}
    return {
        name: after_steps(SOAP(parameter_values(SMALL), **{**REFERENCE, **keywords}), means(SMALL, 2))
        for name, keywords in variants.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_hyperparameter_acts_as_in_the_formulas(variant: str, small_results: Any) -> None:
    arguments, _ = VARIANTS[variant]
    for values, _ in run_ranks(2, train, ShardedSOAP, {**ARGUMENTS, **arguments}, SMALL):
        assert_equal(values, small_results[variant])
    moved = ("bias",) if variant.startswith("adamw") else ("even", "stack")
    assert all(not torch.equal(small_results[variant][n], small_results["default"][n]) for n in moved)


INVALID = [
    (dict(lr=-1.0), r"lr is -1.0; it must be >= 0"),
    (dict(betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\); it must be two values in \[0, 1\)"),
    (dict(shampoo_beta=1.0), r"shampoo_beta is 1.0; it must be -1 or in \[0, 1\)"),
    (dict(shampoo_beta=-0.5), r"shampoo_beta is -0.5; it must be -1 or in \[0, 1\)"),
    (dict(eps=0.0), r"eps is 0.0; it must be > 0"),
    (dict(weight_decay=-0.1), r"weight_decay is -0.1; it must be >= 0"),
    (dict(precondition_frequency=0), r"precondition_frequency is 0; it must be an integer >= 1"),
    (dict(max_precond_dim=32.0), r"max_precond_dim is 32.0; it must be an integer >= 1"),
    (dict(adamw_lr=-1.0), r"lr is -1.0; it must be >= 0"),
]


def construct(rank: int, world_size: int, mesh: Any, cases: list[tuple[dict[str, Any], str]]) -> None:
    for arguments, message in cases:
        module = parameter_module(parameter_values({"w": (4, 4), "b": (4,)}))
        with pytest.raises(ValueError, match=message):
            ShardedSOAP(module.named_parameters(), mesh, **arguments)


def test_invalid_hyperparameters_raise_and_name_the_allowed_range() -> None:
    run_ranks(1, construct, INVALID)


# -- the algorithm of its authors ------------------------------------------------------------------------------------


def normal_gradients(shape: tuple[int, ...], count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def follow(
    rank: int, world_size: int, mesh: Any, shape: tuple[int, ...], arguments: Any, steps: int, zeros: int = 0
) -> list[Tensor]:
    """The parameter after every step; every rank has the same gradients, whose mean is exact on one rank and on two."""
    module = parameter_module(parameter_values({"weight": shape}))
    optimizer = ShardedSOAP(module.named_parameters(), mesh, **arguments)
    seen = []
    for grad in [torch.zeros(shape)] * zeros + normal_gradients(shape, steps):
        backward(module.named_parameters(), {"weight": grad})
        optimizer.step()
        optimizer.zero_grad()
        seen.append(module["weight"].detach().clone())
    return seen


@pytest.mark.parametrize("frequency", [1, 3])
def test_agrees_with_the_loop_of_its_authors(frequency: int) -> None:
    """Square matrices, whose first factors are full: a basis of a null space would be arbitrary."""
    shape, arguments = (16, 16), dict(lr=0.01, betas=(0.9, 0.95), shampoo_beta=0.8, eps=1e-8, weight_decay=0.1)
    start = parameter_values({"weight": shape})["weight"]
    expected = authors_soap(start, normal_gradients(shape, 8), frequency=frequency, **arguments)
    arguments["precondition_frequency"] = frequency
    for found in run_ranks(2, follow, shape, arguments, 8):
        assert torch.equal(found[0], start)
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5, msg=lambda text, step=step: f"{step}: {text}")


@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize("shape, bound", [((7, 13), 6.0), ((96, 64), 8.0), ((300, 50), 8.0)])
def test_the_first_updates_are_bounded(shape: tuple[int, ...], bound: float, zeros: int) -> None:
    """The bounds are those of the authors' loop (2.6, 5.2 and 4.6, measured) with room; other orders reach 10^2 to 10^7,
    and so would gradients that are zero at first, had the basis been taken from them."""
    arguments = dict(lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, precondition_frequency=1)
    start = parameter_values({"weight": shape})["weight"]
    (seen,) = run_ranks(1, follow, shape, arguments, 10, zeros)
    updates = [(after - before).abs().max().item() for before, after in zip([start, *seen], seen, strict=False)]
    assert not any(updates[: zeros + 1])
    assert 0.5 < max(updates) < bound, updates


# -- faults and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, where, bad, bad_step",
    [(1, "even", torch.nan, 4), (2, "stack", torch.nan, 0), (2, "bias", torch.inf, 4), (3, "even", 1e20, 5)],
)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_enters_no_factor(
    world_size: int, where: str, bad: float, bad_step: int, small_results: Any
) -> None:
    for values, messages in run_ranks(world_size, train_with_bad_gradient, ShardedSOAP, ARGUMENTS, bad, where, bad_step):
        (message,) = messages
        assert f"gradient of parameter '{where}' has NaN" in message and "all ranks skip this step" in message
        assert_equal(values, small_results["default"])


def train_while_eigh_fails(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], int]:
    original = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if rank == 0:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return original(matrix)

    matrix_roots.torch.linalg.eigh = failing
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values, _ = train(rank, world_size, mesh, ShardedSOAP, ARGUMENTS, SMALL)
    finally:
        matrix_roots.torch.linalg.eigh = original
    return values, sum("no eigenvectors were found" in str(warning.message) for warning in caught)


def test_an_eigh_that_fails_for_good_on_one_rank_does_not_stop_the_others() -> None:
    results = run_ranks(2, train_while_eigh_fails)
    assert [num_warnings > 0 for _, num_warnings in results] == [True, False]
    assert_equal(results[0][0], results[1][0])
    assert all(value.isfinite().all() for value in results[0][0].values())


def zero_gradients(rank: int, world_size: int, mesh: Any) -> None:
    module = parameter_module(parameter_values(SMALL))
    optimizer = ShardedSOAP(module.named_parameters(), mesh, weight_decay=0.0, **ARGUMENTS)
    before = values_of(module)
    for _ in range(4):
        backward(
            module.named_parameters(), {name: torch.zeros(shape) for name, shape in SMALL.items() if name != "bias"}
        )
        optimizer.step()
        assert_equal(values_of(module), before)
        optimizer.zero_grad()


def test_zero_gradients_move_nothing() -> None:
    run_ranks(2, zero_gradients)


def resume(rank: int, world_size: int, mesh: Any, dtype: torch.dtype, first: int) -> None:
    arguments = {**ARGUMENTS, "bucket_mib": 0.02}

    def run(module: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            grads = rank_gradients(SMALL, world_size, seed=step, dtype=dtype)
            backward(module.named_parameters(), grads.of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()

    module = parameter_module(parameter_values(SMALL, dtype=dtype))
    optimizer = ShardedSOAP(module.named_parameters(), mesh, **arguments)
    run(module, optimizer, range(first))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    other = parameter_module(values_of(module))
    resumed = ShardedSOAP(other.named_parameters(), mesh, **{**arguments, "lr": 0.5})
    resumed.load_state_dict(torch.load(saved, weights_only=False, map_location="cpu"))
    state = state_of(other, resumed)
    for name, expected in state_of(module, optimizer).items():
        assert_equal(state[name], expected)
        assert all(value.dtype == torch.float32 for value in state[name].values()) or name == "bias"
    run(module, optimizer, range(first, STEPS))
    run(other, resumed, range(first, STEPS))
    assert_equal(values_of(other), values_of(module))


@pytest.mark.parametrize("first", [1, 5])
def test_a_resumed_run_of_bf16_parameters_continues_exactly_with_fp32_factors(first: int) -> None:
    run_ranks(2, resume, torch.bfloat16, first)


def continue_from(rank: int, world_size: int, mesh: Any, values: Any, state: Any, steps: range) -> dict[str, Tensor]:
    module = parameter_module(values)
    optimizer = ShardedSOAP(module.named_parameters(), mesh, bucket_mib=0.02, **ARGUMENTS)
    own = optimizer.state_dict()
    keys = [key for group in own["param_groups"] for key in group["params"]]
    names = [name for group in own["param_groups"] for name in group["param_names"]]
    optimizer.load_state_dict({**own, "state": {key: state[name] for key, name in zip(keys, names, strict=True)}})
    for step in steps:
        backward(module.named_parameters(), rank_gradients(SMALL, world_size, seed=step).of_rank(rank))
        optimizer.step()
        optimizer.zero_grad()
    return values_of(module)


def test_state_of_two_ranks_continues_on_three(small_results: Any) -> None:
    values, state = run_ranks(2, train, ShardedSOAP, ARGUMENTS, SMALL, torch.float32, None, (), 5, True)[0]
    for found in run_ranks(3, continue_from, values, state, range(5, STEPS)):
        assert_equal(found, small_results["default"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_turns_do_not_depend_on_names_and_blocks_cannot_be_edited(world_size: int) -> None:
    run_ranks(world_size, resume_under_other_names, ShardedSOAP, ARGUMENTS, "max_precond_dim")


def test_groups_come_and_go() -> None:
    results = run_ranks(2, train_while_groups_come_and_go, ShardedSOAP, ARGUMENTS)
    assert_equal(results[0], results[1])
