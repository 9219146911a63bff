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
        alike = sorted((b for b in self._free if b.dtype == dtype and b.device == device), key=Tensor.numel)
        if not alike:
            return torch.empty(numel, dtype=dtype, device=device)
        # One that is too small gives way to one that fits, so that no more are kept than were ever in use at a time.
        chosen = next((buffer for buffer in alike if buffer.numel() >= numel), alike[-1])
        self._free = [buffer for buffer in self._free if buffer is not chosen]
        return chosen if chosen.numel() >= numel else torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)
