"""What one device computes with 8-bit AdamW, written from the algorithm: no chunks, no tables, one block after the other.

    reference = OneDevice8bit(params, lr=1e-3, weight_decay=0.01)
    for grads in steps:                                   # name -> mean gradient, or None
        reference.step(grads)
    reference.params["weight"], reference.state["weight"]["absmax1"]

    m, v from codes and scales, in fp32
    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr wd);   p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)       rounded once to p's dtype
    per block: absmax = max |x|, code = nearest value of the codebook to x / absmax, ties to the lower one; v: at least 1

Arithmetic is torch's, whole tensors at a time (its fused multiply-adds and its square root are not NumPy's); codes,
scales and codebooks are NumPy's. Parameters below `min_8bit_size` elements, and those in `wide`, are stepped by
`torch.optim.AdamW(fused=True)` on an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor, nn


class OneDevice8bit:
    """Parameters on one device, `params`, and their `state`: state1, state2 and, where 8-bit, absmax1, absmax2.

    Args:
        params: name -> value; copied.
        wide: names with fp32 state.
        master_dtype: torch.float32 updates fp32 copies and rounds them into the parameters after each step.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        block_shape: tuple[int, int] | None = None,
        wide: Collection[str] = (),
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.params = {name: value.detach().clone() for name, value in params.items()}
        self.state: dict[str, dict[str, Tensor]] = {}
        self._masters = {n: p.to(master_dtype, copy=True) if master_dtype else p for n, p in self.params.items()}
        self._steps = dict.fromkeys(params, 0)
        self._blocks: dict[str, list[np.ndarray]] = {}
        self._fused: dict[str, tuple[nn.Parameter, torch.optim.AdamW]] = {}
        for name, value in params.items():
            if value.numel() < min_8bit_size or name in wide:
                copy = nn.Parameter(value.float().clone())
                optimizer = torch.optim.AdamW([copy], lr, betas, eps, weight_decay, fused=True)
                self._fused[name] = copy, optimizer
                self.state[name] = {"state1": torch.zeros(value.shape), "state2": torch.zeros(value.shape)}
            else:
                blocks = self._blocks[name] = list(blocks_of(tuple(value.shape), block_size, block_shape))
                self.state[name] = {
                    "state1": torch.full(value.shape, 127, dtype=torch.uint8),
                    "state2": torch.zeros(value.shape, dtype=torch.uint8),
                    "absmax1": torch.zeros(len(blocks)),
                    "absmax2": torch.zeros(len(blocks)),
                }

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None], *, lr_factor: float = 1.0) -> None:
        """One step. Names that `grads` lacks, or maps to None, have no gradient."""
        for name, grad in grads.items():
            if grad is None:
                continue
            self._steps[name] += 1
            master = self._masters[name]
            update = self._step_wide if name in self._fused else self._step_8bit
            master.copy_(update(name, grad.to(master.dtype).float(), master.float(), self.lr * lr_factor))
            self.params[name].copy_(master)

    def _step_8bit(self, name: str, grad: Tensor, param: Tensor, lr: float) -> Tensor:
        state, (beta1, beta2), step = self.state[name], self.betas, self._steps[name]
        m, v = (self._values(name, number) for number in (1, 2))
        m = m.mul(beta1).add(grad, alpha=1 - beta1)
        v = v.mul(beta2).addcmul(grad, grad, value=1 - beta2)
        denominator = v.sqrt() / sqrt(1 - beta2**step) + self.eps
        param = (param * (1 - lr * self.weight_decay)).addcdiv(m, denominator, value=-lr / (1 - beta1**step))
        for number, moment, least in ((1, m, 0), (2, v, 1)):
            flat = moment.reshape(-1).numpy()
            codes = state[f"state{number}"].view(-1).numpy()
            for index, block in enumerate(self._blocks[name]):
                absmax = np.abs(flat[block]).max()
                state[f"absmax{number}"][index] = float(absmax)
                ratio = flat[block] / absmax if absmax > 0 else np.zeros(len(block), np.float32)
                codes[block] = np.maximum(nearest_codes(ratio, codebook(number == 1)), least)
        return param

    def _values(self, name: str, number: int) -> Tensor:
        state, book = self.state[name], codebook(number == 1)
        codes = state[f"state{number}"].reshape(-1).numpy()
        values = np.empty(codes.shape, np.float32)
        for block, absmax in zip(self._blocks[name], state[f"absmax{number}"].numpy(), strict=True):
            values[block] = book[codes[block]] * absmax
        return torch.from_numpy(values).view(state["state1"].shape)

    def _step_wide(self, name: str, grad: Tensor, param: Tensor, lr: float) -> Tensor:
        copy, optimizer = self._fused[name]
        copy.copy_(param)
        copy.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for key, torch_key in (("state1", "exp_avg"), ("state2", "exp_avg_sq")):
            self.state[name][key].copy_(optimizer.state[copy][torch_key])
        return copy.detach()


def blocks_of(shape: Sequence[int], size: int, tile: tuple[int, int] | None) -> Iterator[np.ndarray]:
    """Positions, in the flat tensor, of the elements of every block, in the order of the scales."""
    positions = np.arange(prod(shape))
    if tile is not None and len(shape) >= 2 and min(shape[-2:]) >= tile[0]:
        for matrix in positions.reshape(-1, *shape[-2:]):
            for row in range(0, shape[-2], tile[0]):
                for column in range(0, shape[-1], tile[1]):
                    yield matrix[row : row + tile[0], column : column + tile[1]].ravel()
        return
    size = size if tile is None else prod(tile)
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def nearest_codes(ratio: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Index of the nearest value, the lower of two equally near ones."""
    wide = book.astype(np.float64)
    return np.searchsorted((wide[:-1] + wide[1:]) / 2, ratio.astype(np.float64), side="left")


@cache
def codebook(is_signed: bool) -> np.ndarray:
    """The dynamic map of the paper, rounded to fp32 after every operation, linspace with a fused multiply-add."""
    one = np.float32
    values = [one(0), one(1)]
    for exponent in range(-6, 1):
        count = 2 ** (exponent + (6 if is_signed else 7))
        width = (one(1) - one(0.1)) / one(count)
        edges = []
        for k in range(count + 1):
            if k < (count + 1) // 2:
                edges.append(one(float(one(0.1)) + float(width) * k))
            else:
                edges.append(one(1 - float(width) * (count - k)))
        for low, high in pairwise(edges):
            middle = one(10.0**exponent) * ((low + high) / one(2))
            values += [middle, -middle] if is_signed else [middle]
    return np.sort(np.array(values, np.float32))
