"""How gradients of DTensor parameters lie: like their parameters, or on all ranks alike in another way.

Under sequence parallelism gradients are Partial, still to be summed over an axis, and users may assign others. Bringing such
a gradient to its parameter is a collective, so a rank without that gradient has to know and take part, with zeros:

    marks = [placement_mark(param) for param in params]         a number each, 0 where it lies like its parameter
    agree on the maximum of marks and of lowest_of(marks)       one message, with whatever else there is to agree on
    placements.learn(both maxima, params, names, agreement)     communicates only for kinds that were never seen
    placements.like_parameter(param, mark)                      collective where the mark is above 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale_optim.sharding.agreement import Agreement, fingerprint

# The mark of a gradient that a rank does not have, and what stands for it where the lowest mark is asked for.
ABSENT, NEVER = -1, -(1 << 62)


class GradientKind(NamedTuple):
    """What a rank without a gradient must know to take part in bringing it to its parameter."""

    placements: tuple[Placement, ...]
    dtype: torch.dtype


def placement_mark(param: DTensor) -> int:
    """How the gradient of a parameter lies, as a number that is the same on all ranks: 0 like the parameter itself."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return ABSENT
    return 0 if grad.placements == param.placements else fingerprint(_kind_of(grad))


def lowest_of(marks: Sequence[int]) -> list[int]:
    """Numbers whose maxima over the ranks are the negated lowest marks of those ranks that have a gradient."""
    return [NEVER if mark == ABSENT else -mark for mark in marks]


class GradientPlacements:
    """The kinds of gradients that ranks have met, by their marks."""

    def __init__(self) -> None:
        self._kinds: dict[int, GradientKind] = {}

    def learn(
        self,
        marks: Sequence[int],
        lowest: Sequence[int],
        params: Sequence[DTensor],
        names: Sequence[str],
        agreement: Agreement,
    ) -> None:
        """Ask each other what new marks mean; every rank calls this with the maxima that they agreed on.

        Raises:
            RuntimeError: on all ranks, where gradients of one parameter lie differently on different ranks.
        """
        for mark, negated, param, name in zip(marks, lowest, params, names, strict=True):
            if mark not in (ABSENT, -negated):
                agreement.raise_fault(_explain_difference(name, param))
        unknown = {mark: index for index, mark in enumerate(marks) if mark > 0 and mark not in self._kinds}
        if not unknown:
            return
        grads = {mark: params[index].grad for mark, index in unknown.items()}
        for kinds in agreement.gather({mark: _kind_of(grad) for mark, grad in grads.items() if grad is not None}):
            self._kinds.update(kinds)

    def like_parameter(self, param: DTensor, mark: int) -> DTensor | None:
        """The gradient, laid out like its parameter; collective where `mark` is above 0, and never None then."""
        grad = param.grad
        if mark <= 0:
            return grad
        if grad is None:
            placements, dtype = self._kinds[mark]
            summands = [Replicate() if placement.is_partial() else placement for placement in placements]
            zeros = torch.distributed.tensor.zeros(
                param.shape, dtype=dtype, device_mesh=param.device_mesh, placements=summands
            )
            grad = DTensor.from_local(
                zeros.to_local(), param.device_mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        return grad.redistribute(placements=param.placements)


def _kind_of(grad: DTensor) -> GradientKind:
    return GradientKind(tuple(grad.placements), grad.dtype)


def _explain_difference(name: str, param: DTensor) -> str | None:
    """This rank's words about a gradient that lies differently elsewhere; None where it has none."""
    if param.grad is None:
        return None
    return (
        f"the gradient of parameter '{name}' of shape {tuple(param.shape)} has placements {tuple(param.grad.placements)} "
        f"and dtype {param.grad.dtype} here and others on other ranks; give gradients that lie alike on all ranks"
    )
