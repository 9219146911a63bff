"""Storage: how the user's parameters live, and how an optimizer meets them.

ReplicatedStorage takes plain parameters, whole and equal on every rank (ZeRO-2; ZeRO-1 beside DDP). They are re-homed
into the global buffers of DBuffers: `p.data` becomes a view, the parameter object stays. Each rank updates the units it
owns in place, and one all-gather per bucket completes the parameters everywhere.

    params.full      | W1 W1 W1 | W1 b1 W2 | W2 W2 W2 |      every p.data is a view
    on rank 1                    ^^^^^^^^^^                  updated by step(), then sent to the others
    grads.shards                 ^^^^^^^^^^                  mean gradients: GradientReduction, or slices of DDP's
    master.shards                ^^^^^^^^^^                  only with master_dtype

All sizes are in elements. The order of buckets is the reverse of registration, the order in which gradients finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_optim.caller_warnings import warn_caller
from vescale_optim.sharding.agreement import Agreement
from vescale_optim.sharding.bucketing import form_buckets
from vescale_optim.sharding.collectives import GroupReference, Pending, data_group, is_host_backend
from vescale_optim.sharding.dbuffer import DBuffer
from vescale_optim.sharding.gradient_bucket import GradientBucket
from vescale_optim.sharding.gradient_reduction import FlushKind, GradientReduction
from vescale_optim.sharding.live_modules import DDP_MESSAGE, ParameterOwners, is_wrapped_by_ddp
from vescale_optim.sharding.parameters import ManagedParameter, checksum, find_orphan, forget_gradient, sparse_gradient
from vescale_optim.sharding.planner import BufferPlan
from vescale_optim.sharding.ragged import RaggedShard, RaggedTensor
from vescale_optim.sharding.rank_shares import RankShares
from vescale_optim.sharding.regions import Part, run_region
from vescale_optim.sharding.storage_protocol import Arrived, Transfer
from vescale_optim.sharding.travelling import depart, settle

# 16 fp32 elements are one AVX-512 register and one cache line: shards cut there go through the same vector lanes as the
# whole tensor, so a fused kernel gives the same bits.
ALIGN = 16


@dataclass(eq=False)
class ParameterBucket:
    """One bucket of a ReplicatedStorage.

    Attributes:
        members: indices of its parameters in the storage, in plan order.
        params: global buffer that the parameters are views of.
        master: shards in a wider dtype, or None.
        grads: mean gradients, or None where somebody else synchronises them.
    """

    members: tuple[int, ...]
    plan: BufferPlan
    params: DBuffer
    master: DBuffer | None
    grads: GradientBucket | None
    gathering: list[Pending] = field(default_factory=list)

    @property
    def updated(self) -> DBuffer:
        """The shards that the rule updates."""
        return self.master or self.params


class ReplicatedStorage:
    """Plain parameters, equal on all ranks of a one-dimensional mesh.

    Args:
        mesh: the ranks; gradients are averaged and state is sharded over them.
        reduces_gradients: average gradients during backward; else they are already equal when `step` comes (DDP).
        master_dtype: dtype of a wider copy of the shards that the rule updates, or None.
        grad_dtype: dtype in which gradients are added up and sent; None for the parameter's.
        bucket_bytes: size of a bucket.
        broadcasts: compare the ranks' values at construction and take rank 0's where they differ.
    """

    _group = GroupReference()

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        reduces_gradients: bool,
        master_dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
        bucket_bytes: int,
        broadcasts: bool,
    ) -> None:
        self.mesh = mesh
        self.agreement = Agreement(mesh.get_group(), "construction of an optimizer")
        self.rank = self.agreement.rank
        self.num_ranks = self.agreement.size
        self.reduction = GradientReduction(self.agreement, self.find_fault) if reduces_gradients else None
        self.parameters: list[ManagedParameter] = []
        self.buckets: list[ParameterBucket] = []
        self.loads = [0.0] * self.num_ranks
        self._master_dtype = master_dtype
        self._grad_dtype = grad_dtype
        self._bucket_bytes = bucket_bytes
        self._broadcasts = broadcasts
        self._group = data_group(mesh.get_group(), mesh.device_type)
        self._location: list[tuple[int, int]] = []
        self._pointers: list[int] = []
        self._regions: dict[int, tuple[Part, ...]] = {}
        self._owners = ParameterOwners()
        self._present: list[bool] = []
        self._has_compared_gradients = False

    # -- construction ------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        """Plan, re-home and hook further parameters; every rank calls this with the same ones.

        Raises:
            ValueError: a parameter that DDP also reduces.
        """
        first = len(self.parameters)
        if self.reduction is not None and is_wrapped_by_ddp([managed.param for managed in parameters]):
            raise ValueError(DDP_MESSAGE)
        self.parameters += parameters
        self.agreement.name_after([managed.name for managed in self.parameters])
        self._location += [(-1, -1)] * len(parameters)
        self._pointers += [0] * len(parameters)
        self._present += [False] * len(parameters)
        new_buckets = [
            self._build_bucket([first + index for index in members], plan)
            for members, plan in self._plan_buckets(parameters)
        ]
        for bucket in new_buckets:
            for slot, index in enumerate(bucket.members):
                self._location[index] = (len(self.buckets), slot)
            self.buckets.append(bucket)
        if self._broadcasts:
            self._make_equal(range(first, len(self.parameters)))
        for bucket in new_buckets:
            if bucket.master is not None:
                bucket.master.copy_(bucket.params)
            if self.reduction is not None:
                self.reduction.add_bucket(bucket.grads)
        self._owners.watch([managed.param for managed in parameters])

    def _plan_buckets(self, parameters: Sequence[ManagedParameter]) -> list[tuple[list[int], BufferPlan]]:
        """Buckets of one dtype and device each, in the reverse order of registration."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(parameters))):
            param = parameters[index].param
            kinds.setdefault((param.dtype, param.device), []).append(index)
        planned = []
        for (dtype, _), indices in kinds.items():
            tensors = [replace(parameters[i].blocks.units, cost=parameters[i].cost) for i in indices]
            buckets = form_buckets(
                tensors,
                self.num_ranks,
                bucket_numel=max(self._bucket_bytes // dtype.itemsize, 1),
                align=ALIGN,
                loads=self.loads,
            )
            planned += [([indices[tensor] for tensor in bucket.tensors], bucket.plan) for bucket in buckets]
        return planned

    def _build_bucket(self, members: list[int], plan: BufferPlan) -> ParameterBucket:
        managed = [self.parameters[index] for index in members]
        dtype, device = managed[0].param.dtype, managed[0].param.device
        params = DBuffer(plan, self._group, dtype, device, with_full=True)
        with torch.no_grad():
            for slot, (index, entry) in enumerate(zip(members, managed, strict=True)):
                view = params.full_view(slot, entry.param.shape)
                view.copy_(entry.param)
                entry.param.data = view
                self._pointers[index] = view.data_ptr()
        # A master copy is wider than the parameter: fp32 beside fp64 parameters would lose their bits.
        needs_master = self._master_dtype not in (None, dtype) and (
            torch.promote_types(self._master_dtype, dtype) == self._master_dtype
        )
        master = DBuffer(plan, self._group, self._master_dtype, device) if needs_master else None
        grads = None
        if self.reduction is not None:
            grad_dtype = self._grad_dtype or dtype
            # Where waiting blocks the host, all buckets are in flight at the end of backward: each has a buffer of its own.
            shards = DBuffer(plan, self._group, grad_dtype, device, with_full=is_host_backend(self._group, device))
            before_read = partial(_before_read, ref(self.reduction))
            views = [
                self._ragged(shards.shard_view(slot), entry.param.shape, plan.shares(slot), before_read)
                for slot, entry in enumerate(managed)
            ]
            names = [entry.name for entry in managed]
            grads = GradientBucket([entry.param for entry in managed], names, shards, views)
        return ParameterBucket(tuple(members), plan, params, master, grads)

    def _make_equal(self, indices: range) -> None:
        """Compare the ranks' parameter values; where they differ, say so and take rank 0's."""
        checked = [(index, value) for index in indices for value in checksum(self.parameters[index].param)]
        sums = [value for _, value in checked]
        agreed = self.agreement.maximum(sums + [-value for value in sums])
        differences = zip(checked, agreed, agreed[len(sums) :], strict=False)
        different = sorted({index for (index, _), largest, negated in differences if largest != -negated})
        if not different:
            return
        more = f" and those of {len(different) - 1} others" if len(different) > 1 else ""
        warn_caller(
            f"the values of parameter '{self.parameters[different[0]].name}'{more} differ between ranks; rank 0's are "
            "broadcast. Seed every rank alike or load the same checkpoint; pass broadcast_parameters=False to keep "
            "different values on purpose"
        )
        for handle in [bucket.params.broadcast() for bucket in self.buckets if set(bucket.members) & set(indices)]:
            handle.wait()

    def _ragged(self, local: Tensor, shape: Sequence[int], shares: Sequence[int], before_read=None) -> RaggedTensor:
        placement = RaggedShard.from_numels(tuple(shape), shares)
        return RaggedTensor.from_local(local, self.mesh, placement, tuple(shape), before_read=before_read)

    def masters(self, indices: Sequence[int]) -> dict[int, RaggedTensor]:
        """The master copies of those parameters that have one, as state of the parameter's shape."""
        found = {}
        for index in indices:
            bucket, slot = self._location[index]
            master = self.buckets[bucket].master
            if master is not None:
                shape = self.parameters[index].param.shape
                found[index] = self._ragged(master.shard_view(slot), shape, self._shares(index))
        return found

    def refresh_copies(self) -> None:
        """Follow edits of the parameters (a checkpoint loaded, a clamp): where one is not its master's cast, it wins."""
        for bucket in self.buckets:
            if bucket.master is not None:
                for master, shard in zip(bucket.master.shards, bucket.params.shards, strict=True):
                    torch.where(shard == master.to(shard.dtype), master, shard.to(master.dtype), out=master)

    # -- state -------------------------------------------------------------------------------------------------------

    def allocate_like_parameters(
        self, indices: Sequence[int], dtype: torch.dtype | None, fill: float
    ) -> dict[int, RaggedTensor]:
        """State of the parameters' shape and placement; dtype None for the dtype that the rule updates."""
        layout = {index: (tuple(self.parameters[index].param.shape), self._shares(index)) for index in indices}
        return self._allocate(layout, dtype, fill)

    def allocate_per_unit(
        self, unit_numels: dict[int, Sequence[int] | int], dtype: torch.dtype | None, fill: float
    ) -> dict[int, RaggedTensor]:
        """State that lives with the owner of each unit: one logical 1-D tensor per parameter, its units in order."""
        layout = {}
        for index, numels in unit_numels.items():
            bucket, slot = self._location[index]
            plan = self.buckets[bucket].plan
            owners = plan.ranks_of(slot)
            ranges = [plan.unit_range(slot, rank) for rank in owners]
            if isinstance(numels, int):
                held = [numels * count for _, count in ranges]
            else:
                held = [sum(numels[first : first + count]) for first, count in ranges]
            layout[index] = ((sum(held),), RankShares.from_first(self.num_ranks, owners.start, held))
        return self._allocate(layout, dtype, fill)

    def _allocate(
        self, layout: dict[int, tuple[tuple[int, ...], Sequence[int]]], dtype: torch.dtype | None, fill: float
    ) -> dict[int, RaggedTensor]:
        """One arena per bucket and dtype: few allocations, each tensor aligned."""
        result: dict[int, RaggedTensor] = {}
        arenas: dict[tuple[int, torch.dtype], list[int]] = {}
        for index in layout:
            bucket = self._location[index][0]
            arenas.setdefault((bucket, dtype or self.buckets[bucket].updated.dtype), []).append(index)
        for (bucket, arena_dtype), indices in arenas.items():
            # In the order of the parameters' buffer: neighbours there are neighbours here.
            indices.sort(key=self._offset)
            strides = [-(-layout[index][1][self.rank] // ALIGN) * ALIGN for index in indices]
            device = self.buckets[bucket].params.device
            arena = torch.full((sum(strides),), fill, dtype=arena_dtype, device=device)
            for index, chunk in zip(indices, arena.split(strides), strict=True):
                shape, shares = layout[index]
                result[index] = self._ragged(chunk[: shares[self.rank]], shape, shares)
        return result

    def _offset(self, index: int) -> int:
        bucket, slot = self._location[index]
        return self.buckets[bucket].plan.offsets[slot]

    def _shares(self, index: int) -> RankShares:
        bucket, slot = self._location[index]
        return self.buckets[bucket].plan.shares(slot)

    # -- what a rule sees --------------------------------------------------------------------------------------------

    def shard(self, index: int) -> Tensor:
        """The flat shard of a parameter that the rule updates in place."""
        bucket, slot = self._location[index]
        return self.buckets[bucket].updated.shard_view(slot)

    def gradient(self, index: int) -> Tensor:
        """The flat shard of its mean gradient, in the gradient's dtype."""
        bucket, slot = self._location[index]
        grads = self.buckets[bucket].grads
        if grads is not None:
            return grads.shards.shard_view(slot)
        extent = self.buckets[bucket].plan.extent(slot, self.rank)
        # Kernels of rules take flat shards: an expanded or sliced gradient stays strided when it is flattened.
        return self.parameters[index].param.grad.reshape(-1).narrow(0, extent.start, extent.numel).contiguous()

    def state_view(self, index: int, state: DTensor) -> Tensor:
        """The flat local part of a state: it lies like the shard, or like its units."""
        return state._local_tensor

    def region(self, index: int) -> tuple[Part, ...]:
        """The boxes of the parameter that the shard is."""
        known = self._regions.get(index)
        if known is None:
            start = self.extent_start(index)
            known = run_region(self.parameters[index].param.shape, start, start + self.shard(index).numel())
            self._regions[index] = known
        return known

    def unit_range(self, index: int) -> tuple[int, int]:
        """First unit and number of units of a parameter on this rank."""
        bucket, slot = self._location[index]
        return self.buckets[bucket].plan.unit_range(slot, self.rank)

    def whole_units(self, index: int) -> range:
        """All units on this rank: shards are runs of whole units."""
        first, count = self.unit_range(index)
        return range(first, first + count)

    def cuts_units(self, index: int) -> bool:
        """Never: shards are runs of whole units."""
        return False

    def extent_start(self, index: int) -> int:
        """Position in the flat parameter of the first element on this rank."""
        bucket, slot = self._location[index]
        return self.buckets[bucket].plan.extent(slot, self.rank).start

    def has_gradient(self, index: int) -> bool:
        """Whether any rank has a gradient of the parameter; known after `synchronize`, the same on all ranks."""
        return self._present[index]

    # -- step --------------------------------------------------------------------------------------------------------

    def synchronize(self, facts: Sequence[int], fault: str | None) -> list[int]:
        """Complete the gradients, and agree that the step can go on.

        Args:
            facts: `NUM_STEP_FACTS` integers; their maximum over ranks is returned.
            fault: what the optimizer found wrong on this rank.

        Raises:
            RuntimeError: on every rank alike, where one found a fault; nothing is changed then.
        """
        if self.reduction is not None:
            agreed = self.reduction.flush(FlushKind.STEP, facts, fault)
            for bucket in self.buckets:
                for index, present in zip(bucket.members, bucket.grads.present, strict=True):
                    self._present[index] = present
        else:
            agreed = self._agree_on_synchronised_gradients(facts, fault or self.find_fault(checks_hooks=False))
        return agreed

    def _agree_on_synchronised_gradients(self, facts: Sequence[int], fault: str | None) -> list[int]:
        mine = [managed.param.grad is not None for managed in self.parameters]
        message = [fault is not None, *mine, *(not flag for flag in mine), *facts]
        agreed = self.agreement.maximum([int(value) for value in message])
        if agreed[0]:
            self.agreement.raise_fault(fault)
        present, absent = agreed[1 : 1 + len(mine)], agreed[1 + len(mine) : 1 + 2 * len(mine)]
        for managed, has, lacks in zip(self.parameters, present, absent, strict=True):
            if has and lacks:
                raise RuntimeError(
                    f"parameter '{managed.name}' has a gradient on some ranks only, but grad_sync='none' takes gradients "
                    "that are already equal on all; synchronise it, or use grad_sync='reduce_scatter'"
                )
        self._present = [bool(flag) for flag in present]
        if not self._has_compared_gradients and any(present):
            self._has_compared_gradients = True
            self._compare_gradients()
        return agreed[1 + 2 * len(mine) :]

    def _compare_gradients(self) -> None:
        """Once: unsynchronised gradients would give a wrong training run without any error."""
        with_gradient = [managed for managed, present in zip(self.parameters, self._present, strict=True) if present]
        norms = [torch.linalg.vector_norm(managed.param.grad).float() for managed in with_gradient]
        values = torch.stack(norms).cpu().view(torch.int32).tolist()
        # The bits of non-negative floats are ordered like their values.
        agreed = self.agreement.maximum(values + [-value for value in values])
        for managed, largest, smallest in zip(with_gradient, agreed[: len(values)], agreed[len(values) :], strict=True):
            high, low = torch.tensor([largest, -smallest], dtype=torch.int32).view(torch.float32).tolist()
            if high - low > 1e-3 * high:
                raise RuntimeError(
                    f"the gradient of parameter '{managed.name}' differs between ranks (norms {low:g} to {high:g}), but "
                    "grad_sync='none' takes gradients that are already averaged (DistributedDataParallel does that); "
                    "use grad_sync='reduce_scatter' to let the optimizer average them"
                )

    def find_fault(self, *, checks_hooks: bool) -> str | None:
        """What became of a parameter that makes a step wrong, by name; None where all is well."""
        for index, managed in enumerate(self.parameters):
            param = managed.param
            bucket, slot = self._location[index]
            if param.data_ptr() != self._pointers[index] or param.dtype != self.buckets[bucket].params.dtype:
                return (
                    f"the storage of parameter '{managed.name}' of shape {tuple(param.shape)} was replaced after the "
                    "optimizer was made (module.to(dtype or device), .half() and the like); convert the model first, "
                    "then construct the optimizer"
                )
            if self.reduction is None and param.grad is not None and param.grad.layout != torch.strided:
                return sparse_gradient(managed)
            if checks_hooks and param.requires_grad and self.reduction.has_lost_hooks(bucket, slot):
                return (
                    f"autograd's accumulation node of parameter '{managed.name}' was replaced after the optimizer was "
                    "made, so its gradients are not seen (assigning .data of another dtype does that); construct the "
                    "optimizer afterwards"
                )
        return find_orphan(self._owners, self.parameters)

    def moves_units(self, bucket: int) -> bool:
        """Never: shards are runs of whole units."""
        return False

    def largest_over_ranks(
        self, bucket: int, measured: Mapping[int, Tensor], present: Sequence[int]
    ) -> Mapping[int, Tensor]:
        return measured

    def send_to_owners(self, bucket: int, wires: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        return Arrived(wires)

    def send_to_shards(self, bucket: int, directions: Mapping[int, Tensor], present: Sequence[int]) -> Transfer:
        return Arrived(directions)

    def publish(self, bucket: int) -> None:
        """Start sending the updated shards of a bucket to the other ranks."""
        parts = self.buckets[bucket]
        if parts.master is not None:
            parts.params.copy_(parts.master)
        parts.gathering = parts.params.all_gather()
        # As any in-place edit does: a backward over values saved before raises.
        torch.autograd.graph.increment_version(self._params_of(parts))

    def let_travel(self) -> None:
        """Leave the buckets that are under way to the first use of their parameters."""
        for bucket in self.buckets:
            if bucket.gathering:
                depart(self._params_of(bucket), partial(self._arrive, bucket))

    def arrive(self) -> None:
        """Wait until all parameters are complete on this rank."""
        for bucket in self.buckets:
            self._arrive(bucket)

    def _arrive(self, bucket: ParameterBucket) -> None:
        gathering, bucket.gathering = bucket.gathering, []
        for handle in gathering:
            handle.wait()
        settle(self._params_of(bucket))

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients; see `ShardedOptimizer.zero_grad`."""
        if self.reduction is not None:
            self.reduction.clear(set_to_none=set_to_none)
            return
        for managed in self.parameters:
            forget_gradient(managed.param, set_to_none=set_to_none)

    def retire(self) -> None:
        """Let all parameters go; they keep their values, as views of the global buffers."""
        if self.reduction is not None:
            self.reduction.retire()

    def _params_of(self, bucket: ParameterBucket) -> list[nn.Parameter]:
        return [self.parameters[index].param for index in bucket.members]

    def bucket_members(self) -> list[tuple[int, ...]]:
        """Indices of the parameters of each bucket, in the order in which they are updated and sent."""
        return [bucket.members for bucket in self.buckets]


def _before_read(reference: ref[GradientReduction]) -> None:
    reduction = reference()
    if reduction is not None:
        reduction.before_read()
