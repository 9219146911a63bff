"""The optimizers of the README section "Write your own optimizer", run as printed there, against single-device loops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.reference import OneDevice, adamw
from tests.support.values import MIXED_SHAPES, backward, parameter_module, parameter_values, rank_gradients
from vescale_optim import Blocks, ShardedOptimizer

README = Path(__file__).parents[1] / "README.md"
ARGUMENTS = {
    "ShardedLion": dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "RowNormalizedSGD": dict(lr=1e-2, eps=1e-6),
    "MatrixNormalizedSGD": dict(lr=1e-2, momentum=0.8, decay=0.7, eps=1e-6, adamw_lr=1e-3),
}
# Lines of the class as printed.
MOST_LINES = {"ShardedLion": 32, "RowNormalizedSGD": 32, "MatrixNormalizedSGD": 42}


def class_from_readme(name: str) -> Any:
    section = README.read_text().split("## Write your own optimizer")[1].split("\n## ")[0]
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", section, re.S) if f"class {name}(" in block]
    assert len(source.splitlines()) <= MOST_LINES[name]
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace[name]


def train(rank: int, world_size: int, mesh: Any, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    module = parameter_module(parameter_values(MIXED_SHAPES, dtype=dtype))
    optimizer = class_from_readme(name)(module.named_parameters(), mesh, bucket_mib=0.02, **ARGUMENTS[name])
    for step in range(4):
        grads = rank_gradients(MIXED_SHAPES, world_size, seed=step, dtype=dtype)
        backward(module.named_parameters(), grads.of_rank(rank))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def lion(param: Tensor, grads: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> Tensor:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2."""
    momentum = torch.zeros_like(param)
    for grad in grads:
        update = momentum.lerp(grad, 1 - betas[0]).sign()
        param = param.mul(1 - lr * weight_decay).add(update, alpha=-lr)
        momentum = momentum.lerp(grad, 1 - betas[1])
    return param


def row_normalized_sgd(param: Tensor, grads: list[Tensor], lr: float, eps: float) -> Tensor:
    rows = param.reshape(-1, param.shape[-1] if param.ndim else 1)
    for grad in grads:
        by_row = grad.reshape(rows.shape)
        rows = rows.add(by_row / by_row.norm(dim=-1, keepdim=True).clamp(min=eps), alpha=-lr)
    return rows.reshape(param.shape)


def matrix_normalized_sgd(
    param: Tensor, grads: list[Tensor], lr: float, momentum: float, decay: float, eps: float, adamw_lr: float
) -> Tensor:
    if param.ndim < 2:
        alone = OneDevice({"vector": param}, {"vector": adamw(lr=adamw_lr)})
        for grad in grads:
            alone.step({"vector": grad})
        return alone.params["vector"]
    matrices, norms = param.reshape(-1, *param.shape[-2:]), torch.zeros(param.shape[:-2].numel())
    moment = torch.zeros_like(matrices)
    for grad in grads:
        moment = moment.mul(momentum).add(grad.reshape(matrices.shape))
        norms = norms.lerp(torch.stack([matrix.flatten()[None].norm(dim=1)[0] for matrix in moment]), 1 - decay)
        matrices = matrices.add(moment / (norms.view(-1, 1, 1) + eps), alpha=-lr)
    return matrices.reshape(param.shape)


REFERENCES = [
    ("ShardedLion", lion),
    ("RowNormalizedSGD", row_normalized_sgd),
    ("MatrixNormalizedSGD", matrix_normalized_sgd),
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name, reference", REFERENCES)
def test_equals_one_device(name: str, reference: Any, world_size: int) -> None:
    steps = [rank_gradients(MIXED_SHAPES, world_size, seed=step).mean for step in range(4)]
    for result in run_ranks(world_size, train, name, torch.float32):
        for key, value in parameter_values(MIXED_SHAPES).items():
            expected = reference(value, [step[key] for step in steps], **ARGUMENTS[name])
            assert torch.equal(result[key], expected), key


READS = {
    "item": lambda group: group["size"],
    "get": lambda group: group.get("size", 2),
    "items": lambda group: dict(group.items())["size"],
    "unpacked": lambda group: dict(**group)["size"],
    "in": lambda group: 3 if "extra" in group else group["other"],
    "dict": lambda group: group["options"]["size"],
}


def edit_in_flight(rank: int, world_size: int, mesh: Any, way: str) -> None:
    class Rows(ShardedOptimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, mesh, dict(lr=0.1, size=2, other=2, options={"size": 2}))

        def blocks(self, shape: Any, group: Any) -> Blocks:
            return Blocks.rows(shape, READS[way](group))

        def apply(self, shards: Any, directions: Any, group: Any) -> None:
            torch._foreach_add_(shards.params, shards.grads, alpha=-group["lr"])

    module = parameter_module(parameter_values({"w": (12, 8)}))
    optimizer = Rows(module.named_parameters())
    group = optimizer.param_groups[0]
    group["lr"] = 0.2
    optimizer.step()
    group.update({"extra": 1} if way == "in" else {"options": {"size": 3}} if way == "dict" else {"size": 3})
    with pytest.raises(ValueError, match=r"parameter 'w' of shape \(12, 8\): .* now and was .* when the optimizer was made"):
        optimizer.step()


@pytest.mark.parametrize("way", READS)
def test_options_that_decide_blocks_are_known_however_a_rule_reads_them(way: str) -> None:
    run_ranks(1, edit_in_flight, way)
