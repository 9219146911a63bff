"""Gradients whose sums over ranks and whose mean are exact, in fp32 and in bf16, in every order of summation.

A test that asks for bit equality must not depend on how a backend adds. Here a gradient element is

    (small integer) * 2**-e          e drawn per element, the same on all ranks and micro-batches

and the ranks' integers add up to world_size * mean, so the division by 3 is exact too. No partial sum over ranks or
micro-batches exceeds 256, the largest run of integers that bf16 (8 significant bits) holds.

    grads = rank_gradients({"w": (7, 13), "b": (7,)}, world_size=3, seed=step)
    grads.of_rank(1)["w"]           what rank 1's backward shall produce
    grads.mean["w"]                 what one device's backward shall produce
    backward(model.named_parameters(), grads.of_rank(1))
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The shapes of the equality tests: odd sizes, one row, one column, fewer rows than ranks, a stack, 1-D and 0-D.
MIXED_SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (7, 13),
    "row": (1, 64),
    "column": (64, 1),
    "tall": (300, 50),
    "square": (5, 5),
    "stack": (3, 16, 24),
    "bias": (13,),
    "scale": (64,),
    "scalar": (),
}

_MAX_WORLD_SIZE = 8
_MAX_MICRO_BATCHES = 4


@dataclass(frozen=True)
class RankGradients:
    """parts[rank][micro_batch][name], and their mean over ranks (summed over micro-batches); None where unused."""

    parts: Sequence[Sequence[Mapping[str, Tensor | None]]]
    mean: Mapping[str, Tensor | None]

    def of_rank(self, rank: int, micro_batch: int | None = None) -> dict[str, Tensor | None]:
        """One micro-batch's gradients on a rank; by default their sum over micro-batches."""
        if micro_batch is not None:
            return dict(self.parts[rank][micro_batch])
        first, *others = self.parts[rank]
        return {n: None if g is None else sum((micro[n] for micro in others), g) for n, g in first.items()}


def rank_gradients(
    shapes: Mapping[str, Sequence[int]],
    world_size: int,
    *,
    seed: int = 0,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    unused: Mapping[str, Collection[int]] | None = None,
) -> RankGradients:
    """Gradients for every rank, deterministic in all arguments: ranks and parent may each call it for themselves.

    The mean depends on `shapes`, `seed` and (it is then a sum) `micro_batches`, not on `world_size` or `dtype`. The
    mean over ranks of each micro-batch alone is exact as well.

    Args:
        unused: name -> ranks that have no gradient for it (None); they count as zeros in the mean, as in every
            data-parallel average. A name unused on all ranks has no mean.
    """
    if not 1 <= world_size <= _MAX_WORLD_SIZE or not 1 <= micro_batches <= _MAX_MICRO_BATCHES:
        raise ValueError(
            f"{world_size} ranks and {micro_batches} micro-batches: sums are exact in bf16 for 1 to {_MAX_WORLD_SIZE} "
            f"ranks and 1 to {_MAX_MICRO_BATCHES} micro-batches"
        )
    parts: list[list[dict[str, Tensor | None]]] = [[{} for _ in range(micro_batches)] for _ in range(world_size)]
    mean: dict[str, Tensor | None] = {}
    for name, shape in shapes.items():
        generator = _generator(name, seed)
        scale = 2.0 ** -_integers(0, 6, shape, generator)
        largest = 8 // micro_batches
        means = [_integers(-largest, largest, shape, generator) for _ in range(micro_batches)]
        users = [rank for rank in range(world_size) if rank not in (unused or {}).get(name, ())]
        for micro, micro_mean in enumerate(means):
            for rank in range(world_size):
                parts[rank][micro][name] = None
            rest = world_size * micro_mean
            for rank in users:
                # The last user makes the sum right, whatever the others drew.
                part = rest if rank == users[-1] else _integers(-2, 2, shape, generator)
                rest = rest - part
                parts[rank][micro][name] = (part * scale).to(dtype)
        mean[name] = (sum(means[1:], means[0]) * scale).to(dtype) if users else None
    return RankGradients(parts, mean)


def parameter_values(
    shapes: Mapping[str, Sequence[int]], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Normal initial values, rounded to `dtype`; deterministic in all arguments."""
    return {n: torch.randn(tuple(shape), generator=_generator(n, seed)).to(dtype) for n, shape in shapes.items()}


def parameter_module(values: Mapping[str, Tensor]) -> nn.ParameterDict:
    """A module that holds copies of the values as parameters, in their order."""
    module = nn.ParameterDict()
    for name, value in values.items():
        module[name] = nn.Parameter(value.clone())
    return module


def backward(parameters: Iterable[tuple[str, nn.Parameter]], grads: Mapping[str, Tensor | None]) -> None:
    """A real backward that produces exactly these gradients; names without one take no part in the loss.

    d/dp sum(p * g) is g, with no rounding.
    """
    used = [(p, grads[name]) for name, p in parameters if grads.get(name) is not None]
    if used:
        torch.stack([(p * g).sum().float() for p, g in used]).sum().backward()


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)


def _integers(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, tuple(shape), generator=generator).float()
