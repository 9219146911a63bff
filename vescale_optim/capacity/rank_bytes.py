"""memory_of, traffic_of: what a rank holds, and what it receives in a step. Pure arithmetic on the plans.

Bytes are those of the fullest rank, beside the mean. Communication buffers are counted as the library holds them on devices
with streams: two buckets under way and one being filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vescale_optim.capacity.declared import Declaration, DeclaredTensor
from vescale_optim.capacity.setting import Setting
from vescale_optim.capacity.storages import StoragePlan, state_bytes_per_rank

# Name of the row of memory that does not shrink with more ranks.
BUFFERS = "communication buffers"


@dataclass(frozen=True)
class BytesRow:
    """One kind of memory or traffic of a rank: of the fullest one, and on average."""

    name: str
    largest: float
    mean: float
    note: str


def memory_of(plan: StoragePlan, setting: Setting) -> tuple[BytesRow, ...]:
    """Bytes per rank between steps, then the peak of the buffers of communication."""
    ranks = range(plan.num_ranks)
    shards = [0] * plan.num_ranks
    params, grads, state = [0] * plan.num_ranks, [0] * plan.num_ranks, [0] * plan.num_ranks
    for bucket in plan.buckets:
        held = [bucket.plan.shard_numel(rank) * bucket.count for rank in ranks]
        kept = state_bytes_per_rank(bucket, plan.num_ranks)
        grad_itemsize = setting.grad_dtype_of(bucket.dtype).itemsize
        for rank in ranks:
            shards[rank] += held[rank]
            is_whole = plan.name == "replicated"
            params[rank] += (bucket.plan.numel * bucket.count if is_whole else held[rank]) * bucket.dtype.itemsize
            grads[rank] += held[rank] * grad_itemsize
            state[rank] += kept[rank] * bucket.count + held[rank] * setting.master_itemsize(bucket.dtype)
    replicas = plan.num_replicas
    unit_state = plan.owners.unit_state_bytes
    state_of_devices = [state[device % plan.num_ranks] + unit_state[device] for device in range(plan.num_ranks * replicas)]
    buffers, note = _communication_peak(plan, setting)
    whole = "whole on every rank" if plan.name == "replicated" else "shards"
    has_master = any(setting.master_itemsize(bucket.dtype) for bucket in plan.buckets)
    rows = [
        _bytes_row("parameters", params, whole),
        _bytes_row("gradients", grads, "shards"),
        _bytes_row("state", state_of_devices, "with the wider copy of the parameters" if has_master else ""),
        BytesRow(BUFFERS, buffers, buffers, note),
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
            dtype = setting.grad_dtype_of(bucket.dtype)
            largest = max(bucket.plan.shard_numel(rank) for rank in range(plan.num_ranks))
            # Equal fp32 shards are summed by NCCL; others arrive rank by rank and are summed in fp32.
            is_summed = dtype == torch.float32 and bucket.plan.is_even
            full.append(bucket.plan.numel * dtype.itemsize)
            received.append(0 if is_summed else plan.num_ranks * largest * dtype.itemsize)
        peak = max(sum(full[i : i + 3]) + sum(received[i : i + 2]) for i in range(len(full)))
        return peak, "gradients of 2 buckets under way, 1 being filled"
    sizes = sorted(
        (
            bucket.plan.numel * (bucket.dtype.itemsize + setting.grad_dtype_of(bucket.dtype).itemsize)
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
        grad_itemsize = setting.grad_dtype_of(bucket.dtype).itemsize
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


# -- per element ------------------------------------------------------------------------------------------------------


def bytes_per_element(declaration: Declaration, setting: Setting) -> float:
    """Parameter, gradient, master copy and state, on average."""
    total = numel = 0
    for tensor in declaration.tensors:
        held = tensor.dtype.itemsize + setting.grad_dtype_of(tensor.dtype).itemsize + setting.master_itemsize(tensor.dtype)
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
