"""TiledOptimizer: what Shampoo and SOAP share beside their tiles.

Which parameters they take, what travels to the owners, and when each tile is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from vescale_optim.optimizers.base import ShardedOptimizer
from vescale_optim.optimizers.rule import Group, Shards, Units
from vescale_optim.optimizers.tiles import MAX_GRADIENT, turns_of
from vescale_optim.sharding.blocks import Blocks


class TiledOptimizer(ShardedOptimizer):
    """Base of optimizers that precondition the tiles of matrices and give everything else to AdamW."""

    max_gradient = MAX_GRADIENT

    # Blocks of the parameters whose tiles take turns, and by their ids the turns. Every parameter was planned with a
    # Blocks object of its own, which says which one it is: names and hyperparameters of groups change.
    _counted: tuple[Blocks, ...] = ()
    _turns: MappingProxyType[int, tuple[int, ...]] = MappingProxyType({})

    def is_fallback(self, shape: Sequence[int], group: Group) -> bool:
        return len(shape) < 2

    def prepare(self, shards: Shards, group: Group) -> list[Tensor]:
        return [grad.float() for grad in shards.grads]

    def wire_dtype(self, group: Group) -> torch.dtype:
        return torch.float32

    def turns(self, units: Sequence[Units]) -> list[tuple[int, ...]]:
        """For each entry the turns of all tiles of its parameter, see `turns_of`."""
        return [self._turns[id(entry.blocks)] for entry in units]

    def _update(self) -> None:
        self._count_turns()
        super()._update()

    def _count_turns(self) -> None:
        """Count anew where groups hold other planned parameters than before, frozen or not; the same on all ranks."""
        homes = [
            self._homes[param]
            for group in self.param_groups
            if self.rule_of(group) is self
            for param in group["params"]
            if param in self._homes
        ]
        counted = tuple(storage.parameters[index].blocks for storage, index in homes)
        ids = tuple(map(id, counted))
        if ids != tuple(self._turns):
            self._counted = counted
            self._turns = MappingProxyType(dict(zip(ids, turns_of(counted), strict=True)))
