"""ShardedAdamW8bit: codes, scales and parameters of one device on any number of ranks, in bitsandbytes' state format."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.support import reference8bit
from tests.support.ranks import run_ranks
from tests.support.reference8bit import OneDevice8bit
from tests.support.values import backward, parameter_module, parameter_values, rank_gradients
from vescale_optim.optimizers import adamw8bit
from vescale_optim.optimizers.adamw import ShardedAdamW
from vescale_optim.optimizers.adamw8bit import Run, ShardedAdamW8bit, joined_runs, update, update_fused
from vescale_optim.optimizers.quantize import (
    FlatLayout,
    TileLayout,
    codebook,
    dequantize_,
    dynamic_map,
    layout_of_blocks,
    quantize_,
)
from vescale_optim.optimizers.rule import Shards
from vescale_optim.sharding.blocks import Blocks

CPU = torch.device("cpu")


def bitsandbytes() -> Any:
    """Imported where it is used: that takes seconds, and every rank imports this file."""
    import bitsandbytes

    return bitsandbytes


STEPS = 10
HYPERPARAMETERS = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
# Sizes on both sides of 4096, and no multiples of 256 among them; stacks, rows, vectors, a scalar.
SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (300, 50),
    "wide": (7, 13),
    "square": (96, 64),
    "row": (1, 64),
    "stack": (3, 40, 48),
    "vector": (5001,),
    "bias": (13,),
    "scalar": (),
}
SMALL_SHAPES = {"wide": (7, 13), "tall": (45, 33), "row": (1, 64), "stack": (3, 40, 24), "vector": (301,), "scalar": ()}


# -- the codebook and the quantiser -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_codebook_is_that_of_bitsandbytes(is_signed: bool) -> None:
    found, expected = dynamic_map(is_signed=is_signed), bitsandbytes().functional.create_dynamic_map(signed=is_signed)
    assert found.shape == (256,) and bool((found.diff() > 0).all())
    assert found[127 if is_signed else 0] == 0 and found[255] == 1
    # bitsandbytes' own values differ by this much between CPUs.
    ulps = (found.view(torch.int32) - expected.view(torch.int32)).abs().max()
    assert ulps <= (0 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 2)
    assert np.array_equal(found.numpy(), reference8bit.codebook(is_signed))


def quantized(values: Tensor, layout: Any, *, is_signed: bool, lowest: int = 0) -> tuple[Tensor, Tensor]:
    book = codebook(is_signed=is_signed, device=CPU, lowest=lowest)
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    absmax = torch.empty(layout.blocks(values.shape).num_units * layout.scales_per_unit())
    scratch = torch.empty(2, values.numel(), dtype=torch.int32).unbind()
    quantize_(values.reshape(-1).clone(), codes, absmax, layout, book, scratch)
    return codes, absmax


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_exactly_the_nearest_ones(is_signed: bool) -> None:
    book = dynamic_map(is_signed=is_signed)
    midpoints = ((book[:-1].double() + book[1:].double()) / 2).float()
    one = torch.tensor(2.0)
    near = [midpoints, torch.nextafter(midpoints, one), torch.nextafter(midpoints, -one), book]
    spread = torch.randn(1 << 18) * torch.exp(4 * torch.randn(1 << 18))
    values = torch.cat([*near, spread, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0])]).clamp(-1, 1)
    values = values if is_signed else values.abs()
    codes, absmax = quantized(values, FlatLayout(values.numel()), is_signed=is_signed)
    assert absmax.tolist() == [1.0]
    assert np.array_equal(codes.numpy(), reference8bit.nearest_codes(values.numpy(), book.numpy()))


def test_zero_and_tiny_blocks_keep_their_values_and_a_nan_stays_visible() -> None:
    values = torch.zeros(4, 64)
    values[1] = torch.linspace(-1, 1, 64) * 1e-42
    values[2, 5] = torch.nan
    values[3, 7] = torch.inf
    codes, absmax = quantized(values.view(-1), FlatLayout(64), is_signed=True)
    assert set(codes[:64].tolist()) == {127}
    index = torch.empty(256, dtype=torch.int32)
    book = codebook(is_signed=True, device=CPU)
    back = dequantize_(torch.empty(256), codes, absmax, FlatLayout(64), book.values, index).view(4, 64)
    assert torch.equal(back[0], values[0])
    torch.testing.assert_close(back[1], values[1], rtol=0, atol=2e-44)
    assert bool(back[2].isnan().all()) and not bool(back[3].isfinite().all())


@pytest.mark.parametrize("shape", [(64, 96), (33, 47), (70, 32), (32, 33)])
def test_tiles_share_a_scale(shape: tuple[int, int]) -> None:
    values = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    layout = TileLayout(shape[1], 32)
    codes, absmax = quantized(values, layout, is_signed=True)
    blocks = list(reference8bit.blocks_of(shape, 256, (32, 32)))
    assert len(blocks) == absmax.numel()
    for block, scale in zip(blocks, absmax, strict=True):
        part = values.view(-1)[torch.from_numpy(block)]
        assert scale == part.abs().max()
        expected = reference8bit.nearest_codes((part / scale).numpy(), reference8bit.codebook(True))
        assert np.array_equal(codes[torch.from_numpy(block)].numpy(), expected)


# -- the same result as one device ------------------------------------------------------------------------------------


def train(
    rank: int,
    world_size: int,
    mesh: Any,
    shapes: dict[str, tuple[int, ...]],
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    unused: dict[str, tuple[int, ...]] | None = None,
    frozen: tuple[str, ...] = (),
    wide: tuple[str, ...] = (),
    chunk_numel: int | None = None,
) -> dict[str, Tensor]:
    module = parameter_module(parameter_values(shapes, dtype=dtype))
    for name in frozen:
        module[name].requires_grad_(False)
    named = list(module.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if n not in wide]},
        {"params": [(n, p) for n, p in named if n in wide], "bits": 32},
    ]
    optimizer = ShardedAdamW8bit(groups if wide else named, mesh, **{"bucket_mib": 0.02, **arguments})
    original = adamw8bit.CPU_CHUNK_NUMEL
    adamw8bit.CPU_CHUNK_NUMEL = chunk_numel or original
    try:
        for step in range(STEPS):
            grads = rank_gradients(shapes, world_size, seed=step, dtype=dtype, unused=unused).of_rank(rank)
            backward(named, {n: g for n, g in grads.items() if n not in frozen})
            optimizer.step()
            optimizer.zero_grad()
    finally:
        adamw8bit.CPU_CHUNK_NUMEL = original
    return everything(module, optimizer)


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and whole state by name; collective."""
    result = {name: param.detach().clone() for name, param in module.named_parameters()}
    for name, param in module.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            result[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return result


def expected_after(
    shapes: dict[str, tuple[int, ...]],
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = STEPS,
    unused: tuple[str, ...] = (),
    **more: Any,
) -> dict[str, Tensor]:
    """What `train` gives on one device; the mean gradients do not depend on the number of ranks."""
    reference = OneDevice8bit(parameter_values(shapes, dtype=dtype), **arguments, **more)
    for step in range(steps):
        grads = dict(rank_gradients(shapes, 1, seed=step, dtype=dtype).mean)
        reference.step({name: None if name in unused else grad for name, grad in grads.items()})
    state = {f"{n}.{key}": value for n, entry in reference.state.items() for key, value in entry.items()}
    return {**reference.params, **state}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {name for name in found if not name.endswith((".step", ".master"))} == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        different = int((found[name] != value).sum())
        assert torch.equal(found[name], value), f"{name}: {different} of {value.numel()} elements differ"


VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 256": {},
    "everything 8-bit": dict(min_8bit_size=0),
    "blocks of 64": dict(min_8bit_size=64, block_size=64),
    "tiles of 32": dict(min_8bit_size=64, block_shape=(32, 32)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_give_the_codes_scales_and_parameters_of_one_device(variant: str, dtype: torch.dtype) -> None:
    shapes = SHAPES if variant == "blocks of 256" else SMALL_SHAPES
    arguments = {**HYPERPARAMETERS, **VARIANTS[variant]}
    expected = expected_after(shapes, arguments, dtype)
    # What casting adds does not depend on how elements are spread over ranks: two numbers of them do for most variants.
    for world_size in (1, 2, 3, 4) if dtype == torch.float32 or variant == "blocks of 256" else (2, 3):
        for found in run_ranks(world_size, train, shapes, arguments, dtype):
            assert_equal(found, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_fp32_master_copy_of_bf16_parameters(world_size: int) -> None:
    arguments = {**HYPERPARAMETERS, "min_8bit_size": 64, "master_dtype": torch.float32}
    expected = expected_after(SMALL_SHAPES, arguments, torch.bfloat16)
    for found in run_ranks(world_size, train, SMALL_SHAPES, arguments, torch.bfloat16):
        assert_equal(found, expected)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_unused_on_some_or_all_ranks_and_frozen(world_size: int) -> None:
    unused = {"square": (0,), "tall": tuple(range(world_size)), "bias": (1,)}
    expected = expected_after(SHAPES, HYPERPARAMETERS, unused=("tall", "stack"))
    expected = {name: value for name, value in expected.items() if not name.startswith("stack.")}
    for found in run_ranks(world_size, train, SHAPES, HYPERPARAMETERS, torch.float32, unused, ("stack",)):
        assert_equal(found, expected)


def test_a_group_with_32_bits() -> None:
    expected = expected_after(SHAPES, HYPERPARAMETERS, wide=("square", "vector"))
    for found in run_ranks(2, train, SHAPES, HYPERPARAMETERS, torch.float32, None, (), ("square", "vector")):
        assert_equal(found, expected)


@pytest.mark.parametrize("block_shape", [None, (32, 32)])
def test_the_size_of_chunks_does_not_matter(block_shape: Any) -> None:
    arguments = {**HYPERPARAMETERS, "min_8bit_size": 64, "block_shape": block_shape}
    expected = expected_after(SMALL_SHAPES, arguments)
    for chunk_numel in (1, 600):
        (found,) = run_ranks(1, train, SMALL_SHAPES, arguments, torch.float32, None, (), (), chunk_numel)
        assert_equal(found, expected)


def test_default_dtype_and_device_of_the_user_do_not_matter() -> None:
    expected, found = a_run(3000), a_run(3000)
    update(expected, HYPERPARAMETERS)
    codebook.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            update(found, HYPERPARAMETERS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found.tensors(), expected.tensors(), strict=True))


HYPERPARAMETER_CHANGES: dict[str, dict[str, Any]] = {
    "lr": dict(lr=2e-2),
    "beta1": dict(betas=(0.5, 0.999)),
    "beta2": dict(betas=(0.9, 0.9)),
    "eps": dict(eps=1e-2),
    "weight_decay": dict(weight_decay=0.0),
    "min_8bit_size": dict(min_8bit_size=10_000),
    "block_size": dict(block_size=512),
    "block_shape": dict(block_shape=(16, 16)),
}


@pytest.mark.parametrize("name", HYPERPARAMETER_CHANGES)
def test_every_hyperparameter_does_what_the_reference_does(name: str) -> None:
    shapes, changed = {"square": (96, 64)}, {**HYPERPARAMETERS, **HYPERPARAMETER_CHANGES[name]}
    expected = expected_after(shapes, changed)
    assert not torch.equal(expected["square"], expected_after(shapes, HYPERPARAMETERS)["square"])
    for found in run_ranks(2, train, shapes, changed):
        assert_equal(found, expected)


# -- neighbours in one run, and the fused kernel ----------------------------------------------------------------------


def count_runs(rank: int, world_size: int, mesh: Any, shapes: dict[str, tuple[int, ...]]) -> list[int]:
    module = parameter_module(parameter_values(shapes))
    optimizer = ShardedAdamW8bit(module.named_parameters(), mesh, min_8bit_size=0)
    counts: list[int] = []
    original = adamw8bit.joined_runs

    def counting(shards: Shards) -> list[Run]:
        runs = original(shards)
        counts.append(len(runs))
        return runs

    adamw8bit.joined_runs = counting
    try:
        backward(module.named_parameters(), rank_gradients(shapes, world_size).of_rank(rank))
        optimizer.step()
    finally:
        adamw8bit.joined_runs = original
    return counts


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bucket_of_whole_blocks_is_updated_in_one_run(world_size: int) -> None:
    whole = {f"w{i}": (64, 64 * (1 + i % 3)) for i in range(6)}
    assert all(counts == [1] for counts in run_ranks(world_size, count_runs, whole))


def a_run(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Run:
    generator = torch.Generator().manual_seed(seed)
    layout = FlatLayout(256)
    values = [torch.randn(numel, generator=generator).to(dtype) for _ in range(2)]
    state = [torch.full((numel,), 127, dtype=torch.uint8), torch.zeros(numel, dtype=torch.uint8)]
    scales = [torch.zeros(-(-numel // 256)) for _ in range(2)]
    return Run(*values, *state, *scales, 1, layout, layout.blocks((numel,)), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_kernel_takes_the_same_step(dtype: torch.dtype) -> None:
    """On CPU bitsandbytes has the operator too, with a coarse quantiser: the first step, from zero state, is the same."""
    ours, fused = a_run(10_000, dtype=dtype), a_run(10_000, dtype=dtype)
    update(ours, HYPERPARAMETERS)
    update_fused(fused, HYPERPARAMETERS)
    tolerance = dict(rtol=1e-6, atol=1e-7) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(fused.param, ours.param, **tolerance)
    assert torch.equal(fused.absmax1, ours.absmax1) and torch.equal(fused.absmax2, ours.absmax2)
    assert (fused.state1 != ours.state1).float().mean() < 0.05 and (fused.state2 != ours.state2).float().mean() < 0.3


def test_around_the_fused_kernel_there_are_decay_and_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = a_run(1000), []
    before = run.param.clone()
    bitsandbytes()
    monkeypatch.setattr(torch.ops.bitsandbytes, "optimizer_update_8bit_blockwise", lambda *args: calls.append(args))
    monkeypatch.setattr(adamw8bit, "FUSED_CHUNK_NUMEL", 768)
    update_fused(run, HYPERPARAMETERS)
    assert [call[1].numel() for call in calls] == [768, 232]
    name, grad, param, state1, state2, *numbers, map1, map2, absmax1, absmax2, decay, scale, skips = calls[1]
    assert (name, decay, scale, skips) == ("adam", 0.0, 1.0, False)
    assert numbers == [0.9, 0.999, 0.0, 0.0, 1e-8, 1, 1e-2]
    for found, whole in ((grad, run.grad), (param, run.param), (state1, run.state1), (state2, run.state2)):
        assert found.data_ptr() == whole[768:].data_ptr()
    assert [map1.tolist(), map2.tolist()] == [dynamic_map(is_signed=flag).tolist() for flag in (True, False)]
    assert absmax1.data_ptr() == run.absmax1[3:].data_ptr() and absmax2.numel() == 1
    assert torch.equal(run.param, before * (1 - 1e-2 * 0.1))
    assert set(run.state2.tolist()) == {1}


def test_runs_join_neighbours_only() -> None:
    layout = FlatLayout(256)

    def shards(numels: list[int], gap: int, steps: list[int]) -> Shards:
        total = sum(numels) + gap * len(numels)
        flat = [torch.randn(total), torch.randn(total), torch.zeros(total), torch.zeros(total)]
        scales = [torch.zeros(total) for _ in range(2)]
        result, start, scale = Shards(steps=steps, starts=[0] * len(numels)), 0, 0
        for numel in numels:
            parts = [tensor[start : start + numel] for tensor in flat]
            count = -(-numel // 256)
            parts += [tensor[scale : scale + count] for tensor in scales]
            result.params.append(parts[0])
            result.grads.append(parts[1])
            for name, part in zip(("state1", "state2", "absmax1", "absmax2"), parts[2:], strict=True):
                result.state.setdefault(name, []).append(part)
            result.blocks.append(Blocks.flat((numel,), 256))
            result.units.append(range(count))
            result.whole.append(range(count))
            start, scale = start + numel + gap, scale + count
        return result

    def found(*arguments: Any) -> list[int]:
        return [run.param.numel() for run in joined_runs(shards(*arguments))]

    assert found([512, 256, 300], 0, [1, 1, 1]) == [1068]
    assert found([512, 300, 256], 0, [1, 1, 1]) == [812, 256]
    assert found([512, 256, 300], 16, [1, 1, 1]) == [512, 256, 300]
    assert found([512, 256, 256], 0, [1, 2, 2]) == [512, 512]
    (run,) = joined_runs(shards([512, 300], 0, [1, 1]))
    assert run.layout == layout and run.absmax1.numel() == 4 and layout_of_blocks(run.blocks) == layout


# -- no drift, no blow-up ---------------------------------------------------------------------------------------------


def still(rank: int, world_size: int, mesh: Any, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    shapes = {"weight": (64, 96), "small": (5, 7)}
    module = parameter_module(parameter_values(shapes))
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    optimizer = ShardedAdamW8bit(module.named_parameters(), mesh, lr=1e-2, weight_decay=decay)
    for _ in range(100):
        backward(module.named_parameters(), {name: torch.zeros(shape) for name, shape in shapes.items()})
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: param.detach().clone() for name, param in module.named_parameters()}


def test_a19_a_gradient_of_zero_does_not_move_parameters() -> None:
    for before, after in run_ranks(2, still, 0.0):
        assert all(torch.equal(after[name], before[name]) for name in before)
    for before, after in run_ranks(2, still, 0.1):
        for name in before:
            torch.testing.assert_close(after[name], before[name] * (1 - 1e-3) ** 100)


# Spread of the sizes of entries, share of exact zeros, and how close to fp32 the largest step has to be. A second moment
# far below its block's largest is a coarse code, which costs more the wider the spread is.
HEAVY = {"half zero": (0.0, 0.5, 0.1), "heavy tail": (1.0, 0.05, 0.1), "heavier tail": (2.0, 0.05, 0.15)}


def heavy_gradients(kind: str, shape: tuple[int, ...]) -> list[Tensor]:
    sigma, share, _ = HEAVY[kind]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator)
        * torch.exp(sigma * torch.randn(shape, generator=generator))
        * (torch.rand(shape, generator=generator) >= share)
        for _ in range(50)
    ]


def heavy(rank: int, world_size: int, mesh: Any, kind: str) -> Tensor:
    start = torch.zeros(64, 1024)
    module = nn.ParameterDict({"weight": nn.Parameter(start.clone())})
    optimizer = ShardedAdamW8bit(module.named_parameters(), mesh, lr=1e-2, weight_decay=0.0)
    for grad in heavy_gradients(kind, (64, 1024)):
        backward(module.named_parameters(), {"weight": grad})
        optimizer.step()
        optimizer.zero_grad()
    return module["weight"].detach() - start


@pytest.mark.parametrize("kind", HEAVY)
def test_second_moments_that_would_round_to_zero_do_not_blow_up(kind: str) -> None:
    param = nn.Parameter(torch.zeros(64, 1024))
    adamw = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.0)
    for grad in heavy_gradients(kind, (64, 1024)):
        param.grad = grad
        adamw.step()
    for moved in run_ranks(2, heavy, kind):
        assert moved.abs().max().item() == pytest.approx(param.detach().abs().max().item(), rel=HEAVY[kind][2])


# -- what decides the form of the state -------------------------------------------------------------------------------


def form_of_state(rank: int, world_size: int, mesh: Any, shape: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    optimizer = ShardedAdamW8bit([nn.Parameter(torch.randn(shape))], mesh, **arguments)
    (state,) = optimizer.state.values()
    local = state["state1"].to_local().numel(), state["absmax1"].to_local().numel() if "absmax1" in state else None
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}, local


@pytest.mark.parametrize("shape, is_8bit", [((6, 1024), True), ((4096,), True), ((4095,), False), ((1, 4096), True)])
def test_a13_the_logical_shape_decides_not_the_shard(shape: tuple[int, ...], is_8bit: bool) -> None:
    dtype = torch.uint8 if is_8bit else torch.float32
    expected = {"step": ((), torch.float32), "state1": (shape, dtype), "state2": (shape, dtype)}
    if is_8bit:
        blocks = -(-torch.Size(shape).numel() // 256)
        expected |= {"absmax1": ((blocks,), torch.float32), "absmax2": ((blocks,), torch.float32)}
    for world_size in (1, 2, 4):
        assert all(form == expected for form, _ in run_ranks(world_size, form_of_state, shape, {}))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_g06_no_block_spans_ranks(world_size: int) -> None:
    arguments = dict(min_8bit_size=0, block_size=32)
    found = run_ranks(world_size, form_of_state, (5, 40), arguments)
    numels = [numel for _, (numel, _) in found]
    assert sum(numels) == 200 and [scales for _, (_, scales) in found] == [-(-numel // 32) for numel in numels]
    ends = [sum(numels[: rank + 1]) for rank in range(world_size)]
    assert all(end % 32 == 0 or end == 200 for end in ends)
    shapes = {"weight": (5, 40)}
    expected = expected_after(shapes, {**HYPERPARAMETERS, **arguments})
    for result in run_ranks(world_size, train, shapes, {**HYPERPARAMETERS, **arguments}):
        assert_equal(result, expected)


def bytes_per_parameter(rank: int, world_size: int, mesh: Any, arguments: dict[str, Any]) -> float:
    shapes = [(512, 384), (100, 333), (3, 40, 72), (4096, 1), (5000,)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = ShardedAdamW8bit(params, mesh, **arguments)
    tensors = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.ndim]
    mine = torch.tensor(float(sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
    torch.distributed.all_reduce(mine)
    return mine.item() / sum(param.numel() for param in params)


@pytest.mark.parametrize("arguments", [{}, dict(block_shape=(32, 32)), dict(block_size=2048)], ids=str)
def test_state_takes_at_most_2_1_bytes_per_parameter(arguments: dict[str, Any]) -> None:
    assert all(2 < found <= 2.1 for found in run_ranks(3, bytes_per_parameter, arguments))


INVALID: list[tuple[dict[str, Any], str]] = [
    (dict(lr=-1.0), "lr is -1.0; it must be >= 0"),
    (dict(betas=(0.9, 1.0)), "betas is (0.9, 1.0); it must be two values in [0, 1)"),
    (dict(eps=-1e-8), "eps is -1e-08; it must be >= 0"),
    (dict(weight_decay=-0.1), "weight_decay is -0.1; it must be >= 0"),
    (dict(min_8bit_size=-1), "min_8bit_size is -1; it must be an integer >= 0"),
    (dict(min_8bit_size=0.5), "min_8bit_size is 0.5; it must be an integer >= 0"),
    (dict(block_size=0), "block_size is 0; it must be a multiple of 32"),
    (dict(block_size=100), "block_size is 100; it must be a multiple of 32"),
    (dict(block_shape=(32, 64)), "block_shape is (32, 64); it must be None or two equal sizes >= 16"),
    (dict(block_shape=(8, 8)), "block_shape is (8, 8); it must be None or two equal sizes >= 16"),
    (dict(block_shape=32), "block_shape is 32; it must be None or two equal sizes >= 16"),
    (dict(master_dtype=torch.float64), "master_dtype is torch.float64; it must be None or torch.float32"),
]


def construct(rank: int, world_size: int, mesh: Any, arguments: dict[str, Any], dtype: torch.dtype, bits: int) -> str:
    group = {"params": [("layers.0.weight", nn.Parameter(torch.zeros(64, 64, dtype=dtype)))], "bits": bits}
    with pytest.raises(ValueError) as error:
        ShardedAdamW8bit([group], mesh, **arguments)
    return str(error.value)


@pytest.mark.parametrize("arguments, message", INVALID, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_hyperparameters_name_the_allowed_range(arguments: dict[str, Any], message: str) -> None:
    assert message in run_ranks(1, construct, arguments, torch.float32, 8)[0]


def test_invalid_bits_and_dtypes() -> None:
    assert "bits is 4; it must be 8 or 32" in run_ranks(1, construct, {}, torch.float32, 4)[0]
    assert "'layers.0.weight' is torch.float64" in run_ranks(1, construct, {}, torch.float64, 8)[0]


# -- checkpoints ------------------------------------------------------------------------------------------------------

CHECKPOINT_SHAPES = {"tall": (150, 50), "square": (64, 96), "bias": (13,), "scalar": ()}


def made(mesh: Any, dtype: torch.dtype, **arguments: Any) -> tuple[nn.ParameterDict, ShardedAdamW8bit]:
    module = parameter_module(parameter_values(CHECKPOINT_SHAPES, dtype=dtype))
    return module, ShardedAdamW8bit(module.named_parameters(), mesh, **{**HYPERPARAMETERS, "bucket_mib": 0.02, **arguments})


def run(
    module: nn.Module, optimizer: Any, rank: int, world_size: int, steps: range, dtype: torch.dtype = torch.float32
) -> None:
    for step in steps:
        grads = rank_gradients(CHECKPOINT_SHAPES, world_size, seed=step, dtype=dtype)
        backward(module.named_parameters(), grads.of_rank(rank))
        optimizer.step()
        optimizer.zero_grad()


def save_and_resume(
    rank: int, world_size: int, mesh: Any, how: str, dtype: torch.dtype, arguments: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, optimizer = made(mesh, dtype, **arguments)
    run(module, optimizer, rank, world_size, range(4), dtype)
    if how == "state_dict":
        other, resumed = made(mesh, dtype, **{**arguments, "lr": 0.5})
        other.load_state_dict(module.state_dict())
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        resumed.load_state_dict(torch.load(saved, weights_only=False))
    else:
        other, resumed = copy.deepcopy((module, optimizer))
    run(other, resumed, rank, world_size, range(4, 7), dtype)
    run(module, optimizer, rank, world_size, range(4, 7), dtype)
    return everything(module, optimizer), everything(other, resumed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("arguments", [{}, dict(block_shape=(32, 32))], ids=str)
def test_d09_copies_continue_bit_for_bit(how: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    for original, resumed in run_ranks(2, save_and_resume, how, dtype, arguments):
        assert original.keys() == resumed.keys()
        for name, value in original.items():
            assert resumed[name].dtype == value.dtype and torch.equal(resumed[name], value), name


def save_dcp(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> None:
    module, optimizer = made(mesh, torch.bfloat16)
    run(module, optimizer, rank, world_size, range(4), torch.bfloat16)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"model": get_model_state_dict(module), "optim": get_optimizer_state_dict(module, optimizer, options=options)}
    dcp.save(state, checkpoint_id=path)


def load_dcp(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> dict[str, Tensor]:
    module, optimizer = made(mesh, torch.bfloat16)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"model": get_model_state_dict(module), "optim": get_optimizer_state_dict(module, optimizer, options=options)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optim"], options=options)
    run(module, optimizer, rank, world_size, range(4, 7), torch.bfloat16)
    return everything(module, optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_d08_d10_checkpoints_reshard_through_plain_dcp_and_resume_exactly(tmp_path: Any, flat: bool) -> None:
    run_ranks(2, save_dcp, str(tmp_path), flat)
    expected = expected_after(CHECKPOINT_SHAPES, HYPERPARAMETERS, torch.bfloat16, steps=7)
    for world_size in (2, 3):
        for found in run_ranks(world_size, load_dcp, str(tmp_path), flat):
            assert_equal(found, expected)


# -- bitsandbytes -----------------------------------------------------------------------------------------------------


def exported(rank: int, world_size: int, mesh: Any, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module, optimizer = made(mesh, dtype)
    run(module, optimizer, rank, world_size, range(4), dtype)
    return optimizer.bitsandbytes_state_dict(), everything(module, optimizer)


def imported(
    rank: int, world_size: int, mesh: Any, state_dict: dict[str, Any], dtype: torch.dtype, arguments: dict[str, Any]
) -> dict[str, Tensor]:
    module, optimizer = made(mesh, dtype, **arguments)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and "alpha" not in optimizer.param_groups[0]
    return everything(module, optimizer)


def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {}
    for key, entry in state_dict["state"].items():
        (nested,) = [value for value in entry.values() if isinstance(value, dict)]
        state[key] = {"step": entry["step"], **nested}
    return {**state_dict, "state": state}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_identical_after_a_round_trip_through_bitsandbytes(dtype: torch.dtype) -> None:
    ours, before = run_ranks(2, exported, dtype)[0]
    single = parameter_module(parameter_values(CHECKPOINT_SHAPES, dtype=dtype))
    theirs = bitsandbytes().optim.AdamW8bit(single.parameters(), lr=0.5)
    theirs.load_state_dict(ours)
    held = theirs.state[single["square"]]
    assert held["step"] == 4 and held["absmax1"].dtype == torch.float32 and held["state1"].dtype == torch.uint8
    back = theirs.state_dict()
    for form in (back, flattened(back)):
        for world_size in (1, 3):
            for after in run_ranks(world_size, imported, form, dtype, {}):
                for name, value in before.items():
                    if "." in name:
                        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    # bitsandbytes goes on from our state: its own first step, which does not depend on its quantiser, is ours.
    for number, grad in enumerate(rank_gradients(CHECKPOINT_SHAPES, 1, seed=4, dtype=dtype).mean.values()):
        list(single.parameters())[number].grad = grad
    with torch.no_grad():
        for name, param in single.items():
            param.copy_(before[name])
    theirs.step()
    expected = expected_after(CHECKPOINT_SHAPES, HYPERPARAMETERS, dtype, steps=5)
    for name in CHECKPOINT_SHAPES:
        tolerance = dict(rtol=1e-6, atol=1e-7) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(single[name].detach(), expected[name], **tolerance)


def test_state_of_bitsandbytes_itself_is_taken_over() -> None:
    single = parameter_module(parameter_values(CHECKPOINT_SHAPES))
    theirs = bitsandbytes().optim.AdamW8bit(single.parameters(), lr=1e-2)
    for step in range(3):
        for name, grad in rank_gradients(CHECKPOINT_SHAPES, 1, seed=step).mean.items():
            single[name].grad = grad
        theirs.step()
    state_dict = theirs.state_dict()
    for found in run_ranks(2, imported, state_dict, torch.float32, {}):
        for name, param in single.items():
            for key, value in theirs.state[param].items():
                if key in ("state1", "absmax1", "absmax2") or (key == "state2" and value.dtype != torch.uint8):
                    assert torch.equal(found[f"{name}.{key}"], value), f"{name}.{key}"
        assert found["square.step"] == 3
        assert torch.equal(found["square.state2"], theirs.state[single["square"]]["state2"].clamp(min=1))


def values_of(state: dict[str, Tensor], name: str, layout: Any, maps: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Both moments as the algorithm reads them."""
    result = []
    for number, lookup in zip((1, 2), maps, strict=True):
        codes = state[f"{name}.state{number}"]
        values = lookup[codes.int()] * 1.0
        for block, scale in layout.views(values.view(-1), state[f"{name}.absmax{number}"]):
            block.mul_(scale)
        result.append(values)
    return result


def test_the_codebook_of_the_checkpoint_is_honoured() -> None:
    """A linear codebook, and one whose entries are in another order: values stay, codes do not."""
    ours, before = run_ranks(1, exported, torch.float32)[0]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    places = torch.empty_like(order)
    places[order] = torch.arange(256)
    shuffled, linear = copy.deepcopy(ours), copy.deepcopy(ours)
    for entry in flattened(shuffled)["state"].values():
        for number in (1, 2):
            if f"qmap{number}" in entry:
                entry[f"qmap{number}"].copy_(dynamic_map(is_signed=number == 1)[order])
                entry[f"state{number}"].copy_(places[entry[f"state{number}"].int()])
    (after,) = run_ranks(1, imported, shuffled, torch.float32, {})
    assert all(torch.equal(after[name], before[name]) for name in before if "." in name)

    lines = torch.linspace(-2, 2, 256), torch.linspace(0, 2, 256)
    for entry in flattened(linear)["state"].values():
        for number in (1, 2):
            if f"qmap{number}" in entry:
                entry[f"qmap{number}"].copy_(lines[number - 1])
    state = {f"square.{key}": value for key, value in flattened(linear)["state"][1].items()}
    (after,) = run_ranks(1, imported, linear, torch.float32, {})
    layout, maps = FlatLayout(256), (dynamic_map(is_signed=True), dynamic_map(is_signed=False))
    for old, new in zip(values_of(state, "square", layout, lines), values_of(after, "square", layout, maps), strict=True):
        # The dynamic map is within 1.2 % of the scale everywhere.
        assert (new - old).abs().max() <= 0.012 * old.abs().max()


FORMS: dict[str, dict[str, Any]] = {
    "fp32": dict(min_8bit_size=100_000),
    "8-bit everywhere": dict(min_8bit_size=0),
}


def reformed(rank: int, world_size: int, mesh: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    module, optimizer = made(mesh, torch.float32)
    run(module, optimizer, rank, world_size, range(4))
    other, resumed = made(mesh, torch.float32, **arguments)
    resumed.load_state_dict(optimizer.state_dict())
    kept = {name: resumed.param_groups[0][name] for name in arguments}
    assert kept == arguments
    return everything(module, optimizer), everything(other, resumed)


@pytest.mark.parametrize("form", FORMS)
def test_state_of_another_form_is_converted(form: str) -> None:
    """Values stay as near as the new form allows, and the form stays what the optimizer was made with."""
    arguments = FORMS[form]
    maps = dynamic_map(is_signed=True), dynamic_map(is_signed=False)
    for before, after in run_ranks(2, reformed, arguments):
        old = values_of(before, "square", FlatLayout(256), maps)
        fp32 = [after["square.state1"], after["square.state2"]]
        new = fp32 if form == "fp32" else values_of(after, "square", FlatLayout(256), maps)
        assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))
        if form == "8-bit everywhere":
            small = values_of(after, "bias", FlatLayout(256), maps)
            for x, y in zip((before["bias.state1"], before["bias.state2"]), small, strict=True):
                # 1.2 % of the scale is half the widest gap of a codebook, and -1 is not in it.
                assert (x - y).abs().max() <= 0.012 * x.abs().max()
        assert after["square.step"] == 4


def in_other_blocks(rank: int, world_size: int, mesh: Any, arguments: dict[str, Any]) -> tuple[str, bool]:
    module, optimizer = made(mesh, torch.float32)
    run(module, optimizer, rank, world_size, range(4))
    other, resumed = made(mesh, torch.float32, **arguments)
    before = everything(other, resumed)
    with pytest.raises(ValueError) as error:
        resumed.load_state_dict(optimizer.state_dict())
    after = everything(other, resumed)
    return str(error.value), all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(block_size=64), "block_size is 256 in the checkpoint and 64 here"),
        (dict(block_size=512), "block_size is 256 in the checkpoint and 512 here"),
        (dict(block_shape=(32, 32)), "block_shape is None in the checkpoint and (32, 32) here"),
    ],
    ids=["finer", "coarser", "tiles"],
)
def test_state_in_other_blocks_is_refused_with_both_values(arguments: dict[str, Any], text: str) -> None:
    for message, is_unchanged in run_ranks(2, in_other_blocks, arguments):
        assert "'tall'" in message and text in message and is_unchanged


def codes_as_moments(rank: int, world_size: int, mesh: Any) -> str:
    """What `dcp.load` does with 8-bit state where the optimizer has fp32 moments: it casts the codes."""
    module, optimizer = made(mesh, torch.float32)
    run(module, optimizer, rank, world_size, range(4))
    _, resumed = made(mesh, torch.float32, min_8bit_size=100_000)
    saved, own = optimizer.state_dict(), resumed.state_dict()
    own["param_groups"] = saved["param_groups"]
    with pytest.raises(ValueError) as error:
        resumed.load_state_dict(own)
    return str(error.value)


def test_codes_that_were_read_as_moments_are_refused() -> None:
    for message in run_ranks(2, codes_as_moments):
        assert "min_8bit_size=" in message and "arrives as torch.float32" in message


def from_adamw(rank: int, world_size: int, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = parameter_module(parameter_values(CHECKPOINT_SHAPES))
    optimizer = ShardedAdamW(module.named_parameters(), mesh, **HYPERPARAMETERS)
    run(module, optimizer, rank, world_size, range(4))
    other, resumed = made(mesh, torch.float32)
    resumed.load_state_dict(optimizer.state_dict())
    return everything(module, optimizer), everything(other, resumed)


def test_state_of_adamw_is_quantised() -> None:
    maps = dynamic_map(is_signed=True), dynamic_map(is_signed=False)
    for before, after in run_ranks(2, from_adamw):
        assert torch.equal(after["bias.state1"], before["bias.exp_avg"])
        old = before["square.exp_avg"], before["square.exp_avg_sq"]
        for x, y in zip(old, values_of(after, "square", FlatLayout(256), maps), strict=True):
            assert (x - y).abs().max() <= 0.012 * x.abs().max()


def refused(rank: int, world_size: int, mesh: Any, state_dict: dict[str, Any]) -> tuple[str, bool]:
    module, optimizer = made(mesh, torch.float32, lr=0.25)
    before = everything(module, optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state_dict)
    after = everything(module, optimizer)
    unchanged = optimizer.param_groups[0]["lr"] == 0.25 and all(torch.equal(after[name], before[name]) for name in before)
    return str(error.value), unchanged


def test_state_that_does_not_fit_is_refused_by_name_before_anything_changes() -> None:
    ours, _ = run_ranks(1, exported, torch.float32)[0]
    faults = {"absmax1": torch.zeros(7), "state1": torch.zeros(3, 3, dtype=torch.uint8)}
    for key, value in faults.items():
        state_dict = copy.deepcopy(ours)
        (nested,) = [entry for entry in state_dict["state"][1].values() if isinstance(entry, dict)]
        nested[key] = value
        for message, is_unchanged in run_ranks(2, refused, state_dict):
            assert "'square'" in message and "(64, 96)" in message and is_unchanged
            assert ("7 and 24 scales" if key == "absmax1" else "(3, 3)") in message


def cannot_export(rank: int, world_size: int, mesh: Any) -> str:
    _, optimizer = made(mesh, torch.float32, block_shape=(32, 32))
    with pytest.raises(ValueError) as error:
        optimizer.bitsandbytes_state_dict()
    return str(error.value)


def test_blocks_that_bitsandbytes_lacks_are_not_exported() -> None:
    (message,) = run_ranks(1, cannot_export)
    assert "'tall'" in message and "runs of 256 elements only" in message


def skipped(rank: int, world_size: int, mesh: Any) -> list[bool]:
    module, optimizer = made(mesh, torch.float32)
    run(module, optimizer, rank, world_size, range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    grads = rank_gradients(CHECKPOINT_SHAPES, world_size, seed=2).of_rank(rank)
    if rank == world_size - 1:
        grads["square"][3, 3] = torch.inf
    before = everything(module, optimizer)
    loss = torch.stack([(param * grads[name]).sum() for name, param in module.named_parameters()]).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = everything(module, optimizer)
    return [torch.equal(after[name], before[name]) for name in before]


def test_an_infinite_gradient_on_one_rank_leaves_all_state_untouched() -> None:
    assert all(all(flags) for flags in run_ranks(2, skipped))
