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

    # Parameters whose tiles take turns, each with the Blocks it was planned with, which are its own; and the turns by the
    # ids of those. Names and hyperparameters of groups change.
    _counted: tuple[tuple[Tensor, Blocks | None], ...] = ()
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
        """Count anew where groups hold other parameters than before, or more of them are planned; the same on all ranks.

        Frozen parameters have their turns too, planned or not: freezing some, then or in a later run, shifts no others.
        """
        members = [
            (param, group) for group in self.param_groups if self.rule_of(group) is self for param in group["params"]
        ]
        planned = tuple((param, self._planned_blocks(param)) for param, _ in members)
        if len(planned) == len(self._counted) and all(
            new is old for pair in zip(planned, self._counted, strict=True) for new, old in zip(*pair, strict=True)
        ):
            return
        counted = [known or self._blocks_if_any(*member) for (_, known), member in zip(planned, members, strict=True)]
        turns = iter(turns_of([blocks for blocks in counted if blocks is not None]))
        all_turns = [() if blocks is None else next(turns) for blocks in counted]
        self._counted = planned
        self._turns = MappingProxyType(
            {id(known): own for (_, known), own in zip(planned, all_turns, strict=True) if known is not None}
        )

    def _blocks_if_any(self, param: Tensor, group: Group) -> Blocks | None:
        """Blocks of a parameter that is not planned; None where its group does not fit it, so that it never can be."""
        try:
            return self.blocks(param.shape, group)
        except ValueError:
            return None

    def _planned_blocks(self, param: Tensor) -> Blocks | None:
        if param not in self._homes:
            return None
        storage, index = self._homes[param]
        return storage.parameters[index].blocks
