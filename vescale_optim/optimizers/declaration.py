"""Declaration: what a rule declares of a parameter when it is planned, and the options of the group that it reads for that.

Blocks, state and what travels are fixed from then on. A group may be edited between steps, as schedulers do, as long as its
rule still declares the same.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_optim.optimizers.groups import plain
from vescale_optim.optimizers.rule import Group, Rule, StateSpec
from vescale_optim.optimizers.rule_checks import check_blocks, check_state_specs
from vescale_optim.sharding.blocks import Blocks


@dataclass(frozen=True)
class Declaration:
    """Of one parameter.

    Attributes:
        blocks, specs, wire_dtype: what the rule returned.
        options: what it read of the group, by name.
    """

    blocks: Blocks
    specs: tuple[StateSpec, ...]
    wire_dtype: torch.dtype | None
    options: dict[str, object]

    @classmethod
    def of(cls, rule: Rule, name: str, shape: Sequence[int], group: Group) -> Declaration:
        """Ask the rule.

        Raises:
            TypeError, ValueError: mistakes in the rule, or a group that does not fit the parameter.
        """
        asked = _AskedGroup(group)
        blocks = check_blocks(rule, rule.blocks(shape, asked), name, shape)
        specs = rule.state_spec(shape, asked)
        check_state_specs(rule, specs, blocks, name)
        wire_dtype = rule.wire_dtype(asked)
        read = sorted(asked.keys_read - {"algorithm", "params", "param_names"})
        options = {key: plain(group.get(key)) for key in ("algorithm", *read)}
        return cls(blocks, tuple(specs), wire_dtype, options)

    def is_of(self, hyperparameters: Mapping[str, object]) -> bool:
        """Whether a group, as `hyperparameters_of` gives it, still says what was read."""
        return all(hyperparameters.get(key) == value for key, value in self.options.items())

    def renewed(self, rule: Rule, name: str, shape: Sequence[int], group: Group) -> Declaration:
        """The declaration under a group that says something else now.

        Raises:
            ValueError: other blocks, state that the parameter does not have, or another dtype that travels; by the name of
                the parameter and of the option.
        """
        try:
            new = Declaration.of(rule, name, shape, group)
            fits = (new.blocks, new.wire_dtype) == (self.blocks, self.wire_dtype) and set(new.specs) <= set(self.specs)
        except ValueError:
            fits = False
        if not fits:
            key = next(key for key, value in self.options.items() if plain(group.get(key)) != value)
            raise ValueError(
                f"parameter '{name}' of shape {tuple(shape)}: {key} is {group.get(key)!r} now and was {self.options[key]!r} "
                "when the optimizer was made, which decided its blocks and its state; construct the optimizer with it"
            )
        return replace(new, specs=self.specs)


class _AskedGroup(dict[str, Any]):
    """A group that remembers which keys were read."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.keys_read.update(super().keys())
        return super().__iter__()

    def keys(self) -> KeysView[str]:
        self.keys_read.update(super().keys())
        return super().keys()

    def values(self) -> ValuesView[Any]:
        self.keys_read.update(super().keys())
        return super().values()

    def items(self) -> ItemsView[str, Any]:
        self.keys_read.update(super().keys())
        return super().items()
