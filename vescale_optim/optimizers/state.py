"""State of one parameter: checked against, and filled from, the state of a checkpoint.

State tensors are DTensors that exist from construction, in placements of their own. What is loaded may be whole (plain
tensors, as a single-device optimizer has them) or a DTensor of any placement; each rank copies its own boxes out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_optim.optimizers.rule import StateSpec
from vescale_optim.sharding.regions import region_of


def check_state(name: str, state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the parameter, where loaded state has another shape; changes nothing."""
    for key, value in state.items():
        if key in loaded and key != "step" and tuple(loaded[key].shape) != tuple(value.shape):
            raise ValueError(
                f"state '{key}' of parameter '{name}' has shape {tuple(loaded[key].shape)} in the checkpoint and "
                f"{tuple(value.shape)} here; load it into an optimizer over the same model and blocks"
            )


def reset_state(state: Mapping[str, Any], specs: Iterable[StateSpec], loaded: Mapping[str, Any]) -> None:
    """State as it was at construction, where a checkpoint lacks it.

    What the checkpoint has is left alone: after `dcp.load` into `state_dict()` the loaded tensors are this very state.
    """
    if "step" not in loaded:
        state["step"].zero_()
    for spec in specs:
        if spec.name not in loaded:
            state[spec.name]._local_tensor.fill_(spec.fill)


@torch.no_grad()
def copy_state(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Fill state from loaded values of the same names and shapes; dtypes stay.

    Collective where a loaded DTensor is laid out otherwise.
    """
    for key, value in state.items():
        if key not in loaded:
            continue
        source = loaded[key]
        if key == "step":
            value.fill_(float(source))
        elif isinstance(source, DTensor) and is_alike(source, value):
            value._local_tensor.copy_(source._local_tensor)
        else:
            copy_local(value, source.full_tensor() if isinstance(source, DTensor) else source)


def is_alike(a: DTensor, b: DTensor) -> bool:
    """Whether every rank holds the same elements of both, at the same places."""
    return a.placements == b.placements and a.device_mesh == b.device_mesh


def copy_local(target: DTensor, whole: Tensor) -> None:
    """Fill this rank's part of a DTensor from the whole tensor."""
    flat = target._local_tensor.view(-1)
    for part in region_of(target):
        box = whole[tuple(slice(start, start + size) for start, size in zip(part.start, part.size, strict=True))]
        view = part.view(flat)
        view.copy_(box.reshape(view.shape))
