"""ParameterSlot: one parameter, the modules it is registered in, and its two forms.

    sharded    a RaggedTensor over this rank's shard: what `module.parameters()` gives, what the optimizer updates
    whole      a plain nn.Parameter over the global buffer: what the module's forward sees, while the buffer is filled
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(eq=False)
class ParameterSlot:
    """One parameter of a wrapped module; a tied one is registered in several places.

    Attributes:
        name: qualified name in the wrapped module, of the first place.
        places: (module, attribute) of every place. Weak: the modules own the slots, not the other way round.
        sharded, whole: its two forms; `whole` is made at the first gather.
        is_hooked: `whole` has its gradient hook.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    places: list[tuple[weakref.ref[nn.Module], str]]
    sharded: nn.Parameter
    whole: nn.Parameter | None = None
    is_hooked: bool = False

    def registered(self) -> nn.Parameter | None:
        """What the first place holds now: loading and conversions may have replaced it."""
        module, attribute = self.places[0]
        owner = module()
        return None if owner is None else owner._parameters.get(attribute)

    def register(self, param: nn.Parameter) -> None:
        """Put one of the two forms where the parameter belongs."""
        for reference, attribute in self.places:
            module = reference()
            if module is None:
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = param
            else:
                # nn.RNN and others keep their own lists of parameters.
                setattr(module, attribute, param)


def find_slots(managed: Iterable[tuple[str, nn.Module]]) -> list[ParameterSlot]:
    """The parameters registered in `managed` modules, each once, in the order of `named_parameters()`."""
    slots: dict[int, ParameterSlot] = {}
    for prefix, owner in managed:
        for attribute, param in owner._parameters.items():
            if param is None:
                continue
            slot = slots.get(id(param))
            if slot is None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                slot = slots[id(param)] = ParameterSlot(name, param.shape, param.dtype, [], param)
            slot.places.append((weakref.ref(owner), attribute))
    return list(slots.values())


def groups_of(slots: Sequence[ParameterSlot]) -> list[list[ParameterSlot]]:
    """Slots that may share a buffer: one dtype, all trained or all frozen."""
    groups: dict[tuple[torch.dtype, bool], list[ParameterSlot]] = {}
    for slot in slots:
        groups.setdefault((slot.dtype, slot.sharded.requires_grad), []).append(slot)
    return list(groups.values())
