"""`RaggedShard`, the DTensor placement that says which rank holds how many units of a tensor, and its geometry.

A tensor is the run of its elements in row-major order, cut into one contiguous range per rank. Ranges may differ in
length and may be empty:

    RaggedShard(dims=(0,), local_units=(2, 0, 1)) of a (6, 4) tensor: units of 24 / 3 = 8 elements

    element 0               8              16              24
            |        rank 0 (16)            |  rank 2 (8)  |        rank 1 holds nothing

`RaggedLayout` is what the placement means for one mesh and one shape; all tensors laid out alike share one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from vescale_optim.sharding.rank_shares import RankShares


@dataclass(frozen=True)
class RaggedShard(Placement):
    """Placement: the leading `dims` are sharded over contiguous memory, rank i holds `local_units[i]` units.

    Args:
        dims: the sharded dimensions, a prefix (0, 1, ..., i); () when at most one rank holds anything.
        local_units: units of each rank, zero allowed; kept as RankShares, which equals the tuple. A unit has
            numel / sum(local_units) elements. The local tensor is flat, 1-D; the global shape is the tensor's.

    Raises:
        ValueError: dims is no prefix, no or negative units, or dims == () with several ranks that hold units.
    """

    dims: tuple[int, ...]
    local_units: Sequence[int]

    def __post_init__(self) -> None:
        # The base class is C++: without this call its methods crash (torch 2.13).
        Placement.__init__(self)
        object.__setattr__(self, "dims", tuple(map(operator.index, self.dims)))
        units = RankShares.of(self.local_units)
        object.__setattr__(self, "local_units", units)
        if self.dims != tuple(range(len(self.dims))):
            raise ValueError(f"RaggedShard shards leading dims; dims is {self.dims}, expected a prefix (0, 1, ..., i)")
        if not units or min(units.held, default=0) < 0:
            raise ValueError(f"local_units is {units}; expected one number >= 0 for each rank")
        if not self.dims and len(units.held) > 1:
            raise ValueError(f"dims=() keeps the tensor on one rank, but several hold units: {units}")

    def __hash__(self) -> int:
        # As cheap on thousands of ranks: not by the numbers of all of them.
        return hash((self.dims, self.local_units.num_ranks, self.local_units.first, self.local_units.held))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dims, self.local_units)

    @classmethod
    def from_numels(cls, shape: Sequence[int], numels: Sequence[int]) -> RaggedShard:
        """The placement in which rank i holds `numels[i]` elements of a tensor of this shape, in rank order."""
        numels = RankShares.of(numels)
        if numels.total != math.prod(shape):
            raise ValueError(f"the shares {numels} sum to {numels.total}, but shape {tuple(shape)} has {math.prod(shape)}")
        unit = math.gcd(*numels.held) or 1
        return cls(tuple(range(len(shape))), numels.over(unit))

    def numels(self, shape: Sequence[int]) -> RankShares:
        """Elements each rank holds of a tensor of this shape."""
        numel, num_units = math.prod(shape), self.local_units.total
        if len(self.dims) > len(shape):
            raise ValueError(f"{self} shards {len(self.dims)} dims, but the shape is {tuple(shape)}")
        if numel == 0:
            return RankShares(len(self.local_units), 0, ())
        if num_units == 0 or numel % num_units:
            raise ValueError(f"{self} cuts shape {tuple(shape)}, {numel} elements, into {num_units} units: not whole ones")
        return self.local_units.times(numel // num_units)

    def range(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """First element of `rank` and the one after its last, in row-major order of a tensor of this shape."""
        numels = self.numels(shape)
        start = numels.before(rank)
        return start, start + numels[rank]


class RaggedLayout:
    """Where the elements of a tensor lie. Made by `ragged_layout`, immutable, one object for all tensors laid out alike.

    Attributes:
        mesh, placements, shape: what it was made from; placements hold one RaggedShard, the rest is Replicate.
        axis: mesh axis of the RaggedShard.  rank: this process's place in that axis.
        numels: elements of each rank.       start, numel: this rank's range.       global_numel: all of them.
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> None:
        axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
        if (
            len(placements) != mesh.ndim
            or len(axes) != 1
            or any(not isinstance(placement, (RaggedShard, Replicate)) for placement in placements)
        ):
            raise ValueError(
                f"placements are {placements} on a mesh of {mesh.ndim} axes; expected one placement per axis: "
                "one RaggedShard, the others Replicate"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this process is not part of {mesh}, so it holds no shard; skip the tensor on this rank")
        axis = axes[0]
        shard = placements[axis]
        if len(shard.local_units) != mesh.size(axis):
            raise ValueError(f"{shard} is for {len(shard.local_units)} ranks, mesh axis {axis} has {mesh.size(axis)}")
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.axis = axis
        self.coordinate = tuple(coordinate)
        self.rank: int = coordinate[axis]
        self.numels: RankShares = shard.numels(shape)
        self.start = self.numels.before(self.rank)
        self.numel = self.numels[self.rank]
        self.global_numel = math.prod(shape)
        self._specs: dict[torch.dtype, DTensorSpec] = {}

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the tensor, in the order of their ranges."""
        group = self.mesh.get_group(self.axis)
        if group.rank() != self.rank:
            raise ValueError(f"the process group of axis {self.axis} of {self.mesh} orders its ranks unlike the mesh")
        return group

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What stock DTensor keeps of a tensor."""
        spec = self._specs.get(dtype)
        if spec is None:
            strides = torch.empty(self.shape, device="meta").stride()
            spec = DTensorSpec(self.mesh, self.placements, TensorMeta(self.shape, strides, dtype))
            self._specs[dtype] = spec
        return spec

    def agrees_with(self, other: RaggedLayout) -> bool:
        """Whether every element lies on the same rank at the same place; units may be expressed differently."""
        return self is other or (
            self.numels == other.numels and self.shape == other.shape and self.axis == other.axis and self.mesh == other.mesh
        )

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedLayout:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return ragged_layout, (self.mesh, self.placements, self.shape)

    def __repr__(self) -> str:
        elements = f"{self.start}:{self.start + self.numel}"
        return f"RaggedLayout({tuple(self.shape)}, {self.placements} on {self.mesh}, elements {elements} here)"


def ragged_layout(mesh: DeviceMesh, placements: Placement | Sequence[Placement], shape: Sequence[int]) -> RaggedLayout:
    """The layout of a tensor of this shape; `placements` may be a RaggedShard alone where the mesh has one axis."""
    placements = (placements,) if isinstance(placements, Placement) else tuple(placements)
    # By identity of the mesh: one made after the process groups were destroyed and made anew equals the old one.
    key = id(mesh), placements, torch.Size(shape)
    layout = _layouts.get(key)
    if layout is None:
        layout = RaggedLayout(mesh, placements, key[2])
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        _layouts[key] = layout
    return layout


# A layout keeps its mesh, so an id in here is never reused. Where one was dropped, its successor still agrees with it.
_layouts: dict[tuple[int, tuple[Placement, ...], torch.Size], RaggedLayout] = {}
_MAX_LAYOUTS = 1 << 15
