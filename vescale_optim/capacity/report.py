"""report_on: bytes, FLOPs and padding of a model under an optimizer on many ranks. Pure arithmetic on the plans.

Memory and traffic are in `rank_bytes`, other planners in `peers`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vescale_optim.capacity.amounts import format_bytes
from vescale_optim.capacity.declared import Declaration, DeclaredTensor
from vescale_optim.capacity.peers import (
    BlockedTensor,
    fsdp2_numel,
    megatron_numel,
    plain_fsdp2_numel,
    published_numel,
)
from vescale_optim.capacity.rank_bytes import BytesRow, bytes_per_element, memory_of, traffic_of
from vescale_optim.capacity.setting import Setting
from vescale_optim.capacity.storages import (
    PlannedBucket,
    StoragePlan,
    default_bucket_bytes,
    plan_replicated,
    plan_sharded,
    rows_of,
    unit_numels,
)
from vescale_optim.sharding.planner import plan_buffer
from vescale_optim.sharding.storage import ALIGN


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
    costliest_unit_flops: float
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
    plan, reason = _planned(declaration, setting)
    seconds = time.perf_counter() - began
    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    memory = memory_of(plan, setting)
    # The buffers and replicated parameters are not what planners differ in.
    per_element = bytes_per_element(declaration, setting)
    peers = peer_rows(declaration, plan, setting, per_element) if with_peers else ()
    flops = plan.owners.flops
    return CapacityReport(
        model=model,
        optimizer=declaration.optimizer,
        setting=setting,
        num_tensors=len(declaration.tensors),
        numel=numel,
        notes=declaration.notes,
        storage=plan.name,
        storage_reason=reason,
        buckets=tuple(_bucket_row(bucket) for bucket in plan.buckets),
        memory=memory,
        traffic=traffic_of(plan, setting),
        busiest_flops=max(flops),
        mean_flops=sum(flops) / len(flops),
        costliest_unit_flops=max(map(_costliest_unit, declaration.tensors)),
        peers=peers,
        plan_seconds=seconds,
        plan=plan,
    )


def _planned(declaration: Declaration, setting: Setting) -> tuple[StoragePlan, str]:
    """The plan, and why its storage. Replicated parameters where they fit: they need no wrapper and the least traffic."""

    def replicated() -> StoragePlan:
        bucket_bytes = setting.bucket_bytes or default_bucket_bytes(setting.num_ranks)
        return plan_replicated(declaration, setting.num_ranks, bucket_bytes)

    def sharded() -> StoragePlan:
        return plan_sharded(declaration, setting.num_ranks, setting.num_replicas, block_rows=setting.block_rows)

    if setting.storage == "replicated":
        if setting.num_replicas > 1:
            raise ValueError(
                f"replicated parameters are sharded over all ranks, so there are no {setting.num_replicas} replicas; give "
                f"--ranks {setting.num_ranks * setting.num_replicas} --replicas 1, or --storage sharded"
            )
        return replicated(), "asked for"
    if setting.storage == "sharded":
        return sharded(), "asked for"
    if setting.block_rows is not None:
        return sharded(), "blocks of rows are a choice of sharded parameters"
    if setting.num_replicas > 1:
        return sharded(), "replicas are a choice of sharded parameters"
    whole = sum(tensor.units.numel * tensor.dtype.itemsize for tensor in declaration.tensors)
    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    rest = (bytes_per_element(declaration, setting) * numel - whole) / setting.num_ranks
    device = f"{format_bytes(setting.device_bytes)} of a device"
    if whole + rest > setting.device_bytes:
        sizes = f"{format_bytes(whole)} of whole parameters + {format_bytes(rest)} of gradient and state shards"
        return sharded(), f"{sizes} exceed the {device}"
    plan = replicated()
    needed = memory_of(plan, setting)[-1].largest
    sizes = f"{format_bytes(needed)} of whole parameters, gradient and state shards and buffers"
    if needed <= setting.device_bytes:
        return plan, f"{sizes} fit into the {device}"
    return sharded(), f"{sizes} exceed the {device}"


def _costliest_unit(tensor: DeclaredTensor) -> float:
    """FLOPs of its largest unit, which no number of ranks divides."""
    # Element-wise rules have a unit per element: they are not listed.
    return tensor.units.cost * max(unit_numels(tensor.units)) / tensor.units.numel if tensor.units.cost else 0.0


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
        driver=plan.driver_by([_name_within(bucket, index) for index in range(len(bucket.tensors))]),
        why=bucket.why,
    )


def _name_within(bucket: PlannedBucket, index: int) -> str:
    """Without the layer where the bucket is called by it."""
    tensor = bucket.tensors[index]
    is_of_layer = tensor.layer and bucket.label.startswith(tensor.layer)
    return tensor.name.removeprefix(f"{tensor.layer}.") if is_of_layer else tensor.name


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
