"""ShardedAdamW, and the AdamW rule that other optimizers use for what is no matrix.

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the arithmetic of
`torch.optim.AdamW(fused=True)`: the same fused kernel runs on the shards, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.optimizers.base import Params, ShardedOptimizer
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.rule import Group, Rule, Shards, StateSpec
from vescale_optim.optimizers.vector_lanes import ends_like_whole, run_in_lanes, vector_lanes


class AdamWRule(Rule):
    """Element-wise: no block needs to be whole. State `exp_avg` and `exp_avg_sq`, 8 bytes per fp32 parameter."""

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        return [StateSpec("exp_avg"), StateSpec("exp_avg_sq")]

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        moments = shards.state["exp_avg"], shards.state["exp_avg_sq"]
        entries = list(zip(shards.params, shards.grads, *moments, shards.steps, strict=True))
        odd = [position for position in range(len(entries)) if not ends_like_whole_parameter(shards, position)]
        for position in odd:
            *tensors, step = entries[position]
            shape, lanes = shards.blocks[position].shape, vector_lanes(tensors[0].dtype)
            # Gradients last: they are read only.
            tensors = [tensors[0], tensors[2], tensors[3], tensors[1]]
            operation = partial(update_one, step=step, group=group)
            run_in_lanes(operation, tensors, 3, shape, shards.regions[position], lanes)
        even = [entry for position, entry in enumerate(entries) if position not in set(odd)]
        if even:
            fused_adamw(*map(list, zip(*even, strict=True)), group)


def ends_like_whole_parameter(shards: Shards, position: int) -> bool:
    """Whether the fused kernel takes each element of a shard as it takes it in the whole parameter; on devices it does."""
    param = shards.params[position]
    return param.device.type != "cpu" or ends_like_whole(
        shards.starts[position], param.numel(), shards.blocks[position].units.numel, vector_lanes(param.dtype)
    )


def update_one(tensors: list[Tensor], *, step: int, group: Group) -> None:
    """AdamW on one [parameter, first moment, second moment, gradient]."""
    param, exp_avg, exp_avg_sq, grad = ([tensor] for tensor in tensors)
    fused_adamw(param, grad, exp_avg, exp_avg_sq, [step], group)


def fused_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[int],
    group: Group,
) -> None:
    """The kernel of `torch.optim.AdamW(fused=True)`."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        step_tensors(steps, params[0].device),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def adamw_beside(
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> dict[str, tuple[Rule, dict[str, Any]]]:
    """AdamW beside the main rule, as `others` of a ShardedOptimizer; the arguments are the defaults of its groups.

    It updates groups with `algorithm="adamw"`, and parameters for which the optimizer's `is_fallback` is true.
    """
    return {"adamw": (AdamWRule(), dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))}


class ShardedAdamW(AdamWRule, ShardedOptimizer):
    """AdamW with state, gradients and update sharded over `mesh`; equals `torch.optim.AdamW(fused=True)`.

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: device mesh of the ranks that train together.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        options: keywords of every sharded optimizer, see `ShardedOptimizer`.
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
        **options: object,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, mesh, defaults, algorithm="adamw", **options)

    def check_group(self, group: Group) -> None:
        check_adamw_group(group)


def check_adamw_group(group: Group) -> None:
    """Raise ValueError for hyperparameters outside their range."""
    require(group["lr"] >= 0, "lr", group["lr"], ">= 0")
    require(len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]), "betas", group["betas"],
            "two values in [0, 1)")
    require(group["eps"] >= 0, "eps", group["eps"], ">= 0")
    require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], ">= 0")


def step_tensors(steps: Sequence[int], device: torch.device) -> list[Tensor]:
    """Step numbers as the fused kernels take them: fp32 scalars on the device, one tensor per distinct number.

    A fill takes the number as an argument of its kernel: no copy from the host, no synchronisation.
    """
    distinct = {step: torch.full((), float(step), device=device) for step in set(steps)}
    return [distinct[step] for step in steps]
