"""declare: what an optimizer declares about the parameters of a model: blocks, FLOPs, state. No ranks are needed.

The optimizer is the real one, made over the meta device: its groups, its routing and its rules are the code that trains.
Only its storage is left out, which would want a process group.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import vescale_optim
from vescale_optim.capacity.model_shapes import ModelShapes, layer_of
from vescale_optim.optimizers.base import ShardedOptimizer
from vescale_optim.optimizers.groups import names_of
from vescale_optim.optimizers.muon import ShardedMuon
from vescale_optim.optimizers.rule import StateSpec
from vescale_optim.sharding.planner import TensorBlocks


@dataclass(frozen=True)
class DeclaredTensor:
    """One parameter, and what its rule says about it.

    Attributes:
        layer: the numbered layer it belongs to, "" where it is outside of all.
        units: what must be whole, with its FLOPs.
        state: every kind of state; the dtype is never None here.
        algorithm: name of the rule in tables.
        is_elementwise: the rule computes on shards as they are: no unit ever has to travel.
        wire_itemsize: bytes per element that units would travel with.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    units: TensorBlocks
    state: tuple[StateSpec, ...]
    algorithm: str
    is_elementwise: bool
    wire_itemsize: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """Everything that decides a plan: tensors of one kind can stand for each other."""
        return self.shape, self.dtype, self.units, self.state, self.algorithm


@dataclass(frozen=True)
class Declaration:
    """What an optimizer declares about a model.

    Attributes:
        optimizer: name of its class.
        tensors: in the order of its groups.
        notes: warnings of its constructor and what was decided by names, for the reader.
    """

    optimizer: str
    tensors: tuple[DeclaredTensor, ...]
    notes: tuple[str, ...]


class _RanksWithoutGroup(DeviceMesh):
    """Stands for a mesh where only its size matters: there is no process group behind it."""

    def __init__(self, size: int) -> None:
        self._num_ranks = size

    @property
    def ndim(self) -> int:
        return 1

    def size(self, mesh_dim: int | None = None) -> int:
        return self._num_ranks


class _WithoutStorage:
    """Mixed into an optimizer class: groups and rules as ever, nothing planned, re-homed or sent."""

    def _manage_new_parameters(self) -> None:
        return


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype that may be given by its name in torch."""
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def find_optimizer(name: str) -> type[ShardedOptimizer]:
    """The class called `name`: "muon" for ShardedMuon and so on, or "module:Class" for your own.

    Raises:
        ValueError: there is no such class.
    """
    known = {
        attribute.removeprefix("Sharded").lower(): getattr(vescale_optim, attribute)
        for attribute in vescale_optim.__all__
        if attribute.startswith("Sharded") and attribute != "ShardedOptimizer"
    }
    if name.lower() in known:
        return known[name.lower()]
    module_name, _, attribute = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute) if module_name else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer {name!r} cannot be imported ({error}); give module:Class") from error
    if not (isinstance(found, type) and issubclass(found, ShardedOptimizer)):
        raise ValueError(f"optimizer {name!r} is not known; give one of {', '.join(known)}, or module:Class of your own")
    return found


def declare(
    model: ModelShapes, optimizer: type[ShardedOptimizer], *, master_dtype: torch.dtype | None = None, **options: Any
) -> Declaration:
    """Blocks, FLOPs and state of every parameter that requires a gradient.

    Args:
        master_dtype, options: as the optimizer takes them.
    """
    bare = type(optimizer.__name__, (_WithoutStorage, optimizer), {})
    params, notes = _groups(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = bare(params, _RanksWithoutGroup(1), master_dtype=master_dtype, **options)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    # Where the names told which tensors are embeddings, a tall matrix inside a layer is none.
    notes += [text for text in said if not (notes and "looks like an embedding" in text)]
    tensors = tuple(_declared(made, master_dtype))
    if not tensors:
        raise ValueError(f"{model.label} has no parameter that requires a gradient; give a model that can be trained")
    return Declaration(optimizer.__name__, tensors, tuple(notes))


def _groups(model: ModelShapes, optimizer: type[ShardedOptimizer]) -> tuple[Any, list[str]]:
    """What the optimizer is given: the module, or groups where only names are known."""
    if model.module is not None:
        return model.module, []
    if not issubclass(optimizer, ShardedMuon):
        return [{"params": list(model.parameters)}], []
    vocabulary = model.vocabulary()
    chosen = set(vocabulary)
    matrices = [entry for entry in model.parameters if entry[0] not in chosen]
    others = [entry for entry in model.parameters if entry[0] in chosen]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    notes = [f"embeddings and head by their names, with AdamW: {', '.join(vocabulary)}"] if vocabulary else []
    return [group for group in groups if group["params"]], notes


def _declared(optimizer: ShardedOptimizer, master_dtype: torch.dtype | None) -> Iterable[DeclaredTensor]:
    for number, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        algorithm = group.get("algorithm") or type(optimizer).__name__.removeprefix("Sharded").lower()
        # What Newton-Schulz reads and writes anyway; other rules compute in fp32.
        wire_itemsize = dtype_named(group["ns_dtype"]).itemsize if "ns_dtype" in group else 4
        known: dict[tuple[Any, ...], tuple[TensorBlocks, tuple[StateSpec, ...]]] = {}
        for name, param in zip(names_of(group, number), group["params"], strict=True):
            if not param.requires_grad:
                continue
            key = tuple(param.shape), param.dtype
            if key not in known:
                units = replace(rule.blocks(param.shape, group).units, cost=rule.cost(param.shape, group))
                updated = master_dtype or param.dtype
                specs = (replace(spec, dtype=spec.dtype or updated) for spec in rule.state_spec(param.shape, group))
                known[key] = units, tuple(specs)
            yield DeclaredTensor(
                name, layer_of(name), *key, *known[key], algorithm, rule.is_elementwise, wire_itemsize
            )
