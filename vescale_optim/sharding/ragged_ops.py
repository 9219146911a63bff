"""What ATen ops do to RaggedTensors, decided once per op from its name and tags, then by a look-up in a table.

    pointwise ops (torch's own tag), in place or not        the op on the flat local tensors
    _foreach_* of pointwise ops, _fused_* optimizer steps   the same, list by list
    normal_, uniform_ and the like, in place                the whole tensor is drawn on each rank, its part is kept
    reductions over the whole tensor                        a pending ReducedScalar (ragged_reductions)
    *_like, new_*                                           a new local tensor; data is not read
    clone, detach, dtype and device copies, identity views  the op on the local tensor

Everything else raises. Operands must be RaggedTensors that agree element by element, or numbers: Python's, 0-dim tensors,
0-dim DTensors; a fully replicated DTensor of the same shape is sliced. Any other plain tensor is refused even if its shape
equals that of the local tensor: DDP's reducer, for one, would copy its own bucket into our gradient without an error.

Functions take `cls`, the class RaggedTensor, which stands above this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Replicate

from vescale_optim.sharding import collectives
from vescale_optim.sharding.ragged_layout import RaggedLayout
from vescale_optim.sharding.ragged_redistribute import local_from_full
from vescale_optim.sharding.ragged_reductions import REDUCTIONS, ReducedScalar, norm_combine

aten = torch.ops.aten
Handler = Callable[[type, Any, Any, Any], Any]

_handlers: dict[Any, Handler] = {}


def dispatch(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an ATen op with at least one RaggedTensor among its arguments."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler_for(func)
    return handler(cls, func, args, kwargs)


def _handler_for(func: Any) -> Handler:
    special = _SPECIAL.get(func)
    if special is not None:
        return special
    if func in REDUCTIONS:
        return _reduction_handler(func)
    name = func._schema.name.removeprefix("aten::")
    is_in_place = name.endswith("_")
    if name.startswith(("_foreach_", "_fused_")):
        if name not in _FUSED_STEPS and not _is_pointwise(name.removeprefix("_foreach_")):
            return _unsupported
        return _foreach_in_place if is_in_place else _foreach
    if name in _RANDOM:
        return _random_in_place
    if torch.Tag.nondeterministic_seeded in func.tags or not _is_pointwise(name, func._overloadname):
        return _unsupported
    if any(argument.alias_info is not None and argument.is_out for argument in func._schema.arguments):
        return _pointwise_out
    return _pointwise_in_place if is_in_place else _pointwise


def _is_pointwise(name: str, overload: str | None = None) -> bool:
    """Whether element i of the result depends on element i of the operands only."""
    name = name.removesuffix("_")
    if name in _POINTWISE_UNTAGGED:
        return True
    packet = getattr(aten, name, None)
    if packet is None or name in _NOT_POINTWISE:
        return False
    # In-place and out variants often lack the tag of their functional twin (torch 2.13: abs_, masked_fill_); an out
    # variant has another overload name, foreach ops have none.
    overloads = [overload] if overload in packet.overloads() and not overload.endswith("out") else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


_POINTWISE_UNTAGGED = frozenset({"copy", "fill", "zero", "masked_fill"})
# Names of which only some overloads are pointwise (max of two tensors), or with a tag that says something else.
_NOT_POINTWISE = frozenset({"max", "min", "equal", "norm", "clone"})
_RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"})
_FUSED_STEPS = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})


# Operands.


def _local(cls: type, func: Any, x: Any, layout: RaggedLayout | None) -> Any:
    """What takes the place of an operand when the op runs on this rank's flat part."""
    if type(x) is cls:
        if x._layout is not layout and (layout is None or not layout.agrees_with(x._layout)):
            raise ValueError(
                f"{func}: the RaggedTensors lie differently: {layout} and {x._layout}; "
                "bring one to the other's place with .redistribute(placements=...)"
            )
        if x._before_read is not None:
            x._before_read.run()
        return x._local_tensor
    if isinstance(x, Tensor):
        return _local_of_other_tensor(func, x, layout)
    return x


def _local_of_other_tensor(func: Any, x: Tensor, layout: RaggedLayout | None) -> Tensor:
    if isinstance(x, ReducedScalar):
        x = x._value()
    elif isinstance(x, DTensor):
        if x.dim() == 0:
            return x.full_tensor()
        if (
            layout is not None
            and x.shape == layout.shape
            and x.device_mesh == layout.mesh
            and all(placement.is_replicate() for placement in x.placements)
        ):
            return local_from_full(x.to_local(), layout)
    if x.dim() == 0 or layout is None:
        return x
    if torch._C._current_graph_task_id() != -1:
        if x.shape == layout.shape and func not in _ADDITIONS:
            # Backward of a sum or mean: one number made as large as the tensor, here as on every rank.
            return local_from_full(x, layout)
        raise RuntimeError(
            f"autograd would add a plain gradient to the sharded one of a parameter of shape {tuple(layout.shape)}: its "
            "storage was replaced after the optimizer was made (module.to(dtype) and the like), which drops the hooks; "
            "convert the model first, then construct the optimizer"
        )
    if func in _ADDITIONS and type(x) is Tensor and x.shape == layout.shape:
        raise ValueError(
            f"a plain tensor of shape {tuple(x.shape)} cannot be added to a sharded one: it may be one rank's part of a "
            "sum, or the same on every rank. RaggedTensor.from_replicate(full, mesh, placements) shards what is the same; "
            ".full_tensor() gathers what is sharded. "
            "Zero-bubble pipelines add one rank's gradients themselves: give the optimizer grad_sync='none' and average "
            "gradients before step(), or shard the stages with torch's fully_shard"
        )
    raise ValueError(
        f"{func}: a RaggedTensor of shape {tuple(layout.shape)} met a {type(x).__name__} of shape {tuple(x.shape)}; "
        "only 0-dim tensors and RaggedTensors of the same layout go together with it. "
        "RaggedTensor.from_replicate(full, mesh, placements) shards a full tensor, .full_tensor() gathers this one"
    )


# With which autograd accumulates gradients.
_ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)


def _written_into_plain(func: Any, target: Tensor) -> ValueError:
    return ValueError(
        f"{func}: a RaggedTensor cannot be written into a {type(target).__name__} of shape {tuple(target.shape)}; "
        "use .full_tensor(), or .to_local() for this rank's part"
    )


def _layout_of(cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> RaggedLayout:
    for x in args:
        if type(x) is cls:
            return x._layout
    return next(x._layout for x in kwargs.values() if type(x) is cls)


def _wrap(cls: type, result: Any, layout: RaggedLayout) -> Any:
    if isinstance(result, Tensor):
        return cls._wrap(result, layout)
    return type(result)(_wrap(cls, part, layout) for part in result)  # frexp


# Pointwise ops.


def _pointwise(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    layout = _layout_of(cls, args, kwargs)
    args = [_local(cls, func, x, layout) for x in args]
    if kwargs:
        kwargs = {name: _local(cls, func, x, layout) for name, x in kwargs.items()}
    return _wrap(cls, func(*args, **kwargs), layout)


def _pointwise_in_place(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    target = args[0]
    if type(target) is not cls:
        raise _written_into_plain(func, target)
    layout = target._layout
    args = [_local(cls, func, x, layout) for x in args]
    if kwargs:
        kwargs = {name: _local(cls, func, x, layout) for name, x in kwargs.items()}
    func(*args, **kwargs)
    return target


def _pointwise_out(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    target = kwargs.get("out")
    if type(target) is not cls:
        return _unsupported(cls, func, args, kwargs)
    layout = target._layout
    func(
        *[_local(cls, func, x, layout) for x in args],
        **{name: _local(cls, func, x, layout) for name, x in kwargs.items()},
    )
    return target


def _random_in_place(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Each rank draws the whole tensor and keeps its part: with equal seeds, the values that one device draws."""
    target = args[0]
    layout = target._layout
    full = torch.empty(layout.shape, dtype=target.dtype, device=target._local_tensor.device)
    func(full, *args[1:], **kwargs)
    _local(cls, func, target, layout).copy_(full.view(-1)[layout.start : layout.start + layout.numel])
    return target


# Lists of tensors. Index i of every list belongs to parameter i; plain parameters may stand between ragged ones.


def _layouts_by_index(cls: type, args: Sequence[Any]) -> list[RaggedLayout | None]:
    layouts: list[RaggedLayout | None] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            layouts.extend([None] * (len(arg) - len(layouts)))
            for i, x in enumerate(arg):
                if layouts[i] is None and type(x) is cls:
                    layouts[i] = x._layout
    return layouts


def _local_lists(cls: type, func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
    layouts = _layouts_by_index(cls, args)

    def local(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [_local(cls, func, x, layout) for x, layout in zip(arg, layouts, strict=False)]
        return _local(cls, func, arg, None)  # one number for all; torch itself checks its shape

    return [local(arg) for arg in args], {name: local(arg) for name, arg in kwargs.items()}, layouts


def _foreach(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs, layouts = _local_lists(cls, func, args, kwargs)
    results = func(*args, **kwargs)
    return [x if layout is None else cls._wrap(x, layout) for x, layout in zip(results, layouts, strict=True)]


def _foreach_in_place(cls: type, func: Any, args: Any, kwargs: Any) -> None:
    targets = args[0]
    args, kwargs, layouts = _local_lists(cls, func, args, kwargs)
    for target, layout in zip(targets, layouts, strict=True):
        if layout is not None and type(target) is not cls:
            raise _written_into_plain(func, target)
    func(*args, **kwargs)


def _foreach_norm(cls: type, func: Any, args: Any, kwargs: Any) -> list[Any]:
    tensors, order = args[0], float(args[1] if len(args) > 1 else 2)
    layouts = _layouts_by_index(cls, args)
    (locals_,), _, _ = _local_lists(cls, func, (tensors,), {})
    # Orders such as inf have no norm of nothing.
    full = [i for i, x in enumerate(locals_) if x.numel()]
    parts: list[Any] = [None] * len(locals_)
    if full:
        for i, part in zip(full, func([locals_[i] for i in full], order, *args[2:], **kwargs), strict=True):
            parts[i] = part
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    results = []
    for part, x, layout in zip(parts, locals_, layouts, strict=True):
        if layout is None:
            results.append(torch.linalg.vector_norm(x, order, dtype=dtype) if part is None else part)
        elif part is None:
            part, combine = REDUCTIONS[aten.linalg_vector_norm.default](x, layout, order, dtype=dtype)
            results.append(ReducedScalar.pending(part, combine, layout))
        else:
            results.append(ReducedScalar.pending(part, norm_combine(order), layout))
    return results


def _amp_unscale(cls: type, func: Any, args: Any, kwargs: Any) -> None:
    grads, found_inf, inv_scale = args
    (locals_, found_inf, inv_scale), _, layouts = _local_lists(cls, func, (list(grads), found_inf, inv_scale), {})
    func(locals_, found_inf, inv_scale)
    # One rank stepping while another skips would split the model for good: all ranks of the mesh decide alike.
    for mesh in dict.fromkeys(layout.mesh for layout in layouts if layout is not None):
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                collectives.all_reduce(found_inf, group=mesh.get_group(axis), op=ReduceOp.MAX)


# Reductions.


def _reduction_handler(func: Any) -> Handler:
    local_part = REDUCTIONS[func]
    names = [argument.name for argument in func._schema.arguments[1:]]
    num_before_dim = 1 + (names.index("dim") if "dim" in names else len(names))

    def reduce(cls: type, func: Any, args: Any, kwargs: Any) -> ReducedScalar:
        tensor = args[0]
        layout = tensor._layout
        if kwargs or len(args) > num_before_dim:
            options = dict(zip(names, args[1:], strict=False), **kwargs)
            dims = options.pop("dim", None)
            if options.pop("keepdim", False) or not _are_all_dims(dims, tensor.dim()):
                return _unsupported(cls, func, args, kwargs)
            part, combine = local_part(_local(cls, func, tensor, layout), layout, **options)
        else:
            part, combine = local_part(_local(cls, func, tensor, layout), layout, *args[1:])
        return ReducedScalar.pending(part, combine, layout)

    return reduce


def _are_all_dims(dims: Any, ndim: int) -> bool:
    if dims is None or dims == []:
        return True
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % max(ndim, 1) for dim in dims} == set(range(max(ndim, 1)))


def _item(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].full_tensor().item()


def _compare(cls: type, func: Any, args: Any, kwargs: Any) -> bool:
    """equal, allclose: True only where it holds on all ranks."""
    a, b = args[:2]
    layout = _layout_of(cls, args, kwargs)
    if a.shape != b.shape:
        return False
    locals_ = [_local(cls, func, x, layout) for x in args]
    same = torch.tensor(int(func(*locals_, **kwargs)), device=locals_[0].device)
    group = layout.group
    if group.size() > 1:
        collectives.all_reduce(same, group=group, op=ReduceOp.MIN)
    return bool(same)


# New tensors.


def _like(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """zeros_like and so on: the data is not read."""
    tensor = args[0]
    return cls._wrap(func(tensor._local_tensor, *args[1:], **kwargs), tensor._layout)


def _new(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """new_zeros and so on: laid out alike where the shape is the same, replicated where it is another."""
    tensor, size = args[0], tuple(args[1])
    layout = tensor._layout
    if size == tuple(layout.shape):
        strides = ([1],) if func is aten.new_empty_strided.default else ()
        rest = args[2 + len(strides) :]
        return cls._wrap(func(tensor._local_tensor, [layout.numel], *strides, *rest, **kwargs), layout)
    local = func(tensor._local_tensor, *args[1:], **kwargs)
    return DTensor.from_local(local, layout.mesh, [Replicate()] * layout.mesh.ndim, run_check=False)


def _copied(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """clone, and copies to another dtype or device."""
    tensor = args[0]
    return cls._wrap(func(_local(cls, func, tensor, tensor._layout), *args[1:], **kwargs), tensor._layout)


def _alias(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """The same memory under another name: nothing is read yet, so what has to happen before a read is kept."""
    tensor = args[0]
    return cls._wrap(tensor._local_tensor, tensor._layout, tensor._before_read)


def _identity_view(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    shape = list(args[0].shape)
    if list(args[1]) not in (shape, [-1] if len(shape) == 1 else shape):
        return _unsupported(cls, func, args, kwargs)
    return _alias(cls, func, args, kwargs)


def _of_local(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _unsupported(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    shape = tuple(_first_ragged(cls, args, kwargs).shape)
    raise NotImplementedError(
        f"{func} is not supported on a RaggedTensor (here of shape {shape}): each rank holds a flat range of its elements. "
        "Use .full_tensor() for the whole tensor or .to_local() for this rank's flat part"
    )


def _first_ragged(cls: type, args: Any, kwargs: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return next(x for x in leaves if type(x) is cls)


_SPECIAL: dict[Any, Handler] = {
    aten.clone.default: _copied,
    aten._to_copy.default: _copied,
    aten._pin_memory.default: _copied,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _identity_view,
    aten._unsafe_view.default: _identity_view,
    aten.expand.default: _identity_view,
    aten.is_pinned.default: _of_local,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.empty_like.default: _like,
    aten.full_like.default: _like,
    aten.new_empty.default: _new,
    aten.new_empty_strided.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _compare,
    aten.allclose.default: _compare,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _amp_unscale,
}
