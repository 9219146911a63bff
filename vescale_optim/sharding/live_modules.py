"""What the modules alive in this process say about parameters: who owns them, and whether DDP wraps them.

Nothing on a parameter tells. A scan of the garbage collector's objects costs tens of milliseconds: it runs at
construction and where something looks wrong, never in a healthy step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import nn
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


def ids_owned_by_modules(params: Sequence[nn.Parameter]) -> set[int]:
    """ids of those parameters that a live module has registered directly."""
    mine = {id(param) for param in params}
    return {id(param) for module in _live(nn.Module) for param in module._parameters.values() if id(param) in mine}


def _live(kind: type[nn.Module]) -> list[nn.Module]:
    # type() and not isinstance(): the latter runs user code of lazy proxies that happen to be alive.
    # A module under construction may not have its tables yet.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kind) and "_parameters" in obj.__dict__]
