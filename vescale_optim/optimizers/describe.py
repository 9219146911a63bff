"""describe_storages: the table that `optimizer.describe()` returns.

Pure arithmetic on the plans: no communication, the same text on every rank of a storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_optim.optimizers.groups import names_of
from vescale_optim.optimizers.rule import Group
from vescale_optim.sharding.dtensor_storage import DTensorStorage, ExchangeBucket
from vescale_optim.sharding.meshes import coordinates
from vescale_optim.sharding.parameters import ManagedParameter
from vescale_optim.sharding.ragged import RaggedShard
from vescale_optim.sharding.regions import placed_region
from vescale_optim.sharding.storage import ReplicatedStorage
from vescale_optim.sharding.storage_protocol import Storage

State = Mapping[Tensor, Mapping[str, Any]]

# Parameters of one rule that are named.
MOST_NAMES = 8


def describe_storages(name: str, storages: Iterable[Storage], state: State) -> str:
    """Buckets with their padding and its cause or what they move, bytes of state per rank, balance of the FLOPs."""
    described = []
    for storage in storages:
        if storage.parameters:
            describe = describe_dtensors if isinstance(storage, DTensorStorage) else describe_storage
            described.append(describe(name, storage, state))
    return "\n\n".join(described) or f"{name}: 0 parameters"


def describe_storage(name: str, storage: ReplicatedStorage, state: State) -> str:
    """Plain parameters: buckets with their padding and its cause."""
    rows = [("bucket", "dtype", "tensors", "elements", "shards", "padding", "lower bound", "driver")]
    for number, bucket in enumerate(storage.buckets):
        plan = bucket.plan
        numel = plan.numel - plan.padding
        rows.append(
            (
                str(number),
                str(bucket.params.dtype).removeprefix("torch."),
                str(len(bucket.members)),
                f"{numel:,}",
                f"{len(plan.segments)} x {'equal' if plan.is_even else 'unequal'}",
                f"{plan.padding_fraction:.2%}",
                f"{plan.lower_bound / max(numel, 1) - 1:.2%}" if plan.is_even else "-",
                plan.driver_by([storage.parameters[index].name for index in bucket.members]) or "-",
            )
        )
    lines = [headline(name, storage.parameters, f"replicated on {storage.num_ranks} ranks"), *format_table(rows)]
    return "\n".join(lines + balance_lines(storage, state))


def describe_dtensors(name: str, storage: DTensorStorage, state: State) -> str:
    """DTensor parameters: what each bucket moves in a step.

    With P columns (ranks that hold different parts), R rows (replicas) and e elements whose units are spread evenly, a
    rank sends e (P - 1) / (R P P) elements to owners and as many back, and gathers e (R - 1) / (R P) from other rows.
    """
    mesh = storage.mesh
    axes = "x".join(map(str, mesh.mesh.shape)) + (f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else "")
    rows = [("bucket", "tensors", "elements", "columns x rows", "wire", "sent here, MiB", "formula, MiB", "buffers, MiB")]
    for number, bucket in enumerate(storage.buckets):
        rows.append((str(number), *describe_exchange(storage, bucket)))
    lines = [headline(name, storage.parameters, f"DTensors on a mesh of {axes}"), *format_table(rows)]
    return "\n".join(lines + balance_lines(storage, state))


def describe_exchange(storage: DTensorStorage, bucket: ExchangeBucket) -> tuple[str, ...]:
    numel = sum(storage.parameters[index].param.numel() for index in bucket.members)
    if bucket.exchange is None:
        return str(len(bucket.members)), f"{numel:,}", "-", "-", "0: element-wise", "0", "0"
    columns, num_rows = bucket.grid.shape.num_columns, bucket.grid.shape.num_rows
    dtype = storage.wire_dtype(bucket)
    to_owners, to_shards = bucket.exchange.to_owners_traffic, bucket.exchange.to_shards_traffic
    sent = to_owners.sent + to_shards.sent
    mib = dtype.itemsize / 2**20
    formula = 2 * numel * (columns - 1) / (num_rows * columns**2) if bucket.exchange.communicates else 0
    return (
        str(len(bucket.members)),
        f"{numel:,}",
        f"{columns} x {num_rows}",
        str(dtype).removeprefix("torch."),
        f"{sent * mib:.3f}",
        f"{formula * mib:.3f}",
        f"{(to_owners.buffers + to_shards.buffers) * mib:.3f}",
    )


def describe_algorithms(groups: Sequence[Group]) -> str:
    """Which rule updates which parameters, where there are several; the last words are the names of some."""
    named: dict[str, list[tuple[str, int]]] = {}
    for number, group in enumerate(groups):
        sizes = [param.numel() for param in group["params"]]
        named.setdefault(group["algorithm"], []).extend(zip(names_of(group, number), sizes, strict=True))
    if len(named) < 2:
        return ""
    lines = []
    for algorithm, entries in named.items():
        shown = [name for name, _ in entries[:MOST_NAMES]] + ["..."] * (len(entries) > MOST_NAMES)
        numel = sum(size for _, size in entries)
        lines.append(f"{algorithm}: {len(entries)} parameters, {numel:,} elements: {', '.join(shown)}")
    return "\n".join(lines)


def headline(name: str, parameters: Sequence[ManagedParameter], where: str) -> str:
    numel = sum(managed.param.numel() for managed in parameters)
    return f"{name}: {len(parameters)} parameters, {numel:,} elements, {where}"


def balance_lines(storage: ReplicatedStorage | DTensorStorage, state: State) -> list[str]:
    """Bytes of state and FLOPs of the busiest rank."""
    state_bytes = state_bytes_per_rank(storage, state)
    mean = sum(state_bytes) / len(state_bytes)
    lines = [
        f"state: {sum(state_bytes):,} bytes, busiest rank {max(state_bytes):,} = "
        f"{max(state_bytes) / mean if mean else 1.0:.3f} x mean"
    ]
    if any(storage.loads):
        mean_load = sum(storage.loads) / len(storage.loads)
        lines.append(
            f"compute: busiest rank {max(storage.loads):.3g} FLOPs a step = {max(storage.loads) / mean_load:.3f} x mean"
        )
    return lines


def state_bytes_per_rank(storage: ReplicatedStorage | DTensorStorage, state: State) -> list[int]:
    """Bytes of optimizer state (without padding, master copies included) that each rank holds."""
    totals = [0] * storage.num_ranks
    for managed in storage.parameters:
        for value in state[managed.param].values():
            if isinstance(value, DTensor):
                for rank, numel in enumerate(numels_per_rank(value)):
                    totals[rank] += numel * value.element_size()
    return totals


def numels_per_rank(value: DTensor) -> Sequence[int]:
    """Elements that every rank of the tensor's mesh holds, in ascending order of global ranks."""
    if len(value.placements) == 1 and isinstance(value.placements[0], RaggedShard):
        return value.placements[0].numels(value.shape)
    mesh = value.device_mesh
    return [
        sum(part.numel for part in placed_region(value.shape, mesh.shape, value.placements, place))
        for _, place in sorted(coordinates(mesh).items())
    ]


def format_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a left-aligned table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
