"""ShardedAdamW8bit on DTensors: parameters, codes and scales of one device bit for bit, however storage cuts the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.layouts import chunk, indices
from tests.support.ranks import run_ranks
from tests.support.reference8bit import OneDevice8bit
from tests.support.values import parameter_values
from vescale_optim import ShardedAdamW8bit, ShardedOptimizer
from vescale_optim.optimizers import adamw8bit
from vescale_optim.optimizers.rule import Group, Shards
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.cut_units import find_cut_units
from vescale_optim.sharding.regions import run_region

STEPS = 5
HYPERPARAMETERS = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
Shapes = Mapping[str, tuple[int, ...]]
Steps = Sequence[Mapping[str, Tensor | None]]
# Rows that are no multiple of a block, fewer rows than ranks, blocks that span several ranks, stacks, vectors.
SHAPES: Shapes = {
    "wide": (7, 13),
    "rows": (5, 40),
    "row": (1, 64),
    "tall": (34, 18),
    "even": (40, 36),
    "stack": (2, 20, 36),
    "vector": (301,),
    "short": (3,),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 32": dict(min_8bit_size=32, block_size=32),
    "blocks of 256": dict(min_8bit_size=32),
    "tiles of 16": dict(min_8bit_size=32, block_shape=(16, 16)),
}
BLOCKS_OF_32 = {**HYPERPARAMETERS, **VARIANTS["blocks of 32"]}


# -- layouts ----------------------------------------------------------------------------------------------------------


class Parameters(nn.Module):
    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def fsdp(module: nn.Module, num_ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (num_ranks,))
    fully_shard(module, mesh=mesh)
    return mesh


def fsdp_columns(module: nn.Module, num_ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (num_ranks,))
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda param: Shard(1))
    return mesh


def hsdp(module: nn.Module, num_ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    return mesh


def place(module: nn.Module, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
    for name, param in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))


def replicated(module: nn.Module, num_ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (num_ranks,))
    place(module, mesh, [Replicate()])
    return mesh


def tp_rowwise(module: nn.Module, num_ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (num_ranks,))
    place(module, mesh, [Shard(1)])
    return mesh


def fsdp_over_tp_colwise(module: nn.Module, num_ranks: int) -> DeviceMesh:
    return _fsdp_over_tp(module, num_ranks, 0)


def fsdp_over_tp_rowwise(module: nn.Module, num_ranks: int) -> DeviceMesh:
    return _fsdp_over_tp(module, num_ranks, 1)


def _fsdp_over_tp(module: nn.Module, num_ranks: int, dim: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    place(module, mesh["tp"], [Shard(dim)])
    fully_shard(module, mesh=mesh["dp"])
    return mesh


Layout = Callable[[nn.Module, int], DeviceMesh]
ALL = tuple(SHAPES)
MATRICES = ("wide", "tall", "even", "stack")
EVEN = ("even", "stack")
LAYOUTS: dict[int, list[tuple[Layout, Sequence[str]]]] = {
    1: [(fsdp, ALL)],
    2: [(fsdp, ALL), (replicated, ALL)],
    3: [(fsdp, ALL), (tp_rowwise, MATRICES)],
    4: [(fsdp, ALL), (hsdp, ALL), (fsdp_columns, EVEN), (fsdp_over_tp_colwise, EVEN), (fsdp_over_tp_rowwise, EVEN)],
}


# -- training and its oracle -------------------------------------------------------------------------------------------


def gradients(
    dtype: torch.dtype = torch.float32, *, absent: Mapping[str, Sequence[int]] | None = None, seed: int = 0
) -> list[dict[str, Tensor | None]]:
    """By step and name; `absent`: name -> steps in which nobody has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for step in range(STEPS):
        spread = {name: torch.randn(2, *shape, generator=generator) for name, shape in SHAPES.items()}
        values = {name: (value * torch.exp(scale)).to(dtype) for name, (value, scale) in spread.items()}
        result.append({n: None if step in (absent or {}).get(n, ()) else value for n, value in values.items()})
    return result


def expected_after(steps: Steps, **arguments: Any) -> dict[str, dict[str, Tensor]]:
    """Parameter and state of one device by name."""
    (dtype,) = {grad.dtype for grads in steps for grad in grads.values() if grad is not None}
    reference = OneDevice8bit(parameter_values(SHAPES, dtype=dtype), **arguments)
    for grads in steps:
        reference.step(grads)
    return {name: {"param": reference.params[name], **state} for name, state in reference.state.items()}


class Sharded:
    """Parameters in a layout, and where their local elements lie, found by sharding the numbers of the elements alike."""

    def __init__(self, layout: Layout, num_ranks: int, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        self.module = Parameters(parameter_values(shapes, dtype=dtype))
        self.mesh = layout(self.module, num_ranks)
        numbers = Parameters({name: torch.arange(float(math.prod(s))).view(s) for name, s in shapes.items()})
        layout(numbers, num_ranks)
        self.index = {name: local(param).long() for name, param in numbers.named_parameters()}

    def optimizer(self, **arguments: Any) -> ShardedAdamW8bit:
        return ShardedAdamW8bit(self.module.named_parameters(), self.mesh, **arguments)

    def run(self, optimizer: ShardedAdamW8bit, steps: Steps, without: Sequence[str] = ()) -> None:
        """Steps with these gradients, of which this rank lacks those of `without`."""
        for grads in steps:
            self.set_gradients({**grads, **dict.fromkeys(without)})
            optimizer.step()

    def set_gradients(self, grads: Mapping[str, Tensor | None]) -> None:
        for name, param in self.module.named_parameters():
            param.grad = None
            if grads.get(name) is not None:
                part = grads[name].reshape(-1)[self.index[name]].view(param._local_tensor.shape)
                param.grad = DTensor.from_local(
                    part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
                )

    def whole(self, name: str, tensor: DTensor) -> Tensor:
        """The flat whole tensor, put together from all ranks' parts; collective."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self.index[name], local(tensor)))
        result = torch.empty(tensor.numel(), dtype=tensor.dtype)
        for index, values in parts:
            result[index] = values
        return result

    def differences(self, optimizer: ShardedAdamW8bit, expected: dict[str, dict[str, Tensor]]) -> list[str]:
        """What differs on this rank; collective, since scales are compared whole."""
        found = []
        for name, param in self.module.named_parameters():
            mine = {"param": param, **optimizer.state[param]}
            for key, value in expected[name].items():
                if key.startswith("absmax"):
                    is_equal = torch.equal(mine[key].full_tensor(), value)
                else:
                    is_equal = torch.equal(local(mine[key]), value.reshape(-1)[self.index[name]])
                found += [] if is_equal else [f"{name}.{key}"]
        return found


def local(tensor: DTensor) -> Tensor:
    return tensor._local_tensor.detach().reshape(-1)


def train(
    rank: int,
    num_ranks: int,
    mesh: Any,
    layouts: Sequence[tuple[Layout, Sequence[str]]],
    arguments: dict[str, Any],
    steps: Steps,
    expected: dict[str, dict[str, Tensor]],
    without: Mapping[str, int] | None = None,
) -> list[str]:
    """What differs from one device after the steps, in any layout; `without`: name -> rank that has no gradient."""
    found = []
    for layout, names in layouts:
        dtype = expected[names[0]]["param"].dtype
        sharded = Sharded(layout, num_ranks, {name: SHAPES[name] for name in names}, dtype)
        optimizer = sharded.optimizer(**arguments)
        sharded.run(optimizer, steps, [name for name, number in (without or {}).items() if number == rank])
        found += [f"{layout.__name__}: {difference}" for difference in sharded.differences(optimizer, expected)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_cut_blocks_get_the_codes_scales_and_parameters_of_one_device(num_ranks: int, variant: str) -> None:
    arguments = {**HYPERPARAMETERS, **VARIANTS[variant]}
    steps = gradients()
    expected = expected_after(steps, **arguments)
    assert run_ranks(num_ranks, train, LAYOUTS[num_ranks], arguments, steps, expected) == [[]] * num_ranks


@pytest.mark.parametrize("master_dtype", [None, torch.float32], ids=str)
def test_bf16_parameters(master_dtype: torch.dtype | None) -> None:
    arguments = {**BLOCKS_OF_32, "master_dtype": master_dtype}
    steps = gradients(torch.bfloat16)
    expected = expected_after(steps, **arguments)
    assert run_ranks(2, train, [(fsdp, ALL), (tp_rowwise, EVEN)], arguments, steps, expected) == [[]] * 2


def test_gradients_missing_on_all_ranks_in_some_steps_and_on_one_rank() -> None:
    steps = gradients(absent={"rows": (1, 3), "vector": (0,)})
    # Rank 0 has no gradient of "even", which counts as zeros for its rows, 14 of 40 on 3 ranks.
    for grads in steps:
        grads["even"][:14] = 0
    expected = expected_after(steps, **BLOCKS_OF_32)
    assert run_ranks(3, train, [(fsdp, ALL)], BLOCKS_OF_32, steps, expected, {"even": 0}) == [[]] * 3


def train_in_small_chunks(rank: int, num_ranks: int, mesh: Any, numel: int, *arguments: Any) -> list[str]:
    original, adamw8bit.CPU_CHUNK_NUMEL = adamw8bit.CPU_CHUNK_NUMEL, numel
    try:
        return train(rank, num_ranks, mesh, *arguments)
    finally:
        adamw8bit.CPU_CHUNK_NUMEL = original


@pytest.mark.parametrize("variant", ["blocks of 256", "tiles of 16"])
def test_the_size_of_chunks_does_not_matter(variant: str) -> None:
    arguments = {**HYPERPARAMETERS, **VARIANTS[variant]}
    steps = gradients()
    expected = expected_after(steps, **arguments)
    layouts = [(fsdp, ALL), (tp_rowwise, EVEN)]
    assert run_ranks(2, train_in_small_chunks, 7, layouts, arguments, steps, expected) == [[]] * 2


# -- state ------------------------------------------------------------------------------------------------------------


def resume(rank: int, num_ranks: int, mesh: Any, first: Layout, second: Layout, steps: Steps, expected: Any) -> list[str]:
    """Three steps in one layout, the others in another; the state comes by way of `load_state_dict`."""
    shapes = {name: SHAPES[name] for name in EVEN}
    before = Sharded(first, num_ranks, shapes)
    optimizer = before.optimizer(**BLOCKS_OF_32)
    before.run(optimizer, steps[:3])
    after = Sharded(second, num_ranks, shapes)
    for name, param in before.module.named_parameters():
        whole = before.whole(name, param)
        target = getattr(after.module, name)
        target._local_tensor.copy_(whole[after.index[name]].view(target._local_tensor.shape))
    resumed = after.optimizer(**BLOCKS_OF_32)
    resumed.load_state_dict(optimizer.state_dict())
    after.run(resumed, steps[3:])
    return after.differences(resumed, expected)


@pytest.mark.parametrize(("first", "second"), [(fsdp, fsdp), (fsdp, tp_rowwise), (tp_rowwise, fsdp)])
def test_resuming_in_any_layout_changes_nothing(first: Layout, second: Layout) -> None:
    steps = gradients()
    expected = expected_after(steps, **BLOCKS_OF_32)
    assert run_ranks(3, resume, first, second, steps, expected) == [[]] * 3


def resume_in_place(rank: int, num_ranks: int, mesh: Any, steps: Steps, expected: Any) -> list[str]:
    """What `dcp.load` does: the tensors of `state_dict()` are overwritten, each rank's own part only."""
    sharded = Sharded(fsdp, num_ranks, SHAPES)
    optimizer = sharded.optimizer(**BLOCKS_OF_32)
    sharded.run(optimizer, steps[:3])
    tensors = [p for p in sharded.module.parameters()]
    tensors += [value for p in tensors for value in optimizer.state[p].values()]
    saved = [getattr(value, "_local_tensor", value).detach().clone() for value in tensors]
    sharded.run(optimizer, gradients(seed=7))
    for value, kept in zip(tensors, saved, strict=True):
        getattr(value, "_local_tensor", value).detach().copy_(kept)
    sharded.run(optimizer, steps[3:])
    return sharded.differences(optimizer, expected)


def test_state_loaded_in_place_reaches_the_other_ranks_of_a_cut_block() -> None:
    steps = gradients()
    expected = expected_after(steps, **BLOCKS_OF_32)
    assert run_ranks(3, resume_in_place, steps, expected) == [[]] * 3


def scale_counts(rank: int, num_ranks: int, mesh: Any) -> dict[str, int]:
    sharded = Sharded(fsdp, num_ranks, SHAPES)
    optimizer = sharded.optimizer(**BLOCKS_OF_32)
    states = {name: optimizer.state[param] for name, param in sharded.module.named_parameters()}
    return {name: state["absmax1"]._local_tensor.numel() for name, state in states.items() if "absmax1" in state}


def test_a_scale_belongs_to_the_rank_that_holds_the_first_element_of_its_block() -> None:
    # (5, 40) on 3 ranks: rows 0-1, 2-3, 4 start at elements 0, 80, 160; blocks of 32 at 0 32 64 | 96 128 | 160 192.
    counts = run_ranks(3, scale_counts)
    assert [count["rows"] for count in counts] == [3, 2, 2]
    assert [count["row"] for count in counts] == [2, 0, 0]


def exchange_of_formats(rank: int, num_ranks: int, mesh: Any, steps: Steps, expected: Any) -> list[str]:
    """Steps, export as bitsandbytes, load the export into a fresh optimizer, and go on."""
    sharded = Sharded(fsdp, num_ranks, SHAPES)
    arguments = {**HYPERPARAMETERS, "min_8bit_size": 32}
    optimizer = sharded.optimizer(**arguments)
    sharded.run(optimizer, steps[:3])
    resumed = sharded.optimizer(**arguments)
    resumed.load_state_dict(optimizer.bitsandbytes_state_dict())
    sharded.run(resumed, steps[3:])
    return sharded.differences(resumed, expected)


def test_the_state_goes_out_as_bitsandbytes_state_and_comes_back() -> None:
    steps = gradients()
    expected = expected_after(steps, **HYPERPARAMETERS, min_8bit_size=32)
    assert run_ranks(2, exchange_of_formats, steps, expected) == [[]] * 2


def load_moments(rank: int, num_ranks: int, mesh: Any) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales after loading the whole state of torch.optim.AdamW, on one device's worth and on shards."""
    moments = {name: torch.rand(SHAPES[name], generator=torch.Generator().manual_seed(3)) for name in EVEN}
    entries = {n: {"step": torch.tensor(4.0), "exp_avg": -m, "exp_avg_sq": m} for n, m in enumerate(moments.values())}
    group = {"params": [0, 1], "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    found = []
    for layout in (replicated, fsdp, tp_rowwise):
        sharded = Sharded(layout, num_ranks, {name: SHAPES[name] for name in EVEN})
        optimizer = sharded.optimizer(**BLOCKS_OF_32)
        optimizer.load_state_dict({"state": entries, "param_groups": [dict(group)]})
        for name, param in sharded.module.named_parameters():
            state = optimizer.state[param]
            found.append((sharded.whole(name, state["state1"]), state["absmax2"].full_tensor()))
    return found


def test_fp32_moments_of_torch_are_quantised_alike_in_every_layout() -> None:
    for found in run_ranks(2, load_moments):
        for (codes, scales), (expected_codes, expected_scales) in zip(found[2:], found[:2] * 2, strict=True):
            assert torch.equal(codes, expected_codes) and torch.equal(scales, expected_scales)
            assert bool((scales > 0.5).all())


# -- communication and faults -----------------------------------------------------------------------------------------


def count_messages(rank: int, num_ranks: int, mesh: Any, layout: Layout) -> list[int]:
    """Messages of data in each step."""
    sharded = Sharded(layout, num_ranks, {name: SHAPES[name] for name in EVEN})
    optimizer = sharded.optimizer(**HYPERPARAMETERS, min_8bit_size=32)
    sharded.run(optimizer, gradients()[:1])
    counts = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "broadcast")}

    def counted(name: str) -> Any:
        def call(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            counts[-1] += tensor.dtype != torch.int64  # that is what ranks agree with
            return originals[name](tensor, *arguments, **keywords)

        return call

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        for grads in [*gradients()[1:3], dict.fromkeys(EVEN)]:
            counts.append(0)
            sharded.run(optimizer, [grads])
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts


@pytest.mark.parametrize(
    ("layout", "expected"),
    # Where each rank keeps its own scales, the ones it shares are brought up to date first.
    [(replicated, [0, 0, 0]), (fsdp, [2, 2, 1]), (tp_rowwise, [1, 1, 0])],
)
def test_one_message_of_maxima_for_all_parameters_of_a_step(layout: Layout, expected: list[int]) -> None:
    assert run_ranks(3, count_messages, layout) == [expected] * 3


def not_a_number(rank: int, num_ranks: int, mesh: Any) -> list[bool]:
    sharded = Sharded(fsdp, num_ranks, {"rows": (5, 40)})
    optimizer = sharded.optimizer(**BLOCKS_OF_32)
    grad = torch.ones(5, 40)
    grad[2, 0] = torch.nan  # the first element of rank 1, in block 2 whose scale is rank 0's
    sharded.run(optimizer, [{"rows": grad}])
    return optimizer.state[sharded.module.rows]["absmax1"].full_tensor().isnan().tolist()


def test_nan_in_one_part_of_a_block_is_seen_by_all() -> None:
    assert run_ranks(3, not_a_number) == [[False, False, True, False, False, False, False]] * 3


class NeedsRuns(ShardedOptimizer):
    """Element-wise on runs of 32, of which it cannot update parts."""

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        return Blocks.flat(shape, 32)

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        for param, grad in zip(shards.params, shards.grads, strict=True):
            param.sub_(grad)


def construct_needs_runs(rank: int, num_ranks: int, mesh: Any, shapes: Shapes) -> str:
    sharded = Sharded(fsdp, num_ranks, shapes)
    try:
        NeedsRuns(sharded.module.named_parameters(), sharded.mesh, {"lr": 1.0})
    except ValueError as error:
        return str(error)
    return ""


def test_a_rule_that_needs_blocks_whole_says_so_at_construction() -> None:
    for message in run_ranks(2, construct_needs_runs, {"fits": (4, 32), "cut": (5, 40)}):
        assert "'cut'" in message and "(5, 40)" in message and "32 elements" in message and "measure" in message
    assert run_ranks(2, construct_needs_runs, {"fits": (4, 32)}) == [""] * 2


@pytest.mark.parametrize("num_columns", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7, 13), (5, 40), (1, 64), (64, 1), (6, 32), (3,), (2, 3, 17), (0, 4)])
def test_units_are_found_as_by_looking_at_every_element(shape: tuple[int, ...], num_columns: int) -> None:
    size, numel = 32, math.prod(shape)
    held = [chunk(indices(shape), 0, num_columns, column).flatten().tolist() for column in range(num_columns)]
    touched = [sorted({element // size for element in elements}) for elements in held]
    cut = [unit for unit in range(-(-numel // size)) if sum(unit in units for units in touched) > 1]

    def region_of(column: int) -> Any:
        elements = held[column] or [0]
        return run_region(shape, elements[0], elements[0] + len(held[column]))

    for column, units in enumerate(touched):
        found = find_cut_units(Blocks.flat(shape, size), region_of, column, num_columns, keeps_runs=True)
        assert found.num_cut == len(cut) and cut[found.cut] == [unit for unit in cut if unit in units]
        assert list(found.units) == units and list(found.whole) == [unit for unit in units if unit not in cut]
        assert list(found.owned) == [unit for unit in units if unit * size in held[column]]
        assert found.shares[column] == len(found.owned)
