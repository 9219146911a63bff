"""eager: functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, out of reach of torch.compile: hooks of compiled modules, or of a backward in a compiled loop.

    Wrapped at its first use and once: importing the compiler takes seconds.
    """
    return torch.compiler.disable(function)
