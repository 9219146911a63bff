"""Shampoo on one device, written from its formulas: what N ranks must equal bit for bit.

    reference = Shampoo(params, block=32, lr=1e-3)
    for grads in steps:                                   # name -> mean gradient, or None
        reference.step(grads)
    assert torch.equal(result["weight"], reference.params["weight"])

Independent of the package: tiles are slices of the parameter, every tile has a dictionary of plain matrices. Equality of
bits still needs the same arithmetic, so the order in which it is done is stated here and is part of the contract:

    F = b2 F + (1 - b2) G G'                       addmm, see `with_gram`; fp32 also for bf16 gradients; F + G G' if b2 = 1
    m = m + (1 - b1) (G - m), then m / (1 - b1^t)  lerp; a division
    v = (b2 v) + w G G, elementwise                addcmul(value=w)
    D = m / (sqrt(v / c) + grafting_eps)
    X = (Q * l^(-1/p)) Q', p-th root in fp64       of F / (1 - b2^t); with grafting times max(l)^(1/p - 1/4)
    P = ((X_L m) X_R) * (|D| / (|X_L m X_R| + eps))
    B = (mu B) + P;   P + mu B  or  B
    p = p (1 - lr wd), then p + (-lr) P            one rounding each to the dtype of the parameter

Every matrix product, `eigh` and norm reads contiguous memory of its own. Parameters of fewer than two dimensions are
stepped by `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)


def tiles_of(tensor: Tensor, block: int) -> list[Tensor]:
    """Views of the tiles of every matrix of a stack, row of tiles by row of tiles."""
    rows, columns = tensor.shape[-2:]
    return [
        matrix[top : top + block, left : left + block]
        for matrix in tensor.reshape(-1, rows, columns)
        for top in range(0, rows, block)
        for left in range(0, columns, block)
    ]


def turns_of_tiles(params: Mapping[str, Tensor], block: int) -> dict[tuple[str, int], int]:
    """By name and tile: a number for every tile of all matrices, shape by shape in ascending order."""
    shapes = {
        (name, index): tuple(tile.shape)
        for name, value in params.items()
        if value.ndim >= 2
        for index, tile in enumerate(tiles_of(value, block))
    }
    turns: dict[tuple[str, int], int] = {}
    for shape in sorted(set(shapes.values())):
        for key in shapes:
            if shapes[key] == shape:
                turns[key] = len(turns)
    return turns


class TiledReference:
    """Parameters on one device: matrices go tile by tile to `direction`, the rest to AdamW.

    Subclasses say what a tile does in a step, and how the parameter takes the directions.
    """

    def __init__(self, params: Mapping[str, Tensor], block: int, adamw: Mapping[str, Any] | None) -> None:
        self.params = {name: value.detach().clone() for name, value in params.items()}
        self.block = block
        self.steps = dict.fromkeys(params, 0)
        self.tiles: dict[str, list[dict[str, Any]]] = {
            name: [self.initial(*tile.shape) for tile in tiles_of(value, block)]
            for name, value in self.params.items()
            if value.ndim >= 2
        }
        self.turns = turns_of_tiles(self.params, block)
        self.others = {name: nn.Parameter(value) for name, value in self.params.items() if value.ndim < 2}
        arguments = {**ADAMW, **(adamw or {})}
        self.adamw = {name: torch.optim.AdamW([p], fused=True, **arguments) for name, p in self.others.items()}

    def initial(self, rows: int, columns: int) -> dict[str, Any]:
        raise NotImplementedError

    def direction(self, state: dict[str, Any], gradient: Tensor, step: int, turn: int) -> Tensor:
        raise NotImplementedError

    def update(self, param: Tensor, direction: Tensor, step: int) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            if grad is None:
                continue
            self.steps[name] += 1
            if name in self.others:
                self.others[name].grad = grad.clone()
                self.adamw[name].step()
                continue
            direction = torch.empty(grad.shape)
            pieces = zip(self.tiles[name], tiles_of(grad, self.block), tiles_of(direction, self.block), strict=True)
            for index, (state, gradient, target) in enumerate(pieces):
                target.copy_(self.direction(state, own(gradient.float()), self.steps[name], self.turns[name, index]))
            self.update(self.params[name], direction, self.steps[name])

    def state(self, name: str, *keys: str) -> Tensor:
        """State of a parameter as the package keeps it: flat, tile after tile."""
        return torch.cat([tile[key].reshape(-1) for tile in self.tiles[name] for key in keys])


class Shampoo(TiledReference):
    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        block: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        frequency: int = 10,
        start: int | None = None,
        grafting: str | None = "adam",
        grafting_eps: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        root: float = 4,
        matrix_eps: float = 1e-6,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.frequency, self.start = frequency, frequency if start is None else start
        self.grafting, self.grafting_eps, self.momentum, self.nesterov = grafting, grafting_eps, momentum, nesterov
        self.root, self.matrix_eps = root, matrix_eps
        super().__init__(params, block, adamw)

    def initial(self, rows: int, columns: int) -> dict[str, Any]:
        return {
            "left": torch.zeros(rows, rows),
            "right": torch.zeros(columns, columns),
            "left root": None,
            "right root": None,
            **{name: torch.zeros(rows, columns) for name in ("first", "second", "momentum")},
        }

    def direction(self, state: dict[str, Any], gradient: Tensor, step: int, turn: int) -> Tensor:
        beta1, beta2 = self.betas
        for side, matrix in (("left", gradient), ("right", gradient.T)):
            state[side] = with_gram(state[side], matrix, beta2)
        first_time = step == self.start or state["left root"] is None
        if step >= self.start and (first_time or step % self.frequency == turn % self.frequency):
            for side in ("left", "right"):
                state[f"{side} root"] = self.inverse_root(state[side] / corrected(beta2, step))
        state["first"] = torch.lerp(state["first"], gradient, 1 - beta1)
        mean = state["first"] / corrected(beta1, step)
        graft = self.graft(state, gradient, mean, step)
        if step < self.start:
            result = graft
        else:
            result = (state["left root"] @ mean) @ state["right root"]
            if self.grafting is not None:
                length = frobenius(result) + self.eps
                result = result * (frobenius(graft) / length) if length > 0 else torch.zeros_like(result)
        if not self.momentum:
            return result
        state["momentum"] = state["momentum"] * self.momentum + result
        return torch.add(result, state["momentum"], alpha=self.momentum) if self.nesterov else state["momentum"]

    def graft(self, state: dict[str, Any], gradient: Tensor, mean: Tensor, step: int) -> Tensor:
        if self.grafting in ("sgd", None):
            return mean
        decay = 1 if self.grafting == "adagrad" else self.betas[1]
        state["second"] = torch.addcmul(state["second"] * decay, gradient, gradient, value=new_weight(decay))
        square = state["second"] / corrected(decay, step) if self.grafting == "adam" else state["second"]
        return mean / (square.sqrt() + self.grafting_eps)

    def inverse_root(self, matrix: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(own(matrix))
        eigenvalues = eigenvalues.double().clamp(min=0)
        top = eigenvalues.max()
        lifted = eigenvalues + self.matrix_eps * top if top > 0 else torch.ones_like(eigenvalues)
        powers = lifted ** (-1 / self.root)
        if self.grafting is not None and top > 0:
            powers = powers * top ** (1 / self.root - 1 / 4)
        return (vectors * powers.float()) @ vectors.T

    def update(self, param: Tensor, direction: Tensor, step: int) -> None:
        param.mul_(1 - self.lr * self.weight_decay)
        param.add_(direction, alpha=-self.lr)


def after_steps(reference: TiledReference, steps: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
    for grads in steps:
        reference.step(grads)
    return reference.params


def with_gram(factor: Tensor, matrix: Tensor, decay: float) -> Tensor:
    """decay F + (1 - decay) A A', or F + A A': panels of 256 rows as far as their diagonal block, the rest mirrored."""
    result = torch.empty_like(factor)
    for top in range(0, len(matrix), 256):
        end = min(top + 256, len(matrix))
        old, weights = factor[top:end, :end], dict(beta=decay, alpha=new_weight(decay))
        result[top:end, :end] = torch.addmm(old, matrix[top:end], matrix[:end].T, **weights)
        result[:top, top:end] = result[top:end, :top].T
    return result


def new_weight(decay: float) -> float:
    return 1 - decay if decay < 1 else 1.0


def corrected(decay: float, step: int) -> float:
    return 1 - decay**step if decay < 1 else 1.0


def frobenius(matrix: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrix)


def own(view: Tensor) -> Tensor:
    """The values in contiguous memory of their own."""
    return view.detach().clone(memory_format=torch.contiguous_format)
