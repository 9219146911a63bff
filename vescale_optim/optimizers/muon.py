"""ShardedMuon: momentum, orthogonalised matrix by matrix.

Source: Jordan et al., "Muon" (2024), with the update of `torch.optim.Muon` (torch 2.13):

    B <- lerp(B, g, 1 - momentum);   u = lerp(g, B, momentum) if nesterov else B
    p <- p (1 - lr wd) - lr r orthogonalize(u)
    r = sqrt(max(1, rows / columns)) ("original"), 0.2 sqrt(max(rows, columns)) ("match_rms_adamw", arXiv 2502.16982)

Rows and columns are those of the matrix that is orthogonalised (a split, an expert, a flattened kernel), never a shard's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.optimizers.adamw import adamw_beside, check_adamw_group
from vescale_optim.optimizers.base import Params, ShardedOptimizer
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.orthogonalize import (
    QUINTIC,
    Coefficients,
    newton_schulz_flops,
    orthogonalize,
    schedule_of,
)
from vescale_optim.optimizers.routing import muon_param_groups, warn_about_vocabulary
from vescale_optim.optimizers.rule import Group, Shards, StateSpec, Units
from vescale_optim.optimizers.vector_lanes import ends_like_whole, run_in_lanes, vector_lanes
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.regions import Part

# A batch of small matrices saves kernel launches; large ones gain nothing, and on CPU their batch leaves the cache.
BATCH_NUMEL = 1 << 19

# Elements of the momentum update at a time: what stays in a CPU's cache, or what keeps a device busy.
CPU_CHUNK_NUMEL = 1 << 17
DEVICE_CHUNK_NUMEL = 1 << 26

# What orthogonalising a matrix with more rows than columns costs, over its transpose: it is turned over and back.
TURNING = 1.15

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class ShardedMuon(ShardedOptimizer):
    """Muon for matrices and AdamW for the rest, sharded over `mesh`; equals `torch.optim.Muon` / `AdamW(fused=True)`.

    Parameters of two dimensions are matrices, of three and more stacks of matrices (experts [E, m, n]); parameters of
    fewer dimensions and groups with `algorithm="adamw"` are updated by AdamW. Given a module, embeddings and the output
    head go to AdamW too (`muon_param_groups`).

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: device mesh of the ranks that train together.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: as in `torch.optim.Muon`, but
            for momentum of norm below `eps` or above 1e19: there torch's direction shrinks to nothing, and ours keeps its
            length (`orthogonalize`).
        ns_dtype: dtype of the Newton-Schulz iteration.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: defaults of the AdamW groups.
        head: with a module: its output head, where the module does not say (see `muon_param_groups`).
        options: keywords of every sharded optimizer, see `ShardedOptimizer`.

    A group may also say how its matrices lie (see `Blocks.matrices`): `flatten="conv"` (dim 0 x rest),
    `splits=[...]` (fused QKV, gate/up), `interleave=k` (k matrices row by row), `matrix_layout="in_out"` (stored
    [in, out], as HF experts and Conv1D).
    """

    def __init__(
        self,
        params: Params,
        mesh: DeviceMesh,
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16",
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        head: str | nn.Module | None = None,
        **options: object,
    ) -> None:
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            eps=eps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            flatten=None,
            splits=None,
            interleave=1,
            matrix_layout="out_in",
        )
        others = adamw_beside(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        if head is not None and not isinstance(params, nn.Module):
            raise ValueError(f"head is {head!r}, but params is no module; put the head in a group with algorithm='adamw'")
        self._head = head
        super().__init__(params, mesh, defaults, algorithm="muon", others=others, **options)
        if not isinstance(params, nn.Module):
            warn_about_vocabulary(self.param_groups)

    def module_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        return muon_param_groups(module, self._head)

    def check_group(self, group: Group) -> None:
        if group["algorithm"] == "adamw":
            check_adamw_group(group)
            return
        require(group["lr"] >= 0, "lr", group["lr"], ">= 0")
        require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], ">= 0")
        require(0 <= group["momentum"] < 1, "momentum", group["momentum"], "in [0, 1)")
        require(group["eps"] > 0, "eps", group["eps"], "> 0")
        require(group["ns_steps"] >= 0, "ns_steps", group["ns_steps"], ">= 0")
        require(
            group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"),
            "adjust_lr_fn",
            group["adjust_lr_fn"],
            'None, "original" or "match_rms_adamw"',
        )
        # A name, not a torch.dtype: groups travel through checkpoints that take plain values only.
        require(group["ns_dtype"] in NS_DTYPES, "ns_dtype", group["ns_dtype"], " or ".join(map(repr, NS_DTYPES)))
        schedule_of(group["ns_coefficients"], group["ns_steps"])

    def is_fallback(self, shape: Sequence[int], group: Group) -> bool:
        return len(shape) < 2

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        return Blocks.matrices(
            shape,
            flatten=group["flatten"],
            splits=group["splits"],
            interleave=group["interleave"],
            matrix_layout=group["matrix_layout"],
        )

    def cost(self, shape: Sequence[int], group: Group) -> float:
        blocks = self.blocks(shape, group)
        matrices = [matrix for unit in range(blocks.num_units) for matrix in blocks.piece_shapes(unit)]
        flops = partial(newton_schulz_flops, steps=group["ns_steps"])
        return sum(flops(rows, columns) * (TURNING if rows > columns else 1) for rows, columns in matrices)

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        return [StateSpec("momentum_buffer")]

    def wire_dtype(self, group: Group) -> torch.dtype:
        # Newton-Schulz casts its input to this and returns it.
        return NS_DTYPES[group["ns_dtype"]]

    def prepare(self, shards: Shards, group: Group) -> list[Tensor]:
        momentum, buffers = group["momentum"], shards.state["momentum_buffer"]
        if not group["nesterov"]:
            torch._foreach_lerp_(buffers, shards.grads, 1 - momentum)
            # The units are the momentum itself; orthogonalize never writes into its input.
            return buffers
        units = [torch.empty_like(grad, dtype=self.wire_dtype(group)) for grad in shards.grads]
        for grads, momenta, targets in chunks(shards.grads, buffers, units):
            torch._foreach_lerp_(momenta, grads, 1 - momentum)
            torch._foreach_copy_(targets, torch._foreach_lerp(grads, momenta, momentum))
        return units

    def compute(self, units: list[Units], group: Group) -> list[Tensor]:
        directions = [torch.empty_like(entry.values, dtype=NS_DTYPES[group["ns_dtype"]]) for entry in units]
        sources: dict[tuple[int, int], list[Tensor]] = {}
        targets: dict[tuple[int, int], list[Tensor]] = {}
        for entry, direction in zip(units, directions, strict=True):
            outputs = entry.blocks.pieces(direction, entry.first, entry.count)
            for source, target in zip(entry.pieces(), outputs, strict=True):
                key = (source.size(-2), source.size(-1))
                sources.setdefault(key, []).extend(source.unbind(0))
                targets.setdefault(key, []).extend(target.unbind(0))
        for (rows, columns), matrices in sources.items():
            size = max(1, BATCH_NUMEL // max(rows * columns, 1))
            for start in range(0, len(matrices), size):
                results = orthogonalize(
                    matrices[start : start + size],
                    coefficients=group["ns_coefficients"],
                    steps=group["ns_steps"],
                    eps=group["eps"],
                    dtype=NS_DTYPES[group["ns_dtype"]],
                )
                for result, target in zip(results, targets[rows, columns][start : start + size], strict=True):
                    target.copy_(result)
        return directions

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        lr = float(group["lr"])
        entries = zip(shards.params, directions, shards.blocks, shards.starts, shards.regions, strict=True)
        for param, direction, blocks, start, region in entries:
            # Not foreach: on CPU (torch 2.13) it rounds the factor to bf16 first, which loses a small decay entirely.
            param.mul_(1 - lr * group["weight_decay"])
            for shape, part, step in split_by_step(param, direction, blocks, start, region, group["adjust_lr_fn"]):
                alpha = -(lr * lr_ratio(*shape, group["adjust_lr_fn"]))
                if part is param and is_cut_in_lanes(param, blocks, start):
                    operation = partial(add_pair_, alpha=alpha, shape=shape)
                    # torch.add takes two vectors at a time.
                    run_in_lanes(operation, [param, direction], 1, blocks.shape, region, 2 * vector_lanes(param.dtype))
                else:
                    add_direction_(part, step, alpha, shape)


def chunks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Equal lists of flat tensors, cut into pieces and taken as many at a time as the cache holds, or a device likes."""
    numel = CPU_CHUNK_NUMEL if lists[0][0].device.type == "cpu" else DEVICE_CHUNK_NUMEL
    chunk: list[tuple[Tensor, ...]] = []
    room = numel
    for tensors in zip(*lists, strict=True):
        for pieces in zip(*(tensor.split(numel) for tensor in tensors), strict=True):
            if chunk and pieces[0].numel() > room:
                yield [list(column) for column in zip(*chunk, strict=True)]
                chunk, room = [], numel
            chunk.append(pieces)
            room -= pieces[0].numel()
    if chunk:
        yield [list(column) for column in zip(*chunk, strict=True)]


def is_cut_in_lanes(param: Tensor, blocks: Blocks, start: int | None) -> bool:
    """Whether a shard of a single bf16 matrix on CPU ends where the kernel would not end in the matrix."""
    is_sensitive = param.device.type == "cpu" and param.dtype == torch.bfloat16 and blocks.num_units == 1
    lanes = 2 * vector_lanes(param.dtype)
    return is_sensitive and not ends_like_whole(start, param.numel(), blocks.units.numel, lanes)


def add_pair_(pair: list[Tensor], *, alpha: float, shape: tuple[int, int]) -> None:
    add_direction_(*pair, alpha, shape)


def add_direction_(param: Tensor, direction: Tensor, alpha: float, shape: tuple[int, int]) -> None:
    """param += alpha * direction, in the arithmetic of torch.optim.Muon for a matrix of `shape`.

    On CPU (torch 2.13) adding to a bf16 matrix rounds alpha and the sum; adding a *transposed* matrix, which is what
    torch's orthogonalisation returns for more rows than columns, rounds the product too.
    """
    if param.device.type != "cpu" or param.dtype != torch.bfloat16:
        param.add_(direction, alpha=alpha)
        return
    target = param.contiguous()
    if shape[0] > shape[1] > 1:
        target.add_(direction.contiguous().to(target.dtype) * torch.tensor(alpha, dtype=target.dtype, device="cpu"))
    else:
        target.add_(direction.contiguous(), alpha=alpha)
    if target is not param:
        param.copy_(target)


def split_by_step(
    param: Tensor,
    direction: Tensor,
    blocks: Blocks,
    start: int | None,
    region: Sequence[Part],
    adjust_lr_fn: str | None,
) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
    """Parts of a shard whose matrices step alike, with the shape of their matrix: mostly the whole shard."""
    if param.numel() == 0:
        return []
    shape = common_shape(blocks, adjust_lr_fn)
    units = None if start is None else blocks.whole_units(start, start + param.numel())
    # A bf16 kernel on CPU rounds the last elements of a tensor otherwise than its vectors: there, matrix by matrix.
    is_whole = param.device.type != "cpu" or param.dtype != torch.bfloat16 or blocks.num_units == 1 or units is None
    if shape is not None and is_whole:
        return [(shape, param, direction)]
    if units is not None:
        pieces = (blocks.pieces(flat, units.start, len(units)) for flat in (param, direction))
        return [
            ((p.size(-2), p.size(-1)), p, d)
            for stacks in zip(*pieces, strict=True)
            for p, d in zip(*(stack.unbind(0) for stack in stacks), strict=True)
        ]
    return [
        (rows_by_columns, cut.view(param), cut.view(direction))
        for part in region
        for rows_by_columns, cut in cut_along_out(blocks, part)
    ]


def cut_along_out(blocks: Blocks, part: Part) -> list[tuple[tuple[int, int], Part]]:
    """A box of a parameter with splits, cut where its matrices end: each with the (rows, columns) of its matrix."""
    axis, sizes = blocks.out_axis, [shape[0] for shape in blocks.matrix_shapes]
    ends = list(accumulate(sizes))
    cuts = []
    for shape, end in zip(blocks.matrix_shapes, ends, strict=True):
        low = max(end - shape[0], part.start[axis])
        high = min(end, part.start[axis] + part.size[axis])
        if low < high:
            begin = (*part.start[:axis], low, *part.start[axis + 1 :])
            size = (*part.size[:axis], high - low, *part.size[axis + 1 :])
            offset = part.offset + (low - part.start[axis]) * part.strides[axis]
            cuts.append((shape, Part(begin, size, offset, part.strides)))
    return cuts


@cache
def common_shape(blocks: Blocks, adjust_lr_fn: str | None) -> tuple[int, int] | None:
    """The shape of one matrix of a parameter, or None where its matrices step differently (unequal splits)."""
    shapes = {shape for unit in range(blocks.num_units) for shape in blocks.piece_shapes(unit)}
    kinds = {(lr_ratio(*shape, adjust_lr_fn), shape[0] > shape[1] > 1) for shape in shapes}
    return next(iter(shapes)) if len(kinds) == 1 else None


def lr_ratio(rows: int, columns: int, adjust_lr_fn: str | None) -> float:
    """Step length of a rows x columns matrix relative to lr."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / max(columns, 1)))
