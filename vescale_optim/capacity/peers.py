"""Padding of other planners: elements of the global buffer when they keep the same blocks. Used by the capacity report and
`benchmarks/padding.py`.

    published    one buffer, the given order, as published for veScale-FSDP (arXiv 2602.22437), from its description
    fsdp2        torch FSDP2: each tensor is cut along its first axis into equal chunks, padded to the number of ranks
    megatron     Megatron-FSDP v2: one buffer of chunks of the lcm of all blocks, a whole number of chunks per rank

All three are written anew here, from what the methods are, and in their favour where a detail is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod


@dataclass(frozen=True)
class BlockedTensor:
    """A tensor of one dimension or more that may be cut only between blocks of `block` elements; the last may be short."""

    shape: tuple[int, ...]
    block: int

    @classmethod
    def rows(cls, shape: tuple[int, ...], block_rows: int) -> BlockedTensor:
        """Blocks of `block_rows` rows; a row is the last axis, a 1-D tensor one row."""
        return cls(shape, block_rows * shape[-1])

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def published_numel(tensors: Sequence[BlockedTensor], num_ranks: int, align: int) -> int:
    """The smallest N*S: bisection over multiples of the lcm of the largest tensors' blocks, for each number of them."""
    sizes = [(_round_up(tensor.numel, align), lcm(tensor.block, align)) for tensor in tensors]
    total = sum(size for size, _ in sizes)
    best = total
    multiple = 0
    largest_first = sorted(set(sizes), key=lambda entry: -entry[0])
    for count in range(len(largest_first) + 1):
        cuts = [cut for size, cut in largest_first[:count] if cut < size]
        if lcm(align, *cuts) == multiple:
            continue
        multiple = lcm(align, *cuts)
        low, high = -(-total // (num_ranks * multiple)), best // multiple
        if low > high or not _fits(sizes, high * multiple, num_ranks):
            continue
        while low < high:
            middle = (low + high) // 2
            if _fits(sizes, middle * multiple, num_ranks):
                high = middle
            else:
                low = middle + 1
        best = min(best, high * multiple)
    return best * num_ranks


def _fits(sizes: Sequence[tuple[int, int]], shard: int, num_ranks: int) -> bool:
    """Each tensor at its earliest legal start."""
    cursor = 0
    for size, cut in sizes:
        room = shard - cursor % shard
        if size > room:
            boundary = cursor + room
            start = boundary - room // cut * cut
            num_inside = len(range(boundary, start + size, shard))
            if shard % cut and (start == boundary or num_inside > 1):
                # Not from here: start at the boundary, or cut once at the next one.
                start = boundary
                if size > shard:
                    start = boundary + shard - shard // cut * cut
                    if start + size > boundary + 2 * shard:
                        return False
            cursor = start
        cursor += size
        if cursor > num_ranks * shard:
            return False
    return True


def fsdp2_numel(tensors: Sequence[BlockedTensor], num_ranks: int) -> int:
    """Chunks of whole first-axis slices; as many slices as make whole blocks."""
    total = 0
    for tensor in tensors:
        length, inner = tensor.shape[0], prod(tensor.shape[1:])
        chunk = _round_up(-(-length // num_ranks), tensor.block // gcd(tensor.block, inner))
        total += num_ranks * min(chunk, length) * inner
    return total


def plain_fsdp2_numel(tensors: Sequence[BlockedTensor], num_ranks: int) -> int:
    """As torch does it: chunks of first-axis slices, 1-D tensors by element, no regard to blocks."""
    return sum(num_ranks * -(-tensor.shape[0] // num_ranks) * prod(tensor.shape[1:]) for tensor in tensors)


def megatron_numel(tensors: Sequence[BlockedTensor], num_ranks: int) -> int:
    """Tensors of a chunk or more start at chunks, two may share one; smaller ones fill gaps, then the tail."""
    blocks = [tensor.block for tensor in tensors if tensor.block < tensor.numel]
    # Shards end between chunks, so a chunk has room for the largest tensor that must not be cut at all.
    whole = max((tensor.numel for tensor in tensors if tensor.block >= tensor.numel), default=1)
    chunk = _round_up(whole, lcm(1, *blocks))
    large = [tensor.numel for tensor in tensors if tensor.numel >= chunk]
    small = sorted((tensor.numel for tensor in tensors if tensor.numel < chunk), reverse=True)
    end, gaps = 0, []
    while large:
        numel = large.pop(0)
        end += _round_up(numel, chunk)
        gap = -numel % chunk
        partner = next((other for other in large if 0 < other % chunk <= gap), None)
        if partner is not None:
            large.remove(partner)
            end += partner - partner % chunk
            gap -= partner % chunk
        gaps.append(gap)
    for numel in small:
        for position, gap in enumerate(gaps):
            if numel <= gap:
                gaps[position] -= numel
                break
        else:
            end += numel
    return _round_up(end, chunk * num_ranks)
