"""ShardedAdamW, and the AdamW rule that other optimizers use for what is no matrix.

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the arithmetic of
`torch.optim.AdamW(fused=True)`: the same fused kernel runs on the shards, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.optimizers.base import Params, ShardedOptimizer
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.rule import Group, Rule, Shards, StateSpec


class AdamWRule(Rule):
    """Element-wise: no block needs to be whole. State `exp_avg` and `exp_avg_sq`, 8 bytes per fp32 parameter."""

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        return [StateSpec("exp_avg"), StateSpec("exp_avg_sq")]

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            shards.params,
            shards.grads,
            shards.state["exp_avg"],
            shards.state["exp_avg_sq"],
            [],
            step_tensors(shards.steps, shards.params[0].device),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


class ShardedAdamW(AdamWRule, ShardedOptimizer):
    """AdamW with state, gradients and update sharded over `mesh`; equals `torch.optim.AdamW(fused=True)`.

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: one-dimensional device mesh of the ranks that train together.
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
        super().__init__(params, mesh, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

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
