"""Groups and one-dimensional meshes over several axes of a device mesh, made once and only by the ranks that are in them.

torch makes one process group per mesh axis. The exchange also needs the ranks that differ along several axes at once
(FSDP2 x TP shards a matrix over two), and unit state needs one number per rank of the whole mesh.

    mesh (dp=2, tp=2)      axes_group(mesh, (0,))    on rank 1: ranks 1, 3       torch's own
     | 0  1 |              axes_group(mesh, (0, 1))  on rank 1: ranks 0, 1, 2, 3  made here
     | 2  3 |
"""

from __future__ import annotations

from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.sharding.collectives import is_alive, new_group_over

_groups: WeakValueDictionary[tuple[tuple[int, ...], str], ProcessGroup] = WeakValueDictionary()
_flat_meshes: dict[tuple[tuple[int, ...], str], tuple[DeviceMesh, ref[ProcessGroup]]] = {}


def ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Global ranks that differ from this one along `axes` only, ascending: the order of every process group."""
    coordinate = mesh.get_coordinate()
    index = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def axes_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> ProcessGroup:
    """The group of `ranks_along`; all of them must call, and nobody else."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    key = ranks_along(mesh, axes), mesh.device_type
    known = _groups.get(key)
    if known is None or not is_alive(known):
        along = [mesh.get_group(axis) for axis in axes]
        known = _groups[key] = new_group_over(key[0], along, backend=dist.get_backend(mesh.get_group(0)))
    return known


def mesh_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of a mesh."""
    return axes_group(mesh, tuple(range(mesh.ndim)))


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh along one axis, in the order of `mesh_group`."""
    if mesh.ndim == 1:
        return mesh
    group = mesh_group(mesh)
    key = tuple(dist.get_process_group_ranks(group)), mesh.device_type
    known = _flat_meshes.get(key)
    # After destroy_process_group a mesh of old cannot find its group any more.
    if known is None or known[1]() is not group:
        known = _flat_meshes[key] = DeviceMesh.from_group(group, mesh.device_type), ref(group)
    return known[0]


def coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Place of every global rank in the mesh."""
    sizes = tuple(mesh.mesh.shape)
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).tolist()
    return {rank: tuple(place) for rank, place in zip(mesh.mesh.flatten().tolist(), places, strict=True)}
