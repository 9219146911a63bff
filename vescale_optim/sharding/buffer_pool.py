"""BufferPool: flat scratch buffers, kept and reused, since fresh pages cost more than copies."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Buffers that nobody uses at the moment; what is given back must no longer be read or written."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least `numel` elements with undefined contents."""
        fitting = [b for b in self._free if b.dtype == dtype and b.device == device and b.numel() >= numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype, device=device)
        smallest = min(fitting, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not smallest]
        return smallest

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)
