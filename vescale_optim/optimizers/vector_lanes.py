"""Vector lanes: element-wise CPU kernels on a shard, with the bits that they give on the whole tensor.

A vectorised kernel of torch takes `lanes` elements at a time and the last numel % lanes one by one, in scalar code whose
compiler contracts other multiplications and additions: the last bit may differ (torch 2.13: fused AdamW in fp32, `add`
with alpha in bf16). A shard that ends elsewhere than the tensor would go the other way at its end:

    whole tensor     |vvvvvvvv|vvvvvvvv|vvvvvvvv|sss|        v: vector, s: scalar
    shard                  |vvvvvvvv|vvvvssss                padded: |vvvvvvvv|vvvv....|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from vescale_optim.sharding.regions import Part, intersect, run_region


def vector_lanes(dtype: torch.dtype) -> int:
    """Elements that go together: 32 bytes, measured on torch 2.13 for AVX2 and AVX-512 alike.

    With AVX-512 the compiler takes half a register more from the scalar rest.
    """
    return 32 // dtype.itemsize


def ends_like_whole(start: int | None, numel: int, whole_numel: int, lanes: int) -> bool:
    """Whether a kernel takes every element of a shard as it takes it in the whole tensor."""
    if start is None or start % lanes:
        return numel == 0
    return numel % lanes == 0 or start + numel == whole_numel


def run_in_lanes(
    operation: Callable[[list[Tensor]], None],
    tensors: Sequence[Tensor],
    num_written: int,
    shape: Sequence[int],
    region: Sequence[Part],
    lanes: int,
) -> None:
    """Run an element-wise operation on flat shards so that every element goes through the code of the whole tensor.

    Args:
        operation: edits the first tensors of a list in place.
        tensors: flat shards of one length.
        num_written: how many of them it edits.
        shape: of the whole tensor.
        region: the boxes of the whole tensor that the shards are.
        lanes: elements that the kernel takes at a time.
    """
    numel = prod(shape)
    scalar_parts = [part for part, _ in intersect(region, run_region(shape, numel - numel % lanes, numel))]
    one_by_one = [[part.view(tensor).clone() for tensor in tensors] for part in scalar_parts]
    padded = [torch.nn.functional.pad(tensor, (0, -tensor.numel() % lanes)) for tensor in tensors]
    operation(padded)
    for values in one_by_one:
        operation(values)
    for position, tensor in enumerate(tensors[:num_written]):
        tensor.copy_(padded[position][: tensor.numel()])
        for part, values in zip(scalar_parts, one_by_one, strict=True):
            part.view(tensor).copy_(values[position])
