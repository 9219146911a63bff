"""TravellingParameter: a parameter whose new values are still on their way from their owners.

With `overlap_forward`, `step()` returns while the all-gathers run. Until a bucket has arrived its parameters are of this
class, and the first torch operation that uses one waits for it and turns the whole bucket back into plain parameters.
So a forward waits layer by layer, and an average, a checkpoint or a print right after the step see the new values too.

What never asks torch for the parameter cannot be intercepted: replaying a CUDA graph, code compiled over the parameter's
type. Hence it is opt-in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class TravellingParameter(nn.Parameter):
    """Made by `depart`, never constructed; the object and its identity are the user's."""

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            for value in tree_leaves((args, kwargs)):
                if type(value) is cls:
                    value._arrive()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # nn.Parameter's own versions look at the class first.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self._arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._arrive()
        return self.__reduce_ex__(protocol)


# What says nothing about the values: reading these must not end the overlap, `zero_grad` among them.
_METADATA_NAMES = ["grad", "grad_dtype", "grad_fn", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf"]
_METADATA_METHODS = [Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.requires_grad_]
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA_NAMES]
    + [getattr(Tensor, name).__set__ for name in _METADATA_NAMES]
    + _METADATA_METHODS
)


def depart(params: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Let the first use of any of the parameters call `arrive`, which must call `settle` on all of them."""
    for param in params:
        # A class of the user's own may do things on its own; such parameters are waited for at once.
        if type(param) is not nn.Parameter:
            arrive()
            return
    for param in params:
        param.__class__ = TravellingParameter
        param._arrive = arrive


def settle(params: Sequence[nn.Parameter]) -> None:
    """The parameters are complete: plain parameters again."""
    for param in params:
        if type(param) is TravellingParameter:
            del param._arrive
            param.__class__ = nn.Parameter
