"""State dicts of wrapped modules hold RaggedTensors; what is loaded may be laid out in any way.

    model.state_dict()                      RaggedTensors, for torch.distributed.checkpoint
    model.load_state_dict(...)              RaggedTensors, stock DTensors, or full tensors that every rank has
    load_full_state_dict(model, ...)        full tensors that only rank 0 has

`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` gives full tensors. Its counterpart
`set_model_state_dict(full_state_dict=True)` refuses placements that it does not know (torch 2.13): `load_full_state_dict`
takes its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_optim.sharding.collectives import broadcast, gather_objects
from vescale_optim.sharding.fully_sharded.group import ShardedGroup
from vescale_optim.sharding.fully_sharded.module_state import ModuleState
from vescale_optim.sharding.meshes import mesh_group
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


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Load full tensors that the mesh's first rank has, one by one, so that no rank holds more than one of them.

    Args:
        module: with wrapped modules inside; every rank of `mesh` calls.
        state_dict: names as in `module.state_dict()`; other ranks may pass an empty one.
        mesh: as given to `fully_shard`.

    Raises:
        ValueError: on every rank, where names or shapes differ from the module's.
    """
    group = mesh_group(mesh)
    own = module.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)}
    given = gather_objects(shapes, group)[0]
    wanted = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, Tensor)}
    if given != wanted:
        differing = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
        name = differing[0]
        raise ValueError(
            f"'{name}' has shape {given.get(name)} in the state dict of the first rank and {wanted.get(name)} in the module "
            f"(None: it is missing); {len(differing)} entries differ"
        )
    with torch.no_grad():
        for name, target in own.items():
            if not isinstance(target, Tensor):
                continue
            local = target.to_local() if isinstance(target, RaggedTensor) else target
            if group.rank() == 0:
                full = state_dict[name].detach().to(local.device, target.dtype).contiguous()
            else:
                full = torch.empty(target.shape, dtype=target.dtype, device=local.device)
            broadcast(full, group).wait()
            if isinstance(target, RaggedTensor):
                target.copy_(RaggedTensor.from_replicate(full, target.device_mesh, target.placements))
            else:
                target.copy_(full)
