"""Storage: the seam between an optimizer and the way its parameters live.

An optimizer meets its parameters through these methods and nothing else. Indices count the parameters of one storage.

    ReplicatedStorage    plain parameters, equal on all ranks; shards are runs of whole units, nothing has to move
    DTensorStorage       DTensors of any placement; units move to their owners, directions move back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.parameters import ManagedParameter
from vescale_optim.sharding.regions import Part


class Transfer(Protocol):
    """Tensors on their way, by the index of their parameter."""

    def wait(self) -> dict[int, Tensor]:
        """The flat tensors that arrived; they are valid until `release`."""
        ...

    def release(self) -> None:
        """Give buffers back: what `wait` returned is not used any more."""
        ...


class Arrived:
    """A transfer of what is where it belongs already."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = dict(tensors)

    def wait(self) -> dict[int, Tensor]:
        return self._tensors

    def release(self) -> None:
        self._tensors = {}


class Storage(Protocol):
    """How parameters of one kind live.

    Attributes:
        agreement: control channel of the ranks that share these parameters.
        parameters: what it looks after.
    """

    agreement: Agreement
    parameters: list[ManagedParameter]

    # Construction.

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        """Take further parameters; every rank calls this with the same ones."""
        ...

    def retire(self) -> None:
        """Let all parameters go: the optimizer has others instead."""
        ...

    def allocate_like_parameters(
        self, indices: Sequence[int], dtype: torch.dtype | None, fill: float
    ) -> Mapping[int, DTensor]:
        """State of the parameters' shape and placement; dtype None for the dtype that the rule updates."""
        ...

    def allocate_per_unit(
        self, unit_numels: dict[int, Sequence[int] | int], dtype: torch.dtype | None, fill: float
    ) -> Mapping[int, DTensor]:
        """State that lives with the owner of each unit: one logical 1-D tensor per parameter, its units in order."""
        ...

    def masters(self, indices: Sequence[int]) -> Mapping[int, DTensor]:
        """The master copies of those parameters that have one, as state of the parameter's shape."""
        ...

    # What a rule sees on this rank.

    def shard(self, index: int) -> Tensor:
        """The flat shard that the rule updates in place."""
        ...

    def gradient(self, index: int) -> Tensor:
        """The flat shard of the mean gradient."""
        ...

    def state_view(self, index: int, state: DTensor) -> Tensor:
        """The flat part of a state that goes with the shard, or with the units where it is per unit."""
        ...

    def region(self, index: int) -> tuple[Part, ...]:
        """The boxes of the parameter that the shard is."""
        ...

    def extent_start(self, index: int) -> int | None:
        """Position of the shard in the flat parameter; None where it is not one run of it."""
        ...

    def unit_range(self, index: int) -> tuple[int, int]:
        """First unit and number of units whose state this rank keeps: those it owns, or holds a part of."""
        ...

    def whole_units(self, index: int) -> range:
        """Of those units of an element-wise rule, the ones that the shard holds whole."""
        ...

    def cuts_units(self, index: int) -> bool:
        """Whether an element-wise rule meets parts of units of the parameter, on any rank."""
        ...

    # A step.

    def synchronize(self, facts: Sequence[int], fault: str | None) -> list[int]:
        """Complete the gradients and agree that the step can go on; returns the maximum over ranks of each fact.

        Raises:
            RuntimeError: on every rank alike, where one found a fault; nothing is changed then.
        """
        ...

    def has_gradient(self, index: int) -> bool:
        """Whether any rank has a gradient of the parameter; known after `synchronize`, the same on all ranks."""
        ...

    def refresh_copies(self) -> None:
        """Make copies (masters, other ranks' state of cut units) follow edits of what they are copies of; collective."""
        ...

    def bucket_members(self) -> list[tuple[int, ...]]:
        """Indices of the parameters of each bucket, in the order in which they are updated."""
        ...

    def moves_units(self, bucket: int) -> bool:
        """Whether units of the bucket have to travel to their owners, on any rank."""
        ...

    def largest_over_ranks(
        self, bucket: int, measured: Mapping[int, Tensor], present: Sequence[int]
    ) -> Mapping[int, Tensor]:
        """Maxima over the ranks of what `Rule.measure` returned; collective where `cuts_units` of any of `present`."""
        ...

    def send_to_owners(self, bucket: int, wires: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        """Start carrying units to their owners; collective where `moves_units`.

        Args:
            wires: what `prepare` returned, flat, of the parameters of which this rank holds anything.
            present: the parameters that take part, on every rank alike.
        """
        ...

    def send_to_shards(self, bucket: int, directions: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        """Start carrying directions, flat over the units that this rank owns, back to the shards."""
        ...

    def publish(self, bucket: int) -> None:
        """The shards of a bucket are updated: make the parameters follow."""
        ...

    def let_travel(self) -> None:
        """Leave what `publish` started to the first use of each parameter."""
        ...

    def arrive(self) -> None:
        """Wait until all parameters are complete on this rank."""
        ...

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients of all parameters."""
        ...
