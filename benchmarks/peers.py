"""What a user would run instead: stock torch around the same model. Baselines of the training and timing benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer


class Several(Optimizer):
    """Optimizers over disjoint parameters, used as one: schedulers see the groups of all of them."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        # The very same group dictionaries, so that a scheduler's lr reaches the parts.
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for part in self.parts:
            part.step()


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, everything else): embeddings, the output head and tied weights are no matrices for Muon."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(model.head.weight))
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in tables]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def muon_and_adamw(model: nn.Module, *, lr: float, adamw_lr: float, **muon_options: Any) -> Several:
    matrices, others = split_for_muon(model)
    return Several(Muon(matrices, lr=lr, **muon_options), AdamW(others, lr=adamw_lr, fused=True))


def ddp(model: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    """DDP as fast as it goes: gradients are views of the buckets, so nothing is copied back."""
    return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)


def ddp_adamw(model: nn.Module, mesh: DeviceMesh, *, lr: float) -> tuple[nn.Module, Optimizer]:
    return ddp(model, mesh), AdamW(model.parameters(), lr=lr, fused=True)


def ddp_adamw8bit(model: nn.Module, mesh: DeviceMesh, *, lr: float) -> tuple[nn.Module, Optimizer]:
    """bitsandbytes' 8-bit AdamW behind DDP."""
    from bitsandbytes.optim import AdamW8bit

    return ddp(model, mesh), AdamW8bit(model.parameters(), lr=lr)


def ddp_muon(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> tuple[nn.Module, Optimizer]:
    return ddp(model, mesh), muon_and_adamw(model, lr=lr, adamw_lr=adamw_lr)


def zero_adamw(model: nn.Module, mesh: DeviceMesh, *, lr: float) -> tuple[nn.Module, Optimizer]:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=AdamW, process_group=mesh.get_group(), lr=lr, fused=True
    )
    return ddp(model, mesh), optimizer


def fsdp2_muon(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> tuple[nn.Module, Optimizer]:
    return fsdp2(model, mesh), muon_and_adamw(model, lr=lr, adamw_lr=adamw_lr)


def fsdp2_muon_fsdp2(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> tuple[nn.Module, Optimizer]:
    """The `muon-fsdp2` package from PyPI; ImportError where it is not installed."""
    from muon_fsdp2 import Muon as MuonFSDP2

    fsdp2(model, mesh)
    matrices, others = split_for_muon(model)
    groups = [
        dict(params=matrices, lr=lr, use_muon=True, rms_scale=False, weight_decay=0.1),
        dict(params=others, lr=adamw_lr, use_muon=False),
    ]
    return model, MuonFSDP2(groups)


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state that this rank holds; scalars such as step counts included."""
    if isinstance(optimizer, Several):
        return sum(state_bytes(part) for part in optimizer.parts)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return state_bytes(optimizer.optim)
    return sum(_local_bytes(value) for state in optimizer.state.values() for value in _tensors(state.values()))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()
