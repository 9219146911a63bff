"""warn_caller: a warning that points at the user's line, however deep in the package its cause was found."""

from __future__ import annotations

import sys
import warnings

# Packages through which the user's call came here.
_INSIDE = ("vescale_optim", "torch")


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside of this package and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
