"""One promise: N ranks give the Shampoo of one device, bit for bit, whatever the tiles, the ranks and the faults."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.reference_shampoo import Shampoo, after_steps
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
from vescale_optim.optimizers import matrix_roots, shampoo
from vescale_optim.optimizers.shampoo import ShardedShampoo, is_due
from vescale_optim.optimizers.tiles import add_gram, batches_of, grouped

# Recomputed in steps 3, 6, 9, 4, 7, 10 and 5, 8: every tile in turn.
ARGUMENTS = dict(lr=0.01, max_preconditioner_dim=32, precondition_frequency=3, weight_decay=0.1)
REFERENCE = dict(lr=0.01, block=32, frequency=3, weight_decay=0.1)


# -- the same as one device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_device_in_parameters_and_state(dtype: torch.dtype) -> None:
    reference = Shampoo(parameter_values(SHAPES, dtype=dtype), **REFERENCE)
    after_steps(reference, means(SHAPES, 1, dtype))
    for world_size in (1, 2, 3, 4):
        for values, state in run_ranks(world_size, train, ShardedShampoo, ARGUMENTS, SHAPES, dtype, None, (), STEPS, True):
            assert_equal(values, reference.params)
            for name in reference.tiles:
                expected = {
                    "factors": reference.state(name, "left", "right"),
                    "roots": reference.state(name, "left root", "right root"),
                    "exp_avg": reference.state(name, "first"),
                    "grafting_sq": reference.state(name, "second"),
                }
                # fp32 also where parameters and gradients are bf16.
                assert_equal({key: state[name][key] for key in expected}, expected)
                assert state[name]["step"] == STEPS


@pytest.mark.parametrize("block", [4, 8])
def test_tiles_of_one_element_do_not_depend_on_where_they_lie(block: int) -> None:
    """The corner of a matrix whose sides are one more than a multiple of the block: its strides tell how wide that is."""
    shapes = {"a": (9, 9), "b": (33, 33), "c": (17, 5), "d": (5, 49), "e": (25, 9)}
    reference = Shampoo(parameter_values(shapes), **REFERENCE | dict(block=block))
    after_steps(reference, means(shapes, 1))
    arguments = ARGUMENTS | dict(max_preconditioner_dim=block)
    for world_size in (1, 2, 3, 4):
        for values, state in run_ranks(
            world_size, train, ShardedShampoo, arguments, shapes, torch.float32, None, (), STEPS, True
        ):
            assert_equal(values, reference.params)
            factors = {name: reference.state(name, "left", "right") for name in shapes}
            assert_equal({name: state[name]["factors"] for name in shapes}, factors)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_unused_somewhere_or_everywhere_and_frozen_ones(world_size: int) -> None:
    unused = {"tall": (world_size - 1,), "row": tuple(range(world_size)), "bias": (0,)}
    frozen = ("wide",)
    results = run_ranks(world_size, train, ShardedShampoo, ARGUMENTS, SHAPES, torch.float32, unused, frozen)
    # Frozen parameters take turns as unused ones do: freezing one does not shift when others are recomputed.
    steps = [mean | dict.fromkeys(frozen) for mean in means(SHAPES, world_size, unused=unused)]
    expected = after_steps(Shampoo(parameter_values(SHAPES), **REFERENCE), steps)
    for values, _ in results:
        assert_equal(values, expected)
    for name in ("row", *frozen):
        assert torch.equal(expected[name], parameter_values(SHAPES)[name])


def test_more_ranks_than_panels_and_an_empty_parameter() -> None:
    shapes = {"wide": (7, 13), "empty": (0, 5), "bias": (3,)}
    results = run_ranks(4, train, ShardedShampoo, ARGUMENTS, shapes)
    steps = [{n: g for n, g in mean.items() if n != "empty"} for mean in means(shapes, 4)]
    start = {n: v for n, v in parameter_values(shapes).items() if n != "empty"}
    expected = after_steps(Shampoo(start, **REFERENCE), steps)
    for values, _ in results:
        assert values.pop("empty").shape == (0, 5)
        assert_equal(values, expected)


def test_fp32_master_copy_of_bf16_parameters() -> None:
    bf16 = torch.bfloat16
    start = {name: value.float() for name, value in parameter_values(SMALL, dtype=bf16).items()}
    steps = [{name: grad.float() for name, grad in mean.items()} for mean in means(SMALL, 3, bf16)]
    expected = after_steps(Shampoo(start, **REFERENCE), steps)
    for values, _ in run_ranks(3, train, ShardedShampoo, {**ARGUMENTS, "master_dtype": torch.float32}, SMALL, bf16):
        assert_equal(values, {name: value.bfloat16() for name, value in expected.items()})


def test_factors_larger_than_one_panel_of_their_grams() -> None:
    shapes = {"large": (300, 520)}
    # Recomputed in step 2; the third one uses the roots.
    reference = Shampoo(parameter_values(shapes), lr=0.01, block=1024, frequency=2)
    expected = after_steps(reference, means(shapes, 2, steps=3))
    arguments = dict(lr=0.01, max_preconditioner_dim=1024, precondition_frequency=2)
    for values, _ in run_ranks(2, train, ShardedShampoo, arguments, shapes, torch.float32, None, (), 3):
        assert_equal(values, expected)


@pytest.mark.parametrize("decay", [0.9, 1.0])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_grams_of_any_size(decay: float, batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 40, 256, 257, 600):
        rows = torch.randn(*batch, size, 30, generator=generator)
        factors = torch.randn(*batch, size, size, generator=generator)
        factors += factors.mT.clone()
        expected = decay * factors.double() + (1 - decay if decay < 1 else 1) * (rows.double() @ rows.double().mT)
        add_gram(factors, rows, decay)
        torch.testing.assert_close(factors.double(), expected, rtol=1e-5, atol=1e-4)


def train_in_batches(rank: int, world_size: int, mesh: Any, arguments: Any, shapes: Any) -> dict[str, Tensor]:
    shampoo.batches_of = grouped
    try:
        return train(rank, world_size, mesh, ShardedShampoo, arguments, shapes)[0]
    finally:
        shampoo.batches_of = batches_of


def test_batches_of_tiles_step_like_single_ones() -> None:
    """The form that runs on devices with batched kernels, which round differently."""
    shapes = {"stack": (3, 16, 16), "even": (48, 32), "ragged": (20, 36)}
    arguments = {**ARGUMENTS, "max_preconditioner_dim": 16, "matrix_eps": 1e-2, "momentum": 0.9}
    expected = run_ranks(1, train, ShardedShampoo, arguments, shapes)[0][0]
    for values in run_ranks(2, train_in_batches, arguments, shapes):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-4)


def test_tiles_take_turns() -> None:
    """300 x 50 by 32 are 20 tiles: all at the start, then some in each step."""
    group = dict(precondition_frequency=10, start_preconditioning_step=-1)
    due = [[is_due(turn, step, group, has_roots=step > 10) for turn in range(20)] for step in range(1, 41)]
    assert [sum(flags) for flags in due] == [0] * 9 + [20] + [2] * 30
    assert all(sum(flags[turn] for flags in due[10:20]) == 1 for turn in range(20))


def raise_frequency(rank: int, world_size: int, mesh: Any, later: int) -> Tensor:
    """Parameters after step 11, in which no roots are due at a frequency of 5 either."""
    param = torch.nn.Parameter(parameter_values({"w": (12, 10)})["w"])
    optimizer = ShardedShampoo([param], mesh, lr=1e-3, precondition_frequency=5, grafting=None)
    for step in range(11):
        optimizer.param_groups[0]["precondition_frequency"] = 5 if step < 10 else later
        optimizer.zero_grad()
        (param * rank_gradients({"w": (12, 10)}, 1, seed=step).of_rank(0)["w"] * 1e-3).sum().backward()
        optimizer.step()
    return param.detach().clone()


@pytest.mark.parametrize("later", [50, 10**6])
def test_roots_stay_in_use_where_the_frequency_is_raised(later: int) -> None:
    (expected,) = run_ranks(1, raise_frequency, 5)
    (found,) = run_ranks(1, raise_frequency, later)
    assert torch.equal(found, expected)


def count_roots(rank: int, world_size: int, mesh: Any, shapes: dict[str, tuple[int, ...]], steps: int) -> list[list[int]]:
    """Sizes of the factors whose roots this rank computes, step by step."""
    sizes: list[list[int]] = []
    original = shampoo.inverse_root

    def counting(factors: Tensor, *args: Any, **options: Any) -> Any:
        sizes[-1].append(len(factors))
        return original(factors, *args, **options)

    module = parameter_module(parameter_values(shapes))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, precondition_frequency=3, start_preconditioning_step=1)
    shampoo.inverse_root = counting
    try:
        for step in range(steps):
            sizes.append([])
            backward(module.named_parameters(), rank_gradients(shapes, world_size, seed=step).of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        shampoo.inverse_root = original
    return sizes


def test_matrices_of_one_tile_take_turns_shape_by_shape() -> None:
    """Three layers of two matrices at a frequency of 3: every step recomputes a large and a small one, on any ranks."""
    layers = {f"{name}{layer}": shape for layer in range(3) for name, shape in (("up", (12, 8)), ("out", (8, 8)))}
    for world_size in (1, 2):
        ranks = run_ranks(world_size, count_roots, layers, 7)
        first, *later = [sorted(size for sizes in ranks for size in sizes[step]) for step in range(7)]
        assert first == [8] * 9 + [12] * 3
        assert later == [[8, 8, 8, 12]] * 6


# Every hyperparameter: its value here, and what it is called in the reference.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": (dict(lr=0.02), dict(lr=0.02)),
    "betas": (dict(betas=(0.5, 0.9)), dict(betas=(0.5, 0.9))),
    "first beta": (dict(betas=(0.0, 0.999)), dict(betas=(0.0, 0.999))),
    "sums": (dict(betas=(0.9, 1.0)), dict(betas=(0.9, 1.0))),
    "eps": (dict(eps=0.5), dict(eps=0.5)),
    "weight_decay": (dict(weight_decay=0.0), dict(weight_decay=0.0)),
    "max_preconditioner_dim": (dict(max_preconditioner_dim=1024), dict(block=1024)),
    "precondition_frequency": (dict(precondition_frequency=2), dict(frequency=2)),
    "start_preconditioning_step": (dict(start_preconditioning_step=5), dict(start=5)),
    "start at once": (dict(start_preconditioning_step=1), dict(start=1)),
    "rmsprop": (dict(grafting="rmsprop"), dict(grafting="rmsprop")),
    "adagrad": (dict(grafting="adagrad"), dict(grafting="adagrad")),
    "sgd": (dict(grafting="sgd"), dict(grafting="sgd")),
    "no grafting": (dict(grafting=None), dict(grafting=None)),
    "grafting_eps": (dict(grafting_eps=0.1), dict(grafting_eps=0.1)),
    "momentum": (dict(momentum=0.9), dict(momentum=0.9)),
    "nesterov": (dict(momentum=0.9, nesterov=True), dict(momentum=0.9, nesterov=True)),
    "root_inv_override": (dict(root_inv_override=2), dict(root=2)),
    "root of 1": (dict(root_inv_override=1), dict(root=1)),
    "root without grafting": (dict(root_inv_override=2, grafting=None), dict(root=2, grafting=None)),
    "matrix_eps": (dict(matrix_eps=0.1), dict(matrix_eps=0.1)),
    "adamw_lr": (dict(adamw_lr=0.5), dict(adamw=dict(lr=0.5))),
    "adamw_betas": (dict(adamw_betas=(0.1, 0.2)), dict(adamw=dict(betas=(0.1, 0.2)))),
    "adamw_eps": (dict(adamw_eps=0.3), dict(adamw=dict(eps=0.3))),
    "adamw_weight_decay": (dict(adamw_weight_decay=0.4), dict(adamw=dict(weight_decay=0.4))),
}


@pytest.fixture(scope="module")
def small_results() -> dict[str, dict[str, Tensor]]:
    steps = means(SMALL, 2)
    variants = {"default": {}, **{name: keywords for name, (_, keywords) in VARIANTS.items()}}
    return {
        name: after_steps(Shampoo(parameter_values(SMALL), **{**REFERENCE, **keywords}), steps)
        for name, keywords in variants.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_hyperparameter_acts_as_in_the_formulas(variant: str, small_results: Any) -> None:
    arguments, _ = VARIANTS[variant]
    for values, _ in run_ranks(2, train, ShardedShampoo, {**ARGUMENTS, **arguments}, SMALL):
        assert_equal(values, small_results[variant])
    moved = ("bias",) if variant.startswith("adamw") else ("even", "stack")
    assert all(not torch.equal(small_results[variant][n], small_results["default"][n]) for n in moved)
    assert small_results["nesterov"]["even"].ne(small_results["momentum"]["even"]).any()


INVALID = [
    (dict(lr=-1.0), r"lr is -1.0; it must be >= 0"),
    (dict(betas=(1.0, 0.9)), r"betas is \(1.0, 0.9\); it must be two values, the first in \[0, 1\)"),
    (dict(betas=(0.9, 1.1)), r"the second in \[0, 1\]"),
    (dict(eps=-1e-8), r"eps is -1e-08; it must be >= 0"),
    (dict(weight_decay=-0.1), r"weight_decay is -0.1; it must be >= 0"),
    (dict(max_preconditioner_dim=0), r"max_preconditioner_dim is 0; it must be an integer >= 1"),
    (dict(precondition_frequency=0.5), r"precondition_frequency is 0.5; it must be an integer >= 1"),
    (dict(start_preconditioning_step=0), r"start_preconditioning_step is 0; it must be -1 or an integer >= 1"),
    (dict(grafting="lion"), r"""grafting is 'lion'; it must be "adam", "rmsprop", "adagrad", "sgd" or None"""),
    (dict(grafting_eps=0.0), r"grafting_eps is 0.0; it must be > 0"),
    (dict(momentum=1.0), r"momentum is 1.0; it must be in \[0, 1\)"),
    (dict(nesterov=True), r"nesterov is True; it must be False where momentum is 0"),
    (dict(root_inv_override=0), r"root_inv_override is 0; it must be None or > 0"),
    (dict(root_inv_override=0.5), r"matrix_eps is 1e-06; it must be >= 3.2e-05 where root_inv_override is 0.5"),
    (dict(matrix_eps=0.0), r"matrix_eps is 0.0; it must be in \(0, 1\)"),
    (dict(adamw_betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\); it must be two values in \[0, 1\)"),
]


def construct(rank: int, world_size: int, mesh: Any, cases: list[tuple[dict[str, Any], str]]) -> None:
    for arguments, message in cases:
        module = parameter_module(parameter_values({"w": (4, 4), "b": (4,)}))
        with pytest.raises(ValueError, match=message):
            ShardedShampoo(module.named_parameters(), mesh, **arguments)


def test_invalid_hyperparameters_raise_and_name_the_allowed_range() -> None:
    run_ranks(1, construct, INVALID)


def raise_later(rank: int, world_size: int, mesh: Any, changes: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Ranks beyond the first own no tile of the one matrix."""
    module = parameter_module(parameter_values({"w": (4, 4)}))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, grafting="sgd", start_preconditioning_step=1)
    before = values_of(module)
    for change in changes:
        group = optimizer.param_groups[0]
        kept = {name: group[name] for name in change}
        group.update(change)
        backward(module.named_parameters(), rank_gradients({"w": (4, 4)}, world_size).of_rank(rank))
        ((key, value),) = change.items()
        text = f"parameter 'w' of shape (4, 4): {key} is {value!r} now and was {kept[key]!r} when the optimizer was made"
        with pytest.raises(ValueError, match=re.escape(text)):
            optimizer.step()
        assert_equal(values_of(module), before)
        group.update(kept)
    optimizer.step()
    return values_of(module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hyperparameters_that_need_state_cannot_come_later(world_size: int) -> None:
    changes = [dict(momentum=0.9), dict(grafting="adam"), dict(max_preconditioner_dim=2)]
    for values in run_ranks(world_size, raise_later, changes):
        assert not torch.equal(values["w"], parameter_values({"w": (4, 4)})["w"])


def train_with_changes(
    rank: int, world_size: int, mesh: Any, arguments: dict[str, Any], changes: dict[str, Any], scale: float = 1.0
) -> dict[str, Tensor]:
    """Train on SMALL with gradients of this scale; the hyperparameters change after four steps."""
    module = parameter_module(parameter_values(SMALL))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, bucket_mib=0.02, **{**ARGUMENTS, **arguments})
    for step in range(STEPS):
        if step == 4:
            optimizer.param_groups[0].update(changes)
        grads = rank_gradients(SMALL, world_size, seed=step).of_rank(rank)
        backward(module.named_parameters(), {name: grad * scale for name, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    return values_of(module)


@pytest.mark.parametrize("grafting", ["adam", None])
@pytest.mark.parametrize("name", ["start_preconditioning_step", "precondition_frequency"])
def test_a_start_moved_into_the_past_computes_roots_at_once(name: str, grafting: str | None) -> None:
    steps = means(SMALL, 2)
    reference = Shampoo(parameter_values(SMALL), **{**REFERENCE, "start": 100, "grafting": grafting})
    after_steps(reference, steps[:4])
    reference.start, reference.frequency = 2, 2 if name == "precondition_frequency" else 3
    expected = after_steps(reference, steps[4:])
    arguments = dict(grafting=grafting, **{name: 100})
    for values in run_ranks(2, train_with_changes, arguments, {name: 2}):
        assert_equal(values, expected)


@pytest.mark.parametrize("arguments", [dict(), dict(root_inv_override=1), dict(root_inv_override=0.5, matrix_eps=1e-2)])
def test_with_grafting_the_scale_of_gradients_plays_no_part(arguments: dict[str, Any]) -> None:
    arguments = dict(matrix_eps=1e-3, grafting_eps=1e-30, adamw_eps=1e-30, start_preconditioning_step=1) | arguments
    expected = run_ranks(1, train_with_changes, arguments, {})[0]
    # 1e-12 and 1e9, as powers of two.
    for scale in (2.0**-40, 2.0**30):
        (values,) = run_ranks(1, train_with_changes, arguments, {}, scale)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
def test_zero_gradients_move_nothing_even_without_eps(grafting: str | None) -> None:
    arguments = dict(eps=0.0, grafting=grafting, start_preconditioning_step=2, weight_decay=0.0, adamw_weight_decay=0.0)
    (values,) = run_ranks(1, train_with_changes, arguments, {}, 0.0)
    assert_equal(values, parameter_values(SMALL))


# -- how matrices lie in parameters ----------------------------------------------------------------------------------


def out_by_in(value: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The matrices of a parameter, (out, in), copied apart."""
    stack = value.flatten(1)[None] if options.get("flatten") else value.reshape(-1, *value.shape[-2:])
    if options.get("matrix_layout") == "in_out":
        stack = stack.mT
    count = options.get("interleave", 1)
    parts = [part for matrix in stack for part in matrix.split(options.get("splits", stack.shape[1]))]
    return [part[k::count].contiguous() for part in parts for k in range(count)]


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "fused qkv": ((48, 12), dict(splits=(32, 8, 8))),
    "heads of a stack": ((2, 18, 20), dict(splits=(9, 9))),
    "gate and up in turn": ((36, 20), dict(interleave=2)),
    "convolution": ((20, 5, 3, 3), dict(flatten="conv")),
    "stored in x out": ((2, 20, 18), dict(matrix_layout="in_out")),
    "splits, stored in x out": ((20, 28), dict(matrix_layout="in_out", splits=(18, 5, 5))),
    "in turn, stored in x out": ((20, 36), dict(matrix_layout="in_out", interleave=2)),
}


@pytest.mark.parametrize("layout, block", [*((name, 16) for name in LAYOUTS), ("fused qkv", 64), ("convolution", 64)])
def test_matrices_inside_a_parameter_step_as_if_stored_apart(layout: str, block: int) -> None:
    """In other orders of summation, and as (out, in): to rounding. Frequency 1, so that no tile waits for its turn."""
    shape, options = LAYOUTS[layout]
    shapes = {"fused": shape, "other": (10, 10)}
    arguments = dict(lr=0.01, max_preconditioner_dim=block, precondition_frequency=1, matrix_eps=1e-2)
    results = run_ranks(3, train, ShardedShampoo, arguments, shapes, torch.float32, None, (), 4, False, {"fused": options})
    start = out_by_in(parameter_values(shapes)["fused"], options)
    grads = [out_by_in(mean["fused"], options) for mean in means(shapes, 3, steps=4)]
    names = [str(index) for index in range(len(start))]
    reference = Shampoo(dict(zip(names, start, strict=True)), lr=0.01, block=block, frequency=1, matrix_eps=1e-2)
    expected = after_steps(reference, [dict(zip(names, grad, strict=True)) for grad in grads])
    for values, _ in results:
        found = dict(zip(names, out_by_in(values["fused"], options), strict=True))
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-5)
            assert (found[name] - start[int(name)]).abs().max() > 5e-3


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, where, bad",
    [
        (1, "even", torch.nan),
        (2, "even", torch.inf),
        # Finite, but its square is not.
        (2, "stack", 1e20),
        (3, "even", torch.nan),
        (3, "bias", -torch.inf),
    ],
)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_enters_no_factor(
    world_size: int, where: str, bad: float, small_results: Any
) -> None:
    for values, messages in run_ranks(world_size, train_with_bad_gradient, ShardedShampoo, ARGUMENTS, bad, where, 4):
        (message,) = messages
        assert f"gradient of parameter '{where}' has NaN" in message and "all ranks skip this step" in message
        assert_equal(values, small_results["default"])


def train_while_eigh_fails(rank: int, world_size: int, mesh: Any, dtypes: Any) -> tuple[dict[str, Tensor], int]:
    module = parameter_module(parameter_values(SMALL))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, bucket_mib=0.02, **ARGUMENTS)
    original = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if matrix.dtype in dtypes and rank == 0:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return original(matrix)

    matrix_roots.torch.linalg.eigh = failing
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                backward(module.named_parameters(), rank_gradients(SMALL, world_size, seed=step).of_rank(rank))
                optimizer.step()
                optimizer.zero_grad()
    finally:
        matrix_roots.torch.linalg.eigh = original
    return values_of(module), sum("no eigenvalues were found" in str(warning.message) for warning in caught)


def test_an_eigh_that_fails_on_one_rank_is_repeated_in_fp64(small_results: Any) -> None:
    for values, num_warnings in run_ranks(2, train_while_eigh_fails, (torch.float32,)):
        assert num_warnings == 0
        for name, expected in small_results["default"].items():
            torch.testing.assert_close(values[name], expected, rtol=0, atol=1e-2)


def test_an_eigh_that_fails_for_good_on_one_rank_does_not_stop_the_others() -> None:
    results = run_ranks(2, train_while_eigh_fails, (torch.float32, torch.float64))
    assert [num_warnings > 0 for _, num_warnings in results] == [True, False]
    assert_equal(results[0][0], results[1][0])
    assert all(value.isfinite().all() for value in results[0][0].values())


def train_while_first_eigh_fails(rank: int, world_size: int, mesh: Any) -> dict[str, Tensor]:
    """No roots are found in step 3, the first one with roots."""
    original = shampoo.inverse_root
    shampoo.inverse_root = lambda *args, **options: original(*args, **options) if is_over else None
    module = parameter_module(parameter_values(SMALL))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, bucket_mib=0.02, **ARGUMENTS)
    try:
        for step in range(STEPS):
            is_over = step >= 3
            backward(module.named_parameters(), rank_gradients(SMALL, world_size, seed=step).of_rank(rank))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            optimizer.zero_grad()
    finally:
        shampoo.inverse_root = original
    return values_of(module)


def test_roots_that_were_not_found_in_the_first_step_with_roots_are_computed_in_the_next() -> None:
    expected = after_steps(Shampoo(parameter_values(SMALL), **{**REFERENCE, "start": 4}), means(SMALL, 2))
    for values in run_ranks(2, train_while_first_eigh_fails):
        assert_equal(values, expected)


def keep_gradients(rank: int, world_size: int, mesh: Any) -> None:
    module = parameter_module(parameter_values(SMALL))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, **{**ARGUMENTS, "start_preconditioning_step": 1})
    for step in range(3):
        grads = rank_gradients(SMALL, world_size, seed=step)
        backward(module.named_parameters(), grads.of_rank(rank))
        optimizer.step()
        assert_equal({n: p.grad.full_tensor() for n, p in module.named_parameters()}, dict(grads.mean))
        optimizer.zero_grad()


def test_gradients_are_not_edited() -> None:
    run_ranks(2, keep_gradients)


# -- resume ----------------------------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, mesh: Any, dtype: torch.dtype) -> None:
    arguments = {**ARGUMENTS, "momentum": 0.9, "bucket_mib": 0.02}

    def run(module: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            grads = rank_gradients(SMALL, world_size, seed=step, dtype=dtype)
            backward(module.named_parameters(), grads.of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()

    module = parameter_module(parameter_values(SMALL, dtype=dtype))
    optimizer = ShardedShampoo(module.named_parameters(), mesh, **arguments)
    run(module, optimizer, range(5))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    other = parameter_module(values_of(module))
    resumed = ShardedShampoo(other.named_parameters(), mesh, **{**arguments, "lr": 0.5})
    resumed.load_state_dict(torch.load(saved, weights_only=False, map_location="cpu"))
    state = state_of(other, resumed)
    for name, expected in state_of(module, optimizer).items():
        assert_equal(state[name], expected)
        assert all(value.dtype == torch.float32 for value in state[name].values()) or name == "bias"
    run(module, optimizer, range(5, 10))
    run(other, resumed, range(5, 10))
    assert_equal(values_of(other), values_of(module))


def test_a_resumed_run_of_bf16_parameters_continues_exactly_with_fp32_factors() -> None:
    run_ranks(2, resume, torch.bfloat16)


def continue_from(rank: int, world_size: int, mesh: Any, values: Any, state: Any, steps: range) -> dict[str, Tensor]:
    module = parameter_module(values)
    optimizer = ShardedShampoo(module.named_parameters(), mesh, bucket_mib=0.02, **ARGUMENTS)
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
    values, state = run_ranks(2, train, ShardedShampoo, ARGUMENTS, SMALL, torch.float32, None, (), 5, True)[0]
    for found in run_ranks(3, continue_from, values, state, range(5, STEPS)):
        assert_equal(found, small_results["default"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_turns_do_not_depend_on_names_and_blocks_cannot_be_edited(world_size: int) -> None:
    run_ranks(world_size, resume_under_other_names, ShardedShampoo, ARGUMENTS, "max_preconditioner_dim")


def test_groups_come_and_go() -> None:
    results = run_ranks(2, train_while_groups_come_and_go, ShardedShampoo, ARGUMENTS)
    assert_equal(results[0], results[1])
