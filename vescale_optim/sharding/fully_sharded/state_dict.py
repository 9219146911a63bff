"""State dicts of wrapped modules hold RaggedTensors; what is loaded may be laid out in any way.

    model.state_dict()              RaggedTensors, for torch.distributed.checkpoint
    model.load_state_dict(...)      RaggedTensors, stock DTensors, or full tensors that every rank has
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_optim.sharding.fully_sharded.group import ShardedGroup
from vescale_optim.sharding.fully_sharded.module_state import ModuleState
from vescale_optim.sharding.ragged import RaggedTensor


def add_state_dict_hooks(state: ModuleState) -> None:
    """Let every module that owns parameters of `state` save shards, and load whatever it is given."""
    owners: dict[int, nn.Module] = {}
    for group in state.groups:
        for slot in group.slots:
            for reference, _ in slot.places:
                owners[id(reference())] = reference()
    weak = weakref.ref(state)
    for owner in owners.values():
        owner.register_state_dict_pre_hook(partial(_before_saving, weak))
        owner._register_load_state_dict_pre_hook(partial(_before_loading, weak), with_module=True)
    # After the children's: with assign=True all parameters of a group are replaced by then.
    state.module().register_load_state_dict_post_hook(partial(_after_loading, weak))


def _before_saving(weak: weakref.ref[ModuleState], *_: Any) -> None:
    state = weak()
    if state is not None:
        state.schedule.reset()
        state.reshard()


def _before_loading(
    weak: weakref.ref[ModuleState], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    state = weak()
    if state is None:
        return
    state.schedule.reset()
    state.reshard()
    for group in state.groups:
        for index, slot in enumerate(group.slots):
            for reference, attribute in slot.places:
                value = state_dict.get(prefix + attribute)
                if reference() is module and isinstance(value, Tensor) and value.shape == slot.shape:
                    state_dict[prefix + attribute] = _laid_out(value, group, index)


def _laid_out(value: Tensor, group: ShardedGroup, index: int) -> Tensor:
    """The value as a RaggedTensor that lies as the parameter does."""
    placements = group.placements(index)
    if isinstance(value, RaggedTensor) and value.placements == placements and value.device_mesh == group.mesh:
        return value
    with torch.no_grad():
        if isinstance(value, DTensor) and value.device_mesh != group.mesh:
            value = value.full_tensor()
        return RaggedTensor.distribute(value.detach(), group.mesh, placements, source=None)


def _after_loading(weak: weakref.ref[ModuleState], *_: Any) -> None:
    state = weak()
    if state is not None:
        for group in state.groups:
            group.follow_replaced()
