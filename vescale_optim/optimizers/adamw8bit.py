"""ShardedAdamW8bit: AdamW whose moments are kept as 8-bit codes with a scale for each block of 256 elements.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), in bitsandbytes' state format:

    state1, state2    codes of the first and second moment, uint8, shape of the parameter
    absmax1, absmax2  scales, fp32, one for each block of the flat logical parameter

    step:  m, v from codes and scales;  m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
           p <- p (1 - lr wd) - lr (m / c1) / (sqrt(v) / sqrt(c2) + eps)       from m and v as they are here, in fp32
           codes and scales from m and v

Blocks are those of the logical parameter, and which parameters have 8-bit state depends on its shape alone, so the
result does not depend on ranks and layouts. Where we store parameters, no rank boundary cuts a block; where the storage of
DTensors does (FSDP2, tensor parallelism), ranks combine the maxima of their parts, and no element moves. Shards that are
no runs of the parameter (columns, strided ones) keep all scales on every rank: 8 / block_size bytes per element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.optimizers.adamw import AdamWRule, check_adamw_group
from vescale_optim.optimizers.adamw8bit_parts import measure_parts, update_parts
from vescale_optim.optimizers.adamw8bit_step import advance_moments_, step_parameter_
from vescale_optim.optimizers.base import Params, ShardedOptimizer
from vescale_optim.optimizers.bitsandbytes_state import converted_state_dict, exported_state_dict
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.quantize import (
    FlatLayout,
    QuantizationLayout,
    chunks,
    codebook,
    dequantize_,
    layout_of,
    layout_of_blocks,
    quantize_,
)
from vescale_optim.optimizers.rule import Group, Shards, StateSpec
from vescale_optim.sharding.blocks import Blocks

# Elements updated at a time: on CPU (for each thread) scratch that stays in the cache; kernels on devices want more.
CPU_CHUNK_NUMEL = 1 << 17
DEVICE_CHUNK_NUMEL = 1 << 24
UPDATED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# bitsandbytes' kernel is compiled for blocks of 256 and counts elements in 32 bits.
FUSED_BLOCK_NUMEL = 256
FUSED_CHUNK_NUMEL = 1 << 30


class ShardedAdamW8bit(ShardedOptimizer):
    """AdamW with 8-bit state, 2.03 bytes per parameter, sharded over `mesh`.

    On CPU and for block sizes other than 256 codes are exactly the nearest ones; on CUDA blocks of 256 are updated by
    bitsandbytes' fused kernel. Codes of the second moment never fall to 0, as they do in other implementations: there
    m / (sqrt(0) + eps) explodes.

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: device mesh of the ranks that train together.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        min_8bit_size: parameters of fewer elements keep fp32 moments.
        block_size: elements that share a scale. bitsandbytes reads and writes 256 only.
        block_shape: (b, b) quantises tiles of matrices instead of runs, with b * b elements (32: 1,024 elements, 2.01
            bytes per parameter). 1-D and narrow parameters get runs of b * b elements.
        options: keywords of every sharded optimizer, see `ShardedOptimizer`. `master_dtype` may be None or float32.

    A group may set all of these but `params` and `mesh`, and `bits=32` for fp32 moments. What decides the form of the
    state (`bits`, `min_8bit_size`, `block_size`, `block_shape`) cannot change after construction.

    A NaN or infinite gradient makes its whole block NaN, since the scale does: let a GradScaler or `clip_grad_norm_` with
    `error_if_nonfinite=True` stop such steps.
    """

    def __init__(
        self,
        params: Params,
        mesh: DeviceMesh,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        block_shape: tuple[int, int] | None = None,
        master_dtype: torch.dtype | None = None,
        **options: object,
    ) -> None:
        require(master_dtype in (None, torch.float32), "master_dtype", master_dtype, "None or torch.float32")
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bits=8,
            min_8bit_size=min_8bit_size,
            block_size=block_size,
            block_shape=block_shape,
        )
        super().__init__(params, mesh, defaults, algorithm="adamw8bit", master_dtype=master_dtype, **options)

    def check_group(self, group: Group) -> None:
        check_adamw_group(group)
        bits, size, shape = group["bits"], group["block_size"], group["block_shape"]
        require(bits in (8, 32), "bits", bits, "8 or 32")
        least = group["min_8bit_size"]
        require(isinstance(least, Integral) and least >= 0, "min_8bit_size", least, "an integer >= 0")
        is_size = isinstance(size, Integral) and size >= 32 and size % 32 == 0
        require(is_size, "block_size", size, "a multiple of 32, from 32 up (bitsandbytes: 256)")
        is_square = isinstance(shape, tuple | list) and len(shape) == 2 and shape[0] == shape[1]
        is_shape = shape is None or (is_square and isinstance(shape[0], Integral) and shape[0] >= 16)
        require(is_shape, "block_shape", shape, "None or two equal sizes >= 16")
        for number, param in enumerate(group["params"]):
            # In a checkpoint's group they are numbers.
            if isinstance(param, Tensor) and param.requires_grad and param.dtype not in UPDATED_DTYPES:
                name = group["param_names"][number] if "param_names" in group else f"number {number} of its group"
                raise ValueError(
                    f"parameter {name!r} is {param.dtype}; 8-bit AdamW updates float32, bfloat16 and float16 in fp32 "
                    "arithmetic; convert it, or give it to ShardedAdamW"
                )

    # -- the rule ----------------------------------------------------------------------------------------------------

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        layout = layout_of(shape, group)
        return Blocks.elements(shape) if layout is None else layout.blocks(shape)

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        layout = layout_of(shape, group)
        if layout is None:
            return [StateSpec("state1", dtype=torch.float32), StateSpec("state2", dtype=torch.float32)]
        scales = layout.scales_per_unit()
        return [
            StateSpec("state1", dtype=torch.uint8, fill=codebook(is_signed=True, device=torch.device("cpu")).zero),
            StateSpec("state2", dtype=torch.uint8),
            StateSpec("absmax1", "unit", torch.float32, scales),
            StateSpec("absmax2", "unit", torch.float32, scales),
        ]

    def num_measured(self, shape: Sequence[int], group: Group) -> int:
        layout = layout_of(shape, group)
        return 0 if layout is None else 2 * layout.scales_per_unit()

    def measure(self, shards: Shards, group: Group) -> list[Tensor]:
        return measure_parts(shards, group, _chunk_numel(shards.params[0].device))

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        if "absmax1" not in shards.state:
            _update_wide(shards, group)
            return
        for run in joined_runs(shards):
            if run.param.device.type == "cuda" and run.layout == FlatLayout(FUSED_BLOCK_NUMEL):
                update_fused(run, group)
            else:
                update(run, group)
        if directions:
            update_parts(shards, directions, group, _chunk_numel(shards.params[0].device))

    # -- state -------------------------------------------------------------------------------------------------------

    def adapt_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take state of `bitsandbytes.optim.AdamW8bit` and `torch.optim.AdamW` as well, and fp32 state for 8-bit and back.

        The form of the state stays that of this optimizer. Codes in the same form are copied, bitsandbytes' by way of the
        codebook of the checkpoint; its other blocks and fp32 moments are converted, parameter by parameter.

        Raises:
            ValueError: state of one of our optimizers in other blocks, with both values.
        """
        return converted_state_dict(state_dict, self.param_groups, self._layouts())

    def bitsandbytes_state_dict(self) -> dict[str, Any]:
        """The state as `bitsandbytes.optim.AdamW8bit.state_dict()` has it, whole, on every rank; all ranks must call.

        Raises:
            ValueError: blocks that bitsandbytes does not have, by parameter name.
        """
        if self._has_to_plan():
            self._manage_parameters()
        return exported_state_dict(self.state_dict(), self.param_groups, self._layouts())

    def _layouts(self) -> dict[Tensor, QuantizationLayout | None]:
        """How the moments of every managed parameter are quantised; None for fp32 moments."""
        managed = [managed for storage in self._storages.values() for managed in storage.parameters]
        blocks = {entry.param: entry.blocks for entry in managed}
        return {p: layout_of_blocks(blocks[p]) if "absmax1" in state else None for p, state in self.state.items()}


class Run(NamedTuple):
    """Consecutive whole units to update in one go, flat: of one parameter, or of several that lie side by side."""

    param: Tensor
    grad: Tensor
    state1: Tensor
    state2: Tensor
    absmax1: Tensor
    absmax2: Tensor
    step: int
    layout: QuantizationLayout
    blocks: Blocks
    start: int

    def tensors(self) -> tuple[Tensor, ...]:
        return self[:6]


def joined_runs(shards: Shards) -> list[Run]:
    """The whole blocks of the shards as few runs: parameters that lie side by side in all buffers are one run of blocks."""
    runs: list[Run] = []
    for run in sorted(whole_runs(shards), key=lambda run: run.param.data_ptr()):
        if runs and _continues(runs[-1], run):
            pairs = zip(runs[-1].tensors(), run.tensors(), strict=True)
            both = [a.as_strided((a.numel() + b.numel(),), (1,)) for a, b in pairs]
            run = Run(*both, run.step, run.layout, Blocks.flat((both[0].numel(),), run.layout.numel), 0)
            runs.pop()
        runs.append(run)
    return runs


def whole_runs(shards: Shards) -> Iterator[Run]:
    """The whole units of each shard that has any."""
    state = [shards.state[name] for name in ("state1", "state2", "absmax1", "absmax2")]
    for *tensors, step, blocks, shard_start, units, whole in zip(
        shards.params,
        shards.grads,
        *state,
        shards.steps,
        shards.blocks,
        shards.starts,
        shards.units,
        shards.whole,
        strict=True,
    ):
        if not whole:
            continue
        layout, start = layout_of_blocks(blocks), blocks.unit_start(whole.start)
        if whole != units:
            elements = slice(start - shard_start, blocks.unit_start(whole.stop) - shard_start)
            scales = slice(*((unit - units.start) * layout.scales_per_unit() for unit in (whole.start, whole.stop)))
            tensors = [tensor[elements] for tensor in tensors[:4]] + [tensor[scales] for tensor in tensors[4:]]
        yield Run(*tensors, step, layout, blocks, start)


def _chunk_numel(device: torch.device) -> int:
    return CPU_CHUNK_NUMEL * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK_NUMEL


def _continues(before: Run, after: Run) -> bool:
    is_flat = isinstance(after.layout, FlatLayout) and before.layout == after.layout
    if not is_flat or before.step != after.step or before.param.numel() % after.layout.numel:
        return False
    return all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in zip(before.tensors(), after.tensors(), strict=True)
    )


def update(run: Run, group: Group) -> None:
    """The step as written above, in fp32 and in torch ops, a chunk of units at a time."""
    device = run.param.device
    first, second = (codebook(is_signed=is_signed, device=device, lowest=1 - is_signed) for is_signed in (True, False))
    parts = list(_chunks(run, _chunk_numel(device)))
    # Kept for all chunks, and written with out=: fresh pages would cost more than the arithmetic.
    largest = max(part[0].numel() for part in parts)
    floats = torch.empty(4, largest, dtype=torch.float32, device=device)
    integers = torch.empty(2, largest, dtype=torch.int32, device=device)
    for param, grad, state1, state2, absmax1, absmax2 in parts:
        m, v, wide_param, wide_grad = floats[:, : param.numel()]
        index, found = integers[:, : param.numel()]
        p = param if param.dtype == torch.float32 else wide_param.copy_(param)
        g = grad if grad.dtype == torch.float32 else wide_grad.copy_(grad)
        dequantize_(m, state1, absmax1, run.layout, first.values, index)
        dequantize_(v, state2, absmax2, run.layout, second.values, index)
        advance_moments_(m, v, g, group)
        step_parameter_(p, m, v, found.view(torch.float32), run.step, group)
        if p is not param:
            param.copy_(p)
        quantize_(m, state1, absmax1, run.layout, first, (index, found))
        quantize_(v, state2, absmax2, run.layout, second, (index, found))


def update_fused(run: Run, group: Group) -> None:
    """The step by bitsandbytes' kernel, which rounds to the nearest code in its own way and lets codes fall to 0.

    The decay comes first, by itself: on CUDA (bitsandbytes 0.50) the kernel would apply it after the update. For low
    precision parameters that is one rounding more than `update` has; `master_dtype` avoids both.
    """
    import bitsandbytes  # noqa: F401 (registers the operator; slow to import, so only where it is used)

    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    device = run.param.device
    maps = [codebook(is_signed=is_signed, device=device).values for is_signed in (True, False)]
    for param, grad, state1, state2, absmax1, absmax2 in _chunks(run, FUSED_CHUNK_NUMEL):
        param.mul_(1 - lr * group["weight_decay"])
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam",
            grad.contiguous(),
            param,
            state1,
            state2,
            beta1,
            beta2,
            0.0,  # beta3 and alpha are AdEMAMix's
            0.0,
            group["eps"],
            run.step,
            lr,
            *maps,
            absmax1,
            absmax2,
            0.0,  # weight_decay
            1.0,  # gnorm_scale
            False,  # skip_zeros
        )
        state2.clamp_(min=1)


def _chunks(run: Run, numel: int) -> Iterator[list[Tensor]]:
    """Views of whole units of about `numel` elements, in the order of `Run.tensors`."""
    for elements, scales in chunks(run.layout, run.blocks, run.start, run.start + run.param.numel(), numel):
        tensors = run.tensors()
        yield [tensor[elements] for tensor in tensors[:4]] + [tensor[scales] for tensor in tensors[4:]]


def _update_wide(shards: Shards, group: Group) -> None:
    """AdamW with fp32 moments, in fp32 arithmetic whatever the dtype of the parameters."""
    moments = {"exp_avg": shards.state["state1"], "exp_avg_sq": shards.state["state2"]}
    params, grads = ([value.float() for value in values] for values in (shards.params, shards.grads))
    AdamWRule().apply(replace(shards, params=params, grads=grads, state=moments), [], group)
    for param, wide in zip(shards.params, params, strict=True):
        if wide is not param:
            param.copy_(wide)
