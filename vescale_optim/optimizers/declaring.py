"""declaring: an optimizer as far as it declares blocks, FLOPs and state, where there are no ranks yet.

Planning a model's capacity and sharding its parameters come before training. The optimizer is the real one: its groups,
its routing and its rules are the code that trains. Only its storage is left out, which would want a process group.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.optimizers.groups import names_of
from vescale_optim.sharding.blocks import Blocks

OptimizerType = TypeVar("OptimizerType")


class _RanksWithoutGroup(DeviceMesh):
    """Stands for a mesh where only its size matters: there is no process group behind it."""

    def __init__(self) -> None:
        pass

    @property
    def ndim(self) -> int:
        return 1

    def size(self, mesh_dim: int | None = None) -> int:
        return 1

    def get_coordinate(self) -> list[int]:
        return [0]


class _WithoutStorage:
    """Mixed into an optimizer class: groups and rules as ever, nothing planned, re-homed or sent."""

    def _manage_parameters(self) -> None:
        return


def make_declaring(optimizer: type[OptimizerType], params: Any, **options: Any) -> OptimizerType:
    """An optimizer that can be asked for its groups and rules, and does nothing else.

    Args:
        params, options: as the optimizer takes them; parameters may be on the meta device.
    """
    return type(optimizer.__name__, (_WithoutStorage, optimizer), {})(params, _RanksWithoutGroup(), **options)


def declared_blocks(optimizer: type, module: nn.Module, **options: Any) -> dict[str, Blocks]:
    """What an optimizer over `module` needs whole of each parameter that requires a gradient, by its name."""
    with warnings.catch_warnings():
        # The optimizer that trains says it again.
        warnings.simplefilter("ignore")
        made = make_declaring(optimizer, module, **options)
    return {
        name: made.rule_of(group).blocks(param.shape, group)
        for number, group in enumerate(made.param_groups)
        for name, param in zip(names_of(group, number), group["params"], strict=True)
        if param.requires_grad
    }
