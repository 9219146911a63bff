"""BufferMemory: memory for global buffers, lent for a while, kept and reused.

The parameters of a group are views of one storage that keeps its identity for ever, since autograd saves views of it. Its
memory comes and goes: lending swaps the data pointers of two storages. So after the first iteration nothing is allocated
or freed, and no page is touched for the first time.

    group 0   storage 0 <---.         memory A (free)
    group 1   storage 1      `------> memory B
    gradients of group 0 -----------> memory C
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

# torch 2.13 has it, 2.11 does not: there, memory is allocated and freed every time, and handing over is a copy.
CAN_SWAP = hasattr(UntypedStorage, "_swap_data_ptr_")


class BufferMemory:
    """What is lent at the moment and what waits to be lent, on one device. Takes the place of a `BufferPool`.

    Attributes:
        bytes_out: lent at the moment.
        bytes_held: lent or waiting.
        usual_bytes: size of the largest buffers; somewhat smaller ones get as much, so that they can take turns.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_held = 0
        self.usual_bytes = 0
        self._free: list[UntypedStorage] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of `numel` elements with undefined contents."""
        storage = self._take(numel * dtype.itemsize, device)
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back that nobody reads or writes any more."""
        self._give(buffer.untyped_storage())

    def lend(self, buffer: Tensor) -> None:
        """Give `buffer`, whose storage has no memory, memory with undefined contents."""
        num_bytes = buffer.numel() * buffer.element_size()
        storage = buffer.untyped_storage()
        if CAN_SWAP and num_bytes:
            storage._swap_data_ptr_(self._take(num_bytes, buffer.device))
        else:
            storage.resize_(num_bytes)
            self.bytes_out += num_bytes
            self.bytes_held += num_bytes

    def hand_over(self, source: Tensor, target: Tensor) -> None:
        """Give the memory and contents of `source` to `target`, a buffer of its size whose storage has none."""
        if CAN_SWAP:
            target.untyped_storage()._swap_data_ptr_(source.untyped_storage())
            return
        target.untyped_storage().resize_(source.untyped_storage().nbytes())
        target.copy_(source)
        source.untyped_storage().resize_(0)

    def reclaim(self, buffer: Tensor) -> None:
        """Take the memory of a `lend` back; whatever was launched on it has been waited for."""
        storage = buffer.untyped_storage()
        if CAN_SWAP and storage.nbytes():
            empty = UntypedStorage(0, device=buffer.device)
            empty._swap_data_ptr_(storage)
            self._give(empty)
        else:
            self.bytes_out -= storage.nbytes()
            self.bytes_held -= storage.nbytes()
            storage.resize_(0)

    def release(self) -> None:
        """Give what waits to be lent back to the system."""
        self.bytes_held -= sum(storage.nbytes() for storage in self._free)
        self._free.clear()

    def _take(self, num_bytes: int, device: torch.device) -> UntypedStorage:
        # Not a much larger one: the next large buffer would then have to be allocated.
        fitting = [s for s in self._free if s.device == device and num_bytes <= s.nbytes() <= 2 * num_bytes]
        if fitting:
            storage = min(fitting, key=UntypedStorage.nbytes)
            self._free = [other for other in self._free if other is not storage]
        else:
            if num_bytes < self.usual_bytes <= 1.5 * num_bytes:
                num_bytes = self.usual_bytes
            storage = UntypedStorage(num_bytes, device=device)
            self.bytes_held += num_bytes
        self.bytes_out += storage.nbytes()
        return storage

    def _give(self, storage: UntypedStorage) -> None:
        self.bytes_out -= storage.nbytes()
        self._free.append(storage)
