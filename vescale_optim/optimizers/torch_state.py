"""State dicts of single-device optimizers: whole plain tensors, parameters numbered in the order of groups.

    opt.load_state_dict(adamw.state_dict())                                      torch.optim.AdamW into ShardedAdamW
    opt.load_state_dict(join_state_dicts(muon.state_dict(), adamw.state_dict()))  two optimizers into one ShardedMuon
    muon.load_state_dict(opt.full_state_dict(algorithm="muon"))                   and back
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# What `torch.optim.AdamW` keeps in its groups beside hyperparameters; `load_state_dict` replaces whole groups (torch 2.13).
TORCH_ADAMW_GROUP = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,  # the arithmetic that the state comes from
    "decoupled_weight_decay": True,
}


@torch.no_grad()
def full_state_dict(state_dict: Mapping[str, Any], algorithm: str | None) -> dict[str, Any]:
    """The groups of an algorithm (None: all) of a sharded optimizer's `state_dict`, tensors whole; collective.

    Raises:
        ValueError: no group has this algorithm.
    """
    groups = [group for group in state_dict["param_groups"] if algorithm in (None, group["algorithm"])]
    if not groups:
        known = sorted({group["algorithm"] for group in state_dict["param_groups"]})
        raise ValueError(f"algorithm is {algorithm!r}, but the groups have {known}")
    state: dict[int, dict[str, Any]] = {}
    numbered = []
    first = 0
    for group in groups:
        numbers = range(first, first + len(group["params"]))
        first = numbers.stop
        for key, number in zip(group["params"], numbers, strict=True):
            if key in state_dict["state"]:
                state[number] = {name: _whole(value) for name, value in state_dict["state"][key].items()}
        defaults = TORCH_ADAMW_GROUP if group["algorithm"] == "adamw" else {}
        numbered.append({**defaults, **group, "params": list(numbers)})
    return {"state": state, "param_groups": numbered}


def join_state_dicts(*state_dicts: Mapping[str, Any]) -> dict[str, Any]:
    """One state dict of several optimizers', group after group: the sharded optimizer's groups must have this order."""
    state: dict[int, Any] = {}
    groups = []
    first = 0
    for state_dict in state_dicts:
        for group in state_dict["param_groups"]:
            numbers = range(first, first + len(group["params"]))
            first = numbers.stop
            for key, number in zip(group["params"], numbers, strict=True):
                if key in state_dict["state"]:
                    state[number] = state_dict["state"][key]
            groups.append({**group, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
