"""Gradients that users make themselves: expanded, sliced, transposed and sparse ones, taken for their values or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.checkpoints import OPTIMIZERS
from tests.support.ranks import run_ranks
from tests.support.sharded_models import Holder, differences, named_parameters, sharded, whole, world_mesh
from tests.support.values import parameter_values
from vescale_optim import ShardedAdamW

SHAPES = {"wide": (7, 13), "tall": (40, 12), "bias": (13,), "scale": (64,)}


def sliced(grad: Tensor) -> Tensor:
    """Every second element of a memory whose others are NaN."""
    return torch.stack([grad, torch.full_like(grad, torch.nan)], dim=-1)[..., 0]


def transposed(grad: Tensor) -> Tensor:
    return grad.mT.contiguous().mT if grad.ndim > 1 else sliced(grad)


def expanded(grad: Tensor) -> Tensor:
    """One number for all, as `torch.autograd.grad` gives it for a sum."""
    return torch.tensor(0.25).expand(grad.shape)


MEMORIES = {"sliced": sliced, "transposed": transposed, "expanded": expanded}


def train(rank: int, world_size: int, mesh: Any, kind: str, storage: str, memory: str) -> list[dict[str, Tensor]]:
    """With gradients of such a memory, and with contiguous ones of the same values."""
    results = []
    for is_contiguous in (False, True):
        values = parameter_values(SHAPES)
        params = named_parameters(Holder(values)) if storage == "plain" else sharded(storage, values)
        optimizer, arguments = OPTIMIZERS[kind]
        made = optimizer(params.items(), world_mesh(), grad_sync="none", **arguments)
        for step in range(3):
            grads = sharded(storage, parameter_values(SHAPES, seed=step)) if storage != "plain" else {}
            for name, param in params.items():
                value = grads[name].detach() if grads else parameter_values(SHAPES, seed=step)[name]
                local = value._local_tensor if isinstance(value, DTensor) else value
                given = MEMORIES[memory](local)
                assert local.numel() < 2 or not given.reshape(-1).is_contiguous() or memory == "transposed"
                given = given.contiguous() if is_contiguous else given
                if isinstance(value, DTensor):
                    value._local_tensor = given
                param.grad = value if isinstance(value, DTensor) else given
            made.step()
        results.append(whole(params))
    return results


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("storage", ["plain", "fsdp_on_2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_memory_of_a_gradient_makes_no_difference(kind: str, storage: str, memory: str) -> None:
    for strided, contiguous in run_ranks(2, train, kind, storage, memory):
        assert differences(strided, contiguous) == {}


def embed(rank: int, world_size: int, mesh: Any, is_sparse: bool) -> Tensor:
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 6, sparse=is_sparse)
    optimizer = ShardedAdamW(embedding.named_parameters(), mesh, lr=0.1)
    for step in range(3):
        embedding(torch.tensor([rank, step, 3, 3])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight.detach().clone()


def test_sparse_gradients_that_we_reduce_count_as_dense_ones() -> None:
    for dense, sparse in zip(run_ranks(2, embed, False), run_ranks(2, embed, True), strict=True):
        assert torch.equal(dense, sparse)


def step_with_sparse_gradient(rank: int, world_size: int, mesh: Any, storage: str) -> None:
    params = sharded(storage, parameter_values(SHAPES)) if storage != "plain" else named_parameters(
        Holder(parameter_values(SHAPES))
    )
    optimizer = ShardedAdamW(params.items(), world_mesh(), grad_sync="none")
    before = whole(params)
    for param in params.values():
        param.grad = torch.zeros_like(param).detach()
    if storage == "plain":
        params["tall"].grad = params["tall"].detach().to_sparse()
    else:
        params["tall"].grad._local_tensor = params["tall"]._local_tensor.detach().to_sparse()
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'tall' of shape \(40, 12\) is sparse; .*to_dense"):
        optimizer.step()
    assert differences(whole(params), before) == {}
    assert not any(state["step"] for state in optimizer.state.values())


@pytest.mark.parametrize("storage", ["plain", "fsdp_on_2"])
def test_sparse_gradients_that_are_synchronised_already_are_refused(storage: str) -> None:
    run_ranks(2, step_with_sparse_gradient, storage)
