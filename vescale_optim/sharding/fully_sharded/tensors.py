"""Tensors inside the arguments and results of a module: tuples, lists, dicts, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor replaced; parts without tensors that change stay the same objects."""
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Mapping):
        return _with_new_fields(function, value)
    if isinstance(value, dict):
        new = {key: map_tensors(function, part) for key, part in value.items()}
        if all(new[key] is part for key, part in value.items()):
            return value
        return new if type(value) is dict else _refilled(value, new)
    if isinstance(value, list | tuple):
        parts = [map_tensors(function, part) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _with_new_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy, without a new `__init__`: some attributes are set after it, and some are no fields."""
    names = [field.name for field in dataclasses.fields(value)] + list(getattr(value, "__dict__", ()))
    parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    new = {name: map_tensors(function, part) for name, part in parts.items()}
    changed = {name: part for name, part in new.items() if part is not parts[name]}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(copied, name, part)  # frozen ones too
    return copied


def _refilled(value: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    """A dict class of its own (an OrderedDict, a result of transformers): a copy with other values."""
    copied = value.copy() if hasattr(value, "copy") else type(value)(value)
    copied = copied if type(copied) is type(value) else type(value)(**value)
    for key, part in new.items():
        copied[key] = part
    return copied


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in `dtype`; None for as they are."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def tensors_that_require_grad(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
