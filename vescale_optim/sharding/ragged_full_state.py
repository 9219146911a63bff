"""Lets torch's `set_model_state_dict` and `set_optimizer_state_dict` load full tensors into RaggedTensors.

With `full_state_dict=True` torch cuts full tensors itself, for the placements it knows, before it calls `load_state_dict`;
at a RaggedShard it raises, and with `broadcast_from_rank0=True` it copies the whole tensor over the shard (torch 2.11 to
2.13). The two functions that cut are caught here, for RaggedTensors alone:

    full tensor on every rank       _distribute_state_dict -> distribute_tensor
    sent by rank 0, one by one      _broadcast_state_dict  -> _distribute_tensors

Each rank keeps its range, in a new tensor: what is loaded changes nothing until `load_state_dict` has checked it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed import _state_dict_utils as torch_functions
from torch.distributed.tensor import DTensor

from vescale_optim.sharding.ragged_layout import RaggedShard


def takes_full_tensors(kind: type) -> type:
    """Class decorator: let torch's functions cut full tensors for `kind`. A torch without them does not need it."""
    for name, catch in (("distribute_tensor", _catch_distribute_tensor), ("_distribute_tensors", _catch_distribute_tensors)):
        function = getattr(torch_functions, name, None)
        if function is not None:
            setattr(torch_functions, name, catch(function, kind))
    return kind


def _catch_distribute_tensor(function: Callable[..., DTensor], kind: type) -> Callable[..., DTensor]:
    @wraps(function)
    def distribute_tensor(tensor: Tensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if any(isinstance(placement, RaggedShard) for placement in placements or ()):
            return kind.from_replicate(tensor.detach(), device_mesh, placements)
        return function(tensor, device_mesh, placements, **options)

    return distribute_tensor


def _catch_distribute_tensors(function: Callable[..., None], kind: type) -> Callable[..., None]:
    @wraps(function)
    def _distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *arguments: Any) -> None:
        for key in keys:
            entry = local_state_dict.get(key)
            if isinstance(entry, tuple) and isinstance(entry[0], kind):
                target, full = entry
                local_state_dict[key] = kind.from_replicate(full, target.device_mesh, target.placements)
        function(local_state_dict, keys, *arguments)

    return _distribute_tensors
