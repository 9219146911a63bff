"""What one device computes: stock torch optimizers, one separate parameter per matrix. The tests compare ranks with it.

    reference = OneDevice(params, {"weight": muon(lr=0.02), "qkv": muon(splits=(8, 4, 4)), "bias": adamw(lr=1e-3)})
    for grads in steps:                                   # name -> mean gradient, or None
        reference.step(grads)
    assert torch.equal(result["weight"], reference.params["weight"])

Independent of the package on purpose: each matrix of a stack, each split, each interleaved part and each flattened
convolution becomes a contiguous (out, in) `nn.Parameter` of its own and is stepped by `torch.optim.Muon`; everything
else by `torch.optim.AdamW(fused=True)`. A parameter without a gradient is skipped and its step does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated: torch's keyword arguments, and how its matrices lie in it."""

    algorithm: Literal["muon", "adamw"]
    arguments: Mapping[str, Any]
    splits: tuple[int, ...] | None = None
    interleave: int = 1
    flatten: Literal["conv"] | None = None
    matrix_layout: Literal["out_in", "in_out"] = "out_in"


def muon(
    *,
    splits: Sequence[int] | None = None,
    interleave: int = 1,
    flatten: Literal["conv"] | None = None,
    matrix_layout: Literal["out_in", "in_out"] = "out_in",
    **arguments: Any,
) -> Rule:
    """`torch.optim.Muon(**arguments)` on every matrix of the parameter."""
    return Rule("muon", arguments, tuple(splits) if splits else None, interleave, flatten, matrix_layout)


def adamw(**arguments: Any) -> Rule:
    """`torch.optim.AdamW(fused=True, **arguments)`."""
    return Rule("adamw", arguments)


class OneDevice:
    """Parameters on one device and the optimizers that step them.

    Args:
        params: name -> value; copied.
        rules: name -> rule, or a function (name, value) -> rule.
        master_dtype: optimizers work on a copy of this dtype and see gradients cast to it; each step ends with
            `parameter.copy_(copy)`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rules: Mapping[str, Rule] | Callable[[str, Tensor], Rule],
        *,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.params = {name: value.detach().clone().contiguous() for name, value in params.items()}
        self._masters = self.params
        if master_dtype is not None:
            self._masters = {name: value.to(master_dtype, copy=True) for name, value in self.params.items()}
        self.rules = {name: rules(name, value) if callable(rules) else rules[name] for name, value in params.items()}
        self._pieces: dict[str, list[nn.Parameter]] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for name, rule in self.rules.items():
            self._pieces[name] = [nn.Parameter(_own(view)) for view in _pieces(self._masters[name], rule)]
            if rule.algorithm == "muon":
                self._optimizers[name] = torch.optim.Muon(self._pieces[name], **rule.arguments)
            else:
                self._optimizers[name] = torch.optim.AdamW(self._pieces[name], fused=True, **rule.arguments)
        self._base_lr = {name: optimizer.param_groups[0]["lr"] for name, optimizer in self._optimizers.items()}

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None], *, lr_factor: float = 1.0) -> None:
        """One step. Names that `grads` lacks, or maps to None, have no gradient. `lr_factor` is a scheduler's."""
        for name, grad in grads.items():
            if grad is None:
                continue
            rule, master = self.rules[name], self._masters[name]
            grad = grad.to(master.dtype)
            for piece, grad_view in zip(self._pieces[name], _pieces(grad, rule), strict=True):
                piece.grad = _own(grad_view)
            optimizer = self._optimizers[name]
            optimizer.param_groups[0]["lr"] = self._base_lr[name] * lr_factor
            true_momenta = [self._momentum_after(piece, name) for piece in self._pieces[name]]
            optimizer.step()
            for piece, momentum in zip(self._pieces[name], true_momenta, strict=True):
                if momentum is not None:
                    optimizer.state[piece]["momentum_buffer"].copy_(momentum)
            for piece, view in zip(self._pieces[name], _pieces(master, rule), strict=True):
                view.copy_(piece)
            if master is not self.params[name]:
                self.params[name].copy_(master)

    def state(self, name: str) -> list[dict[str, Any]]:
        """Optimizer state of every piece of a parameter: one for AdamW, one per matrix for Muon."""
        return [self._optimizers[name].state[piece] for piece in self._pieces[name]]

    def _momentum_after(self, piece: nn.Parameter, name: str) -> Tensor | None:
        """The momentum that torch should leave behind where it does not.

        With bf16 parameters and nesterov=False torch.optim.Muon 2.13 normalises its momentum buffer in place: the
        orthogonalisation's input is the buffer itself.
        """
        group = self._optimizers[name].param_groups[0]
        if group.get("nesterov", True) or piece.dtype != torch.bfloat16:
            return None
        state = self._optimizers[name].state[piece]
        before = state["momentum_buffer"].clone() if state else torch.zeros_like(piece)
        return before.lerp_(piece.grad, 1 - group["momentum"])


def after_steps(
    params: Mapping[str, Tensor],
    steps: Sequence[Mapping[str, Tensor | None]],
    rules: Mapping[str, Rule] | Callable[[str, Tensor], Rule],
    *,
    master_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Parameters after one step per entry of `steps` (name -> mean gradient or None)."""
    reference = OneDevice(params, rules, master_dtype=master_dtype)
    for grads in steps:
        reference.step(grads)
    return reference.params


def muon_for_matrices(muon_rule: Rule, adamw_rule: Rule) -> Callable[[str, Tensor], Rule]:
    """Rules for `OneDevice`: matrices and stacks of them by the first rule, 0-D and 1-D parameters by the second."""
    return lambda name, value: muon_rule if value.ndim >= 2 else adamw_rule


def _pieces(tensor: Tensor, rule: Rule) -> list[Tensor]:
    """Views of the matrices (out, in) that the rule updates separately; the whole tensor for AdamW."""
    if rule.algorithm == "adamw":
        return [tensor]
    stack_shape = (1, tensor.shape[0], -1) if rule.flatten == "conv" else (-1, *tensor.shape[-2:])
    stack = tensor.view(stack_shape)
    matrices = [matrix.T if rule.matrix_layout == "in_out" else matrix for matrix in stack]
    if rule.splits is not None:
        return [part for matrix in matrices for part in matrix.split(rule.splits)]
    return [matrix[k :: rule.interleave] for matrix in matrices for k in range(rule.interleave)]


def _own(view: Tensor) -> Tensor:
    return view.detach().clone(memory_format=torch.contiguous_format)
