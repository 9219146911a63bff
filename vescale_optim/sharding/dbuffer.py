"""DBuffer: the tensors of one bucket in one flat buffer, sharded by a BufferPlan.

A DBuffer holds this rank's shards, and optionally the whole global buffer they lie in. Every logical tensor is a
zero-copy view of either, and every collective is in place:

    full:   | segment 0: shard 0 | shard 1 | shard 2 | segment 1: shard 0 | shard 1 | shard 2 |     `full_view(i)`
                           ^^^^^^^                                  ^^^^^^^
    shards on rank 1:      shards[0]                                shards[1]                       `shard_view(i)`

    without `full`, the shards lie one after another in `local`:  | shards[0] | shards[1] |

Parameters of a replicated model are views of `full`; gradients, master weights and optimizer states are shards alone.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.collectives import (
    GroupReference,
    Pending,
    all_gather,
    all_reduce,
    all_reduce_mean,
    broadcast,
    new_tag,
    reduce_scatter_mean,
)
from vescale_optim.sharding.planner import BufferPlan


class DBuffer:
    """Storage of one bucket on one rank.

    Args:
        plan: where the tensors and shards lie.
        group: the ranks that share the buffer; rank r of the group holds shard r.
        dtype, device: of the storage. New storage is zero, padding included.
        with_full: hold the global buffer, the shards being views of it.
    """

    group = GroupReference()

    def __init__(
        self,
        plan: BufferPlan,
        group: ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_full: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self.rank = group.rank()
        self.dtype = dtype
        self.device = device
        self._tags = [new_tag(group) for _ in plan.segments]
        self._shard_views: list[Tensor | None] = [None] * len(plan.tensors)
        self._segment_of = {tensor: index for index, segment in enumerate(plan.segments) for tensor in segment.tensors}
        self.full = torch.zeros(plan.numel, dtype=dtype, device=device) if with_full else None
        if self.full is not None:
            self.shards = self.shards_of(self.full)
            self.local = None
        else:
            self._lie_in(torch.zeros(plan.shard_numel(self.rank), dtype=dtype, device=device))

    def _lie_in(self, local: Tensor) -> None:
        self.local = local
        self.shards = [
            local.narrow(0, segment.local_start[self.rank], segment.shard_numels[self.rank])
            for segment in self.plan.segments
        ]

    def over(self, local: Tensor) -> DBuffer:
        """The shards of the same plan and ranks in other memory: `local`, flat, of this rank's elements and this dtype."""
        other = copy.copy(self)
        other.full, other._shard_views = None, [None] * len(self.plan.tensors)
        other._lie_in(local)
        return other

    def shards_of(self, full: Tensor) -> list[Tensor]:
        """This rank's shard of every segment, as views of a global buffer of this plan."""
        return [
            full.narrow(0, segment.start + sum(segment.shard_numels[: self.rank]), segment.shard_numels[self.rank])
            for segment in self.plan.segments
        ]

    def segments_of(self, full: Tensor) -> list[Tensor]:
        """Every segment, as views of a global buffer of this plan."""
        return [full.narrow(0, segment.start, sum(segment.shard_numels)) for segment in self.plan.segments]

    def full_view(self, tensor: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Logical tensor `tensor` as a view of the global buffer."""
        return view_in_full(self._require_full(), self.plan, tensor, shape)

    def shard_view(self, tensor: int) -> Tensor:
        """What this rank holds of logical tensor `tensor`: a flat view, empty where it holds nothing."""
        view = self._shard_views[tensor]
        if view is None:
            extent = self.plan.extent(tensor, self.rank)
            segment = self._segment_of[tensor]
            offset = extent.local - self.plan.segments[segment].local_start[self.rank]
            view = self._shard_views[tensor] = self.shards[segment].narrow(0, offset, extent.numel)
        return view

    def all_gather(self) -> list[Pending]:
        """Complete `full` from every rank's shards, in place; one handle per segment."""
        segments = zip(self.plan.segments, self.segments_of(self._require_full()), strict=True)
        return [all_gather(view, segment.shard_numels, self.group) for segment, view in segments]

    def reduce_scatter_mean(
        self, full: Tensor, pool: BufferPool, *, add: bool = False, is_divided: bool = False
    ) -> list[Pending]:
        """Write (or add) the mean over ranks of `full`, a global buffer of this plan, into the shards."""
        return [
            reduce_scatter_mean(view, segment.shard_numels, shard, self.group, pool, add=add, is_divided=is_divided, tag=tag)
            for segment, view, shard, tag in zip(
                self.plan.segments, self.segments_of(full), self.shards, self._tags, strict=True
            )
        ]

    def all_reduce_mean(self, replicas: ProcessGroup) -> list[Pending]:
        """Average the shards over the replicas that hold the same ones (the second axis of hybrid sharding), in place; one
        handle per segment."""
        return [all_reduce_mean(shard, replicas) for shard in self.shards]

    def broadcast(self, source: int = 0) -> Pending:
        """Give every rank the global buffer of rank `source`."""
        return broadcast(self._require_full(), self.group, source=source)

    def zero_(self) -> None:
        for shard in self.shards:
            shard.zero_()

    def copy_(self, other: DBuffer) -> None:
        """Copy the shards of a buffer of the same plan, casting to this dtype."""
        for mine, theirs in zip(self.shards, other.shards, strict=True):
            mine.copy_(theirs)

    def add_(self, other: DBuffer, *, alpha: float = 1.0) -> None:
        """Add the shards of a buffer of the same plan."""
        for mine, theirs in zip(self.shards, other.shards, strict=True):
            mine.add_(theirs, alpha=alpha)

    def mul_(self, factor: float | Tensor) -> None:
        for shard in self.shards:
            shard.mul_(factor)

    def norm(self) -> Tensor:
        """2-norm over the shards of all ranks, a 0-D fp32 tensor. Padding is zero and adds nothing."""
        norms = [torch.linalg.vector_norm(shard, dtype=torch.float32) for shard in self.shards]
        square = torch.stack(norms).square().sum()
        all_reduce(square, self.group)
        return square.sqrt()

    def free_full(self) -> None:
        """Give the memory of the global buffer back in one piece; views stay valid names for `allocate_full`."""
        self._require_full().untyped_storage().resize_(0)

    def allocate_full(self) -> None:
        """Take the memory of the global buffer again; its contents are undefined."""
        full = self._require_full()
        full.untyped_storage().resize_(full.numel() * full.element_size())

    def _require_full(self) -> Tensor:
        if self.full is None:
            raise ValueError("this DBuffer holds shards only; construct it with with_full=True")
        return self.full


def view_in_full(full: Tensor, plan: BufferPlan, tensor: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Logical tensor `tensor` as a view of `full`, a global buffer of `plan`."""
    return full.narrow(0, plan.offsets[tensor], plan.tensors[tensor].numel).view(shape)
