"""TiledOptimizer: what Shampoo and SOAP share beside their tiles.

Which parameters they take, what travels to the owners, and when each tile is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from vescale_optim.optimizers.base import ShardedOptimizer
from vescale_optim.optimizers.groups import names_of
from vescale_optim.optimizers.rule import Group, Shards, Units
from vescale_optim.optimizers.tiles import MAX_GRADIENT, turns_of
from vescale_optim.sharding.blocks import Blocks


class TiledOptimizer(ShardedOptimizer):
    """Base of optimizers that precondition the tiles of matrices and give everything else to AdamW."""

    max_gradient = MAX_GRADIENT

    # By name and blocks of a parameter, the turns of its tiles, and the parameters that they were counted over.
    _turns: MappingProxyType[tuple[str, Blocks], tuple[int, ...]] = MappingProxyType({})
    _counted: tuple[int, ...] = ()

    def is_fallback(self, shape: Sequence[int], group: Group) -> bool:
        return len(shape) < 2

    def prepare(self, shards: Shards, group: Group) -> list[Tensor]:
        return [grad.float() for grad in shards.grads]

    def wire_dtype(self, group: Group) -> torch.dtype:
        return torch.float32

    def turns(self, units: Sequence[Units]) -> list[tuple[int, ...]]:
        """For each entry the turns of all tiles of its parameter, see `turns_of`."""
        counted = tuple(map(id, self.state))
        if counted != self._counted:
            keys = [
                (name, self.blocks(param.shape, group))
                for number, group in enumerate(self.param_groups)
                if self.rule_of(group) is self
                for name, param in zip(names_of(group, number), group["params"], strict=True)
                # All that was ever trained, frozen since or not; the others may be of any shape.
                if param in self.state
            ]
            turns = turns_of([blocks for _, blocks in keys])
            self._turns = MappingProxyType(dict(zip(keys, turns, strict=True)))
            self._counted = counted
        return [self._turns[entry.name, entry.blocks] for entry in units]
