"""One promise: through real forwards and backwards under `fully_shard`, parameters move as on one device.

One process takes the batches of all ranks in turn, each rounded to bf16 by itself as the ranks do, and adds up in fp32. Sums
of other order round otherwise, and Newton-Schulz iterates in bf16, so the promise is a tolerance: the distance between the
two updates is at most 2 % of the update.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from tests.support.reference import OneDevice, adamw, muon, muon_for_matrices
from tests.support.sharded_models import mesh_of, whole
from vescale_optim import ShardedMuon

STEPS = 3
# Many more than a matrix has rows: Newton-Schulz blows up the rounding of directions in which a gradient is zero.
SAMPLES = 256
RATES = dict(lr=0.02, weight_decay=0.1)
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(20) for _ in range(2))
        self.head = nn.Linear(20, 7)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 20, generator=generator), torch.randint(0, 7, (SAMPLES,), generator=generator)


def train(rank: int, world_size: int, mesh: Any, kind: str, compiles: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(checkpoints=True)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = mesh_of((2, 2), ("replicate", "shard")) if kind == "hsdp" else mesh
    for block in model.blocks:
        if compiles:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = ShardedMuon(list(model.named_parameters()), mesh, **RATES)
    for step in range(STEPS):
        inputs, targets = (value.chunk(world_size)[rank] for value in data(step))
        nn.functional.cross_entropy(model(inputs).float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(dict(model.named_parameters()))


def on_one_device(num_batches: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model()
    values = {name: param.detach() for name, param in model.named_parameters()}
    reference = OneDevice(values, muon_for_matrices(muon(**RATES), adamw(**ADAMW)))
    for step in range(STEPS):
        means = {name: torch.zeros_like(value) for name, value in values.items()}
        for inputs, targets in zip(*(value.chunk(num_batches) for value in data(step)), strict=True):
            leaves = {name: value.to(dtype).requires_grad_() for name, value in reference.params.items()}
            logits = torch.func.functional_call(model, leaves, (inputs.to(dtype),))
            loss = nn.functional.cross_entropy(logits.float(), targets)
            for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                means[name] += grad.float() / num_batches
        reference.step(means)
    return reference.params


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("fsdp", torch.float32), ("fsdp", torch.bfloat16), ("hsdp", torch.bfloat16)])
def test_checkpointed_and_compiled_blocks_move_as_on_one_device(kind: str, dtype: torch.dtype, compiles: bool) -> None:
    start = {name: param.detach() for name, param in Model().named_parameters()}
    world_size = 4 if kind == "hsdp" else 2
    expected = on_one_device(world_size, dtype)
    for found in run_ranks(world_size, train, kind, compiles, dtype):
        for name, value in expected.items():
            error = ((found[name] - value).norm() / (value - start[name]).norm()).item()
            assert error < 0.02, (name, error)
