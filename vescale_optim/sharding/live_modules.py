"""What the modules alive in this process say about parameters: who owns them, and whether DDP wraps them.

Nothing on a parameter tells. A scan of the garbage collector's objects costs tens of milliseconds: it runs at
construction and where something looks wrong, never in a healthy step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from weakref import ref

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

DDP_MESSAGE = (
    "these parameters are wrapped by DistributedDataParallel, which averages gradients itself; pass grad_sync='none' "
    "to the optimizer, or do not wrap the model"
)


def is_wrapped_by_ddp(params: Sequence[nn.Parameter]) -> bool:
    """Whether a live DistributedDataParallel module holds any of the parameters."""
    mine = {id(param) for param in params}
    wrappers = _live(DistributedDataParallel)
    return any(id(param) in mine for module in wrappers for param in module.parameters())


# A module that has registered a parameter, and under which name.
Owner = tuple[ref[nn.Module], str]


class ParameterOwners:
    """Which modules own parameters, and which parameters they let go: those never get a gradient again.

    A parameter whose modules are gone may live on in functional calls: it is not watched any more.
    """

    def __init__(self) -> None:
        self._owners: dict[int, list[Owner]] = {}

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """Remember the owners of further parameters; those without any are never found orphaned."""
        self._owners.update(_find_owners(params))

    def find_orphan(self, params: Sequence[nn.Parameter]) -> int | None:
        """The index of a parameter that no module owns any more."""
        for index, param in enumerate(params):
            owners = [(module(), name) for module, name in self._owners.get(id(param), ())]
            alive = [(module, name) for module, name in owners if module is not None]
            if alive and not any(_owns(module, name, param) for module, name in alive):
                # It may have moved to another module.
                moved = _find_owners([param])
                if not moved:
                    return index
                self._owners.update(moved)
        return None


def _owns(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    held = module._parameters.get(name)
    # While a sharded module has its parameters whole, plain ones stand in for the sharded ones.
    return held is param or (held is not None and isinstance(param, DTensor) and not isinstance(held, DTensor))


def _find_owners(params: Sequence[nn.Parameter]) -> dict[int, list[Owner]]:
    mine = {id(param) for param in params}
    owners: dict[int, list[Owner]] = {}
    for module in _live(nn.Module):
        for name, param in module._parameters.items():
            if id(param) in mine:
                owners.setdefault(id(param), []).append((ref(module), name))
    return owners


def _live(kind: type[nn.Module]) -> list[nn.Module]:
    # type() and not isinstance(): the latter runs user code of lazy proxies that happen to be alive.
    # A module under construction may not have its tables yet.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kind) and "_parameters" in obj.__dict__]
