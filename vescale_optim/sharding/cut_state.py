"""CutState: state of units that the storage cuts, kept beside the shards, and what ranks combine about such units.

A rank keeps the state of every unit of which its shard holds a part (see `cut_units`). Its part of the logical state is a
view of that, the rest a copy of what another rank owns:

    kept on rank 1    | u1 | u2 | u3 |        u1 is rank 0's: a copy
    local state            | u2 | u3 |        what checkpoints save and load

Both messages are one all-reduce of the maximum, laid out alike on every rank, whether it holds anything or not. Numbers are
compared by their bits: those of non-negative floats are ordered like their values, and NaN is above all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale_optim.sharding.collectives import GroupReference, all_reduce
from vescale_optim.sharding.cut_units import CutUnits, cut_rows
from vescale_optim.sharding.ragged import RaggedShard, RaggedTensor

# Below the bits of every number.
NOTHING = torch.iinfo(torch.int32).min


@dataclass(eq=False)
class CutParameter:
    """One parameter of an element-wise rule with blocks.

    Attributes:
        num_units: of the whole parameter.
        axis: mesh axis whose ranks hold different parts; None where all hold everything, or several axes cut it.
        num_measured: numbers of each unit that the rule measures.
        states: (logical state, what this rank keeps of it) for each kind of state.
        width: numbers of each unit in all kinds of state.
    """

    units: CutUnits
    num_units: int
    axis: int | None
    num_measured: int
    states: list[tuple[DTensor, Tensor]] = field(default_factory=list)
    width: int = 0

    def rows(self, values: Tensor) -> list[Tensor]:
        """Rows of the cut units in [units here, numbers]."""
        return [values[rows] for rows in cut_rows(self.units.units, self.units.whole)]


class CutState:
    """State of the units of one storage's element-wise parameters, by the index of the parameter.

    Args:
        mesh: the parameters' own.
        group: all its ranks, on the device of the messages.
    """

    _group = GroupReference()

    def __init__(self, mesh: DeviceMesh, group: ProcessGroup) -> None:
        self._mesh = mesh
        self._group = group
        self._parameters: dict[int, CutParameter] = {}

    def add(self, index: int, parameter: CutParameter) -> None:
        self._parameters[index] = parameter

    def __contains__(self, index: int) -> bool:
        return index in self._parameters

    def units(self, index: int) -> CutUnits:
        return self._parameters[index].units

    def is_cut(self, index: int) -> bool:
        """Whether any unit of a parameter is cut; the same on all ranks."""
        return index in self._parameters and self._parameters[index].units.num_cut > 0

    def allocate(
        self, index: int, numels: Sequence[int] | int, dtype: torch.dtype, fill: float, device: torch.device
    ) -> DTensor:
        """The logical state; what this rank keeps of it is `view`.

        Raises:
            ValueError: state of different size for each unit, where units are cut.
        """
        entry = self._parameters[index]
        units = entry.units
        if not isinstance(numels, int) and units.num_cut:
            raise ValueError(
                f"state of units that the storage cuts must have one size, found {len(set(numels))}; give one number"
            )

        kept = torch.full((_numel_of(units.units, numels),), fill, dtype=dtype, device=device)
        shape = (_numel_of(range(entry.num_units), numels),)
        placements: list[Placement] = [Replicate()] * self._mesh.ndim
        if units.shares is None or entry.axis is None:
            state = DTensor.from_local(kept, self._mesh, placements, run_check=False, shape=shape, stride=(1,))
        else:
            placements[entry.axis] = RaggedShard.from_numels(shape, _numels_of_shares(units.shares, numels))
            own = _numel_of(units.owned, numels)
            state = RaggedTensor.from_local(kept[kept.numel() - own :], self._mesh, tuple(placements), shape)
        entry.states.append((state, kept))
        entry.width += numels if isinstance(numels, int) else 0
        return state

    def view(self, index: int, state: DTensor) -> Tensor | None:
        """What this rank keeps of a state, flat; None where the state is not of units here."""
        states = self._parameters[index].states if index in self._parameters else []
        return next((kept for known, kept in states if known is state), None)

    def refresh(self, device: torch.device) -> None:
        """Give the owner's state of each cut unit, which may have been loaded, to the others that hold a part of it."""
        shared = {
            index: entry
            for index, entry in self._parameters.items()
            if entry.units.num_cut and entry.units.shares is not None and entry.states
        }
        rows: dict[int, Tensor] = {}
        for index, entry in shared.items():
            units = entry.units
            if units.cut.start < units.cut.stop:
                states = [kept.float().view(len(units.units), -1) for _, kept in entry.states]
                bits = torch.cat(entry.rows(torch.cat(states, dim=1))).view(torch.int32)
                if units.units.start != units.owned.start or not units.owned:
                    bits[0] = NOTHING
                rows[index] = bits
        widths = {index: entry.width for index, entry in shared.items()}
        for index, found in self._largest_bits(widths, rows, device).items():
            entry = shared[index]
            if entry.units.units.start != entry.units.owned.start or not entry.units.owned:
                values = found[0].view(torch.float32).to(entry.states[0][1].device)
                sizes = [kept.numel() // len(entry.units.units) for _, kept in entry.states]
                for (_, kept), value in zip(entry.states, values.split(sizes), strict=True):
                    kept[: value.numel()].copy_(value)

    def largest(self, indices: Iterable[int], measured: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
        """`measured` with the maxima over all ranks in the rows of cut units.

        Args:
            indices: parameters that take part, on every rank alike.
            measured: fp32 [units here, num_measured], none negative, of parameters of which this rank holds anything.
        """
        cut = [index for index in indices if self.is_cut(index)]
        here = [index for index in cut if index in measured and self.units(index).cut.start < self.units(index).cut.stop]
        rows = {index: torch.cat(self._parameters[index].rows(measured[index])).view(torch.int32) for index in here}
        widths = {index: self._parameters[index].num_measured for index in cut}
        for index, found in self._largest_bits(widths, rows, device).items():
            targets = self._parameters[index].rows(measured[index])
            values = found.view(torch.float32).to(measured[index].device)
            for target, value in zip(targets, values.split([len(target) for target in targets]), strict=True):
                target.copy_(value)
        return dict(measured)

    def _largest_bits(
        self, widths: Mapping[int, int], rows: Mapping[int, Tensor], device: torch.device
    ) -> dict[int, Tensor]:
        """Maximum over the ranks of int32 rows [cut units here, width]."""
        sizes = [self.units(index).num_cut * width for index, width in widths.items()]
        if not sum(sizes):
            return dict(rows)
        message = torch.full((sum(sizes),), NOTHING, dtype=torch.int32, device=device)
        sections = dict(zip(widths, message.split(sizes), strict=True))
        mine = {index: sections[index].view(-1, widths[index])[self.units(index).cut] for index in rows}
        for index, section in mine.items():
            section.copy_(rows[index])
        all_reduce(message, self._group, ReduceOp.MAX)
        return mine


def _numel_of(units: range, numels: Sequence[int] | int) -> int:
    """Elements of consecutive units, of one size or of a size each."""
    return numels * len(units) if isinstance(numels, int) else sum(numels[units.start : units.stop])


def _numels_of_shares(shares: Sequence[int], numels: Sequence[int] | int) -> list[int]:
    """Elements that each column owns of consecutive units."""
    if isinstance(numels, int):
        return [numels * share for share in shares]
    return [_numel_of(range(end - share, end), numels) for end, share in zip(accumulate(shares), shares, strict=True)]
