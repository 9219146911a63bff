"""A small GPT and a text that lies on every machine: what the benchmarks train, and on what.

The text is the source code of Python's standard library, one token per byte. Every tenth file is for validation.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; `tied` shares the embedding with the output head."""

    vocabulary: int = BYTES
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    tied: bool = False


class GPT(nn.Module):
    """Decoder with pre-norm blocks, causal attention and learned positions.

    >>> model = GPT(GPTConfig())
    >>> loss = model(tokens, targets)          # both [batch, time], int64
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.token.weight

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        # Each block adds two terms to the residual stream: keep its variance independent of the depth.
        for block in self.blocks:
            for projection in (block.attention.out, block.mlp.down):
                nn.init.normal_(projection.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, or logits [batch, time, vocabulary] without targets."""
        x = self.token(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def get_output_embeddings(self) -> nn.Linear:
        """The head, under the name that transformers gave to this question; optimizers route its weight by it."""
        return self.head

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Text:
    """Tokens of the two parts, flat uint8."""

    train: Tensor
    validation: Tensor


def standard_library_text(max_bytes: int = 16_000_000) -> Text:
    """Source files of the standard library in sorted order, up to `max_bytes` together.

    Raises:
        FileNotFoundError: this Python has no sources of its library on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    size = number = 0
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"}.intersection(file.relative_to(root).parts):
            continue
        data = file.read_bytes()[: max_bytes - size]
        parts[number % 10 == 0].append(data)
        size += len(data)
        number += 1
        if size >= max_bytes:
            break
    if number < 10:
        raise FileNotFoundError(
            f"found {number} Python sources under {root}; use a Python that is installed with its library's sources"
        )
    validation, train = (torch.frombuffer(bytearray(b"".join(parts[key])), dtype=torch.uint8) for key in (True, False))
    return Text(train, validation)


class Batches:
    """Random windows of a text, drawn alike on every rank; each rank takes its own part of the global batch."""

    def __init__(self, tokens: Tensor, *, context: int, batch: int, rank: int, world_size: int, seed: int) -> None:
        self.tokens, self.context, self.batch = tokens, context, batch
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, context] of this rank."""
        high = len(self.tokens) - self.context
        starts = torch.randint(high, (self.world_size * self.batch,), generator=self.generator)
        mine = starts[self.rank * self.batch : (self.rank + 1) * self.batch]
        windows = torch.stack([self.tokens[start : start + self.context + 1] for start in mine.tolist()])
        windows = windows.to(device=device, dtype=torch.long)
        return windows[:, :-1], windows[:, 1:]
