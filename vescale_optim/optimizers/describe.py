"""describe_storage: the table that `optimizer.describe()` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_optim.sharding.storage import ReplicatedStorage


def describe_storage(name: str, storage: ReplicatedStorage, state: Mapping[Tensor, Mapping[str, Any]]) -> str:
    """Buckets with their padding and its cause, bytes of state per rank, balance of the ranks' FLOPs.

    Pure arithmetic on the plans: no communication, the same text on every rank.
    """
    head = (
        f"{name}: {len(storage.parameters)} parameters, "
        f"{sum(managed.param.numel() for managed in storage.parameters):,} elements, "
        f"replicated on {storage.num_ranks} ranks"
    )
    rows = [("bucket", "dtype", "tensors", "elements", "shards", "padding", "lower bound", "driver")]
    for number, bucket in enumerate(storage.buckets):
        plan = bucket.plan
        rows.append(
            (
                str(number),
                str(bucket.params.dtype).removeprefix("torch."),
                str(len(bucket.members)),
                f"{plan.numel - plan.padding:,}",
                f"{len(plan.segments)} x {'equal' if plan.is_even else 'unequal'}",
                f"{plan.padding_fraction:.2%}",
                f"{plan.lower_bound:,}",
                plan.driver or "-",
            )
        )
    state_bytes = state_bytes_per_rank(storage, state)
    mean = sum(state_bytes) / len(state_bytes)
    lines = [head, *format_table(rows)]
    lines.append(
        f"state: {sum(state_bytes):,} bytes, busiest rank {max(state_bytes):,} = "
        f"{max(state_bytes) / mean if mean else 1.0:.3f} x mean"
    )
    if any(storage.loads):
        mean_load = sum(storage.loads) / len(storage.loads)
        lines.append(
            f"compute: busiest rank {max(storage.loads):.3g} FLOPs a step = {max(storage.loads) / mean_load:.3f} x mean"
        )
    return "\n".join(lines)


def state_bytes_per_rank(storage: ReplicatedStorage, state: Mapping[Tensor, Mapping[str, Any]]) -> list[int]:
    """Bytes of optimizer state (without padding, master copies included) that each rank holds."""
    totals = [0] * storage.num_ranks
    for managed in storage.parameters:
        for value in state[managed.param].values():
            if isinstance(value, DTensor):
                for rank, numel in enumerate(value.placements[0].numels(value.shape)):
                    totals[rank] += numel * value.element_size()
    return totals


def format_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a left-aligned table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
