"""One promise: the sequence of collectives depends on the plan and on what the ranks agreed, never on one rank's data.

A rank that does otherwise (fewer backwards, other parameters, a failure) gives the right mean or an error on all ranks,
never a hang. The expected gradient is the sum over ranks of what each rank's backwards produced, divided by the ranks.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon, ShardedOptimizer

SHAPES = {"a": (7, 13), "b": (40, 12), "c": (5, 5), "d": (13,), "e": ()}


def make(mesh: Any, kind: type[ShardedOptimizer] = ShardedAdamW, **arguments: Any) -> tuple[nn.ParameterDict, Any]:
    module = parameter_module(parameter_values(SHAPES))
    return module, kind(module.named_parameters(), mesh, **{"lr": 0.01, "bucket_mib": 0.0005, **arguments})


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.full_tensor() for n, p in module.named_parameters()}


# -- gradients --------------------------------------------------------------------------------------------------------


def script(rank: int, world_size: int, mesh: Any, backwards: list[list[tuple[list[str], bool]]]) -> Any:
    """Every rank runs its own list of backwards: (names used, synchronise)."""
    module, optimizer = make(mesh)
    for round_number in range(2):
        for number, (names, synchronise) in enumerate(backwards[rank]):
            grads = rank_gradients(SHAPES, world_size, seed=10 * round_number + number).of_rank(rank)
            used = [(n, module[n]) for n in names]
            if synchronise:
                backward(used, grads)
            else:
                with optimizer.no_sync():
                    backward(used, grads)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        optimizer.step()
        found = full_grads(module)
        optimizer.zero_grad()
    return float(norm), found


def expected_grads(world_size: int, backwards: list[list[tuple[list[str], bool]]]) -> dict[str, Tensor | None]:
    result: dict[str, Tensor | None] = dict.fromkeys(SHAPES)
    for rank in range(world_size):
        for number, (names, _) in enumerate(backwards[rank]):
            grads = rank_gradients(SHAPES, world_size, seed=10 + number).of_rank(rank)
            for name in names:
                so_far = result[name]
                result[name] = grads[name] if so_far is None else so_far + grads[name]
    return {n: None if g is None else g / world_size for n, g in result.items()}


ALL = list(SHAPES)
SCRIPTS = {
    "all ranks alike": [[(ALL, True)]] * 3,
    "3, 2 and 1 backwards": [[(ALL, True)] * 3, [(ALL, True)] * 2, [(ALL, True)]],
    "5 backwards and none": [[(ALL, True)] * 5, [], [(["a"], True)]],
    "a rank under no_sync only": [[(ALL, True)], [(ALL, False)], [(ALL, False), (ALL, True)]],
    "all under no_sync": [[(ALL, False)] * 2] * 3,
    "disjoint subsets": [[(["a", "d"], True)], [(["b"], True)], [(["c"], True), (["e"], True)]],
    "nobody": [[], [], []],
    "no_sync on one, nothing else": [[(["b"], False)], [], []],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_may_run_different_backwards(name: str) -> None:
    expected = expected_grads(3, SCRIPTS[name])
    results = run_ranks(3, script, SCRIPTS[name])
    for norm, found in results:
        assert norm == results[0][0]
        for key, value in expected.items():
            assert (found[key] is None) == (value is None), key
            if value is not None:
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7)


def random_order(rank: int, world_size: int, mesh: Any) -> dict[str, Tensor]:
    """The graph visits parameters in another order on each rank, so gradients finish in another order."""
    module, optimizer = make(mesh)
    names = list(SHAPES)
    random.Random(rank).shuffle(names)
    grads = rank_gradients(SHAPES, world_size).of_rank(rank)
    total = torch.zeros(())
    for name in names:
        total = total + (module[name] * grads[name]).sum()
    total.backward()
    optimizer.step()
    return full_grads(module)


def test_order_of_completion_may_differ() -> None:
    mean = rank_gradients(SHAPES, 4).mean
    for found in run_ranks(4, random_order):
        assert all(torch.equal(found[name], mean[name]) for name in SHAPES)


def accumulate_and_edit(rank: int, world_size: int, mesh: Any, edit: str) -> dict[str, Tensor]:
    module, optimizer = make(mesh)
    grads = [rank_gradients(SHAPES, world_size, seed=seed).of_rank(rank) for seed in range(2)]
    backward(module.named_parameters(), grads[0])
    if edit == "drop one":
        module["b"].grad = None
    elif edit == "drop all":
        module.zero_grad()
    elif edit == "replace":
        module["b"].grad = module["b"].grad * 2
    elif edit == "in place":
        module["b"].grad.mul_(2)
    elif edit == "zero":
        optimizer.zero_grad(set_to_none=False)
    backward(module.named_parameters(), grads[1])
    optimizer.step()
    return full_grads(module)


@pytest.mark.parametrize("edit", ["none", "drop one", "drop all", "replace", "in place", "zero"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_edits_between_two_backwards_are_followed(world_size: int, edit: str) -> None:
    first, second = (rank_gradients(SHAPES, world_size, seed=seed).mean for seed in range(2))
    factor = {name: 0.0 if edit in ("drop all", "zero") else 1.0 for name in SHAPES}
    factor["b"] = {"none": 1.0, "replace": 2.0, "in place": 2.0}.get(edit, 0.0)
    for found in run_ranks(world_size, accumulate_and_edit, edit):
        for name in SHAPES:
            assert torch.equal(found[name], factor[name] * first[name] + second[name]), name


def zeros_stay(rank: int, world_size: int, mesh: Any) -> tuple[bool, bool, list[bool]]:
    """zero_grad(set_to_none=False) keeps zero gradients: AdamW then still decays, as torch's does."""
    module, optimizer = make(mesh, weight_decay=0.5)
    before = module["b"].detach().clone()
    optimizer.step()
    untouched = torch.equal(before, module["b"])
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = module["b"].detach().clone()
    optimizer.step()
    moved = not torch.equal(before, module["b"])
    optimizer.zero_grad()
    optimizer.step()
    return untouched, moved, [p.grad is None for p in module.values()]


def test_without_gradients_nothing_moves_and_zero_gradients_count_as_gradients() -> None:
    assert run_ranks(2, zeros_stay) == [(True, True, [True] * len(SHAPES))] * 2


def plain_grad(rank: int, world_size: int, mesh: Any) -> str:
    module, optimizer = make(mesh)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    if rank == 1:
        module["b"].grad = torch.ones(40, 12)
    before = module["b"].detach().clone()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert torch.equal(before, module["b"])
    return str(error.value)


def test_a_plain_gradient_on_one_rank_raises_on_all() -> None:
    for message in run_ranks(2, plain_grad):
        assert "'b' of shape (40, 12) was given a plain .grad" in message and "found on rank 1 of 2" in message


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("out of luck")


def failing_backward(rank: int, world_size: int, mesh: Any, failing: tuple[int, ...], clear: bool) -> Any:
    module, optimizer = make(mesh)
    grads = rank_gradients(SHAPES, world_size).of_rank(rank)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    # Autograd runs what was made last first: the failure comes after the other gradients.
    first = Failing.apply(module["a"]) if rank in failing else module["a"]
    losses = {n: ((first if n == "a" else p) * grads[n]).sum() for n, p in module.named_parameters()}
    message = "none"
    with contextlib.suppress(ValueError):
        torch.stack(list(losses.values())).sum().backward()
    if clear:
        optimizer.zero_grad()
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    untouched = all(torch.equal(before[n], p) for n, p in module.named_parameters())
    backward(module.named_parameters(), grads)
    optimizer.step()
    return message, untouched, full_grads(module)


@pytest.mark.parametrize("failing, clear", [((1,), False), ((0, 1, 2), False), ((1,), True), ((0, 1, 2), True)])
def test_a_backward_that_raises_on_one_rank(failing: tuple[int, ...], clear: bool) -> None:
    mean = rank_gradients(SHAPES, 3).mean
    for message, untouched, found in run_ranks(3, failing_backward, failing, clear):
        assert ("backward raised on at least one rank" in message) == (not clear)
        assert untouched
        assert all(torch.equal(found[name], mean[name]) for name in SHAPES)


def skipped_batch(rank: int, world_size: int, mesh: Any) -> Any:
    """All ranks throw a batch away in which only some ran a backward; rank 1 was not among them."""
    module, optimizer = make(mesh)
    old, new = (rank_gradients(SHAPES, world_size, seed=seed).of_rank(rank) for seed in range(2))
    if rank != 1:
        backward(module.named_parameters(), old)
    optimizer.zero_grad()
    optimizer.step()
    backward(module.named_parameters(), new)
    optimizer.step()
    found = full_grads(module)
    optimizer.zero_grad()
    if rank != 1:
        backward(module.named_parameters(), old)
    optimizer.zero_grad()
    backward(module.named_parameters(), new)
    before = module["b"].detach().clone()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert torch.equal(before, module["b"])
    backward(module.named_parameters(), new)
    optimizer.step()
    return found, str(error.value), full_grads(module)


def test_a_batch_that_all_ranks_throw_away() -> None:
    mean = rank_gradients(SHAPES, 3, seed=1).mean
    for found, message, again in run_ranks(3, skipped_batch):
        assert all(torch.equal(found[name], mean[name]) for name in SHAPES)
        assert "gradients from before and after zero_grad() met" in message
        assert all(torch.equal(again[name], mean[name]) for name in SHAPES)


def moved_model(rank: int, world_size: int, mesh: Any) -> list[bool]:
    module, optimizer = make(mesh)
    module.to("cpu").to(torch.float32)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    module.to("cpu")
    optimizer.step()
    return [torch.equal(found, rank_gradients(SHAPES, world_size).mean[n]) for n, found in full_grads(module).items()]


def test_module_to_the_same_device_changes_nothing() -> None:
    assert run_ranks(2, moved_model) == [[True] * len(SHAPES)] * 2


def nan_on_one_rank(rank: int, world_size: int, mesh: Any) -> list[bool]:
    module, optimizer = make(mesh, ShardedMuon)
    for step in range(2):
        grads = rank_gradients(SHAPES, world_size, seed=step).of_rank(rank)
        if rank == 0:
            grads["a"][:] = torch.nan
        backward(module.named_parameters(), grads)
        optimizer.step()
        optimizer.zero_grad()
    return [bool(p.isnan().any()) for p in module.values()]


def test_a_nan_on_one_rank_reaches_all_and_hangs_none() -> None:
    assert run_ranks(3, nan_on_one_rank) == [[True, False, False, False, False]] * 3


def two_optimizers(rank: int, world_size: int, mesh: Any) -> dict[str, Tensor]:
    """Two optimizers whose hooks fire in one backward, interleaved differently on each rank."""
    module = parameter_module(parameter_values(SHAPES))
    named = list(module.named_parameters())
    first = ShardedAdamW(named[:2], mesh, bucket_mib=0.0005)
    second = ShardedMuon(named[2:], mesh, bucket_mib=0.0005)
    names = [n for n, _ in named]
    random.Random(rank).shuffle(names)
    grads = rank_gradients(SHAPES, world_size).of_rank(rank)
    total = torch.zeros(())
    for name in names:
        total = total + (module[name] * grads[name]).sum()
    total.backward()
    first.step()
    second.step()
    return full_grads(module)


def test_two_optimizers_in_one_backward() -> None:
    mean = rank_gradients(SHAPES, 3).mean
    for found in run_ranks(3, two_optimizers):
        assert all(torch.equal(found[name], mean[name]) for name in SHAPES)


# -- counts -----------------------------------------------------------------------------------------------------------


def count_collectives(rank: int, world_size: int, mesh: Any, num_params: int) -> int:
    module = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(num_params)])
    optimizer = ShardedMuon(module.parameters(), mesh)
    calls = 0

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    names = ("isend", "irecv", "broadcast", "all_reduce", "all_to_all_single", "all_gather_into_tensor")
    originals = {name: getattr(dist, name) for name in names}
    for name, function in originals.items():
        setattr(dist, name, counting(function))
    try:
        torch.stack([p.sum() for p in module]).sum().backward()
        optimizer.step()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return calls


def test_number_of_collectives_does_not_grow_with_the_parameters() -> None:
    few, many = run_ranks(2, count_collectives, 8), run_ranks(2, count_collectives, 200)
    assert few == many and few[0] == few[1] > 0


# -- construction -----------------------------------------------------------------------------------------------------


def differing_construction(rank: int, world_size: int, mesh: Any, what: str) -> str:
    shapes = dict(SHAPES)
    lr, dtype = 0.01, torch.float32
    if rank == 1:
        if what == "shape":
            shapes["b"] = (41, 12)
        elif what == "order":
            shapes = dict(reversed(shapes.items()))
        elif what == "count":
            del shapes["e"]
        elif what == "lr":
            lr = 0.02
        elif what == "dtype":
            dtype = torch.bfloat16
    module = parameter_module(parameter_values(shapes, dtype=dtype))
    pointers = [p.data_ptr() for p in module.values()]
    arguments = {"bucket_mib": 2} if what == "bucket_mib" and rank == 1 else {}
    try:
        ShardedMuon(module.named_parameters(), mesh, lr=lr, **arguments)
    except ValueError as error:
        assert pointers == [p.data_ptr() for p in module.values()]
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "what, names",
    [
        ("shape", ["'b'", "(40, 12)", "(41, 12)"]),
        ("order", ["'a'", "'c'"]),
        ("count", ["'e'", "nothing"]),
        ("lr", ["'lr': 0.01", "'lr': 0.02"]),
        ("dtype", ["'a'", "float32", "bfloat16"]),
        ("bucket_mib", ["bucket_bytes"]),
    ],
)
def test_a_difference_at_construction_raises_on_every_rank_and_is_named(what: str, names: list[str]) -> None:
    messages = run_ranks(3, differing_construction, what)
    assert messages[0] == messages[1] == messages[2]
    for name in ["ranks disagree", *names]:
        assert name in messages[0]


def part_ways(rank: int, world_size: int, mesh: Any, what: str) -> str:
    """Rank 1 does something else than the others, and all are told."""
    module = parameter_module(parameter_values(SHAPES))
    optimizers = [ShardedAdamW(list(module.named_parameters())[part::2], mesh) for part in range(2)]
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size, seed=0).of_rank(rank))
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    stepping = optimizers
    try:
        if what == "another order" and rank == 1:
            stepping = optimizers[::-1]
        elif what == "a parameter less" and rank == 1:
            optimizers[0].param_groups[0]["params"].pop()
        elif what == "a group less" and rank == 1:
            optimizers[0].param_groups.clear()
        elif what == "another optimizer" and rank == 1:
            ShardedAdamW([torch.nn.Parameter(torch.zeros(2))], mesh)
        elif what == "only one steps" and rank == 1:
            stepping = optimizers[1:]
        for optimizer in stepping:
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        assert all(torch.equal(param, before[name]) for name, param in module.named_parameters())
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another order", ["rank 0 at optimizer", "rank 1 at optimizer", "in the same order on all ranks"]),
        ("only one steps", ["rank 0 at optimizer", "rank 1 at optimizer", "in the same order on all ranks"]),
        ("a parameter less", ["param_names", "found on rank 1 of 3"]),
        ("a group less", ["rank 0 at optimizer", "rank 1 at parameters that left their groups"]),
        ("another optimizer", ["rank 0 at optimizer", "rank 1 at construction of an optimizer"]),
    ],
)
def test_ranks_that_part_ways_are_told(what: str, words: list[str]) -> None:
    for message in run_ranks(3, part_ways, what):
        assert all(word in message for word in words), message


def differing_values(rank: int, world_size: int, mesh: Any, keep: bool) -> tuple[list[str], dict[str, Tensor]]:
    import warnings

    module = parameter_module(parameter_values(SHAPES))
    with torch.no_grad():
        module["b"][0, 0] += rank
        module["c"] += 10 * rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ShardedMuon(module.named_parameters(), mesh, broadcast_parameters=not keep)
    texts = [str(w.message) for w in caught if "differ" in str(w.message)]
    return texts, {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("keep", [False, True])
def test_parameters_that_differ_between_ranks(keep: bool) -> None:
    values = parameter_values(SHAPES)
    for rank, (texts, found) in enumerate(run_ranks(3, differing_values, keep)):
        if keep:
            assert texts == [] and torch.equal(found["c"], values["c"] + 10 * rank)
        else:
            assert len(texts) == 1 and "'b'" in texts[0]
            assert all(torch.equal(found[name], values[name]) for name in values)


def replaced_storage(rank: int, world_size: int, mesh: Any, how: str, clears: bool) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = ShardedMuon(model.named_parameters(), mesh)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if clears:
        optimizer.zero_grad()
    x = torch.ones(2, 4)
    try:
        if how == "to bf16":
            model.to(torch.bfloat16)
            x = x.bfloat16()
        elif how == "to float64 and back":
            model.double().float()
        elif how == "assign" or (how == "assign on rank 1" and rank == 1):
            model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
        elif how == "assign a layer":
            model[1].load_state_dict({n: v.clone() for n, v in model[1].state_dict().items()}, assign=True)
        model(x).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize(
    "how, text",
    [
        ("to bf16", "was replaced after the optimizer was made"),
        ("to float64 and back", "was replaced after the optimizer was made"),
        ("assign", "parameter '0.weight' of shape (4, 4) is no longer part of its module"),
        ("assign on rank 1", "parameter '0.weight' of shape (4, 4) is no longer part of its module"),
        ("assign a layer", "parameter '1.weight' of shape (3, 4) is no longer part of its module"),
        ("nothing", "no error"),
    ],
)
def test_replaced_storage_is_detected_by_the_next_step(how: str, text: str, clears: bool) -> None:
    # torch 2.11 finds it itself where the old gradients are still there.
    texts = (text, "mixed torch.Tensor and DTensor") if torch.__version__ < "2.12" else (text,)
    for message in run_ranks(2, replaced_storage, how, clears):
        assert any(text in message for text in texts), message


def write_between_forward_and_backward(rank: int, world_size: int, mesh: Any) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ShardedMuon(model.named_parameters(), mesh)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def test_a_step_between_forward_and_backward_is_detected() -> None:
    assert all("modified by an inplace operation" in text for text in run_ranks(2, write_between_forward_and_backward))


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def wrong_ddp(rank: int, world_size: int, mesh: Any, how: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    try:
        if how == "before":
            wrapped = DistributedDataParallel(model)
            ShardedMuon(wrapped.parameters(), mesh)
        elif how == "after":
            optimizer = ShardedMuon(model.parameters(), mesh)
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        elif how == "not wrapped":
            optimizer = ShardedMuon(model.parameters(), mesh, grad_sync="none")
            (model(torch.ones(2, 4)).sum() * (1 + rank)).backward()
            optimizer.step()
        elif how == "gradient on one rank":
            optimizer = ShardedMuon(model.parameters(), mesh, grad_sync="none")
            model[0 if rank == 0 else 1](torch.ones(2, 4)).sum().backward()
            optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "how, text",
    [
        ("before", "wrapped by DistributedDataParallel"),
        ("after", "wrapped by DistributedDataParallel"),
        ("not wrapped", "differs between ranks"),
        ("gradient on one rank", "has a gradient on some ranks only"),
    ],
)
def test_wrong_combinations_with_ddp_raise_on_every_rank(how: str, text: str) -> None:
    assert all(text in message for message in run_ranks(2, wrong_ddp, how))


def shared_memory(rank: int, world_size: int, mesh: Any) -> list[str]:
    messages = []
    base = nn.Parameter(torch.randn(4, 4))
    alias = nn.Parameter(base.data)
    for params, error_type in [
        ([("x", base), ("y", alias)], ValueError),
        ([("z", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))], ValueError),
        ([("m", nn.Parameter(torch.zeros(2, 2, device="meta")))], ValueError),
        ([("g", nn.Parameter(torch.zeros(2, 2)))], TypeError),
    ]:
        with pytest.raises(error_type) as error:
            ShardedMuon(params, "cpu" if error_type is TypeError else mesh)
        messages.append(str(error.value))
    return messages


def test_parameters_that_cannot_be_rehomed_are_named() -> None:
    shared, complex_, meta, mesh = run_ranks(1, shared_memory)[0]
    assert "'x' and 'y' are different objects over the same memory" in shared
    assert "'z' of shape (2, 2) has dtype torch.complex64" in complex_
    assert "'m' of shape (2, 2) is on meta, but the mesh is of cpu devices" in meta
    assert "give a DeviceMesh" in mesh


def gradient_is_sharded(rank: int, world_size: int, mesh: Any) -> tuple[str, int, int]:
    module, _ = make(mesh)
    backward(module.named_parameters(), rank_gradients(SHAPES, world_size).of_rank(rank))
    held = sum(p.grad.to_local().numel() for p in module.values())
    assert all(isinstance(p.grad, RaggedTensor) for p in module.values())
    return type(module["b"].grad).__name__, held, sum(p.numel() for p in module.values())


def test_gradients_are_sharded_after_backward() -> None:
    results = run_ranks(4, gradient_is_sharded)
    assert sum(held for _, held, _ in results) == results[0][2]
