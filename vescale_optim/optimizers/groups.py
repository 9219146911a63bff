"""Param groups: names, hyperparameters as plain values, and the checks that name what is wrong."""

from __future__ import annotations

import difflib
import inspect
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.caller_warnings import warn_caller
from vescale_optim.optimizers.rule import Group


def names_of(group: Group, number: int) -> list[str]:
    """Names of the parameters of a group, or their position where they have none.

    Raises:
        ValueError: as many names as parameters are not there.
    """
    names, count = group.get("param_names"), len(group["params"])
    if names and len(names) != count:
        raise ValueError(
            f"groups[{number}] has {count} parameters and {len(names)} param_names; whoever takes a parameter out of a "
            "group, or puts one in, does the same with its name"
        )
    return names or [f"groups[{number}][{index}]" for index in range(count)]


def hyperparameters_of(group: Group) -> dict[str, Any]:
    """Everything a group says but its parameters, in values that print alike on every rank."""
    return {name: plain(value) for name, value in sorted(group.items()) if name not in ("params", "param_names")}


def plain(value: object) -> object:
    """A hyperparameter in a value that compares, and prints alike on every rank."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Number) and hasattr(value, "item"):
        return value.item()  # numpy's
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    # Other objects (a tag, a function) print with their address: their kind has to do.
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def record_of(name: str, param: Tensor, group: Group) -> str:
    """One line that must be equal on all ranks."""
    return f"'{name}' {tuple(param.shape)} {param.dtype} {hyperparameters_of(group)}"


def explain_difference(expected: str, rank: int, found: str, other: int) -> str:
    return (
        f"ranks disagree: rank {rank} has {expected}, rank {other} has {found}; every rank must construct and step the "
        "optimizer with the same parameters, in the same order, and the same hyperparameters"
    )


def warn_about_misspelt(group: Group, known: set[str]) -> None:
    """Warn about keys that a group has beside the known ones and that look like one of them; schedulers add others."""
    for key in sorted(set(group) - known - {"params", "param_names"}):
        (alike,) = difflib.get_close_matches(key, known, 1, cutoff=0.85) or [None]
        if alike is not None:
            warn_caller(f"a group has the key {key!r}, which nothing reads; the hyperparameter is called {alike!r}")


def unknown_keyword(kind: type, name: str) -> TypeError:
    """The error for a keyword that no constructor of a class and its bases has, with those that look like it."""
    own = [base.__init__ for base in kind.__mro__ if "__init__" in vars(base) and base.__module__ != "builtins"]
    known = sorted({key for init in own for key in inspect.signature(init).parameters} - {"self"})
    alike = difflib.get_close_matches(name, known, 2, cutoff=0.6)
    hint = f"; did you mean {' or '.join(alike)}?" if alike else ""
    return TypeError(f"{kind.__name__} has no keyword {name!r}{hint}")


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError that names a hyperparameter, what was found, and the allowed range."""
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def check_mesh(mesh: object) -> None:
    """Raise where `mesh` is no device mesh that this process is part of."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {type(mesh).__name__}; give a DeviceMesh: init_device_mesh(device_type, (world_size,))")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not part of {mesh}; construct the optimizer on its ranks only")


def check_plain_mesh(mesh: DeviceMesh, name: str, param: Tensor) -> None:
    """Raise where plain parameters, which are equal on all ranks, meet a mesh of several axes."""
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}, but parameter '{name}' of shape {tuple(param.shape)} is "
            'plain; give the axis that replicates the parameters, for example mesh["dp"]'
        )


def check_mesh_covers(mesh: DeviceMesh, own: DeviceMesh, name: str, param: Tensor) -> None:
    """Raise where a DTensor parameter lives on ranks outside the optimizer's mesh, or not on this one."""
    if own.get_coordinate() is None:
        raise ValueError(
            f"parameter '{name}' of shape {tuple(param.shape)} lives on ranks {own.mesh.flatten().tolist()} only; give each "
            "rank the parameters that it has, to an optimizer over a mesh of their ranks"
        )
    outside = sorted(set(own.mesh.flatten().tolist()) - set(mesh.mesh.flatten().tolist()))
    if outside:
        raise ValueError(
            f"parameter '{name}' of shape {tuple(param.shape)} is sharded over axes {own.mesh_dim_names} with ranks "
            f"{outside} that the optimizer's mesh, axes {mesh.mesh_dim_names}, does not have; give a mesh that covers the "
            "meshes of all parameters"
        )


def check_mesh_is_covered(mesh: DeviceMesh, own: DeviceMesh, name: str, param: Tensor) -> None:
    """Raise where nobody averages the gradients of a DTensor parameter over all of the optimizer's ranks."""
    if own.size() < mesh.size():
        raise ValueError(
            f"parameter '{name}' of shape {tuple(param.shape)} lives on axes {own.mesh_dim_names} of {own.size()} ranks, "
            f"and the optimizer's mesh, axes {mesh.mesh_dim_names}, has {mesh.size()}: over the other ranks nobody averages "
            "its gradients; shard or replicate it over all axes (fully_shard on the data-parallel ones), give the mesh of "
            'the parameters, or average gradients yourself and give grad_sync="none"'
        )


def check_logical(name: str, param: Tensor) -> None:
    """Raise where a parameter is a flat piece of others, whose shape says nothing."""
    if type(param).__name__ == "FlatParameter" or getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            f"parameter '{name}' of shape {tuple(param.shape)} is flattened by FSDP1, which hides the shapes that decide "
            "its update; use fully_shard (FSDP2), or give the optimizer the unwrapped model"
        )
