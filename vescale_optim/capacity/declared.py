"""declare: what an optimizer declares about the parameters of a model: blocks, FLOPs, state. No ranks are needed.

The optimizer is the real one, made over the meta device (see `make_declaring`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

import vescale_optim
from vescale_optim.capacity.model_shapes import ModelShapes, layer_of
from vescale_optim.optimizers.base import ShardedOptimizer
from vescale_optim.optimizers.declaring import make_declaring
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


def known_optimizers() -> dict[str, type[ShardedOptimizer]]:
    """The package's own, by their short names: "muon" for ShardedMuon and so on."""
    return {
        attribute.removeprefix("Sharded").lower(): getattr(vescale_optim, attribute)
        for attribute in vescale_optim.__all__
        if attribute.startswith("Sharded") and attribute != "ShardedOptimizer"
    }


def find_optimizer(name: str) -> type[ShardedOptimizer]:
    """The class called `name`: one of `known_optimizers`, or "module:Class" for your own.

    Raises:
        ValueError: there is no such class.
    """
    known = known_optimizers()
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
    params, notes = _groups(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make_declaring(optimizer, params, master_dtype=master_dtype, **options)
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
        # Rules that do not say compute in fp32.
        wire_itemsize = (rule.wire_dtype(group) or torch.float32).itemsize
        known: dict[tuple[Any, ...], tuple[TensorBlocks, tuple[StateSpec, ...]]] = {}
        for name, param in zip(names_of(group, number), group["params"], strict=True):
            if not param.requires_grad:
                continue
            key = tuple(param.shape), param.dtype
            if key not in known:
                # As owners are chosen: a rule that does not say works as much on every element.
                flops = rule.cost(param.shape, group) or (0.0 if rule.is_elementwise else float(param.numel()))
                units = replace(rule.blocks(param.shape, group).units, cost=flops)
                updated = master_dtype or param.dtype
                specs = (replace(spec, dtype=spec.dtype or updated) for spec in rule.state_spec(param.shape, group))
                known[key] = units, tuple(specs)
            yield DeclaredTensor(
                name, layer_of(name), *key, *known[key], algorithm, rule.is_elementwise, wire_itemsize
            )
