"""fully_shard: ZeRO-3. Parameters, gradients and optimizer state are sharded; modules see whole parameters as they compute.

    for block in model.blocks:
        fully_shard(block, mesh, optimizer=ShardedMuon)
    fully_shard(model, mesh, optimizer=ShardedMuon)
    opt = ShardedMuon(model, mesh, lr=0.02)

As torch's `fully_shard`: wrap modules from the inside to the outside; a parameter belongs to the innermost wrapped module
that contains it, and the parameters of one wrapped module travel in one collective. What differs: the shards are cut where
the optimizer wants (`optimizer=`), so that its step needs no communication, and parameters are views of the buffer that
the collective fills, so nothing is copied in or out.

A module may return its parameters, of which copies leave, but it may not keep tensors in attributes whose backward starts
elsewhere than at its outputs: that backward finds no parameters ("storage of size 0"). Return such a loss.

`module.parameters()` are RaggedTensors on the mesh, with RaggedTensor gradients after `loss.backward()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.collectives import broadcast, shared_data_group
from vescale_optim.sharding.fully_sharded.group import ShardedGroup
from vescale_optim.sharding.fully_sharded.layout import choose_layout
from vescale_optim.sharding.fully_sharded.module_state import ModuleState
from vescale_optim.sharding.fully_sharded.schedule import Schedule
from vescale_optim.sharding.fully_sharded.slots import ParameterSlot, find_slots, groups_of
from vescale_optim.sharding.fully_sharded.state_dict import add_state_dict_hooks
from vescale_optim.sharding.ragged import RaggedTensor


class DeclaresBlocks(Protocol):
    """An optimizer class: it can say what it needs whole without being constructed."""

    @classmethod
    def declared_blocks(cls, module: nn.Module) -> dict[str, Blocks]: ...


BlocksOf = type[DeclaresBlocks] | Callable[[str, torch.Size], Blocks]


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    optimizer: BlocksOf | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that no wrapped module inside of it has.

    Args:
        module: changed in place; its class becomes a subclass that is a `FullyShardedModule` too.
        mesh: one axis to shard over, or two: replicate, then shard (hybrid sharding).
        optimizer: what must be whole on a rank: an optimizer class of this package, or a function of the parameter's name
            (in `module`) and shape. None: shards are cut anywhere.
        reshard_after_forward: free the whole parameters after forward and gather them again in backward. None: yes, but
            for the outermost module, whose backward comes next.
        mp_policy: `param_dtype` of whole parameters and of inputs, `reduce_dtype` of gradients on their way (their mean is
            always summed in fp32 or wider), `output_dtype`. Shards keep the dtype of the parameters.
        ignored_params: left as they are.

    Returns:
        The module.

    Raises:
        ValueError: no forward to hook, wrapped already, a mesh of more than two axes, or a parameter that is shared with
            a module wrapped before.
        TypeError: a parameter is a DTensor already.
    """
    _check(module, mesh)
    policy = mp_policy or MixedPrecisionPolicy()
    slots = find_slots(_managed_modules(module))
    slots = [slot for slot in slots if slot.sharded not in (ignored_params or set())]
    for slot in slots:
        _check_parameter(slot)
    blocks_of = _blocks_by_name(module, slots, optimizer) if slots else {}
    schedule = Schedule(mesh)
    axis = mesh.ndim - 1
    group = shared_data_group(mesh.get_group(axis), mesh.device_type)
    device = _device_of(mesh)
    groups = []
    for members in groups_of(slots):
        originals = [slot.sharded for slot in members]
        itemsize = (policy.param_dtype or members[0].dtype).itemsize
        layout = choose_layout([blocks_of[slot.name] for slot in members], mesh.size(axis), itemsize)
        groups.append(ShardedGroup(members, layout, mesh, group, device, policy, schedule))
        for original, slot in zip(originals, members, strict=True):
            _sharded[original] = slot.name
        if mesh.ndim == 2 and groups[-1].shards.device.type != "meta":
            # Replicas that start apart stay apart, without any error.
            broadcast(groups[-1].shards.local, mesh.get_group(0)).wait()
    for owner in {id(m): m for _, m in _managed_modules(module)}.values():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                owner._buffers[name] = buffer.to(device)
    state = ModuleState(module, groups, schedule, policy, reshard_after_forward)
    add_state_dict_hooks(state)
    module.__dict__[_STATE] = state
    module.__class__ = _fully_sharded_class(type(module))
    _share_schedule(module, schedule)
    return module


class FullyShardedModule:
    """What `fully_shard` adds to a module's class."""

    def unshard(self) -> None:
        """Gather the parameters of this module (not of wrapped modules inside) and register them whole."""
        state = _state_of(self)
        state.schedule.reset()
        state.gather()

    def reshard(self) -> None:
        """Free the whole parameters and register the shards."""
        state = _state_of(self)
        state.schedule.reset()
        state.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward sends gradients; if not, they add up on each rank, as large as the parameters."""
        for state in _states_in(self, recurse):
            state.syncs_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Hybrid sharding: whether backward averages the gradient shards over replicas. If not, the shards add up, and
        `.grad` appears after the first backward that does: set it for the last micro-batch only."""
        for state in _states_in(self, recurse):
            state.averages_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        for state in _states_in(self, recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the whole parameters; if not, they are stale after the next optimizer step."""
        for state in _states_in(self, recurse):
            state.reshards_after_backward = reshard_after_backward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up gradients on each rank; the first one outside sends them."""
        states = _states_in(self, True)
        before = [state.syncs_gradients for state in states]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.syncs_gradients = value

    def describe(self) -> str:
        """Where the parameters of every wrapped module lie: how much each rank holds, how much of it is padding, and why."""
        lines = []
        for name, module in self.named_modules():
            if isinstance(module, FullyShardedModule):
                lines += [_describe_group(name or "(the module)", group) for group in _state_of(module).groups]
        return "\n".join(lines)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # to(), to_empty(), half(): the conversion acts on shards, and what it makes is brought back into flat buffers.
        state = _state_of(self)
        state.schedule.reset()
        state.reshard()
        super()._apply(fn, recurse)
        for group in state.groups:
            group.follow_replaced()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: its parameters live in buffers shared by their group; copy the "
            "model before fully_shard, or its state_dict()"
        )


def _describe_group(name: str, group: ShardedGroup) -> str:
    plan, itemsize = group.plan, group.shards.dtype.itemsize
    used = sum(tensor.numel for tensor in plan.tensors)
    dtype = str(group.shards.dtype).removeprefix("torch.")
    largest = max(plan.shard_numel(rank) for rank in range(plan.num_ranks))
    what = "whole units on a rank" if group.layout.kind == "units" else "rows, units have to travel"
    return (
        f"{name}: {len(group.slots)} parameters, {used:,} elements {dtype}, {'trained' if group.is_trained else 'frozen'}; "
        f"{largest * itemsize:,} bytes on each of {plan.num_ranks} ranks, {what} ({group.layout.reason})"
    )


_STATE = "_fully_sharded_state"
# Parameters that were sharded, by name: another module may still hold the original.
_sharded = WeakTensorKeyDictionary()


def _state_of(module: Any) -> ModuleState:
    return module.__dict__[_STATE]


def _states_in(module: Any, recurse: bool) -> list[ModuleState]:
    modules = module.modules() if recurse else [module]
    return [_state_of(m) for m in modules if isinstance(m, FullyShardedModule)]


def _share_schedule(module: nn.Module, schedule: Schedule) -> None:
    """One schedule for the module and the wrapped modules inside of it."""
    states = _states_in(module, True)
    for state in states:
        state.schedule.reset()
        state.reshard()
        state.schedule = schedule
        state.is_root = state.module() is module
        for group in state.groups:
            group.schedule = schedule
    schedule.set_states(states)


@cache
def _fully_sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FullySharded{cls.__name__}", (FullyShardedModule, cls), {"__module__": cls.__module__})


def _managed_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the module and those inside, without wrapped modules, in the order of named_modules()."""
    found: dict[nn.Module, str] = {}

    def visit(prefix: str, current: nn.Module) -> None:
        if current in found or (current is not module and isinstance(current, FullyShardedModule)):
            return
        found[current] = prefix
        for name, child in current.named_children():
            visit(f"{prefix}.{name}" if prefix else name, child)

    visit("", module)
    return [(prefix, current) for current, prefix in found.items()]


def _blocks_by_name(
    module: nn.Module, slots: Sequence[ParameterSlot], optimizer: BlocksOf | None
) -> dict[str, Blocks]:
    if optimizer is None:
        return {slot.name: Blocks.elements(slot.shape) for slot in slots}
    if isinstance(optimizer, type):
        declared = optimizer.declared_blocks(module)
        return {slot.name: declared.get(slot.name) or Blocks.elements(slot.shape) for slot in slots}
    return {slot.name: optimizer(slot.name, slot.shape) for slot in slots}


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, FullyShardedModule):
        raise ValueError(f"{type(module).__name__} is wrapped already; call fully_shard once for each module")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"{type(module).__name__} has no forward to gather before; wrap the modules in it")
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; give one axis to shard over, or (replicate, shard)"
        )


def _check_parameter(slot: ParameterSlot) -> None:
    param = slot.sharded
    where = f"parameter '{slot.name}' of shape {tuple(slot.shape)}"
    if isinstance(param, DTensor):
        raise TypeError(f"{where} is a DTensor of placements {param.placements}; fully_shard takes plain parameters")
    if param in _sharded:
        raise ValueError(
            f"{where} is shared with '{_sharded[param]}' of a module wrapped before, which would break the tie; wrap one "
            "module that contains both instead"
        )
    if isinstance(param.grad, RaggedTensor):
        raise ValueError(f"{where} belongs to an optimizer already; call fully_shard first, then construct the optimizer")
    if param.grad is not None:
        raise ValueError(f"{where} has a gradient; call fully_shard before the first backward, or zero_grad() first")
