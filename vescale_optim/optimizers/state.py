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

from vescale_optim.optimizers.rule import Group, Rule, StateSpec
from vescale_optim.sharding.regions import region_of


def check_rule(name: str, shape: torch.Size, rule: Rule, group: Group, saved: Group) -> None:
    """Raise ValueError where state saved with the group `saved` means something else under `rule` and `group`.

    That is another algorithm, another version of its rule, or options that cut other blocks or keep other state; lr and the
    like may differ. What `saved` does not say, being a single-device optimizer's, is taken as it is here.
    """
    for key in ("algorithm", "rule_version"):
        if saved.get(key, group[key]) != group[key]:
            raise other_meaning(name, shape, key, saved[key], group[key])
    options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    here = _meaning(rule, shape, group)
    if _meaning(rule, shape, {**group, **options}) != here:
        for key, value in options.items():
            if key in group and _meaning(rule, shape, {**group, key: value}) != here:
                raise other_meaning(name, shape, key, value, group[key])
        changed = {key for key, value in options.items() if key in group and value != group[key]}
        both = ({key: values[key] for key in sorted(changed)} for values in (options, group))
        raise other_meaning(name, shape, "the group", *both)


def _meaning(rule: Rule, shape: torch.Size, group: Group) -> object:
    """What the state of a parameter depends on; None where the group does not fit the parameter."""
    try:
        return rule.blocks(shape, group), rule.state_spec(shape, group)
    except ValueError:
        return None


def other_meaning(name: str, shape: torch.Size, key: str, saved: object, here: object) -> ValueError:
    """The error for state of one parameter that was saved with another value of the option `key`."""
    return ValueError(
        f"parameter '{name}' of shape {tuple(shape)}: {key} is {saved!r} in the checkpoint and {here!r} here, so its "
        f"state means something else; construct the optimizer with {saved!r}, or start it without this state"
    )


def check_state(name: str, state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the parameter, where loaded state lacks some or has another shape; changes nothing.

    State that lacks everything starts anew, and so may the step and the master copy, which the parameter itself gives.
    """
    missing = sorted(state.keys() - loaded.keys() - {"step", "master"})
    if loaded and missing:
        raise ValueError(
            f"state of parameter '{name}' is {sorted(loaded)} in the checkpoint and lacks {missing}; it is that of another "
            "optimizer"
        )
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
        if source is value:
            continue  # after `dcp.load` into `state_dict()`
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
