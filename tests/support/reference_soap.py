"""SOAP on one device, twice: tile by tile as N ranks must equal it bit for bit, and as its authors wrote it.

The first, `SOAP`, is independent of the package, but equality of bits needs the same arithmetic, whose order is:

    first step with a gradient:  F as below, from zero;  Q = eigenvectors of F, last one first;  no update
    g = (Q_L' G) Q_R
    M = M + (1 - b1) (g - M)                       lerp
    V = (b2 V) + (1 - b2) g g, elementwise         addcmul(value=1 - b2)
    P = (Q_L (M / (sqrt(V) + eps))) Q_R'
    p = p + (-lr c) P, then p (1 - lr wd)          one rounding each to the dtype of the parameter
    F = b F + (1 - b) gram                         addmm, see `with_gram`
    refresh: A = F Q; columns by descending sum(Q * A), ties in order; new Q = qr(A[:, order])
             M = (Q_L_new' ((Q_L M) Q_R')) Q_R_new;   V permuted by both orders

`authors_soap` is the loop of the authors' reference implementation (arXiv 2409.11321) for one matrix: it turns the first
moment back and forth in every step. The two agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.reference_shampoo import TiledReference, own, with_gram


class SOAP(TiledReference):
    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        block: int,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        frequency: int = 10,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay, self.frequency = lr, betas, eps, weight_decay, frequency
        self.factor_beta = betas[1] if shampoo_beta is None else shampoo_beta
        super().__init__(params, block, adamw)

    def initial(self, rows: int, columns: int) -> dict[str, Any]:
        return {
            "left": torch.zeros(rows, rows),
            "right": torch.zeros(columns, columns),
            "first": torch.zeros(rows, columns),
            "second": torch.zeros(rows, columns),
        }

    def direction(self, state: dict[str, Any], gradient: Tensor, step: int, turn: int) -> Tensor:
        if "left basis" not in state:
            if gradient.any():
                self.start(state, gradient)
            return torch.zeros_like(gradient)
        beta1, beta2 = self.betas
        left, right = state["left basis"], state["right basis"]
        projected = (left.T @ gradient) @ right
        state["first"] = torch.lerp(state["first"], projected, 1 - beta1)
        state["second"] = torch.addcmul(state["second"] * beta2, projected, projected, value=1 - beta2)
        adam = state["first"] / (state["second"].sqrt() + self.eps)
        result = (left @ adam) @ right.T
        self.add_grams(state, gradient)
        if (step - 1) % self.frequency == turn % self.frequency:
            self.refresh(state)
        return result

    def start(self, state: dict[str, Any], gradient: Tensor) -> None:
        self.add_grams(state, gradient)
        for side in ("left", "right"):
            _, vectors = torch.linalg.eigh(own(state[side]))
            state[f"{side} basis"] = own(vectors.flip(1))

    def add_grams(self, state: dict[str, Any], gradient: Tensor) -> None:
        beta = self.factor_beta
        state["left"] = with_gram(state["left"], gradient, beta)
        state["right"] = with_gram(state["right"], gradient.T, beta)

    def refresh(self, state: dict[str, Any]) -> None:
        first = (state["left basis"] @ state["first"]) @ state["right basis"].T
        orders = {}
        for side in ("left", "right"):
            basis = state[f"{side} basis"]
            image = state[side] @ basis
            orders[side] = torch.sort((basis * image).sum(0), descending=True, stable=True).indices
            state[f"{side} basis"] = own(torch.linalg.qr(image[:, orders[side]]).Q)
        state["first"] = (state["left basis"].T @ first) @ state["right basis"]
        state["second"] = state["second"][orders["left"]][:, orders["right"]]

    def update(self, param: Tensor, direction: Tensor, step: int) -> None:
        if step == 1:
            return
        correction = math.sqrt(1 - self.betas[1] ** (step - 1)) / (1 - self.betas[0] ** (step - 1))
        param.add_(direction, alpha=-self.lr * correction)
        param.mul_(1 - self.lr * self.weight_decay)


def authors_soap(
    param: Tensor,
    grads: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    shampoo_beta: float,
    eps: float,
    weight_decay: float,
    frequency: int,
) -> list[Tensor]:
    """The matrix after every step."""
    beta1, beta2 = betas
    param = param.clone()
    factors = [torch.zeros(size, size, dtype=param.dtype) for size in param.shape]
    bases: list[Tensor] = []
    average, square = torch.zeros_like(param), torch.zeros_like(param)

    def project(matrix: Tensor) -> Tensor:
        return torch.tensordot(torch.tensordot(matrix, bases[0], dims=[[0], [0]]), bases[1], dims=[[0], [0]])

    def project_back(matrix: Tensor) -> Tensor:
        return torch.tensordot(torch.tensordot(matrix, bases[0], dims=[[0], [1]]), bases[1], dims=[[0], [1]])

    def update_factors(grad: Tensor) -> None:
        for axis, factor in enumerate(factors):
            factor.lerp_(torch.tensordot(grad, grad, dims=[[1 - axis], [1 - axis]]), 1 - shampoo_beta)

    results = []
    for step, grad in enumerate(grads):
        if step == 0:
            update_factors(grad)
            bases = [torch.linalg.eigh(factor + 1e-30 * torch.eye(len(factor)))[1].flip(1) for factor in factors]
            results.append(param.clone())
            continue
        projected = project(grad)
        average.mul_(beta1).add_(projected, alpha=1 - beta1)
        square.mul_(beta2).add_(projected.square(), alpha=1 - beta2)
        size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        param.add_(project_back(average / square.sqrt().add_(eps)), alpha=-size)
        param.add_(param, alpha=-lr * weight_decay)
        average = project_back(average)
        update_factors(grad)
        if step % frequency == 0:
            refreshed = []
            for axis, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
                order = torch.argsort(torch.diag(basis.T @ factor @ basis), descending=True)
                square = square.index_select(axis, order)
                refreshed.append(torch.linalg.qr(factor @ basis[:, order])[0])
            bases = refreshed
        average = project(average)
        results.append(param.clone())
    return results
