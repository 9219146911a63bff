"""report_on: bytes, FLOPs and padding of a model under an optimizer on many ranks. Pure arithmetic on the plans.

Bytes of a rank are those of the fullest one, beside the mean. Communication buffers are counted as the library holds them
on devices with streams: two buckets under way and one being filled.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_optim.capacity.declared import Declaration, DeclaredTensor
from vescale_optim.capacity.peers import (
    BlockedTensor,
    fsdp2_numel,
    megatron_numel,
    plain_fsdp2_numel,
    published_numel,
)
from vescale_optim.capacity.storages import (
    PlannedBucket,
    StoragePlan,
    default_bucket_bytes,
    plan_replicated,
    plan_sharded,
    rows_of,
    state_bytes_per_rank,
)
from vescale_optim.sharding.planner import plan_buffer
from vescale_optim.sharding.storage import ALIGN


@dataclass(frozen=True)
class Setting:
    """What is asked for.

    Args:
        num_ranks: devices that shard one replica; `num_replicas` of them hold the same shards.
        storage: "replicated", "sharded", or "auto" for the first that fits `device_bytes`.
        block_rows: blocks of rows that sharded parameters keep whole; None for the optimizer's units.
        bucket_bytes: size of a bucket of replicated parameters; None for the optimizers' own choice.
        master_dtype, grad_dtype: as the optimizers take them.
    """

    num_ranks: int
    num_replicas: int = 1
    storage: str = "auto"
    block_rows: int | None = None
    bucket_bytes: int | None = None
    device_bytes: float = 80 * 2**30
    master_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class BucketRow:
    """One bucket, or `count` that are alike; padding and bound in elements."""

    label: str
    count: int
    dtype: str
    num_tensors: int
    numel: int
    segments: int
    is_even: bool
    padding: int
    lower_bound: int
    driver: str
    why: str


@dataclass(frozen=True)
class BytesRow:
    """One kind of memory or traffic of a rank: of the fullest one, and on average."""

    name: str
    largest: float
    mean: float
    note: str


@dataclass(frozen=True)
class PeerRow:
    """A planner on the same model: padding by elements, and bytes of sharded parameters, gradients and state per rank."""

    name: str
    padding: float
    sharded_bytes: float
    note: str


@dataclass(frozen=True)
class CapacityReport:
    """Everything that is shown; `plan` is left out of the JSON file."""

    model: str
    optimizer: str
    setting: Setting
    num_tensors: int
    numel: int
    notes: tuple[str, ...]
    storage: str
    storage_reason: str
    buckets: tuple[BucketRow, ...]
    memory: tuple[BytesRow, ...]
    traffic: tuple[BytesRow, ...]
    busiest_flops: float
    mean_flops: float
    peers: tuple[PeerRow, ...]
    plan_seconds: float
    plan: StoragePlan

    @property
    def padding_fraction(self) -> float:
        return sum(row.count * row.padding for row in self.buckets) / self.numel

    @property
    def balance(self) -> float:
        """Busiest by mean FLOPs of the ranks; 1 where nothing is computed on units."""
        return self.busiest_flops / self.mean_flops if self.mean_flops else 1.0


def report_on(model: str, declaration: Declaration, setting: Setting, *, with_peers: bool = True) -> CapacityReport:
    """Plan a model for one number of ranks, and add up.

    Raises:
        ValueError: replicas of replicated parameters, which have one axis of ranks only.
    """
    began = time.perf_counter()
    storage, reason = _choose_storage(declaration, setting)
    if storage == "replicated":
        bucket_bytes = setting.bucket_bytes or default_bucket_bytes(setting.num_ranks)
        plan = plan_replicated(declaration, setting.num_ranks, bucket_bytes)
    else:
        plan = plan_sharded(declaration, setting.num_ranks, setting.num_replicas, block_rows=setting.block_rows)
    seconds = time.perf_counter() - began
    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    memory = memory_of(plan, setting)
    # The buffers and replicated parameters are not what planners differ in.
    per_element = _bytes_per_element(declaration, setting)
    peers = peer_rows(declaration, plan, setting, per_element) if with_peers else ()
    flops = plan.owners.flops
    return CapacityReport(
        model=model,
        optimizer=declaration.optimizer,
        setting=setting,
        num_tensors=len(declaration.tensors),
        numel=numel,
        notes=declaration.notes,
        storage=storage,
        storage_reason=reason,
        buckets=tuple(_bucket_row(bucket) for bucket in plan.buckets),
        memory=memory,
        traffic=traffic_of(plan, setting),
        busiest_flops=max(flops),
        mean_flops=sum(flops) / len(flops),
        peers=peers,
        plan_seconds=seconds,
        plan=plan,
    )


def _choose_storage(declaration: Declaration, setting: Setting) -> tuple[str, str]:
    """Replicated parameters where they fit: they need no wrapper and the least traffic."""
    if setting.storage == "replicated":
        if setting.num_replicas > 1:
            raise ValueError(
                f"replicated parameters are sharded over all ranks, so there are no {setting.num_replicas} replicas; give "
                f"--ranks {setting.num_ranks * setting.num_replicas} --replicas 1, or --storage sharded"
            )
        return "replicated", "asked for"
    if setting.storage == "sharded":
        return "sharded", "asked for"
    if setting.block_rows is not None:
        return "sharded", "blocks of rows are a choice of sharded parameters"
    if setting.num_replicas > 1:
        return "sharded", "replicas are a choice of sharded parameters"
    whole = sum(tensor.units.numel * tensor.dtype.itemsize for tensor in declaration.tensors)
    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    rest = (_bytes_per_element(declaration, setting) * numel - whole) / setting.num_ranks
    # Shards of whole units cannot be smaller than one unit, but then they are unequal: the mean decides.
    needed, room = whole + rest, setting.device_bytes
    sizes = f"{format_bytes(whole)} of whole parameters + {format_bytes(rest)} of gradient and state shards"
    if needed <= room:
        return "replicated", f"{sizes} fit into {format_bytes(room)}"
    return "sharded", f"{sizes} exceed {format_bytes(room)} of a device"


def _bytes_per_element(declaration: Declaration, setting: Setting) -> float:
    """Parameter, gradient, master copy and state, on average."""
    total = numel = 0
    for tensor in declaration.tensors:
        held = tensor.dtype.itemsize + _grad_dtype(tensor.dtype, setting).itemsize + _master_itemsize(tensor.dtype, setting)
        total += held * tensor.units.numel + state_bytes_of(tensor)
        numel += tensor.units.numel
    return total / max(numel, 1)


def state_bytes_of(tensor: DeclaredTensor) -> int:
    """All state of one parameter, over all ranks."""
    total = 0
    for spec in tensor.state:
        if spec.where == "parameter":
            numel = tensor.units.numel
        elif isinstance(spec.unit_numels, int):
            numel = spec.unit_numels * -(-tensor.units.numel // tensor.units.block)
        else:
            numel = sum(spec.unit_numels)
        total += numel * spec.dtype.itemsize
    return total


def _grad_dtype(dtype: torch.dtype, setting: Setting) -> torch.dtype:
    return setting.grad_dtype or dtype


def _master_itemsize(dtype: torch.dtype, setting: Setting) -> int:
    return setting.master_dtype.itemsize if setting.master_dtype not in (None, dtype) else 0


def _bucket_row(bucket: PlannedBucket) -> BucketRow:
    plan = bucket.plan
    return BucketRow(
        label=bucket.label,
        count=bucket.count,
        dtype=str(bucket.dtype).removeprefix("torch."),
        num_tensors=len(bucket.tensors),
        numel=plan.numel - plan.padding,
        segments=len(plan.segments),
        is_even=plan.is_even,
        padding=plan.padding,
        lower_bound=plan.lower_bound,
        driver=re.sub(r"tensor (\d+)", lambda found: bucket.tensors[int(found[1])].name, plan.driver),
        why=bucket.why,
    )


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_of(plan: StoragePlan, setting: Setting) -> tuple[BytesRow, ...]:
    """Bytes per rank between steps, then the peak of the buffers of communication."""
    ranks = range(plan.num_ranks)
    shards = [0] * plan.num_ranks
    params, grads, state = [0] * plan.num_ranks, [0] * plan.num_ranks, [0] * plan.num_ranks
    for bucket in plan.buckets:
        held = [bucket.plan.shard_numel(rank) * bucket.count for rank in ranks]
        kept = state_bytes_per_rank(bucket, plan.num_ranks)
        grad_itemsize = _grad_dtype(bucket.dtype, setting).itemsize
        for rank in ranks:
            shards[rank] += held[rank]
            is_whole = plan.name == "replicated"
            params[rank] += (bucket.plan.numel * bucket.count if is_whole else held[rank]) * bucket.dtype.itemsize
            grads[rank] += held[rank] * grad_itemsize
            state[rank] += kept[rank] * bucket.count + held[rank] * _master_itemsize(bucket.dtype, setting)
    replicas = plan.num_replicas
    unit_state = plan.owners.unit_state_bytes
    state_of_devices = [state[device % plan.num_ranks] + unit_state[device] for device in range(plan.num_ranks * replicas)]
    buffers, note = _communication_peak(plan, setting)
    whole = "whole on every rank" if plan.name == "replicated" else "shards"
    has_master = any(_master_itemsize(bucket.dtype, setting) for bucket in plan.buckets)
    rows = [
        _bytes_row("parameters", params, whole),
        _bytes_row("gradients", grads, "shards"),
        _bytes_row("state", state_of_devices, "with the wider copy of the parameters" if has_master else ""),
        BytesRow("communication buffers", buffers, buffers, note),
    ]
    totals = [
        params[device % plan.num_ranks] + grads[device % plan.num_ranks] + state_of_devices[device] + buffers
        for device in range(plan.num_ranks * replicas)
    ]
    return (*rows, _bytes_row("total", totals, "activations not counted"))


def _bytes_row(name: str, values: Sequence[float], note: str) -> BytesRow:
    return BytesRow(name, max(values), sum(values) / len(values), note)


def _communication_peak(plan: StoragePlan, setting: Setting) -> tuple[float, str]:
    if plan.num_ranks == 1 and plan.num_replicas == 1:
        return 0, "one rank sends nothing"
    if plan.name == "replicated":
        full, received = [], []
        for bucket in plan.buckets:
            dtype = _grad_dtype(bucket.dtype, setting)
            largest = max(bucket.plan.shard_numel(rank) for rank in range(plan.num_ranks))
            # Equal fp32 shards are summed by NCCL; others arrive rank by rank and are summed in fp32.
            is_summed = dtype == torch.float32 and bucket.plan.is_even
            full.append(bucket.plan.numel * dtype.itemsize)
            received.append(0 if is_summed else plan.num_ranks * largest * dtype.itemsize)
        peak = max(sum(full[i : i + 3]) + sum(received[i : i + 2]) for i in range(len(full)))
        return peak, "gradients of 2 buckets under way, 1 being filled"
    sizes = sorted(
        (
            bucket.plan.numel * (bucket.dtype.itemsize + _grad_dtype(bucket.dtype, setting).itemsize)
            for bucket in plan.buckets
            for _ in range(min(bucket.count, 2))
        ),
        reverse=True,
    )
    return sum(sizes[:2]), "parameters and gradients of the 2 largest layers, whole"


# -- traffic ---------------------------------------------------------------------------------------------------------


def traffic_of(plan: StoragePlan, setting: Setting) -> tuple[BytesRow, ...]:
    """Bytes that a rank receives in one step of one micro-batch."""
    ranks, size, replicas = range(plan.num_ranks), plan.num_ranks, plan.num_replicas
    gathered, reduced, averaged = ([0.0] * size for _ in range(3))
    for bucket in plan.buckets:
        grad_itemsize = _grad_dtype(bucket.dtype, setting).itemsize
        for rank in ranks:
            shard = bucket.plan.shard_numel(rank) * bucket.count
            gathered[rank] += (bucket.plan.numel * bucket.count - shard) * bucket.dtype.itemsize
            reduced[rank] += (size - 1) * shard * grad_itemsize
            averaged[rank] += 2 * (replicas - 1) / replicas * shard * grad_itemsize
    rows = [_bytes_row("reduce-scatter of gradients", reduced, "during backward")]
    if replicas > 1:
        rows.append(_bytes_row("all-reduce over replicas", averaged, "of the gradient shards"))
    if plan.name == "replicated":
        rows.append(_bytes_row("all-gather of parameters", gathered, "after the step, or during the next forward"))
    else:
        rows.append(_bytes_row("all-gather of parameters", [2 * b for b in gathered], "forward and backward"))
        exchanged = _exchanged_bytes(plan)
        if any(exchanged):
            rows.append(_bytes_row("units to owners and back", exchanged, "in the step"))
    totals = [sum(values) for values in zip(*((row.largest, row.mean) for row in rows), strict=True)]
    return (*rows, BytesRow("total", *totals, ""))


def _exchanged_bytes(plan: StoragePlan) -> list[float]:
    """Per device: the parts of its units that others hold, then the directions of its shard that others computed."""
    devices = plan.num_ranks * plan.num_replicas
    travelling = [tensor for bucket in plan.buckets if not bucket.keeps_units for tensor in bucket.tensors]
    itemsize = max((tensor.wire_itemsize for tensor in travelling if tensor.units.cost), default=0)
    back = [0.0] * plan.num_ranks
    for bucket in plan.buckets:
        if bucket.keeps_units:
            continue
        for index, tensor in enumerate(bucket.tensors):
            if tensor.units.cost:
                for rank in bucket.plan.ranks_of(index):
                    back[rank] += bucket.count * bucket.plan.extent(index, rank).numel
    others = (plan.num_ranks - 1) / plan.num_ranks
    return [
        itemsize * (plan.owners.exchanged_numels[device] * others + back[device % plan.num_ranks] * (devices - 1) / devices)
        for device in range(devices)
    ]


# -- peers -----------------------------------------------------------------------------------------------------------


def peer_rows(
    declaration: Declaration, plan: StoragePlan, setting: Setting, bytes_per_element: float
) -> tuple[PeerRow, ...]:
    """The same model under other planners, layer by layer and with the same blocks whole.

    Blocks are those that `plan` keeps whole. Uneven units count as blocks of the largest one, in favour of nobody.
    """
    size = plan.num_ranks
    layers: dict[str, list[DeclaredTensor]] = {}
    for tensor in declaration.tensors:
        if tensor.units.numel:
            layers.setdefault(tensor.layer, []).append(tensor)
    counts = Counter(tuple(tensor.kind for tensor in tensors) for tensors in layers.values())
    of_kind = {tuple(tensor.kind for tensor in tensors): tensors for tensors in layers.values()}
    stores_rows = {bucket.label: not bucket.keeps_units for bucket in plan.buckets} if plan.name == "sharded" else {}
    block_rows = setting.block_rows or (1 if any(stores_rows.values()) else None)

    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    blocked = {kind: [_blocked(tensor, block_rows) for tensor in tensors] for kind, tensors in of_kind.items()}

    def row(name: str, padded: Callable[[tuple[Any, ...]], int], note: str) -> PeerRow:
        total = sum(padded(kind) * count for kind, count in counts.items())
        return PeerRow(name, total / numel - 1, total * bytes_per_element / size, note)

    def ours(kind: tuple[Any, ...]) -> int:
        units = [rows_of(tensor, block_rows) if block_rows else tensor.units for tensor in of_kind[kind]]
        return plan_buffer(units, size, align=ALIGN).numel

    planned = sum(bucket.plan.numel * bucket.count for bucket in plan.buckets)
    rows = [PeerRow("vescale_optim, as planned", planned / numel - 1, planned * bytes_per_element / size, "")]
    if plan.name == "replicated" or planned != sum(ours(kind) * count for kind, count in counts.items()):
        rows.append(row("vescale_optim, layer by layer", ours, ""))
    return (
        *rows,
        row("published single-buffer plan", lambda kind: published_numel(blocked[kind], size, ALIGN), "veScale-FSDP"),
        row("FSDP2, same blocks whole", lambda kind: fsdp2_numel(blocked[kind], size), "dim 0, padded"),
        row("Megatron-FSDP, same blocks whole", lambda kind: megatron_numel(blocked[kind], size), "chunks of the lcm"),
        row("FSDP2 as it is", lambda kind: plain_fsdp2_numel(blocked[kind], size), "cuts through blocks"),
    )


def _blocked(tensor: DeclaredTensor, block_rows: int | None) -> BlockedTensor:
    units = rows_of(tensor, block_rows) if block_rows else tensor.units
    if units.boundaries is not None:
        block = max(end - start for start, end in zip((0, *units.boundaries), units.boundaries, strict=False))
    else:
        block = units.block
    return BlockedTensor(tensor.shape or (1,), block)


# -- sweep -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """A model at one number of ranks: padding by elements, bytes of the fullest rank."""

    num_ranks: int
    padding: dict[str, float]
    memory: dict[str, float]
    balance: float


def sweep(
    model: str, declaration: Declaration, setting: Setting, all_ranks: Iterable[int], storage: str
) -> list[SweepPoint]:
    """The same model and storage on other numbers of ranks."""
    points = []
    for num_ranks in all_ranks:
        changed = Setting(**{**setting.__dict__, "num_ranks": num_ranks, "storage": storage})
        found = report_on(model, declaration, changed)
        points.append(
            SweepPoint(
                num_ranks,
                {row.name: row.padding for row in found.peers},
                {row.name: row.largest for row in found.memory},
                found.balance,
            )
        )
    return points


def format_bytes(value: float) -> str:
    """3.40 GB, 12.5 MB, 1,342 TB: three digits or more, decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:,.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{value:,.0f} B"
