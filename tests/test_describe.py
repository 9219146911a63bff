"""describe() tells the truth: state is 1/N on every rank, padding small and bounded below, FLOPs balanced."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.ranks import run_ranks
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon, ShardedOptimizer


class TransformerShapes(nn.Module):
    """The parameters of a GPT: fused QKV, projection, MLP, norms with biases, token and position embeddings, a head."""

    def __init__(self, width: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(128, width)
        for layer in range(layers):
            self.add_module(f"norm1_{layer}", nn.LayerNorm(width))
            self.add_module(f"qkv_{layer}", nn.Linear(width, 3 * width))
            self.add_module(f"project_{layer}", nn.Linear(width, width))
            self.add_module(f"norm2_{layer}", nn.LayerNorm(width))
            self.add_module(f"up_{layer}", nn.Linear(width, 4 * width))
            self.add_module(f"down_{layer}", nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)


KINDS: dict[str, type[ShardedOptimizer]] = {"muon": ShardedMuon, "adamw": ShardedAdamW}


def measure(rank: int, world_size: int, mesh: Any, kind: str, width: int, layers: int, bucket_mib: float) -> Any:
    model = TransformerShapes(width, layers)
    arguments = {"head": "head"} if kind == "muon" else {}
    optimizer = KINDS[kind](model, mesh, bucket_mib=bucket_mib, **arguments)
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, RaggedTensor)]
    held = sum(tensor.to_local().numel() * 4 for tensor in tensors)
    total = sum(tensor.numel() * 4 for tensor in tensors)
    storage = optimizer._storages["replicated"]
    padding = sum(b.plan.padding for b in storage.buckets) / sum(p.numel() for p in model.parameters())
    return held, total, padding, storage.loads, optimizer.describe(), len(storage.buckets)


@pytest.mark.parametrize("width, layers", [(64, 4), (96, 6)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_of_a_gpt_is_shared_evenly(world_size: int, width: int, layers: int) -> None:
    for kind, limit in (("adamw", 1.02), ("muon", 1.1)):
        results = run_ranks(world_size, measure, kind, width, layers, 1)
        total = results[0][1]
        assert sum(held for held, *_ in results) == total
        assert max(held for held, *_ in results) <= limit * total / world_size
        for _, _, padding, loads, _, _ in results:
            assert padding <= 0.03
            if kind == "muon":
                assert max(loads) <= 1.1 * sum(loads) / world_size


def test_describe_is_the_same_table_on_every_rank() -> None:
    results = run_ranks(2, measure, "muon", 64, 4, 0.25)
    held = [result[0] for result in results]
    texts = [result[4] for result in results]
    assert texts[0] == texts[1]
    table, algorithms = texts[0].split("\n\n")
    head, columns, *rows, state, compute = table.splitlines()
    params = list(TransformerShapes(64, 4).parameters())
    elements = sum(param.numel() for param in params)
    assert head == f"ShardedMuon: {len(params)} parameters, {elements:,} elements, replicated on 2 ranks"
    for word in ("bucket", "elements", "padding", "lower bound", "driver"):
        assert word in columns
    assert len(rows) == results[0][5]
    assert f"state: {sum(held):,} bytes, busiest rank {max(held):,}" in state
    assert "x mean" in compute
    matrices = [name for name, param in TransformerShapes(64, 4).named_parameters() if param.ndim == 2]
    hidden = [name for name in matrices if name.partition(".")[0] not in ("tokens", "positions", "head")]
    muon, adamw = algorithms.splitlines()
    assert muon.startswith(f"muon: {len(hidden)} parameters, ") and muon.endswith(f": {', '.join(hidden[:8])}, ...")
    assert adamw.startswith(f"adamw: {len(params) - len(hidden)} parameters, ") and "tokens.weight" in adamw
