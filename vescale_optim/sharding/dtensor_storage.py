"""DTensorStorage: parameters that are DTensors already (FSDP2, HSDP, tensor and expert parallelism), left as they are.

Each rank updates its local shard in place. What a rule needs whole is brought to owners and back by an `Exchange`, a
bucket at a time; element-wise rules, and units that lie whole where they are stored, move nothing.

    mesh axes of a parameter    cut it: the columns of a grid         hold it whole: the rows
    FSDP2                       (shard,)                              ()
    HSDP                        (shard,)                              (replicate,)
    FSDP2 x TP                  (dp, tp)                              ()
    router under TP             (dp,)                                 (tp,)

Every rank of the grid owns some of the units, those of all rows too, so no matrix is computed twice. State of a
parameter's shape has the parameter's own placement; state of units is one logical 1-D tensor, a run of it on each owner.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.collectives import GroupReference, broadcast
from vescale_optim.sharding.cut_state import CutParameter, CutState
from vescale_optim.sharding.cut_units import find_cut_units
from vescale_optim.sharding.exchange import Arrival, Exchange, RoutedTensor
from vescale_optim.sharding.gradient_placements import ABSENT, GradientPlacements, lowest_of, placement_mark
from vescale_optim.sharding.live_modules import ParameterOwners
from vescale_optim.sharding.meshes import axes_group, flat_mesh, mesh_group
from vescale_optim.sharding.owners import GridShape, OwnedUnits, choose_owners
from vescale_optim.sharding.parameters import ManagedParameter, find_orphan, forget_gradient, sparse_gradient
from vescale_optim.sharding.ragged import RaggedShard, RaggedTensor
from vescale_optim.sharding.rank_shares import RankShares
from vescale_optim.sharding.regions import Part, PlacedRegions, flat_extent, region_of
from vescale_optim.sharding.storage_protocol import Arrived, Transfer

# Buckets that hold buffers at the same time: units arriving, units being computed, directions going back.
NUM_IN_FLIGHT = 3

# Loads travel as 64-bit integers.
MOST_FLOPS = 1 << 60


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh as columns that hold different parts of a parameter, and rows that hold the same.

    Attributes:
        axes: mesh axes of the columns.
        shape: position of every (row, column) in the group of all ranks of the mesh.
        row, column: of this rank.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    shape: GridShape
    row: int
    column: int

    @property
    def column_group(self) -> ProcessGroup | None:
        """The ranks of this row, in the order of columns."""
        return self._columns.group

    @property
    def row_group(self) -> ProcessGroup | None:
        """The ranks of this column, in the order of rows."""
        return self._rows.group

    @cached_property
    def _columns(self) -> _Line:
        return _Line(axes_group(self.mesh, self.axes) if self.shape.num_columns > 1 else None)

    @cached_property
    def _rows(self) -> _Line:
        others = tuple(axis for axis in range(self.mesh.ndim) if axis not in self.axes)
        return _Line(axes_group(self.mesh, others) if self.shape.num_rows > 1 else None)


class _Line:
    """The group of a row or column of the grid; made at its first use, by all its ranks."""

    group = GroupReference()

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group


@dataclass(eq=False)
class ExchangeBucket:
    """Parameters that travel together, or, without an exchange, that stay.

    Attributes:
        members: indices of the parameters in the storage.
        wire_dtype: None for the dtype of what is sent.
    """

    members: tuple[int, ...]
    grid: Grid | None = None
    exchange: Exchange | None = None
    wire_dtype: torch.dtype | None = None

    def exchange_of(self, present: Sequence[int]) -> Exchange:
        """The exchange of those members that take part in a step."""
        if len(present) == len(self.members):
            return self.exchange
        chosen = set(present)
        return self.exchange.subset([index in chosen for index in self.members])


class DTensorStorage:
    """DTensor parameters of one device mesh.

    Args:
        mesh: the parameters' own.
        master_dtype: dtype of a wider copy of the shards that the rule updates, or None.
        exchange_bytes: bound of the buffers of all buckets in flight on a rank.
        loads: FLOPs given to each global rank so far, by all storages of the optimizer; updated.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        master_dtype: torch.dtype | None,
        exchange_bytes: int,
        loads: MutableMapping[int, float],
    ) -> None:
        self.mesh = mesh
        self.agreement = Agreement(mesh_group(mesh), "construction of an optimizer")
        self.rank = self.agreement.rank
        self.num_ranks = self.agreement.size
        self.parameters: list[ManagedParameter] = []
        self.buckets: list[ExchangeBucket] = []
        self.exchange_bytes = exchange_bytes
        self._global_ranks = dist.get_process_group_ranks(mesh_group(mesh))
        self._master_dtype = master_dtype
        self._loads_by_rank = loads
        self._pool = BufferPool()
        self._grids: dict[tuple[int, ...], Grid] = {}
        self._regions: list[tuple[Part, ...]] = []
        self._dtypes: list[torch.dtype] = []
        self._devices: list[torch.device] = []
        self._starts: list[int | None] = []
        self._numels: list[int] = []
        self._owned: dict[int, tuple[OwnedUnits, ...]] = {}
        self._grid_of: dict[int, Grid] = {}
        self._masters: dict[int, Tensor] = {}
        self._cut_state = CutState(mesh, mesh_group(mesh))
        self._owners = ParameterOwners()
        self._present: list[bool] = []
        self._gradients: dict[int, Tensor] = {}
        self._placements = GradientPlacements()

    @property
    def loads(self) -> list[float]:
        """FLOPs given to each rank of the mesh."""
        return [self._loads_by_rank.get(rank, 0.0) for rank in self._global_ranks]

    # -- construction ------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        """Choose owners for further parameters and plan their exchange; every rank calls this with the same ones.

        Raises:
            ValueError: a placement that cuts units which an element-wise rule needs whole, by the name of the parameter.
        """
        first = len(self.parameters)
        self.parameters += parameters
        self.agreement.name_after([managed.name for managed in self.parameters])
        self._agree_on_loads()
        self._present += [False] * len(parameters)
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index, managed in enumerate(parameters, first):
            param = managed.param
            region = region_of(param)
            self._regions.append(region)
            self._numels.append(sum(part.numel for part in region))
            self._dtypes.append(param.dtype)
            self._devices.append(param._local_tensor.device)
            extent = flat_extent(param.shape, region)
            self._starts.append(None if extent is None else extent[0])
            if self._needs_master(param.dtype):
                self._masters[index] = _flat_local(param).to(self._master_dtype, copy=True)
            axes = None if managed.is_elementwise else self._cut_axes(param)
            if managed.is_elementwise and (managed.has_unit_state or managed.blocks.num_units < param.numel()):
                self._cut_state.add(index, self._find_cut_units(managed))
            kinds.setdefault((axes, self._updated_dtype(param.dtype), managed.wire_dtype, param.device), []).append(index)
        self._owners.watch([managed.param for managed in parameters])
        for (axes, dtype, wire_dtype, _), indices in kinds.items():
            if axes is None:
                self.buckets.append(ExchangeBucket(tuple(indices)))
            else:
                self._plan_exchanges(indices, self._grid(axes), dtype, wire_dtype)

    def _agree_on_loads(self) -> None:
        """Owners follow from the loads: meshes that share ranks must know of each other what these compute already."""
        agreed = self.agreement.maximum([min(int(load), MOST_FLOPS) for load in self.loads])
        self._loads_by_rank.update(zip(self._global_ranks, map(float, agreed), strict=True))

    def _find_cut_units(self, managed: ManagedParameter) -> CutParameter:
        param, blocks = managed.param, managed.blocks
        axes = self._cut_axes(param)
        grid = self._grid(axes)
        regions = PlacedRegions(tuple(param.shape), tuple(self.mesh.shape), tuple(param.placements), axes)
        # A RaggedShard lies on one mesh axis; the others replicate it.
        units = find_cut_units(blocks, regions, grid.column, grid.shape.num_columns, keeps_runs=len(axes) < 2)
        if units.num_cut and not managed.num_measured:
            raise ValueError(
                f"parameter '{managed.name}' of shape {tuple(param.shape)} has placements {tuple(param.placements)}, which "
                f"cut units of {blocks.units.block} elements that its element-wise rule needs whole; give the rule "
                "`num_measured` and `measure`, or shard the parameter between units"
            )
        axis = axes[0] if len(axes) == 1 else None
        return CutParameter(units, blocks.num_units, axis, managed.num_measured)

    def _cut_axes(self, param: DTensor) -> tuple[int, ...]:
        return tuple(
            axis
            for axis, placement in enumerate(param.placements)
            if not isinstance(placement, Replicate) and self.mesh.size(axis) > 1
        )

    def _grid(self, axes: tuple[int, ...]) -> Grid:
        if axes not in self._grids:
            others = tuple(axis for axis in range(self.mesh.ndim) if axis not in axes)
            ranks = self.mesh.mesh.permute(*others, *axes)
            ranks = ranks.reshape(-1, ranks[(0,) * len(others)].numel()).tolist()
            position = {rank: number for number, rank in enumerate(self._global_ranks)}
            shape = GridShape(tuple(tuple(position[rank] for rank in row) for row in ranks))
            ascending = all(list(line) == sorted(line) for line in (*shape.rank_at, *zip(*shape.rank_at, strict=True)))
            if not ascending:
                raise ValueError(
                    f"the ranks of {self.mesh} do not ascend in row-major order, so its process groups order them "
                    "otherwise; make the mesh with init_device_mesh"
                )
            self._grids[axes] = Grid(self.mesh, axes, shape, *shape.places[self.rank])
        return self._grids[axes]

    def _plan_exchanges(
        self, indices: Sequence[int], grid: Grid, dtype: torch.dtype, wire_dtype: torch.dtype | None
    ) -> None:
        """Buckets in the order of parameters, as large as the byte budget allows: large ones fill all ranks."""
        itemsize = (wire_dtype or dtype).itemsize
        room = self.exchange_bytes // (NUM_IN_FLIGHT * itemsize)
        members: list[int] = []
        held = owned = largest = 0
        for index in indices:
            managed = self.parameters[index]
            numel = managed.param.numel()
            whole = max((managed.blocks.unit_numel(unit) for unit in range(min(managed.blocks.num_units, 2))), default=0)
            grown = (
                held + -(-numel // grid.shape.num_columns),
                owned + -(-numel // self.num_ranks),
                max(largest, whole),
            )
            # Sent, received and unpacked: the parts of a rank, and the units of the busiest one.
            if members and grown[0] + 2 * max(grown[1], grown[2]) > room:
                self._add_bucket(members, grid, wire_dtype)
                members = []
                grown = (-(-numel // grid.shape.num_columns), -(-numel // self.num_ranks), whole)
            held, owned, largest = grown
            members.append(index)
        if members:
            self._add_bucket(members, grid, wire_dtype)

    def _add_bucket(self, members: Sequence[int], grid: Grid, wire_dtype: torch.dtype | None) -> None:
        loads = self.loads
        routed: dict[int, RoutedTensor] = {}
        # Dear ones first: what follows levels the loads.
        for index in sorted(members, key=lambda index: -self._cost(index)):
            managed = self.parameters[index]
            param = managed.param
            regions = PlacedRegions(tuple(param.shape), tuple(self.mesh.shape), tuple(param.placements), grid.axes)
            owned = choose_owners(
                managed.blocks, self._cost(index), regions, grid.shape, loads, ascending=managed.has_unit_state
            )
            for entry in owned:
                share = managed.blocks.unit_start(entry.first + entry.count) - managed.blocks.unit_start(entry.first)
                rank = grid.shape.rank_at[entry.row][entry.column]
                loads[rank] += self._cost(index) * share / param.numel()
            self._owned[index] = owned
            self._grid_of[index] = grid
            routed[index] = RoutedTensor(tuple(param.shape), regions, tuple(entry.run(managed.blocks) for entry in owned))
        self._loads_by_rank.update(zip(self._global_ranks, loads, strict=True))
        exchange = Exchange(
            [routed[index] for index in members],
            row=grid.row,
            column=grid.column,
            num_rows=grid.shape.num_rows,
            num_columns=grid.shape.num_columns,
            device=self._exchange_device(members),
        )
        self.buckets.append(ExchangeBucket(tuple(members), grid, exchange, wire_dtype))

    def _cost(self, index: int) -> float:
        """FLOPs; a rule that does not say is taken to work as much on every element."""
        managed = self.parameters[index]
        return managed.cost or float(managed.param.numel())

    def _exchange_device(self, members: Sequence[int]) -> torch.device:
        """Where the process groups communicate: with CPU offload, not where the parameters are."""
        device, kind = self.parameters[members[0]].param.device, self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        if kind == device.type:
            return device
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def _needs_master(self, dtype: torch.dtype) -> bool:
        # A master copy is wider than the parameter: fp32 beside fp64 parameters would lose their bits.
        wide = self._master_dtype
        return wide not in (None, dtype) and torch.promote_types(wide, dtype) == wide

    def _updated_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._master_dtype if self._needs_master(dtype) else dtype

    def retire(self) -> None:
        """Nothing to undo: no hooks, no views."""

    # -- state -------------------------------------------------------------------------------------------------------

    def allocate_like_parameters(
        self, indices: Sequence[int], dtype: torch.dtype | None, fill: float
    ) -> dict[int, DTensor]:
        """State of the parameters' shape and placement; dtype None for the dtype that the rule updates."""
        return {
            index: self._like_parameter(index, torch.full_like(self.shard(index), fill, dtype=dtype)) for index in indices
        }

    def allocate_per_unit(
        self, unit_numels: dict[int, Sequence[int] | int], dtype: torch.dtype | None, fill: float
    ) -> dict[int, DTensor]:
        """State that lives with the owner of each unit: one logical 1-D tensor per parameter, its units in order."""
        result: dict[int, DTensor] = {}
        mesh = flat_mesh(self.mesh)
        for index, numels in unit_numels.items():
            device = self.parameters[index].param.device
            if index in self._cut_state:
                updated_dtype = dtype or self.shard(index).dtype
                result[index] = self._cut_state.allocate(index, numels, updated_dtype, fill, device)
                continue
            shares = [0] * self.num_ranks
            grid = self._grid_of[index]
            for entry in self._owned[index]:
                units = range(entry.first, entry.first + entry.count)
                numel = numels * len(units) if isinstance(numels, int) else sum(numels[units.start : units.stop])
                shares[grid.shape.rank_at[entry.row][entry.column]] = numel
            local = torch.full((shares[self.rank],), fill, dtype=dtype or self.shard(index).dtype, device=device)
            placement = RaggedShard.from_numels((sum(shares),), RankShares.of(shares))
            result[index] = RaggedTensor.from_local(local, mesh, placement, (sum(shares),))
        return result

    def masters(self, indices: Sequence[int]) -> dict[int, DTensor]:
        """The master copies of those parameters that have one, as state of the parameter's shape."""
        return {index: self._like_parameter(index, self._masters[index]) for index in indices if index in self._masters}

    def _like_parameter(self, index: int, flat: Tensor) -> DTensor:
        param = self.parameters[index].param
        if isinstance(param, RaggedTensor):
            return RaggedTensor.from_local(flat, param.device_mesh, param.placements, param.shape)
        local = flat.view(param._local_tensor.shape)
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )

    # -- what a rule sees --------------------------------------------------------------------------------------------

    def shard(self, index: int) -> Tensor:
        """The flat shard of a parameter that the rule updates in place."""
        master = self._masters.get(index)
        return master if master is not None else _flat_local(self.parameters[index].param)

    def gradient(self, index: int) -> Tensor:
        """The flat shard of its gradient; zeros where this rank has none and another has."""
        known = self._gradients.get(index)
        if known is None:
            known = self._gradients[index] = torch.zeros_like(_flat_local(self.parameters[index].param))
        return known

    def state_view(self, index: int, state: DTensor) -> Tensor:
        """The flat part of a state that goes with the shard, or with the units of `unit_range`."""
        kept = self._cut_state.view(index, state)
        return state._local_tensor.view(-1) if kept is None else kept

    def region(self, index: int) -> tuple[Part, ...]:
        """The boxes of the parameter that the shard is."""
        return self._regions[index]

    def extent_start(self, index: int) -> int | None:
        """Position of the shard in the flat parameter; None where it is not one run of it."""
        return self._starts[index]

    def unit_range(self, index: int) -> tuple[int, int]:
        """First unit and number of units whose state this rank keeps; see `Storage`."""
        if index in self._cut_state:
            units = self._cut_state.units(index).units
            return units.start, len(units)
        grid = self._grid_of.get(index)
        for entry in self._owned.get(index, ()):
            if (entry.row, entry.column) == (grid.row, grid.column):
                return entry.first, entry.count
        return 0, 0

    def whole_units(self, index: int) -> range:
        """Of those units of an element-wise rule, the ones that the shard holds whole."""
        return self._cut_state.units(index).whole if index in self._cut_state else range(0)

    def cuts_units(self, index: int) -> bool:
        """Whether an element-wise rule meets parts of units of the parameter, on any rank."""
        return self._cut_state.is_cut(index)

    def has_gradient(self, index: int) -> bool:
        """Whether any rank has a gradient of the parameter; known after `synchronize`, the same on all ranks."""
        return self._present[index]

    # -- step --------------------------------------------------------------------------------------------------------

    def synchronize(self, facts: Sequence[int], fault: str | None) -> list[int]:
        """Agree on who has gradients, and that the step can go on; gradients come synchronised.

        Raises:
            RuntimeError: on every rank alike, where one found a fault; nothing is changed then.
        """
        fault = fault or self._find_fault()
        params = [managed.param for managed in self.parameters]
        absent = [param.grad is None for param in params]
        marks = [placement_mark(param) for param in params]
        agreed = self.agreement.maximum([int(fault is not None), *map(int, absent), *marks, *lowest_of(marks), *facts])
        if agreed[0]:
            self.agreement.raise_fault(fault)
        count = len(params)
        absent, marks, lowest = (agreed[1 + part * count : 1 + (part + 1) * count] for part in range(3))
        self._placements.learn(marks, lowest, params, [managed.name for managed in self.parameters], self.agreement)
        self._present = [mark != ABSENT for mark in marks]
        self._gradients = {}
        for index, (param, mark) in enumerate(zip(params, marks, strict=True)):
            grad = self._placements.like_parameter(param, mark)
            if grad is not None:
                # An expanded or sliced gradient stays strided when it is flattened.
                self._gradients[index] = _flat_local(grad).contiguous()
        self._share_among_replicas([index for index in range(count) if self._present[index] and absent[index]])
        return agreed[1 + 3 * count :]

    def _find_fault(self) -> str | None:
        for index, managed in enumerate(self.parameters):
            param, grad = managed.param, managed.param.grad
            local, dtype = param._local_tensor, self._dtypes[index]
            numel, device = self._numels[index], self._devices[index]
            # Assigning .data changes the dtype of a DTensor, but not its local tensor (torch 2.13).
            if (local.numel(), local.dtype, param.dtype, local.device) != (numel, dtype, dtype, device):
                return (
                    f"the local tensor of parameter '{managed.name}' of shape {tuple(param.shape)} was replaced after the "
                    f"optimizer was made: it had {numel} of {dtype} on {device} and has {local.numel()} of {param.dtype} on "
                    f"{local.device}; shard, convert and move the model first, then construct the optimizer"
                )
            if not local.is_contiguous():
                return (
                    f"the local tensor of parameter '{managed.name}' of shape {tuple(param.shape)} has strides "
                    f"{local.stride()} since the optimizer was made (to(memory_format=...) does that), so it cannot be "
                    "updated in place; convert the model first, then construct the optimizer"
                )
            if grad is not None and not (isinstance(grad, DTensor) and grad.device_mesh == param.device_mesh):
                kind = f"a DTensor on {grad.device_mesh}" if isinstance(grad, DTensor) else "a plain tensor"
                return (
                    f"the gradient of parameter '{managed.name}' is {kind} of shape {tuple(grad.shape)}, but the parameter "
                    f"is a DTensor of placements {param.placements} on {param.device_mesh}; give a DTensor on its mesh"
                )
            if grad is not None and grad._local_tensor.layout != torch.strided:
                return sparse_gradient(managed)
            if grad is not None and grad.placements == param.placements and grad._local_tensor.numel() != numel:
                return (
                    f"the gradient of parameter '{managed.name}' of shape {tuple(param.shape)} has "
                    f"{grad._local_tensor.numel()} elements here, but the parameter has {numel}; give a gradient of the "
                    "parameter's shape"
                )
        return find_orphan(self._owners, self.parameters)

    def _share_among_replicas(self, indices: Sequence[int]) -> None:
        """Where a gradient is missing on some ranks only, take it from a replica that has it: replicas must stay equal."""
        for index in indices:
            grid = self._grid(self._cut_axes(self.parameters[index].param))
            if grid.row_group is None:
                continue
            channel = Agreement(grid.row_group, "gradients of replicas")
            has = index in self._gradients
            (last,) = channel.maximum([channel.rank + 1 if has else 0])
            if last:
                dtype = self.parameters[index].param.dtype
                values = self.gradient(index).to(dtype, copy=True) if has else self.gradient(index)
                broadcast(values, grid.row_group, source=last - 1).wait()
                self._gradients[index] = values

    def refresh_copies(self) -> None:
        """Follow edits (a checkpoint loaded, a clamp): a parameter that is not its master's cast wins, and of the state of a
        cut unit what its owner has."""
        for index, master in self._masters.items():
            shard = _flat_local(self.parameters[index].param)
            torch.where(shard == master.to(shard.dtype), master, shard.to(master.dtype), out=master)
        if self.parameters:
            self._cut_state.refresh(self._exchange_device([0]))

    def bucket_members(self) -> list[tuple[int, ...]]:
        """Indices of the parameters of each bucket, in the order in which they are updated."""
        return [bucket.members for bucket in self.buckets]

    def moves_units(self, bucket: int) -> bool:
        """Whether units of the bucket travel to other ranks."""
        parts = self.buckets[bucket]
        return parts.exchange is not None and (parts.exchange.communicates or parts.grid.shape.num_rows > 1)

    def largest_over_ranks(
        self, bucket: int, measured: Mapping[int, Tensor], present: Sequence[int]
    ) -> Mapping[int, Tensor]:
        """Maxima over the ranks of what a rule measured of parts of units; see `Storage`."""
        return self._cut_state.largest(present, measured, self._exchange_device(self.buckets[bucket].members))

    def send_to_owners(self, bucket: int, wires: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        """Start carrying units to their owners; see `Storage`."""
        parts = self.buckets[bucket]
        if parts.exchange is None:
            return Arrived(wires)
        shards = [self._on_exchange_device(parts, wires.get(index)) for index in parts.members]
        exchange = parts.exchange_of(present)
        return _Exchanged(parts, exchange.to_owners(shards, self.wire_dtype(parts), parts.grid.column_group, self._pool))

    def send_to_shards(self, bucket: int, directions: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        """Start carrying directions back to the shards; see `Storage`."""
        parts = self.buckets[bucket]
        if parts.exchange is None:
            return Arrived(directions)
        owned = [directions.get(index) for index in parts.members]
        grid, dtype = parts.grid, self.wire_dtype(parts)
        arrival = parts.exchange_of(present).to_shards(owned, dtype, grid.column_group, grid.row_group, self._pool)
        return _Exchanged(parts, arrival, device=self.parameters[parts.members[0]].param.device)

    def wire_dtype(self, parts: ExchangeBucket) -> torch.dtype:
        """dtype in which units and directions of a bucket travel."""
        return parts.wire_dtype or self.shard(parts.members[0]).dtype

    def _on_exchange_device(self, parts: ExchangeBucket, wire: Tensor | None) -> Tensor | None:
        return None if wire is None else wire.to(self._exchange_device(parts.members))

    def publish(self, bucket: int) -> None:
        """Masters are cast into their parameters; versions change, as with any in-place edit."""
        members = self.buckets[bucket].members
        for index in members:
            if index in self._masters:
                _flat_local(self.parameters[index].param).copy_(self._masters[index])
        torch.autograd.graph.increment_version([self.parameters[index].param for index in members])

    def let_travel(self) -> None:
        """Nothing travels after a step: shards are where they belong."""

    def arrive(self) -> None:
        """Nothing to wait for; the step is over, so gradients need not be kept alive any longer."""
        self._gradients = {}

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients of all parameters."""
        self._gradients = {}
        for managed in self.parameters:
            forget_gradient(managed.param, set_to_none=set_to_none)


class _Exchanged:
    """Results of an exchange by the index of their parameter, on the device of the shards where that is another."""

    def __init__(self, bucket: ExchangeBucket, arrival: Arrival, device: torch.device | None = None) -> None:
        self._bucket = bucket
        self._arrival = arrival
        self._device = device

    def wait(self) -> dict[int, Tensor]:
        values = dict(zip(self._bucket.members, self._arrival.wait(), strict=True))
        return {
            index: value if self._device is None else value.to(self._device)
            for index, value in values.items()
            if value is not None
        }

    def release(self) -> None:
        self._arrival.release()


def _flat_local(tensor: DTensor) -> Tensor:
    """This rank's part of a DTensor, flat; a view of it where it is contiguous."""
    local = tensor.to_local() if isinstance(tensor, RaggedTensor) else tensor._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local.detach().reshape(-1)
