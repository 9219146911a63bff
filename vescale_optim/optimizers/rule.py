"""Rule: the mathematics of an optimizer, without any distribution.

A rule says what must be whole (`blocks`), what it costs (`cost`) and which state it keeps (`state_spec`), and updates in
three moves. Between them the library may carry whole units to their owners and directions back:

    prepare   on the shard      momentum and the like; returns what the units need, one flat tensor per shard
    compute   on the owner      whole units -> directions; no collectives in here
    apply     on the shard      p.mul_(1 - lr * weight_decay); p.add_(direction, alpha=-lr)

An element-wise rule implements `apply` alone; one whose blocks are more than single elements may add `measure`, and then
also updates parts of blocks, where DTensors are cut inside them. All moves get lists of flat local views, so that they can
use foreach and fused kernels; they edit parameters and state in place and must not edit gradients.

What a shard is depends on how the parameter is stored: a run of whole units where we store it, and any boxes of it (rows,
columns) where FSDP2, tensor or expert parallelism do. `Shards.regions` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.regions import Part

Group = dict[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One kind of state of a parameter; it exists from construction, on every rank alike.

    Args:
        name: its key in `optimizer.state[param]`.
        where: "parameter": shape and placement of the parameter. "unit": it lives with the owner of each unit.
        dtype: None for the dtype that the rule updates (the parameter's, or `master_dtype`).
        unit_numels: for "unit": elements of every unit's state, in the order of units; one number where all are equal.
        fill: initial value.

    Raises:
        ValueError: state per unit without `unit_numels`, or state of the parameter's shape with them.
    """

    name: str
    where: Literal["parameter", "unit"] = "parameter"
    dtype: torch.dtype | None = None
    unit_numels: Sequence[int] | int | None = None
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.where not in ("parameter", "unit"):
            raise ValueError(f'state {self.name!r} has where={self.where!r}; give "parameter" or "unit"')
        if isinstance(self.unit_numels, list):
            object.__setattr__(self, "unit_numels", tuple(self.unit_numels))
        if (self.where == "unit") != (self.unit_numels is not None):
            raise ValueError(
                f"state {self.name!r} has where={self.where!r} and unit_numels={self.unit_numels}; give unit_numels, the "
                'elements that each unit keeps, with where="unit" and only there'
            )


@dataclass
class Shards:
    """What `prepare` and `apply` see: this rank's parts of some parameters of one group, in lists of equal length.

    Their state has the same names; parameters of a group with other state come in a call of their own.

    Attributes:
        params: flat views to update in place (the master copy where there is one).
        grads: flat mean gradients in the dtype of `params`; not to be edited.
        state: for every `StateSpec` the flat local views.
        steps: number of the current step of each parameter, from 1.
        blocks: blocks of the whole parameters.
        starts: position of each part in its flat parameter; None where it is not one run of it.
        regions: the boxes of the parameter that each part is, and how they lie in it.
        units: units whose "unit" state `state` holds; of an element-wise rule all of which the shard holds a part.
        whole: of the units of an element-wise rule with blocks, those that the shard holds whole.
        names: of the parameters, for messages.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    blocks: list[Blocks] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    regions: list[tuple[Part, ...]] = field(default_factory=list)
    units: list[range] = field(default_factory=list)
    whole: list[range] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass
class Units:
    """What `compute` sees: consecutive whole units of one parameter, on their owner.

    Attributes:
        values: flat, what `prepare` returned for these units.
        blocks: blocks of the whole parameter.
        first, count: which units.
        state: for every "unit" `StateSpec` the flat state of these units.
        step: number of the current step of the parameter, from 1.
        name: of the parameter, for messages.
    """

    values: Tensor
    blocks: Blocks
    first: int
    count: int
    state: dict[str, Tensor]
    step: int
    name: str

    def pieces(self) -> list[Tensor]:
        """Views [batch, rows, columns] of `values`, as the parameter's blocks define them."""
        return self.blocks.pieces(self.values, self.first, self.count)


class Rule:
    """Override what the optimizer needs; see the module docstring. `group` is the parameter's param group.

    Attributes:
        max_gradient: where an entry of any mean gradient is larger than this, infinite or NaN, all ranks skip the step
            with a warning. For rules whose state such an entry would spoil for good; None looks at no gradient.
        version: raised when the same state comes to mean something else; checkpoints of another version are refused.
    """

    max_gradient: float | None = None
    version: int = 1

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        """What must be whole of a parameter of this shape."""
        return Blocks.elements(shape)

    def cost(self, shape: Sequence[int], group: Group) -> float:
        """FLOPs of `compute` on the whole parameter; it decides the balance of owners. 0 for element-wise rules."""
        return 0.0

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        """State of a parameter of this shape."""
        return []

    def wire_dtype(self, group: Group) -> torch.dtype | None:
        """dtype in which units and directions travel between ranks, where they must; None for what the moves return.

        Choose what `compute` casts its input to first thing: then nothing is lost, and fewer bytes are sent.
        """
        return None

    def prepare(self, shards: Shards, group: Group) -> list[Tensor]:
        """What the units need, one flat tensor per shard: a fresh tensor, or, by default, the gradient itself."""
        return shards.grads

    def compute(self, units: list[Units], group: Group) -> list[Tensor]:
        """Directions, flat and laid out like `values`, one fresh tensor per entry; `values` are not to be edited."""
        raise NotImplementedError(f"{type(self).__name__} is element-wise: it has no compute")

    def num_measured(self, shape: Sequence[int], group: Group) -> int:
        """Numbers that `measure` gives for each unit; 0 for an element-wise rule that needs its units whole."""
        return 0

    def measure(self, shards: Shards, group: Group) -> list[Tensor]:
        """What an element-wise rule has to know of whole units where shards hold parts: maxima over the elements.

        Returns:
            For each shard fp32 [units, num_measured], none negative. `apply` gets the maxima over all ranks for units that
            are cut; rows of units that the shard holds whole are left as they are.
        """
        raise NotImplementedError(f"{type(self).__name__} does not measure parts of units")

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        """Update parameters in place; for an element-wise rule `directions` is what was measured, empty if nothing was."""
        raise NotImplementedError(f"{type(self).__name__} must implement apply")

    @property
    def is_elementwise(self) -> bool:
        """Whether `apply` does everything, so that nothing has to be whole for it beyond its own blocks."""
        return type(self).compute is Rule.compute
