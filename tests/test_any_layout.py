"""One promise: parameters that are sharded already, however, are updated as on one device, bit for bit.

Layouts are made by torch (`fully_shard`, `parallelize_module`); gradients are injected into `.grad`. The references are
those of the other tests: stock torch.optim.Muon and AdamW(fused=True), Shampoo and SOAP tile by tile.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support import reference_shampoo, reference_soap
from tests.support.ranks import run_ranks
from tests.support.reference import adamw, after_steps, muon, muon_for_matrices
from tests.support.sharded_models import (
    LAYOUTS,
    Holder,
    differences,
    mesh_of,
    set_gradients,
    sharded,
    whole,
    world_mesh,
)
from tests.support.values import parameter_values, rank_gradients
from vescale_optim import ShardedAdamW, ShardedMuon, ShardedOptimizer, ShardedShampoo, ShardedSOAP

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (7, 13),
    "row": (1, 64),
    "column": (64, 1),
    "tall": (70, 40),
    "square": (5, 5),
    "even": (8, 16),
    "stack": (4, 16, 24),
    "bias": (13,),
    "one": (1,),
}
STEPS = 5
MUON = dict(lr=0.02, weight_decay=0.1)
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
OPTIMIZERS: dict[str, tuple[type[ShardedOptimizer], dict[str, Any]]] = {
    "muon": (ShardedMuon, MUON),
    "adamw": (ShardedAdamW, ADAMW),
    "shampoo": (ShardedShampoo, dict(lr=0.01, max_preconditioner_dim=32, precondition_frequency=2, weight_decay=0.1)),
    "soap": (ShardedSOAP, dict(lr=0.01, max_precond_dim=32, precondition_frequency=2)),
}

Gradients = Mapping[str, Tensor | None]


def expected(
    kind: str, values: Mapping[str, Tensor], steps: Sequence[Gradients], rules: Any = None, **options: Any
) -> dict[str, Tensor]:
    """What one device computes."""
    if kind == "shampoo":
        one = reference_shampoo.Shampoo(values, lr=0.01, block=32, frequency=2, weight_decay=0.1)
    elif kind == "soap":
        one = reference_soap.SOAP(values, lr=0.01, block=32, frequency=2)
    else:
        matrices = {"muon": muon(**MUON), "adamw": adamw(**ADAMW)}[kind]
        rules = rules or muon_for_matrices(matrices, adamw(**ADAMW))
        return after_steps(values, steps, rules, **options)
    return reference_shampoo.after_steps(one, steps)


def gradients(
    shapes: Mapping[str, Sequence[int]] = SHAPES, steps: int = STEPS, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    return [parameter_values(shapes, seed=1000 + step, dtype=dtype) for step in range(steps)]


def make(kind: str, params: Any, mesh: Any, **options: Any) -> ShardedOptimizer:
    optimizer, arguments = OPTIMIZERS[kind]
    return optimizer(params, mesh, grad_sync="none", **arguments, **options)


def train(
    rank: int,
    world_size: int,
    mesh: Any,
    layout: str,
    kind: str,
    values: Mapping[str, Tensor],
    steps: Sequence[Gradients],
    options: Mapping[str, Any] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Tensor]:
    params = sharded(layout, values)
    assert not differences(whole(params), values)
    named: Any = params.items()
    if groups is not None:
        named = [{"params": [(name, params[name])], **group} for name, group in groups.items()]
    optimizer = make(kind, named, world_mesh(), **(options or {}))
    for grads in steps:
        set_gradients(params, layout, grads)
        optimizer.step()
        optimizer.zero_grad()
    return whole(params)


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_parameters_of_one_device(layout: str, kind: str) -> None:
    values = parameter_values(SHAPES)
    reference = expected(kind, values, gradients())
    for found in run_ranks(LAYOUTS[layout][0], train, layout, kind, values, gradients()):
        assert differences(found, reference) == {}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("layout", ["fsdp_on_2", "fsdp_tensor", "hsdp"])
@pytest.mark.parametrize("master", [torch.float32, None])
def test_bf16_parameters_with_and_without_a_master_copy(layout: str, kind: str, master: torch.dtype | None) -> None:
    values, grads = parameter_values(SHAPES, dtype=torch.bfloat16), gradients(dtype=torch.bfloat16)
    reference = expected(kind, values, grads, master_dtype=master)
    for found in run_ranks(LAYOUTS[layout][0], train, layout, kind, values, grads, {"master_dtype": master}):
        assert differences(found, reference) == {}


# Six heads of three rows, on 2 and on 4 ranks cut inside a head; gate and up; interleaved; stored [in, out]; a kernel.
MATRIX_LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "heads": ((18, 8), dict(splits=(3,) * 6)),
    "qkv": ((22, 8), dict(splits=(12, 5, 5))),
    "gate_up": ((3, 14, 8), dict(splits=(9, 5))),
    "interleaved": ((14, 6), dict(interleave=2)),
    "in_out": ((3, 10, 6), dict(matrix_layout="in_out")),
    "kernel": ((6, 3, 3, 3), dict(flatten="conv")),
}


@pytest.mark.parametrize("layout", ["fsdp_on_2", "fsdp_on_4", "fsdp_columns_on_2", "hsdp"])
def test_shard_borders_inside_heads_and_interleaved_rows(layout: str) -> None:
    shapes = {name: shape for name, (shape, _) in MATRIX_LAYOUTS.items()}
    groups = {name: group for name, (_, group) in MATRIX_LAYOUTS.items()}
    values, grads = parameter_values(shapes), gradients(shapes)
    rules = {name: muon(**MUON, **group) for name, group in groups.items()}
    reference = expected("muon", values, grads, rules)
    for found in run_ranks(LAYOUTS[layout][0], train, layout, "muon", values, grads, None, groups):
        assert differences(found, reference) == {}


# -- gradients that are missing, or lie otherwise ---------------------------------------------------------------------

# step -> name -> (ranks without a gradient, ranks whose part counts as zeros: no replica has it either)
Missing = dict[int, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]
MISSING: dict[str, Missing] = {
    "fsdp_on_2": {
        0: {"tall": ((1,), (1,)), "bias": ((0,), (0,))},
        1: {"tall": ((0, 1), ())},
        3: {name: ((0,), (0,)) for name in SHAPES},
        4: {name: ((0, 1), ()) for name in SHAPES},
    },
    "hsdp": {
        0: {"wide": ((1,), ()), "bias": ((2, 3), ()), "stack": ((0, 2), (0, 2))},
        1: {name: ((0, 1), ()) for name in SHAPES},
        3: {name: ((0, 1, 2, 3), ()) for name in SHAPES},
    },
    # An expert parallel rank whose experts got no token; later no expert at all.
    "experts": {0: {"stack": ((1, 3), (1, 3))}, 2: {"stack": ((0, 1, 2, 3), ())}, 4: {"tall": ((2,), (2,))}},
}


def train_with_missing(
    rank: int, world_size: int, mesh: Any, layout: str, kind: str, values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Gradients]]:
    """The parameters, and the gradients that one device would have seen."""
    params = sharded(layout, values)
    optimizer = make(kind, params.items(), world_mesh())
    seen = []
    for step, grads in enumerate(gradients()):
        missing = MISSING[layout].get(step, {})
        set_gradients(params, layout, grads)
        logical = {name: param.grad.clone() for name, param in params.items()}
        for name, (lacking, zeroed) in missing.items():
            if rank in lacking:
                params[name].grad = None
            if rank in zeroed:
                logical[name].to_local().zero_()
        everywhere = [name for name, (lacking, _) in missing.items() if len(lacking) == world_size]
        seen.append({name: None if name in everywhere else grad for name, grad in whole(logical).items()})
        optimizer.step()
        optimizer.zero_grad()
    return whole(params), seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", MISSING)
def test_gradients_missing_on_some_or_all_ranks(layout: str, kind: str) -> None:
    values = parameter_values(SHAPES)
    for found, seen in run_ranks(LAYOUTS[layout][0], train_with_missing, layout, kind, values):
        assert differences(found, expected(kind, values, seen)) == {}


def step_over_nan(rank: int, world_size: int, mesh: Any, kind: str) -> tuple[dict[str, Tensor], list[str]]:
    params = sharded("fsdp_on_2", parameter_values(SHAPES))
    optimizer = make(kind, params.items(), world_mesh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, grads in enumerate(gradients()):
            set_gradients(params, "fsdp_on_2", grads)
            if step == 2 and rank == 1:
                params["tall"].grad.to_local()[0, 0] = math.nan
            optimizer.step()
    return whole(params), [str(warning.message) for warning in caught if "skip this step" in str(warning.message)]


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_a_nan_on_one_rank_skips_the_step_on_all(kind: str) -> None:
    reference = expected(kind, parameter_values(SHAPES), [grads for step, grads in enumerate(gradients()) if step != 2])
    for found, messages in run_ranks(2, step_over_nan, kind):
        assert differences(found, reference) == {}
        assert len(messages) == 1 and "'tall'" in messages[0]


ROUTER = {"router": (6, 10), "norm": (10,)}


def place_of(kind: str, name: str) -> Any:
    """How a gradient lies on the tp axis, over which its parameter is whole."""
    return {"partial": Partial(), "whole": Replicate(), "cut": Shard(0 if name == "norm" else 1)}[kind]


def step_on_odd(
    rank: int, world_size: int, mesh: Any, cut: bool, lacking: Sequence[int], kinds: Sequence[str]
) -> dict[str, Tensor]:
    """Parameters whole on the tp axis, with gradients that are still to be summed over it, or lie otherwise; by step."""
    grid = mesh_of((2, 2), ("dp", "tp"))
    tp = grid.get_local_rank("tp")
    first = Shard(0) if cut else Replicate()
    params = {
        name: nn.Parameter(distribute_tensor(value, grid, [first, Replicate()]))
        for name, value in parameter_values(ROUTER).items()
    }
    optimizer = make("muon", params.items(), world_mesh())
    for step in range(STEPS):
        kind, grads = kinds[step % len(kinds)], rank_gradients(ROUTER, 2, seed=step)
        for name, param in params.items():
            if kind == "partial":
                part = grads.of_rank(tp)[name]
                local = distribute_tensor(part, grid["dp"], [first], src_data_rank=None).to_local()
            else:
                there = [first, place_of(kind, name)]
                local = distribute_tensor(2 * grads.mean[name], grid, there, src_data_rank=None).to_local()
            param.grad = DTensor.from_local(
                local, grid, [first, place_of(kind, name)], run_check=False, shape=param.shape, stride=param.stride()
            )
        if rank in lacking:
            params["router"].grad = None
        optimizer.step()
    return whole(params)


def odd_gradients(step: int, kind: str, lacks_second: bool) -> dict[str, Tensor]:
    """What they add up to; of the router without what the second rank of tp holds."""
    grads = rank_gradients(ROUTER, 2, seed=step)
    sums = {name: 2 * mean for name, mean in grads.mean.items()}
    if lacks_second and kind == "partial":
        sums["router"] = grads.of_rank(0)["router"]
    elif lacks_second and kind == "cut":
        sums["router"][:, 5:] = 0
    return sums


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("lacking", [(), (1, 3)])
@pytest.mark.parametrize("kinds", [("partial",), ("cut", "partial", "whole")])
def test_gradients_that_lie_elsewhere(cut: bool, lacking: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    grads = [odd_gradients(step, kinds[step % len(kinds)], bool(lacking)) for step in range(STEPS)]
    reference = expected("muon", parameter_values(ROUTER), grads)
    for found in run_ranks(4, step_on_odd, cut, lacking, kinds):
        assert differences(found, reference) == {}


def step_on_sub_meshes(rank: int, world_size: int, mesh: Any) -> dict[str, Tensor]:
    """Matrices on the rows and on the columns of a mesh: each rank shares them with other ranks."""
    grid = mesh_of((2, 2), ("dp", "tp"))
    values = parameter_values({"a": (8, 8), "b": (8, 6), "c": (6, 6), "d": (10, 8)})
    params = {
        name: nn.Parameter(distribute_tensor(value, grid[axis], [Shard(0)], src_data_rank=None))
        for (name, value), axis in zip(values.items(), ("tp", "dp", "dp", "tp"), strict=True)
    }
    optimizer = make("muon", params.items(), grid)
    for step in range(STEPS):
        grads = rank_gradients({name: tuple(value.shape) for name, value in values.items()}, 1, seed=step).mean
        for name, param in params.items():
            param.grad = distribute_tensor(grads[name], param.device_mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    return whole(params)


def test_meshes_that_share_some_ranks_balance_their_owners_together() -> None:
    shapes = {"a": (8, 8), "b": (8, 6), "c": (6, 6), "d": (10, 8)}
    grads = [rank_gradients(shapes, 1, seed=step).mean for step in range(STEPS)]
    reference = expected("muon", parameter_values(shapes), grads)
    for found in run_ranks(4, step_on_sub_meshes):
        assert differences(found, reference) == {}


# -- what goes wrong is said on every rank ----------------------------------------------------------------------------


def fail(rank: int, world_size: int, mesh: Any, fault: str) -> str:
    params = sharded("hsdp", parameter_values(SHAPES))
    covering = mesh_of((2, 2), ("replicate", "shard"))["shard"] if fault == "mesh" else mesh
    try:
        if fault == "meta":
            params["wide"] = nn.Parameter(params["wide"].to("meta"))
        if fault == "not here":
            part = DeviceMesh("cpu", [0, 1])
            params["part"] = nn.Parameter(DTensor.from_local(torch.ones(4, 4), part, [Shard(0)], run_check=False))
        if fault == "other ranks":
            half = mesh_of((2, 2), ("dp", "tp"))["tp"]
            ShardedMuon([nn.Parameter(distribute_tensor(torch.ones(8, 8), half, [Shard(0)]))], mesh)
        optimizer = make("muon", params.items(), covering)
        set_gradients(params, "hsdp", gradients()[0])
        if fault == "plain gradient" and rank == 1:
            params["wide"].grad = torch.zeros(params["wide"].shape)
        if fault == "gradient elsewhere" and rank == 1:
            wide = params["wide"]
            wide.grad = DTensor.from_local(torch.ones(wide.shape), wide.device_mesh, [Replicate()] * 2, run_check=False)
        if fault == "gradient too short" and rank == 1:
            wide = params["wide"]
            short = torch.ones(3)
            wide.grad = wide.grad.clone()
            wide.grad._local_tensor = short
        if fault == "strides" and rank == 2:
            params["wide"]._local_tensor = params["wide"]._local_tensor.detach().t().contiguous().t()
        if fault == "fewer" and rank == 1:
            optimizer.param_groups[0]["params"].pop()
        if fault == "lr" and rank == 2:
            optimizer.param_groups[0]["lr"] = 0.5
        if fault == "replaced" and rank == 3:
            params["wide"].data = params["wide"].data.to(torch.bfloat16)
        before = whole(params) if fault != "replaced" else {}
        try:
            optimizer.step()
        finally:
            assert not before or differences(whole(params), before) == {}
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("mesh", ("'wide'", "(7, 13)", "give a mesh that covers")),
        ("meta", ("'wide'", "(7, 13)", "is on the meta device", "to_empty")),
        ("other ranks", ("of 2 ranks", "has 4", "nobody averages its gradients", 'grad_sync="none"')),
        ("plain gradient", ("'wide'", "plain tensor", "give a DTensor", "rank 1 of 4")),
        ("gradient elsewhere", ("'wide'", "(7, 13)", "others on other ranks", "lie alike")),
        ("gradient too short", ("'wide'", "(7, 13)", "has 3 elements here", "rank 1 of 4")),
        ("strides", ("'wide'", "(7, 13)", "strides", "convert the model first", "rank 2 of 4")),
        ("fewer", ("param_names", "rank 1 of 4")),
        ("not here", ("lives on ranks [0, 1] only",)),
        ("lr", ("'lr': 0.5", "rank 2", "same hyperparameters")),
        ("replaced", ("'wide'", "(7, 13)", "construct the optimizer", "rank 3 of 4")),
    ],
)
def test_faults_raise_on_every_rank_and_say_what_to_do(fault: str, words: Sequence[str]) -> None:
    messages = run_ranks(4, fail, fault)
    for message in messages:
        assert all(word in message for word in words), message


# -- how users get there ----------------------------------------------------------------------------------------------


def swap_parameters(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], int]:
    """What accelerate does: the optimizer is made over plain parameters, and gets the sharded ones before the first step."""
    module = Holder(parameter_values(SHAPES))
    optimizer = ShardedMuon(module.named_parameters(), mesh, **MUON)
    plain = {param: name for name, param in module.named_parameters()}
    fully_shard(module, mesh=mesh)
    params = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [params[plain[param]] for param in group["params"]]
    watched = [weakref.ref(param) for param in plain]
    plain.clear()
    for grads in gradients():
        set_gradients(params, "fsdp_on_2", grads)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    return whole(params), sum(reference() is not None for reference in watched)


def test_parameters_swapped_before_the_first_step_are_planned_anew_and_the_old_ones_freed() -> None:
    reference = expected("muon", parameter_values(SHAPES), gradients())
    for found, alive in run_ranks(2, swap_parameters):
        assert differences(found, reference) == {}
        assert alive == 0


def offload(rank: int, world_size: int, mesh: Any) -> dict[str, Tensor]:
    module = fully_shard(Sum(parameter_values(SHAPES)), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = make("muon", module.named_parameters(), mesh)
    for step in range(STEPS):
        module(rank_gradients(SHAPES, world_size, seed=step).of_rank(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(dict(module.named_parameters()))


def assign(rank: int, world_size: int, mesh: Any) -> str:
    module = fully_shard(Sum(parameter_values(SHAPES)), mesh=mesh)
    optimizer = make("muon", module.named_parameters(), mesh)
    grads = rank_gradients(SHAPES, world_size, seed=0).of_rank(rank)
    for _ in range(2):
        module(grads).backward()
        module(grads)  # leaves the parameters whole: their module has plain ones then
        optimizer.step()
        module.reshard()
        optimizer.zero_grad()
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    module(grads).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_parameters_that_were_replaced_in_their_module_are_named() -> None:
    for message in run_ranks(2, assign):
        assert "no longer part of its module" in message and "construct the optimizer afterwards" in message


class Sum(Holder):
    """Its loss has the given gradients."""

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(param * grads[name]).sum() for name, param in self.named_parameters()]).sum()


def test_cpu_offload_through_a_real_backward() -> None:
    grads = [dict(rank_gradients(SHAPES, 2, seed=step).mean) for step in range(STEPS)]
    reference = expected("muon", parameter_values(SHAPES), grads)
    for found in run_ranks(2, offload):
        assert differences(found, reference) == {}
