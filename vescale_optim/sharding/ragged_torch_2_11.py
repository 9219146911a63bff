"""Torch 2.11 only: lets DTensor subclasses have their own dispatch, which it ignores (pytorch issue 177716, mended in 2.12).

Torch 2.11 sends an op on any DTensor subclass to stock DTensor, whatever `__torch_dispatch__` the subclass has. Here the
call is caught one level higher, in `__torch_function__`, and each such tensor is replaced by a carrier: a wrapper tensor
that is no DTensor, so that torch decomposes the call as usual and then asks the carrier, which asks the subclass.

    torch.linalg.vector_norm(ragged) -> __torch_function__ -> vector_norm(carrier) -> Carrier.__torch_dispatch__
        -> RaggedTensor.__torch_dispatch__(aten.linalg_vector_norm, ragged)

Autograd works above dispatch and sees the carrier only: gradients that are RaggedTensors work as in later versions, but
no gradients accumulate in parameters that are RaggedTensors (it raises). To be deleted with the support of torch 2.11.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map_only

IS_NEEDED = TorchVersion(torch.__version__) < "2.12"

# These concern the object itself, not its elements.
_ON_THE_OBJECT = frozenset({"__get__", "__set__", "__delete__", "requires_grad_", "register_hook", "retain_grad"})


class Carrier(Tensor):
    """Stands for a tensor of one of our DTensor subclasses while torch works out which ATen ops a call consists of."""

    original: Any

    @staticmethod
    def __new__(cls, original: DTensor) -> Carrier:
        with torch._C.DisableTorchFunctionSubclass():
            carrier = Tensor._make_wrapper_subclass(
                cls, original.shape, strides=original.stride(), dtype=original.dtype, device=original.device
            )
        carrier.original = original
        return carrier

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Carrier, lambda carrier: carrier.original, (args, kwargs or {}))
        ours = [type(x) for x in tree_leaves((args, kwargs)) if type(x) in _kinds]
        # As among subclasses in torch: the first that does not decline decides.
        for kind in dict.fromkeys(ours):
            result = kind.__torch_dispatch__(func, ours, args, kwargs)
            if result is not NotImplemented:
                return tree_map_only(tuple(_kinds), Carrier, result)
        return func(*args, **kwargs)


_kinds: set[type] = set()


def carry(kind: type) -> type:
    """Class decorator: make torch 2.11 honour the `__torch_dispatch__` of a DTensor subclass."""
    if IS_NEEDED:
        _kinds.add(kind)
        kind.__torch_function__ = classmethod(_torch_function)
    return kind


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func.__name__ not in _ON_THE_OBJECT:
        args, kwargs = tree_map_only(DTensor, Carrier, (args, kwargs))  # stock operands, too, must not take over
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    return tree_map_only(Carrier, lambda carrier: carrier.original, result)
