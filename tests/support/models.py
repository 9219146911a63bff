"""Small models of the kinds that people shard, and batches for them; every rank and the reference make the same ones.

    model, wrapped = make_model("moe")       wrapped: the names of the modules to shard, from the inside to the outside
    inputs, targets = make_batch("moe", 8, seed=step)
    loss = loss_of(model(inputs), targets)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTConfig

VOCABULARY, CONTEXT, WIDTH = 48, 12, 32

KINDS = ("gpt", "tied", "moe", "conv")


def make_model(kind: str, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[str]]:
    """The model after `torch.manual_seed(0)`, and the names of what `fully_shard` wraps before the model itself."""
    torch.manual_seed(0)
    if kind == "conv":
        model: nn.Module = ConvNet()
        wrapped = [f"stages.{i}" for i in range(len(model.stages))]
    elif kind == "moe":
        model = MoELanguageModel()
        wrapped = [f"layers.{i}" for i in range(len(model.layers))]
    else:
        model = GPT(
            GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, layers=3, width=WIDTH, heads=4, tied=kind == "tied")
        )
        wrapped = [f"blocks.{i}" for i in range(3)]
    return model.to(dtype), wrapped


def make_batch(kind: str, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "conv":
        return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)
    tokens = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class ConvNet(nn.Module):
    """Residual stages with group norms (batch norms see the local batch only), strides, 1x1 shortcuts, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stages = nn.ModuleList([Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 20, 2)])
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(2, out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(2, out)
        is_same = channels == out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu_(self.second_norm(self.second(y)) + self.shortcut(x))


class MoELanguageModel(nn.Module):
    """Top-1 experts; the last expert of each layer never gets a token, the others only on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MoELayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MoELayer(nn.Module):
    NUM_EXPERTS = 5

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, self.NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(self.NUM_EXPERTS)
        )
        with torch.no_grad():
            self.router.bias[-1] = -1e9

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, choice = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + result.view_as(x)
