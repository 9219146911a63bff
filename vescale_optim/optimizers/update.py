"""One step over all buckets: prepare, compute and apply, with units and directions on their way in between.

    bucket 0   prepare ==to owners==> compute ==to shards==>  apply
    bucket 1           prepare ==to owners========>  compute ==to shards==>  apply
    bucket 2                                  prepare ==to owners========>  compute ...

While the owners compute bucket k, the units of bucket k + 1 arrive and the directions of bucket k - 1 go back. A bucket
whose units are whole where they are stored goes through at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_optim.optimizers.rule import Group, Rule, Shards, Units
from vescale_optim.optimizers.rule_checks import NoDirections, check_returned
from vescale_optim.sharding.storage_protocol import Storage, Transfer

# State of one parameter: `optimizer.state[param]`.
State = Mapping[str, Any]


@dataclass
class RuleCall:
    """Parameters of one bucket that a rule updates together: of one group, with the same kinds of state.

    Attributes:
        indices: all of them, in bucket order, on every rank alike.
        held: those of which this rank holds anything: elements, or state of units that are cut.
        shards: what it holds, once the update has begun.
    """

    rule: Rule
    group: Group
    indices: list[int]
    held: list[int]
    shards: Shards


class BucketUpdate:
    """One bucket on its way through a step."""

    def __init__(
        self,
        storage: Storage,
        bucket: int,
        groups: Sequence[tuple[Rule, Group, list[int]]],
        state_of: Callable[[Tensor], State],
    ) -> None:
        self._storage = storage
        self._bucket = bucket
        self._state_of = state_of
        self._calls = [
            RuleCall(rule, group, same, [index for index in same if self._is_held(index)], Shards())
            for rule, group, indices in groups
            for same in self._by_kinds_of_state(indices)
        ]
        self._present = [index for call in self._calls for index in call.indices]
        self._transfer: Transfer | None = None

    @property
    def moves_units(self) -> bool:
        return self._storage.moves_units(self._bucket)

    def begin(self) -> None:
        """Prepare on the shards, and send units to their owners."""
        wires: dict[int, Tensor] = {}
        measured: dict[int, Tensor] = {}
        for call in self._calls:
            for index in call.indices:
                self._state(index)["step"] += 1
            call.shards = self._shards_of(call.held)
            if not call.held:
                continue
            if not call.rule.is_elementwise:
                prepared = call.rule.prepare(call.shards, call.group)
                numels = [param.numel() for param in call.shards.params]
                check_returned(call.rule, "prepare", prepared, numels, call.shards.names)
                wires.update(zip(call.held, prepared, strict=True))
            elif self._meets_cut_units(call):
                measured.update(zip(call.held, call.rule.measure(call.shards, call.group), strict=True))
        largest = self._storage.largest_over_ranks(self._bucket, measured, self._present)
        for call in self._calls:
            if call.held and call.rule.is_elementwise:
                meets_cut_units = self._meets_cut_units(call)
                directions = [largest[index] for index in call.held] if meets_cut_units else NoDirections(call.rule)
                call.rule.apply(call.shards, directions, call.group)
        self._transfer = self._storage.send_to_owners(self._bucket, wires, self._present)

    def compute(self) -> None:
        """Compute on the owners, and send directions to the shards."""
        values = self._transfer.wait()
        directions: dict[int, Tensor] = {}
        for call in self._calls:
            owned = [index for index in call.indices if index in values and self._storage.unit_range(index)[1]]
            if owned and not call.rule.is_elementwise:
                units = [self._units_of(index, values[index]) for index in owned]
                computed = call.rule.compute(units, call.group)
                numels, names = [entry.values.numel() for entry in units], [entry.name for entry in units]
                check_returned(call.rule, "compute", computed, numels, names)
                directions.update(zip(owned, computed, strict=True))
        incoming = self._transfer
        self._transfer = self._storage.send_to_shards(self._bucket, directions, self._present)
        incoming.release()

    def finish(self) -> None:
        """Apply to the shards, and make the parameters follow."""
        directions = self._transfer.wait()
        for call in self._calls:
            if call.held and not call.rule.is_elementwise:
                call.rule.apply(call.shards, [directions[index] for index in call.held], call.group)
        self._transfer.release()
        self._storage.publish(self._bucket)

    def _is_held(self, index: int) -> bool:
        storage = self._storage
        return storage.shard(index).numel() > 0 or (storage.cuts_units(index) and storage.unit_range(index)[1] > 0)

    def _meets_cut_units(self, call: RuleCall) -> bool:
        return any(self._storage.cuts_units(index) for index in call.held)

    def _state(self, index: int) -> State:
        return self._state_of(self._storage.parameters[index].param)

    def _by_kinds_of_state(self, indices: Iterable[int]) -> list[list[int]]:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for index in indices:
            kinds.setdefault(tuple(self._state(index)), []).append(index)
        return list(kinds.values())

    def _shards_of(self, indices: Sequence[int]) -> Shards:
        storage, shards = self._storage, Shards()
        for index in indices:
            managed, state = storage.parameters[index], self._state(index)
            param = storage.shard(index)
            shards.params.append(param)
            shards.grads.append(storage.gradient(index).to(param.dtype))
            shards.blocks.append(managed.blocks)
            shards.starts.append(storage.extent_start(index))
            shards.regions.append(storage.region(index))
            first, count = storage.unit_range(index)
            shards.units.append(range(first, first + count))
            shards.whole.append(storage.whole_units(index))
            shards.names.append(managed.name)
            shards.steps.append(int(state["step"]))
            for name, value in state.items():
                if name != "step":
                    shards.state.setdefault(name, []).append(storage.state_view(index, value))
        return shards

    def _units_of(self, index: int, values: Tensor) -> Units:
        managed, state = self._storage.parameters[index], self._state(index)
        first, count = self._storage.unit_range(index)
        views = {name: self._storage.state_view(index, value) for name, value in state.items() if name != "step"}
        return Units(values, managed.blocks, first, count, views, int(state["step"]), managed.name)


def run(updates: Iterable[BucketUpdate]) -> None:
    """Take all buckets through the step, in order; every rank calls this with the same ones."""
    arriving: deque[BucketUpdate] = deque()
    returning: deque[BucketUpdate] = deque()

    def compute_next() -> None:
        update = arriving.popleft()
        update.compute()
        returning.append(update)
        if len(returning) > 1:
            returning.popleft().finish()

    for update in updates:
        update.begin()
        if not update.moves_units:
            update.compute()
            update.finish()
            continue
        arriving.append(update)
        if len(arriving) > 1:
            compute_next()
    while arriving:
        compute_next()
    while returning:
        returning.popleft().finish()
