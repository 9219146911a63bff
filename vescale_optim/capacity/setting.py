"""Setting: what a capacity report is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

    def grad_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Of the gradients of parameters of this dtype."""
        return self.grad_dtype or dtype

    def master_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes per element of the wider copy of parameters of this dtype, 0 where there is none."""
        return self.master_dtype.itemsize if self.master_dtype not in (None, dtype) else 0
