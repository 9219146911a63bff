"""form_buckets: which tensors travel in one collective.

Buckets follow the order in which gradients finish. A bucket grows beyond its size until equal shards waste at most
`max_padding`; where even the rest of the model does not suffice (fewer matrices than ranks), shards may be unequal, which
moves the same bytes.

Pure Python, like the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_optim.sharding.planner import BufferPlan, TensorBlocks, plan_buffer


@dataclass(frozen=True)
class Bucket:
    """Tensors `tensors` (indices into the caller's list, in plan order) and the plan of their buffer."""

    tensors: tuple[int, ...]
    plan: BufferPlan


def form_buckets(
    tensors: Sequence[TensorBlocks],
    num_ranks: int,
    *,
    bucket_numel: int,
    align: int,
    max_padding: float = 0.03,
    loads: list[float],
) -> list[Bucket]:
    """Cut `tensors`, in the order of use, into buckets and plan each.

    Args:
        bucket_numel: elements a bucket has before it is closed, if its padding allows.
        max_padding: padding as a fraction of the elements that equal shards may cost.
        loads: FLOPs already given to each rank; updated with the FLOPs of these buckets.
    """
    buckets: list[Bucket] = []
    start = 0
    while start < len(tensors):
        smallest_end = _end_of_bucket(tensors, start, bucket_numel)
        end, plan = smallest_end, None
        while plan is None:
            candidate = plan_buffer(tensors[start:end], num_ranks, align=align, loads=loads, padding_tolerance=max_padding)
            if candidate.padding_fraction <= max_padding:
                plan = candidate
            elif end == len(tensors):
                end = smallest_end
                plan = plan_buffer(tensors[start:end], num_ranks, align=align, loads=loads, even=False)
            else:
                # Doubling keeps the number of plans logarithmic in the size of the model.
                end = _end_of_bucket(tensors, start, 2 * sum(tensor.numel for tensor in tensors[start:end]))
        loads[:] = [load + cost for load, cost in zip(loads, plan.rank_costs(), strict=True)]
        buckets.append(Bucket(tuple(range(start, end)), plan))
        start = end
    return buckets


def _end_of_bucket(tensors: Sequence[TensorBlocks], start: int, numel: int) -> int:
    """One past the last tensor of a bucket of at least `numel` elements; a remainder under half a bucket joins it."""
    total, end = 0, start
    while end < len(tensors) and total < numel:
        total += tensors[end].numel
        end += 1
    remainder = sum(tensor.numel for tensor in tensors[end:])
    return len(tensors) if remainder < numel // 2 else end
