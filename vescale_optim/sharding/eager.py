"""eager: functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Not functools.cache: the compiler, which meets `step` in compiled loops, warns about it.
_eager: dict[Callable[..., Any], Callable[..., Any]] = {}


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, out of reach of torch.compile: hooks of compiled modules or of a backward in a compiled loop, steps.

    Wrapped at its first use and once: importing the compiler takes seconds.
    """
    if function not in _eager:
        _eager[function] = torch.compiler.disable(function)
    return _eager[function]
