"""The buckets and the owners of a model, for the two ways in which its parameters can live.

    replicated   parameters whole on every rank, gradients and state in shards: buckets of the optimizer's units, planned
                 by the code that ReplicatedStorage runs (`form_buckets`)
    sharded      parameters in shards too, layer by layer. Where a layer's units can be kept whole with little padding (as
                 `fully_shard` decides), the step sends nothing; else rows are stored, and units travel to owners and back
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

import torch

from vescale_optim.capacity.declared import Declaration, DeclaredTensor
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.bucketing import form_buckets
from vescale_optim.sharding.fully_sharded.layout import keeps_units
from vescale_optim.sharding.planner import BufferPlan, TensorBlocks, plan_buffer
from vescale_optim.sharding.planning.balance import Job, assign_jobs
from vescale_optim.sharding.storage import ALIGN

# Padding of equal shards that replicated parameters accept, as in `form_buckets`.
MAX_PADDING = 0.03


@dataclass(frozen=True)
class PlannedBucket:
    """What travels in one collective, or several buckets that are alike.

    Attributes:
        label: the layer, or a number.
        tensors: of one of them, in the order of `plan.tensors`.
        count: how many are alike.
        keeps_units: the optimizer's units are whole in the shards, so its step has nothing to exchange.
        why: one line: what was chosen for it, and for which reason.
    """

    label: str
    tensors: tuple[DeclaredTensor, ...]
    plan: BufferPlan
    count: int
    keeps_units: bool
    why: str

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


@dataclass(frozen=True)
class Owners:
    """Who computes what; one entry per device of all replicas.

    Attributes:
        flops: of the rule's `compute` in one step.
        exchanged_numels: elements of the units that come to this owner from the shards of others.
        unit_state_bytes: of the state that lives with those units.
    """

    flops: tuple[float, ...]
    exchanged_numels: tuple[int, ...]
    unit_state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class StoragePlan:
    """Buckets and owners of a whole model. `num_ranks` shard it, each shard is on `num_replicas` devices."""

    name: str
    num_ranks: int
    num_replicas: int
    buckets: tuple[PlannedBucket, ...]
    owners: Owners


def default_bucket_bytes(num_ranks: int) -> int:
    """As the optimizers choose it (`bucket_mib=None`)."""
    return int(max(16, 0.25 * num_ranks) * 2**20)


def plan_replicated(declaration: Declaration, num_ranks: int, bucket_bytes: int) -> StoragePlan:
    """The plan that an optimizer over plain parameters would make."""
    kinds: dict[torch.dtype, list[DeclaredTensor]] = {}
    # From the last parameter to the first: the order in which gradients finish.
    for tensor in reversed(declaration.tensors):
        kinds.setdefault(tensor.dtype, []).append(tensor)
    flops, buckets = [0.0] * num_ranks, []
    for dtype, tensors in kinds.items():
        formed = form_buckets(
            [tensor.units for tensor in tensors],
            num_ranks,
            bucket_numel=max(bucket_bytes // dtype.itemsize, 1),
            align=ALIGN,
            loads=flops,
        )
        for bucket in formed:
            members = tuple(tensors[index] for index in bucket.tensors)
            if bucket.plan.is_even:
                why = "equal shards, every unit whole on one rank"
            else:
                why = f"unequal shards: equal ones of whole units would pad more than {MAX_PADDING:.0%}"
            buckets.append(PlannedBucket(str(len(buckets)), members, bucket.plan, 1, True, why))
    idle = (0,) * num_ranks
    return StoragePlan("replicated", num_ranks, 1, tuple(buckets), Owners(tuple(flops), idle, idle))


def plan_sharded(
    declaration: Declaration, num_ranks: int, num_replicas: int = 1, *, block_rows: int | None = None
) -> StoragePlan:
    """The plan of a model whose parameters are sharded layer by layer.

    Args:
        block_rows: store blocks of this many rows in every layer; None to keep the optimizer's units whole where
            that pads little, and store rows where it does not.
    """
    layers: dict[tuple[str, torch.dtype], list[DeclaredTensor]] = {}
    for tensor in declaration.tensors:
        layers.setdefault((tensor.layer, tensor.dtype), []).append(tensor)
    alike: dict[tuple[object, ...], list[str]] = {}
    members: dict[tuple[object, ...], list[DeclaredTensor]] = {}
    for (layer, _), tensors in layers.items():
        key = tuple(tensor.kind for tensor in tensors)
        alike.setdefault(key, []).append(layer or "outside layers")
        members.setdefault(key, tensors)
    buckets = [
        _plan_layer(_label(alike[key]), members[key], len(alike[key]), num_ranks, block_rows) for key in alike
    ]
    return StoragePlan(
        "sharded", num_ranks, num_replicas, tuple(buckets), _owners(buckets, num_ranks, num_replicas)
    )


def _label(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} +{len(layers) - 1}"


def _plan_layer(
    label: str, tensors: Sequence[DeclaredTensor], count: int, num_ranks: int, block_rows: int | None
) -> PlannedBucket:
    is_free = all(tensor.is_elementwise or not tensor.units.cost for tensor in tensors)
    units = [tensor.units for tensor in tensors]
    if block_rows is None:
        plan = plan_buffer(units, num_ranks, align=ALIGN)
        moved = sum(tensor.units.numel for tensor in tensors if not tensor.is_elementwise)
        if is_free or keeps_units(plan, moved, num_ranks, tensors[0].dtype.itemsize):
            why = "units whole in the shards: the step sends nothing"
            return PlannedBucket(label, tuple(tensors), plan, count, True, why)
        refused = f"; whole units would pad {plan.padding_fraction:,.0%}"
    else:
        refused = " were asked for"
    rows = block_rows or 1
    plan = plan_buffer([rows_of(tensor, rows) for tensor in tensors], num_ranks, align=ALIGN)
    exchanged = "" if is_free else ", units are exchanged with owners"
    why = f"blocks of {rows} row{'s' * (rows > 1)}{refused}{exchanged}"
    return PlannedBucket(label, tuple(tensors), plan, count, is_free, why)


def rows_of(tensor: DeclaredTensor, block_rows: int) -> TensorBlocks:
    """Blocks of rows of a tensor that also keep whole what an element-wise rule needs whole."""
    blocks = Blocks.rows(tensor.shape, block_rows).units
    if not tensor.is_elementwise or tensor.units.boundaries is not None:
        return blocks
    return dataclasses.replace(blocks, block=lcm(blocks.block, tensor.units.block))


def _owners(buckets: Sequence[PlannedBucket], num_ranks: int, num_replicas: int) -> Owners:
    """Units that are whole are computed where they are, in every replica; the others go to any device, by FLOPs."""
    kept = [0.0] * num_ranks
    jobs: list[Job] = []
    state: list[int] = []
    for bucket in buckets:
        if bucket.keeps_units:
            kept = [a + bucket.count * b for a, b in zip(kept, bucket.plan.rank_costs(), strict=True)]
            continue
        for kind, number in Counter(bucket.tensors).items():
            if kind.units.cost:
                unit_jobs, unit_state = _jobs_of(kind)
                jobs += unit_jobs * (number * bucket.count)
                state += unit_state * (number * bucket.count)
    flops = kept * num_replicas
    exchanged, unit_state_bytes = [0] * len(flops), [0] * len(flops)
    owners = assign_jobs(jobs, exchanged, flops) or []
    for job, held, owner in zip(jobs, state, owners, strict=True):
        flops[owner] += job.cost
        exchanged[owner] += int(job.size)
        unit_state_bytes[owner] += held
    return Owners(tuple(flops), tuple(exchanged), tuple(unit_state_bytes))


def _jobs_of(tensor: DeclaredTensor) -> tuple[list[Job], list[int]]:
    """The units of a tensor as jobs, and the bytes of state of each."""
    numels = unit_numels(tensor.units)
    jobs = [Job(numel, tensor.units.cost * numel / tensor.units.numel) for numel in numels]
    state = [0] * len(numels)
    for spec in tensor.state:
        if spec.where == "unit":
            for unit in range(len(numels)):
                held = spec.unit_numels if isinstance(spec.unit_numels, int) else spec.unit_numels[unit]
                state[unit] += held * spec.dtype.itemsize
    return jobs, state


def unit_numels(units: TensorBlocks) -> list[int]:
    """Elements of every unit."""
    if units.boundaries is not None:
        return [end - start for start, end in zip((0, *units.boundaries), units.boundaries, strict=False)]
    full, short = divmod(units.numel, units.block)
    return [units.block] * full + [short] * (short > 0)


def state_bytes_per_rank(bucket: PlannedBucket, num_ranks: int) -> list[int]:
    """State of one bucket that lies in the shards, without alignment: all of it where units are whole."""
    totals = [0] * num_ranks
    for index, tensor in enumerate(bucket.tensors):
        per_element = sum(spec.dtype.itemsize for spec in tensor.state if spec.where == "parameter")
        per_unit = [spec for spec in tensor.state if spec.where == "unit"] if bucket.keeps_units else []
        sums = [
            None if isinstance(spec.unit_numels, int) else list(accumulate(spec.unit_numels, initial=0))
            for spec in per_unit
        ]
        if not per_element and not per_unit:
            continue
        for rank in bucket.plan.ranks_of(index):
            totals[rank] += per_element * bucket.plan.extent(index, rank).numel
            if not per_unit:
                continue
            first, count = bucket.plan.unit_range(index, rank)
            for spec, ends in zip(per_unit, sums, strict=True):
                numel = spec.unit_numels * count if ends is None else ends[first + count] - ends[first]
                totals[rank] += numel * spec.dtype.itemsize
    return totals
