"""thinned: a long table of cases of which the default run takes every n-th, so that it ends within minutes.

`python -m pytest -m "slow or not slow"` takes them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases as parameters, all but every `every`-th marked slow."""
    result = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        result.append(pytest.param(*values, marks=[] if number % every == 0 else [pytest.mark.slow]))
    return result
