"""Training that does not depend on the ranks, to be saved and resumed: five optimizers, three storages, any world size.

    run = Training("muon", "fsdp2", seed=0)
    run.train(range(3))
    run.state()                 every parameter and state, whole, by name; and what the groups say

Gradients belong to logical tensors and sums over ranks are exact, so all world sizes and storages give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2

from tests.support.sharded_models import whole, world_mesh
from tests.support.values import parameter_values, rank_gradients
from vescale_optim import (
    ShardedAdamW,
    ShardedAdamW8bit,
    ShardedMuon,
    ShardedOptimizer,
    ShardedShampoo,
    ShardedSOAP,
)
from vescale_optim.sharding.fully_shard import fully_shard

# Fewer rows than ranks, rows that no number of ranks divides, a stack, and 1-D: with 8 ranks many hold nothing.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (3, 10),
    "tall": (20, 6),
    "unused": (5, 8),
    "stack": (3, 4, 6),
    "bias": (7,),
}
OPTIMIZERS: dict[str, tuple[type[ShardedOptimizer], dict[str, Any]]] = {
    "muon": (ShardedMuon, dict(lr=0.02)),
    "adamw": (ShardedAdamW, dict(lr=1e-3)),
    "adamw8bit": (ShardedAdamW8bit, dict(lr=1e-3, min_8bit_size=32, block_size=32)),
    "shampoo": (ShardedShampoo, dict(lr=0.01, max_preconditioner_dim=8, precondition_frequency=2)),
    "soap": (ShardedSOAP, dict(lr=0.01, max_precond_dim=8, precondition_frequency=2)),
}
STORAGES = ("replicated", "fsdp2", "fully_shard")


class Linearised(nn.Module):
    """Parameters whose gradients are what forward is given: d/dp sum(p * g) is g, with no rounding."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, grads: Mapping[str, Tensor | None]) -> Tensor:
        terms = [(getattr(self, name) * grad).sum().float() for name, grad in grads.items() if grad is not None]
        return torch.stack(terms).sum()


class Training:
    """A module under one storage, its optimizer and its schedule."""

    def __init__(
        self,
        kind: str,
        storage: str,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        groups: Mapping[str, dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> None:
        """`groups`: parameters that are alone in a group, with what it says."""
        self.dtype, self.shapes = dtype, shapes
        self.module = Linearised(parameter_values(shapes, seed=seed, dtype=dtype))
        optimizer, defaults = OPTIMIZERS[kind]
        if storage == "fsdp2":
            fsdp2(self.module, mesh=world_mesh())
        elif storage == "fully_shard":
            fully_shard(self.module, world_mesh(), optimizer=optimizer)
        named = dict(self.module.named_parameters())
        alone = [{"params": [(name, named.pop(name))], **said} for name, said in (groups or {}).items()]
        params = [{"params": list(named.items())}, *alone]
        self.optimizer = optimizer(params, world_mesh(), **{**defaults, **arguments})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(
        self, steps: range, unused: Mapping[int, Collection[str]] | None = None, *, schedules: bool = True
    ) -> list[float]:
        """Steps with the gradients of their numbers; returns losses, which depend on all parameters.

        Args:
            unused: step -> parameters without any gradient in it.
            schedules: let the learning rate fall.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        losses = []
        for step in steps:
            without = {name: range(world_size) for name in (unused or {}).get(step, ())}
            grads = rank_gradients(self.shapes, world_size, seed=step, dtype=self.dtype, unused=without)
            self.module(grads.of_rank(rank)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if schedules:
                self.scheduler.step()
            losses.append(sum(value.float().square().sum().item() for value in self.parameters().values()))
        return losses

    def parameters(self) -> dict[str, Tensor]:
        return whole({name: param.detach() for name, param in self.module.named_parameters()})

    def state(self) -> dict[str, Tensor]:
        """Every parameter, every state and every learning rate, whole."""
        entries = {
            f"{name}.{key}": value
            for name, param in self.module.named_parameters()
            for key, value in self.optimizer.state[param].items()
        }
        rates = {f"lr {number}": torch.tensor(group["lr"]) for number, group in enumerate(self.optimizer.param_groups)}
        return {**self.parameters(), **whole(entries), **rates}
