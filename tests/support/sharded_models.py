"""Parameters sharded as their users shard them: `fully_shard`, `parallelize_module`, expert parallel meshes.

    params = sharded("fsdp_tensor", values)        name -> DTensor parameter, made by torch alone
    set_gradients(params, "fsdp_tensor", grads)    the same layout for whole gradients; None where there is none

Call them on all ranks of a world of `LAYOUTS[layout]` ranks. Gradients are laid out by sharding a second model that holds
them as its values, so nothing here knows where an element lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.support.layouts import indices, local_indices
from vescale_optim.sharding.collectives import gather_objects


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, made once per process: each costs process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Holder(nn.Module):
    """A module that has the values as its parameters."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def linears(values: Mapping[str, Tensor]) -> nn.ModuleDict:
    """One nn.Linear without bias for each matrix."""
    modules = nn.ModuleDict()
    for name, value in values.items():
        modules[name] = nn.Linear(1, 1, bias=False)
        modules[name].weight = nn.Parameter(value.clone())
    return modules


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removesuffix(".weight"): param for name, param in module.named_parameters()}


def world_mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("dp",))


def fsdp(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return named_parameters(fully_shard(Holder(values), mesh=world_mesh()))


def fsdp_columns(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The last dim is cut where FSDP2 allows it, which wants it even."""
    size = dist.get_world_size()

    def place(param: nn.Parameter) -> Shard:
        last = param.ndim - 1
        return Shard(last if param.shape[last] % size == 0 else 0)

    return named_parameters(fully_shard(Holder(values), mesh=world_mesh(), shard_placement_fn=place))


def hsdp(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return named_parameters(fully_shard(Holder(values), mesh=mesh_of((2, 2), ("replicate", "shard"))))


def tensor_parallel(values: Mapping[str, Tensor], style: type[ParallelStyle], mesh: DeviceMesh) -> nn.ModuleDict:
    """Matrices are cut, the rest stays plain."""
    modules = linears({name: value for name, value in values.items() if value.ndim == 2})
    parallelize_module(modules, mesh, {name: style() for name in modules})
    for name, value in values.items():
        if value.ndim != 2:
            modules[name] = nn.Linear(1, 1, bias=False)
            modules[name].weight = nn.Parameter(value.clone())
    return modules


def colwise(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return named_parameters(tensor_parallel(values, ColwiseParallel, world_mesh()))


def rowwise(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return named_parameters(tensor_parallel(values, RowwiseParallel, world_mesh()))


def fsdp_tensor(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """FSDP2 over TP: matrices are cut by rows twice, `(_StridedShard(0), Shard(0))`, or by rows and by columns."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = nn.Module()
    names = sorted(name for name, value in values.items() if value.ndim == 2)
    half = set(names[::2])
    model.columns = tensor_parallel({n: v for n, v in values.items() if n not in half}, ColwiseParallel, mesh["tp"])
    model.rows = tensor_parallel({n: v for n, v in values.items() if n in half}, RowwiseParallel, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    params = {**named_parameters(model.columns), **named_parameters(model.rows)}
    return {name: params[name] for name in values}


def experts(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Stacks over EP x FSDP2, dense parameters over FSDP2 on all ranks, 1-D ones plain: three kinds, two meshes."""
    mesh = mesh_of((2, 2), ("efsdp", "ep"))
    stacks = Holder({name: value for name, value in values.items() if value.ndim == 3})
    for name, param in list(stacks.named_parameters()):
        stacks.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
    fully_shard(stacks, mesh=mesh["efsdp"])
    dense = Holder({name: value for name, value in values.items() if value.ndim == 2})
    fully_shard(dense, mesh=mesh_of((4,), ("dp",)))
    plain = Holder({name: value for name, value in values.items() if value.ndim < 2})
    params = {**named_parameters(stacks), **named_parameters(dense), **named_parameters(plain)}
    return {name: params[name] for name in values}


Shards = Callable[[Mapping[str, Tensor]], dict[str, nn.Parameter]]
LAYOUTS: dict[str, tuple[int, Shards]] = {
    "fsdp_on_2": (2, fsdp),
    "fsdp_on_4": (4, fsdp),
    "fsdp_columns_on_2": (2, fsdp_columns),
    "fsdp_columns_on_4": (4, fsdp_columns),
    "hsdp": (4, hsdp),
    "colwise": (2, colwise),
    "rowwise": (2, rowwise),
    "fsdp_tensor": (4, fsdp_tensor),
    "experts": (4, experts),
}


def sharded(layout: str, values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The values as parameters of that layout, in the same order."""
    return LAYOUTS[layout][1](values)


def set_gradients(params: Mapping[str, nn.Parameter], layout: str, grads: Mapping[str, Tensor | None]) -> None:
    """Give parameters whole gradients as the layout has them; None, or a name left out, for none."""
    given = {name: grad for name, grad in grads.items() if grad is not None}
    laid_out = sharded(layout, given)
    for name, param in params.items():
        param.grad = laid_out[name].detach() if name in laid_out else None


def whole(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logical tensors, put together from all ranks' local ones; replicas must agree bit for bit.

    Not by full_tensor(), which fails on uneven `_StridedShard`s (torch 2.13).
    """
    mine = {}
    for name, param in params.items():
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            held = local_indices(param.shape, mesh.shape, param.placements, mesh.get_coordinate())
            mine[name] = held, param.to_local().detach().flatten()
        else:
            mine[name] = indices(param.shape).flatten(), param.detach().flatten()
    result = {name: torch.empty(param.numel(), dtype=param.dtype) for name, param in params.items()}
    filled = {name: torch.zeros(param.numel(), dtype=torch.bool) for name, param in params.items()}
    for others in gather_objects(mine, dist.group.WORLD):
        for name, (held, local) in others.items():
            again = filled[name][held]
            assert torch.equal(result[name][held][again], local[again]), f"replicas of {name} differ"
            result[name][held] = local
            filled[name][held] = True
    assert all(flags.all() for flags in filled.values())
    return {name: value.view(params[name].shape) for name, value in result.items()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor that is not equal bit for bit."""
    return {
        name: (found[name].double() - value.double()).abs().max().item()
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    }
