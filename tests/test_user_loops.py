"""One promise: everything else in a training loop works as with torch.optim.AdamW."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import run_ranks
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon, ShardedOptimizer, muon_param_groups

SHAPES = {"wide": (7, 13), "tall": (40, 12), "bias": (13,), "scalar": ()}


def make(mesh: Any, kind: type[ShardedOptimizer] = ShardedMuon, **arguments: Any) -> tuple[nn.ParameterDict, Any]:
    module = parameter_module(parameter_values(SHAPES))
    return module, kind(module.named_parameters(), mesh, **{"lr": 0.02, "bucket_mib": 0.001, **arguments})


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_same(results: list[Any]) -> None:
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(result[name], results[0][name]) for name in result)


# -- clipping ---------------------------------------------------------------------------------------------------------


def clip(rank: int, world_size: int, mesh: Any, unused: dict[str, Any], max_norm: float, zero: str) -> Any:
    module, optimizer = make(mesh)
    norms = []
    for step in range(3):
        grads = rank_gradients(SHAPES, world_size, seed=step, unused=unused)
        backward(module.named_parameters(), grads.of_rank(rank))
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        norms.append(float(norm))
        optimizer.step()
        clipped = {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}
        (optimizer if zero == "optimizer" else module).zero_grad()
    return norms, clipped, values_of(module)


def expected_clip(world_size: int, unused: dict[str, Any], max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    norms = []
    for step in range(3):
        mean = rank_gradients(SHAPES, world_size, seed=step, unused=unused).mean
        params = {n: nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
        for name, param in params.items():
            param.grad = None if mean[name] is None else mean[name].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), max_norm).item())
    return norms, {n: p.grad for n, p in params.items() if p.grad is not None}


UNUSED = {
    "all used": {},
    "one rank touches nothing": {name: (0,) for name in SHAPES},
    "another subset on each rank": {"wide": (0,), "tall": (1,), "bias": (0, 1)},
}


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clip_grad_norm_sees_and_scales_the_global_gradient(world_size: int, unused: str, max_norm: float) -> None:
    if world_size == 1 and UNUSED[unused]:
        pytest.skip("one rank has no peers")
    norms, clipped = expected_clip(world_size, UNUSED[unused], max_norm)
    results = run_ranks(world_size, clip, UNUSED[unused], max_norm, "optimizer")
    for found_norms, found_grads, _ in results:
        assert found_norms == pytest.approx(norms, rel=1e-6)
        assert found_grads.keys() == clipped.keys()
        for name, grad in clipped.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-5, atol=1e-7)
    assert_same([values for _, _, values in results])


def test_model_zero_grad_works_where_every_rank_has_gradients() -> None:
    results = run_ranks(2, clip, {"wide": (0,)}, 0.5, "model")
    reference = run_ranks(2, clip, {"wide": (0,)}, 0.5, "optimizer")
    assert results[0][0] == reference[0][0]
    assert_same([results[0][2], results[1][2], reference[0][2]])


def read_on_one_rank_only(rank: int, world_size: int, mesh: Any) -> str:
    module, optimizer = make(mesh)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    try:
        if rank == 0:
            module["wide"].grad.norm()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_reading_gradients_on_some_ranks_only_is_an_error_and_no_hang() -> None:
    assert all("some ranks read gradients" in text for text in run_ranks(2, read_on_one_rank_only))


# -- GradScaler -------------------------------------------------------------------------------------------------------


def scale(rank: int, world_size: int, mesh: Any, bad_step: int | None, through_clip: bool) -> Any:
    module, optimizer = make(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    history = []
    for step in range(4):
        grads = rank_gradients(SHAPES, world_size, seed=step).of_rank(rank)
        if step == bad_step and rank == world_size - 1:
            grads["tall"][0, 0] = torch.inf
        before = values_of(module), copy_state(optimizer)
        loss = torch.stack([(p * grads[n]).sum() for n, p in module.named_parameters()]).sum()
        scaler.scale(loss).backward()
        if through_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = values_of(module), copy_state(optimizer)
        untouched = all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in pairs(x, y))
        history.append((untouched, scaler.get_scale()))
    return history, values_of(module)


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": (value.to_local() if isinstance(value, RaggedTensor) else value).clone()
        for index, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }


def pairs(x: dict[str, Tensor], y: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    assert x.keys() == y.keys()
    return [(x[name], y[name]) for name in x]


@pytest.mark.parametrize("through_clip", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_inf_on_one_rank_skips_the_step_on_all(world_size: int, through_clip: bool) -> None:
    results = run_ranks(world_size, scale, 1, through_clip)
    for history, _ in results:
        assert [untouched for untouched, _ in history] == [False, True, False, False]
        assert [scale for _, scale in history] == [4.0, 2.0, 2.0, 2.0]
    assert_same([values for _, values in results])


# -- schedulers, closures, hooks --------------------------------------------------------------------------------------


def schedule(rank: int, world_size: int, mesh: Any, diverge: bool) -> Any:
    module, optimizer = make(mesh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    lrs = []
    for step in range(3):
        backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=step).of_rank(rank))
        lrs.append([group["lr"] for group in optimizer.param_groups])
        before = values_of(module)
        try:
            optimizer.step()
        except ValueError as error:
            return str(error), all(torch.equal(a, b) for a, b in pairs(before, values_of(module)))
        scheduler.step()
        if diverge and step == 0 and rank == 1:
            optimizer.param_groups[1]["lr"] *= 1.5
        optimizer.zero_grad()
    return lrs, calls


def test_schedulers_act_on_both_groups_and_hooks_run_once() -> None:
    for lrs, calls in run_ranks(2, schedule, False):
        assert lrs == [[0.02, 1e-3], [0.01, 5e-4], [0.005, 2.5e-4]]
        assert calls == ["pre", "post"] * 3


def test_lr_that_diverges_later_raises_on_every_rank_and_changes_nothing() -> None:
    for message, is_untouched in run_ranks(2, schedule, True):
        assert "ranks disagree" in message and "group 1" in message and "lr" in message
        assert is_untouched


IN_FLIGHT = {
    "lr below zero": (dict(lr=-1.0), "lr is -1.0; it must be >= 0"),
    "lr that is text": (dict(lr="1e-3"), "numbers must be numbers"),
    "momentum": (dict(momentum=1.5), "momentum is 1.5"),
    "another algorithm": (dict(algorithm="adamw", betas=(0.9, 0.99)), "algorithm is 'adamw' now and was 'muon'"),
    "splits": (dict(splits=(3, 4)), "splits is (3, 4) now and was None"),
    "layout": (dict(matrix_layout="in_out"), "matrix_layout is 'in_out' now and was 'out_in'"),
    "dtype of the iteration": (dict(ns_dtype="float32"), "ns_dtype is 'float32' now and was 'bfloat16'"),
    "a name too few": (dict(param_names=["wide"]), "parameters and 1 param_names"),
}


def change_in_flight(rank: int, world_size: int, mesh: Any, changes: dict[str, Any]) -> tuple[str, bool]:
    module, optimizer = make(mesh, adamw_lr=0.01)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=0).of_rank(rank))
    optimizer.step()
    before = values_of(module) | {"step": optimizer.state[module["wide"]]["step"].clone()}
    kept = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(changes)
    with pytest.raises((ValueError, RuntimeError)) as error:
        optimizer.step()
    after = values_of(module) | {"step": optimizer.state[module["wide"]]["step"]}
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    optimizer.param_groups[0].update(kept)
    optimizer.step()
    return str(error.value), unchanged


@pytest.mark.parametrize("what", IN_FLIGHT)
def test_hyperparameters_that_cannot_be_are_refused_in_any_step_before_anything_changes(what: str) -> None:
    changes, text = IN_FLIGHT[what]
    for message, unchanged in run_ranks(2, change_in_flight, changes):
        assert text in message and unchanged


def step_with_closure(rank: int, world_size: int, mesh: Any) -> tuple[float, bool]:
    module, optimizer = make(mesh)
    grads = rank_gradients(SHAPES, world_size).of_rank(rank)
    before = values_of(module)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(p * grads[n]).sum() for n, p in module.named_parameters()]).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return float(loss), torch.equal(before["wide"], module["wide"])


def test_closure() -> None:
    for loss, is_unchanged in run_ranks(2, step_with_closure):
        assert isinstance(loss, float) and not is_unchanged


# -- state, copies ----------------------------------------------------------------------------------------------------


def save_and_resume(rank: int, world_size: int, mesh: Any, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, optimizer = make(mesh)

    def run(module: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=step).of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()

    run(module, optimizer, range(3))
    if how == "state_dict":
        other, resumed = make(mesh, lr=0.5)
        other.load_state_dict(module.state_dict())
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        resumed.load_state_dict(torch.load(saved, weights_only=False))
    elif how == "deepcopy":
        other, resumed = copy.deepcopy((module, optimizer))
    else:
        other, resumed = pickle.loads(pickle.dumps((module, optimizer)))
    run(other, resumed, range(3, 5))
    run(module, optimizer, range(3, 5))
    return values_of(module), values_of(other)


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_continue_like_the_original(world_size: int, how: str) -> None:
    for original, resumed in run_ranks(world_size, save_and_resume, how):
        assert_same([original, resumed])


def state_of(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    _, optimizer = make(mesh)
    state = optimizer.state_dict()["state"]
    return {key: {n: (tuple(v.shape), type(v).__name__) for n, v in entry.items()} for key, entry in state.items()}


def test_state_exists_from_construction_with_the_same_keys_on_every_rank() -> None:
    results = run_ranks(4, state_of)
    assert all(result == results[0] for result in results)
    assert results[0][0] == {"step": ((), "Tensor"), "momentum_buffer": ((7, 13), "RaggedTensor")}
    names = sorted(name for entry in results[0].values() for name in entry)
    assert names == ["exp_avg", "exp_avg_sq"] * 0 + sorted(
        ["step", "momentum_buffer"] * 2 + ["step", "exp_avg", "exp_avg_sq"] * 2
    )


def load_torch_state(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, optimizer = make(mesh, ShardedAdamW, lr=1e-2)
    single = parameter_module(parameter_values(SHAPES))
    torch_optimizer = torch.optim.AdamW(single.parameters(), lr=1e-2, fused=True)

    def run_single(steps: range) -> None:
        for step in steps:
            for name, grad in rank_gradients(SHAPES, world_size, seed=step).mean.items():
                single[name].grad = grad.clone()
            torch_optimizer.step()

    run_single(range(2))
    module.load_state_dict(single.state_dict())
    optimizer.load_state_dict(torch_optimizer.state_dict())
    run_single(range(2, 4))
    for step in range(2, 4):
        backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=step).of_rank(rank))
        optimizer.step()
        optimizer.zero_grad()
    return values_of(single), values_of(module)


def test_state_of_torch_adamw_continues_exactly() -> None:
    for single, sharded in run_ranks(2, load_torch_state):
        assert_same([single, sharded])


def load_wrong_shape(rank: int, world_size: int, mesh: Any) -> tuple[str, bool]:
    _, optimizer = make(mesh)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    state["state"][1]["momentum_buffer"] = torch.zeros(3, 3)
    before = copy_state(optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state)
    unchanged = optimizer.param_groups[0]["lr"] == 0.02
    return str(error.value), unchanged and all(torch.equal(a, b) for a, b in pairs(before, copy_state(optimizer)))


def test_state_of_another_shape_is_refused_by_name_before_anything_changes() -> None:
    for message, is_unchanged in run_ranks(2, load_wrong_shape):
        assert "momentum_buffer" in message and "tall" in message and "(3, 3)" in message and "(40, 12)" in message
        assert is_unchanged


# -- groups -----------------------------------------------------------------------------------------------------------


def grow(rank: int, world_size: int, mesh: Any, how: str) -> Any:
    module = parameter_module(parameter_values(SHAPES))
    reference = parameter_module(parameter_values(SHAPES))
    named = dict(module.named_parameters())
    if how == "unfreeze":
        module["tall"].requires_grad_(False)
        optimizer = ShardedMuon(named.items(), mesh, lr=0.02)
    else:
        optimizer = ShardedMuon([(n, p) for n, p in named.items() if n != "tall"], mesh, lr=0.02)
    always = ShardedMuon(reference.named_parameters(), mesh, lr=0.02)
    frozen_pointer = module["tall"].data_ptr()
    for step in range(4):
        grads = rank_gradients(SHAPES, world_size, seed=step)
        mine = grads.of_rank(rank)
        if step == 2:
            assert module["tall"].data_ptr() == frozen_pointer and module["tall"] not in optimizer.state
            if how == "unfreeze":
                module["tall"].requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [("tall", module["tall"])]})
        if step < 2:
            mine["tall"] = None
        for target, opt in ((module, optimizer), (reference, always)):
            backward(target.named_parameters(), mine)
            opt.step()
            opt.zero_grad()
    return values_of(reference), values_of(module), len(optimizer.param_groups)


@pytest.mark.parametrize("how", ["unfreeze", "add_param_group"])
def test_parameters_that_come_later_join_at_the_next_step(how: str) -> None:
    for expected, found, num_groups in run_ranks(2, grow, how):
        assert_same([expected, found])
        assert num_groups == (2 if how == "unfreeze" else 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)


def test_a_module_is_routed_by_the_roles_of_its_parameters() -> None:
    model = Net()
    matrices, others = muon_param_groups(model, head="head")
    assert [name for name, _ in matrices["params"]] == ["hidden.weight"]
    assert others["algorithm"] == "adamw"
    assert {name for name, _ in others["params"]} == {
        "embedding.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"
    }  # fmt: skip
    with pytest.warns(UserWarning, match="looks like the output head"):
        assert [name for name, _ in muon_param_groups(model)[0]["params"]] == ["hidden.weight", "head.weight"]
    with pytest.raises(ValueError, match="is no module of Net"):
        muon_param_groups(model, head="lm_head")
    model.get_output_embeddings = lambda: model.head
    assert [name for name, _ in muon_param_groups(model)[0]["params"]] == ["hidden.weight"]


def group_hyperparameters(rank: int, world_size: int, mesh: Any) -> list[dict[str, Any]]:
    module = parameter_module(parameter_values(SHAPES))
    groups = [
        {"params": [module["wide"], module["bias"]], "weight_decay": 0.0, "adamw_lr": 3e-4},
        {"params": [module["tall"]], "algorithm": "adamw", "lr": 5e-4},
        {"params": []},
        {"params": module["scalar"]},
    ]
    optimizer = ShardedMuon(groups, mesh, lr=0.02, adamw_betas=(0.8, 0.9), adamw_eps=1e-6)
    keys = ("algorithm", "lr", "weight_decay", "betas", "eps", "momentum")
    return [{"n": len(g["params"]), **{k: g[k] for k in keys if k in g}} for g in optimizer.param_groups]


def test_what_a_group_says_wins_over_defaults() -> None:
    first, second, third, empty, last = run_ranks(1, group_hyperparameters)[0]
    assert (first["algorithm"], first["lr"], first["weight_decay"], first["eps"]) == ("muon", 0.02, 0.0, 1e-7)
    assert (second["algorithm"], second["lr"], second["weight_decay"]) == ("adamw", 3e-4, 0.0)
    assert (second["betas"], second["eps"]) == ((0.8, 0.9), 1e-6)
    assert (third["algorithm"], third["lr"], third["weight_decay"]) == ("adamw", 5e-4, 1e-2)
    assert empty["n"] == 0 and last == {**second, "lr": 1e-3, "weight_decay": 1e-2}


def tensor_lr(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = []
    for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        module, optimizer = make(mesh, lr=lr, adamw_lr=lr)
        for step in range(2):
            backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=step).of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()
        results.append(values_of(module))
    return tuple(results)


def test_tensor_lr_steps_like_a_number() -> None:
    for number, tensor in run_ranks(2, tensor_lr):
        assert_same([number, tensor])


# -- frozen and compiled ----------------------------------------------------------------------------------------------


def hooks_of_frozen(rank: int, world_size: int, mesh: Any) -> tuple[bool, int]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = [p.data_ptr() for p in model[0].parameters()]
    optimizer = ShardedMuon(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return before == [p.data_ptr() for p in model[0].parameters()], len(optimizer.state)


def test_frozen_parameters_are_left_alone() -> None:
    assert run_ranks(2, hooks_of_frozen) == [(True, 2)] * 2


def train_through_forward(rank: int, world_size: int, mesh: Any, how: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = ShardedMuon(model.named_parameters(), mesh, lr=0.02, bucket_mib=0.0005)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def forward(x: Tensor) -> Tensor:
        if how in ("reentrant", "non-reentrant"):
            for layer in model:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=how == "reentrant")
            return x
        return model(x)

    for _ in range(3):
        x = data.clone().requires_grad_(how == "reentrant")
        forward(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def test_activation_checkpointing_gives_the_same_parameters() -> None:
    """All ranks see the same data, so the mean is exact on two ranks; recomputation repeats the same kernels."""
    plain = run_ranks(2, train_through_forward, "plain")
    for how in ("reentrant", "non-reentrant"):
        assert_same([plain[0], *run_ranks(2, train_through_forward, how)])


# -- parameters that travel during the next forward -------------------------------------------------------------------


USES = {
    "nothing but metadata": lambda p: (p.shape, p.requires_grad, p.grad, p.numel()),
    "an average": lambda p: torch.zeros_like(p).lerp_(p, 0.5),
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "foreach": lambda p: torch._foreach_mul([p], 2.0),
    "print": repr,
    "numpy": lambda p: p.detach().numpy().sum(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, p.shape[-1]), p),
}


def travel(rank: int, world_size: int, mesh: Any, use: str) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    results = []
    classes = set()
    for overlap in (False, True):
        module, optimizer = make(mesh, overlap_forward=overlap)
        for step in range(3):
            backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=step).of_rank(rank))
            optimizer.step()
            optimizer.zero_grad()
            if overlap:
                classes.add(type(module["tall"]).__name__)
                USES[use](module["tall"])
                classes.add(type(module["tall"]).__name__)
        results.append({n: v.clone() for n, v in module.state_dict().items()})
        assert all(type(p) is nn.Parameter for p in module.values())
    return *results, classes


@pytest.mark.parametrize("use", USES)
def test_parameters_may_travel_until_their_first_use(use: str) -> None:
    for waited, travelled, classes in run_ranks(2, travel, use):
        assert_same([waited, travelled])
        stays = use == "nothing but metadata"
        assert classes == {"TravellingParameter"} | (set() if stays else {"Parameter"})


def compiled(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        optimizer = ShardedMuon(model.named_parameters(), mesh, lr=0.02)
        run = wrap(model)
        for _ in range(2):
            run(torch.ones(3, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values_of(model))
    return tuple(results)


def test_compiled_models_train_alike() -> None:
    """aot_eager runs the same kernels, so the bits are the same; gradients come all at once."""
    for eager, graph in run_ranks(2, compiled):
        assert_same([eager, graph])


def step_in(rank: int, world_size: int, mesh: Any, way: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_plain in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
            optimizer = ShardedMuon(model.named_parameters(), mesh, lr=0.02)
            compiled_step = torch.compile(optimizer.step, backend="eager")
            for number in range(3):
                model(torch.full((3, 8), 1.0 + number)).square().sum().backward()
                if is_plain or (way == "inference mode" and number == 2):
                    optimizer.step()
                elif way == "inference mode":
                    with torch.inference_mode():
                        optimizer.step()
                else:
                    compiled_step()
                optimizer.zero_grad()
            results.append(values_of(model))
    return *results, [str(warning.message) for warning in caught if "vescale" in str(warning.message)]


@pytest.mark.parametrize("way", ["a compiled step", "inference mode"])
def test_steps_run_as_they_are_wherever_they_are_called(way: str) -> None:
    for plain, other, warned in run_ranks(2, step_in, way):
        assert_same([plain, other])
        assert warned == []


UNKNOWN = {"betas": "; did you mean adamw_betas", "bucket_mb": "; did you mean bucket_mib", "nonsense": "'$"}


def misspell(rank: int, world_size: int, mesh: Any) -> None:
    for key, text in UNKNOWN.items():
        with pytest.raises(TypeError, match=f"^ShardedMuon has no keyword '{key}.*{text}"):
            make(mesh, **{key: 1})


def test_unknown_keywords_are_named_with_what_looks_like_them() -> None:
    run_ranks(1, misspell)


def numpy_lr(rank: int, world_size: int, mesh: Any) -> None:
    _, optimizer = make(mesh, lr=0.02 if rank else numpy.float64(0.02))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = numpy.float32(0.01 * (1 + rank))
    with pytest.raises(ValueError, match="ranks disagree"):
        optimizer.step()


def test_numbers_of_numpy_are_compared_by_value() -> None:
    run_ranks(2, numpy_lr)


def unfreeze_after_resume(rank: int, world_size: int, mesh: Any, kind: type[ShardedOptimizer], resumes: bool) -> Any:
    """'wide' trains, is frozen, and trains again; the resumed run begins while it is frozen."""
    module, optimizer = make(mesh, kind)
    for step in range(6):
        if step == 3 and resumes:
            state = optimizer.full_state_dict()
            module = parameter_module(values_of(module))
            module["wide"].requires_grad_(False)
            optimizer = kind(module.named_parameters(), mesh, lr=0.02, bucket_mib=0.001)
            optimizer.load_state_dict(state)
        module["wide"].requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        grads = rank_gradients(SHAPES, world_size, seed=step).of_rank(rank)
        backward(module.named_parameters(), {n: g for n, g in grads.items() if module[n].requires_grad})
        optimizer.step()
        optimizer.zero_grad()
    return values_of(module), optimizer.state[module["wide"]]["step"].item()


@pytest.mark.parametrize("kind", [ShardedAdamW, ShardedMuon])
def test_state_of_a_frozen_parameter_waits_until_it_is_not(kind: type[ShardedOptimizer]) -> None:
    plain, resumed = (run_ranks(2, unfreeze_after_resume, kind, resumes) for resumes in (False, True))
    for (expected, steps), (found, found_steps) in zip(plain, resumed, strict=True):
        assert_same([expected, found])
        assert steps == found_steps == 4
