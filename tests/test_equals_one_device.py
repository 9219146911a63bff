"""One promise: N ranks give the parameters of one device, bit for bit.

The reference is torch.optim.Muon and torch.optim.AdamW(fused=True), one separate parameter per matrix, fed the mean
gradients; the ranks' gradients are chosen so that sums and means are exact (tests/support/values.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.reference import Rule, adamw, after_steps, muon
from tests.support.values import MIXED_SHAPES, backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import ShardedAdamW, ShardedMuon

STEPS = 5
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
MUON = dict(lr=0.02, weight_decay=0.1, momentum=0.95)


def train(
    rank: int,
    world_size: int,
    mesh: Any,
    kind: str,
    arguments: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    micro_batches: int = 1,
    unused: dict[str, tuple[int, ...]] | None = None,
    unused_in_step: dict[int, dict[str, tuple[int, ...]]] | None = None,
    frozen: tuple[str, ...] = (),
    groups: list[dict[str, Any]] | None = None,
    ddp: bool = False,
    no_sync: bool = False,
) -> dict[str, Tensor]:
    module = parameter_module(parameter_values(shapes, dtype=dtype))
    for name in frozen:
        module[name].requires_grad_(False)
    named: Any = list(module.named_parameters())
    if groups is not None:
        named = [{**group, "params": [(name, module[name]) for name in group["params"]]} for group in groups]
    if ddp:
        wrapper = DistributedDataParallel(WeightedSum(module), find_unused_parameters=True)
        arguments = {**arguments, "grad_sync": "none"}
    optimizer = {"muon": ShardedMuon, "adamw": ShardedAdamW}[kind](named, mesh, bucket_mib=0.02, **arguments)
    for step in range(STEPS):
        missing = {**(unused or {}), **(unused_in_step or {}).get(step, {})}
        grads = rank_gradients(
            shapes, world_size, seed=step, micro_batches=micro_batches, dtype=dtype, unused=missing
        )
        for micro in range(micro_batches):
            mine = {n: g for n, g in grads.of_rank(rank, micro).items() if n not in frozen}
            if ddp:
                wrapper(mine).backward()
            elif no_sync and micro < micro_batches - 1:
                with optimizer.no_sync():
                    backward(module.named_parameters(), mine)
            else:
                backward(module.named_parameters(), mine)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in module.named_parameters()}


class WeightedSum(nn.Module):
    """A loss whose gradients are the given ones, as a forward that DDP can wrap."""

    def __init__(self, params: nn.ParameterDict) -> None:
        super().__init__()
        self.params = params

    def forward(self, grads: dict[str, Tensor | None]) -> Tensor:
        used = [(p, grads[n]) for n, p in self.params.items() if grads.get(n) is not None]
        return torch.stack([(p * g).sum().float() for p, g in used]).sum()


def mean_gradients(
    shapes: dict[str, tuple[int, ...]],
    world_size: int,
    dtype: torch.dtype,
    micro_batches: int = 1,
    unused: dict[str, tuple[int, ...]] | None = None,
    unused_in_step: dict[int, dict[str, tuple[int, ...]]] | None = None,
) -> list[dict[str, Tensor | None]]:
    return [
        dict(
            rank_gradients(
                shapes,
                world_size,
                seed=step,
                micro_batches=micro_batches,
                dtype=dtype,
                unused={**(unused or {}), **(unused_in_step or {}).get(step, {})},
            ).mean
        )
        for step in range(STEPS)
    ]


def assert_equal_on_all_ranks(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for rank, result in enumerate(results):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            worst = (result[name].float() - value.float()).abs().max().item() if value.numel() else 0.0
            assert torch.equal(result[name], value), f"rank {rank}, {name}: off by {worst}"


def mixed_rules(name: str, value: Tensor) -> Rule:
    return muon(**MUON) if value.ndim >= 2 else adamw(**ADAMW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_muon_and_adamw_in_one_optimizer(world_size: int, dtype: torch.dtype) -> None:
    results = run_ranks(world_size, train, "muon", MUON, MIXED_SHAPES, dtype)
    expected = after_steps(
        parameter_values(MIXED_SHAPES, dtype=dtype), mean_gradients(MIXED_SHAPES, world_size, dtype), mixed_rules
    )
    assert_equal_on_all_ranks(results, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_adamw_of_every_shape(world_size: int, dtype: torch.dtype) -> None:
    results = run_ranks(world_size, train, "adamw", ADAMW, MIXED_SHAPES, dtype)
    expected = after_steps(
        parameter_values(MIXED_SHAPES, dtype=dtype),
        mean_gradients(MIXED_SHAPES, world_size, dtype),
        lambda name, value: adamw(**ADAMW),
    )
    assert_equal_on_all_ranks(results, expected)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_fp32_master_copy_of_bf16_parameters(world_size: int, kind: str) -> None:
    dtype, master = torch.bfloat16, torch.float32
    arguments = {**(MUON if kind == "muon" else ADAMW), "master_dtype": master}
    results = run_ranks(world_size, train, kind, arguments, MIXED_SHAPES, dtype)
    expected = after_steps(
        parameter_values(MIXED_SHAPES, dtype=dtype),
        mean_gradients(MIXED_SHAPES, world_size, dtype),
        mixed_rules if kind == "muon" else lambda name, value: adamw(**ADAMW),
        master_dtype=master,
    )
    assert_equal_on_all_ranks(results, expected)


VARIANTS: dict[str, tuple[dict[str, Any], Rule]] = {
    "no nesterov": (dict(nesterov=False), muon(**MUON, nesterov=False)),
    "rms of adamw": (dict(adjust_lr_fn="match_rms_adamw"), muon(**MUON, adjust_lr_fn="match_rms_adamw")),
    "two steps": (dict(ns_steps=2), muon(**MUON, ns_steps=2)),
    "coefficients": (dict(ns_coefficients=(2.0, -1.5, 0.5)), muon(**MUON, ns_coefficients=(2.0, -1.5, 0.5))),
    "no momentum": (dict(momentum=0.0), muon(**{**MUON, "momentum": 0.0})),
    "no decay": (dict(weight_decay=0.0), muon(**{**MUON, "weight_decay": 0.0})),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_hyperparameter_of_muon(variant: str, dtype: torch.dtype) -> None:
    arguments, rule = VARIANTS[variant]
    results = run_ranks(2, train, "muon", {**MUON, **arguments}, MIXED_SHAPES, dtype)
    expected = after_steps(
        parameter_values(MIXED_SHAPES, dtype=dtype),
        mean_gradients(MIXED_SHAPES, 2, dtype),
        lambda name, value: rule if value.ndim >= 2 else adamw(**ADAMW),
    )
    assert_equal_on_all_ranks(results, expected)


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "fused qkv": ((48, 16), dict(splits=(32, 8, 8))),
    "four uneven splits": ((18, 6), dict(splits=(8, 8, 1, 1))),
    "heads of a stack": ((3, 12, 10), dict(splits=(4, 4, 4))),
    "interleaved gate and up": ((24, 10), dict(interleave=2)),
    "convolution": ((16, 8, 3, 3), dict(flatten="conv")),
    "stored in x out": ((3, 10, 24), dict(matrix_layout="in_out")),
    "splits, stored in x out": ((10, 24), dict(matrix_layout="in_out", splits=(16, 4, 4))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_inside_a_parameter_step_as_if_stored_apart(layout: str, adjust: str) -> None:
    shape, options = LAYOUTS[layout]
    shapes = {"fused": shape, "other": (32, 16)}
    groups = [{"params": ["fused"], **options}, {"params": ["other"]}]
    arguments = {**MUON, "adjust_lr_fn": adjust}
    results = run_ranks(4, train, "muon", arguments, shapes, torch.float32, 1, None, None, (), groups)
    expected = after_steps(
        parameter_values(shapes),
        mean_gradients(shapes, 4, torch.float32),
        {"fused": muon(**arguments, **options), "other": muon(**arguments)},
    )
    assert_equal_on_all_ranks(results, expected)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_four_micro_batches_step_as_one(world_size: int, no_sync: bool) -> None:
    results = run_ranks(
        world_size, train, "muon", MUON, MIXED_SHAPES, torch.float32, 4, None, None, (), None, False, no_sync
    )
    means = mean_gradients(MIXED_SHAPES, world_size, torch.float32, micro_batches=4)
    assert_equal_on_all_ranks(results, after_steps(parameter_values(MIXED_SHAPES), means, mixed_rules))


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_unused_on_one_rank_on_all_ranks_and_frozen(world_size: int) -> None:
    unused = {"tall": (world_size - 1,), "bias": (0,), "row": tuple(range(world_size)), "scalar": (1,)}
    in_step = {1: {"square": tuple(range(world_size)), "scale": tuple(range(world_size))}, 2: {"tall": (0,)}}
    frozen = ("column",)
    results = run_ranks(
        world_size, train, "muon", MUON, MIXED_SHAPES, torch.float32, 1, unused, in_step, frozen
    )
    means = mean_gradients(MIXED_SHAPES, world_size, torch.float32, 1, unused, in_step)
    means = [{n: None if n in frozen else g for n, g in mean.items()} for mean in means]
    assert_equal_on_all_ranks(results, after_steps(parameter_values(MIXED_SHAPES), means, mixed_rules))


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_groups_with_different_learning_rates(world_size: int) -> None:
    """The second group mixes matrices and others; its own lr wins for both parts."""
    groups = [{"params": ["wide", "tall", "bias"]}, {"params": ["square", "stack", "scale", "scalar"], "lr": 0.005}]
    shapes = {name: MIXED_SHAPES[name] for group in groups for name in group["params"]}
    results = run_ranks(world_size, train, "muon", MUON, shapes, torch.float32, 1, None, None, (), groups)

    def rules(name: str, value: Tensor) -> Rule:
        lr = {"lr": 0.005} if name in groups[1]["params"] else {}
        return muon(**{**MUON, **lr}) if value.ndim >= 2 else adamw(**{**ADAMW, **lr})

    means = mean_gradients(shapes, world_size, torch.float32)
    assert_equal_on_all_ranks(results, after_steps(parameter_values(shapes), means, rules))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_beside_distributed_data_parallel(world_size: int, kind: str) -> None:
    arguments = MUON if kind == "muon" else ADAMW
    unused = {"tall": (0,), "bias": tuple(range(world_size))}
    results = run_ranks(
        world_size, train, kind, arguments, MIXED_SHAPES, torch.float32, 1, unused, None, (), None, True
    )
    rules = mixed_rules if kind == "muon" else lambda name, value: adamw(**ADAMW)
    means = mean_gradients(MIXED_SHAPES, world_size, torch.float32, 1, unused)
    results = [{n.removeprefix("params."): p for n, p in result.items()} for result in results]
    assert_equal_on_all_ranks(results, after_steps(parameter_values(MIXED_SHAPES), means, rules))


def test_more_ranks_than_matrices() -> None:
    shapes = {"only": (7, 13), "bias": (3,)}
    results = run_ranks(8, train, "muon", MUON, shapes, torch.float32)
    means = mean_gradients(shapes, 8, torch.float32)
    assert_equal_on_all_ranks(results, after_steps(parameter_values(shapes), means, mixed_rules))


class TiedModel(nn.Module):
    """An embedding whose weight is also the output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6, bias=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens)))


def train_tied(rank: int, world_size: int, mesh: Any, as_module: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Every rank sees the same tokens, so that the mean is exact where world_size is a power of two."""
    model = TiedModel()
    groups = [
        {"params": [("hidden.weight", model.hidden.weight), ("hidden.bias", model.hidden.bias)]},
        {"params": [("embedding.weight", model.embedding.weight)], "algorithm": "adamw"},
    ]
    optimizer = ShardedMuon(model if as_module else groups, mesh, lr=0.02)
    seen = []
    for step in range(STEPS):
        tokens = torch.arange(step, step + 8) % 11
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11).backward()
        optimizer.step()
        seen.append(model.head.weight.detach().clone())
        optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    return {n: p.detach().clone() for n, p in model.named_parameters()}, seen


@pytest.mark.parametrize("as_module", [True, False])
def test_tied_weights(as_module: bool) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    muons = torch.optim.Muon([model.hidden.weight], lr=0.02)
    adamws = torch.optim.AdamW([model.embedding.weight, model.hidden.bias], fused=True, **ADAMW)
    for step in range(STEPS):
        tokens = torch.arange(step, step + 8) % 11
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11).backward()
        for optimizer in (muons, adamws):
            optimizer.step()
            optimizer.zero_grad()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    for world_size in (2, 4):
        assert_equal_on_all_ranks([r for r, _ in run_ranks(world_size, train_tied, as_module)], expected)
