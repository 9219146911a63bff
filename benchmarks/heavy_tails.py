"""Does 8-bit AdamW blow up on heavy-tailed gradients with zeros, where fp32 AdamW does not?

    python benchmarks/heavy_tails.py      # torchao's rows appear where it is installed

A second moment far below the largest one of its block rounds to code 0, and then m / (sqrt(0) + eps) explodes. 64 x 1,024
parameters start at 0 and take 50 steps; printed is the largest distance that any of them has come, and its ratio to fp32.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from vescale_optim import ShardedAdamW8bit

SHAPE, STEPS, LR = (64, 1024), 50, 1e-2

# Spread of the sizes of entries (sigma of their logarithm), and the share of exact zeros.
GRADIENTS = {"half zeros": (0.0, 0.5), "heavy tail, 5 % zeros": (1.0, 0.05), "heavier tail, 5 % zeros": (2.0, 0.05)}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], DeviceMesh], Optimizer]] = {
    "torch AdamW, fp32": lambda params, mesh: AdamW(params, lr=LR, weight_decay=0.0),
    "ShardedAdamW8bit": lambda params, mesh: ShardedAdamW8bit(params, mesh, lr=LR, weight_decay=0.0),
    "bitsandbytes AdamW8bit": lambda params, mesh: importlib.import_module("bitsandbytes").optim.AdamW8bit(
        params, lr=LR, weight_decay=0.0
    ),
    "torchao AdamW8bit": lambda params, mesh: importlib.import_module("torchao.optim").AdamW8bit(
        params, lr=LR, weight_decay=0.0
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    distances: dict[str, dict[str, float]] = {}
    for name, build in OPTIMIZERS.items():
        try:
            distances[name] = {kind: largest_distance(build, mesh, kind) for kind in GRADIENTS}
        except ImportError as error:
            print(f"skipped {name}: {error}")
    show(distances)
    if args.json:
        record = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "steps": STEPS, "lr": LR}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record | {"largest_distance": distances}, indent=1))
        print(f"wrote {args.json}")
    dist.destroy_process_group()


def largest_distance(build: Callable[..., Optimizer], mesh: DeviceMesh, kind: str) -> float:
    param = nn.Parameter(torch.zeros(SHAPE))
    optimizer = build([param], mesh)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        (param * gradient(kind, generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return param.abs().max().item()


def gradient(kind: str, generator: torch.Generator) -> Tensor:
    sigma, share = GRADIENTS[kind]
    normal, size = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    is_zero = torch.rand(SHAPE, generator=generator) < share
    return (normal * (sigma * size).exp()).masked_fill(is_zero, 0.0)


def show(distances: dict[str, dict[str, float]]) -> None:
    print(f"{'largest distance (ratio to fp32)':28}" + "".join(f"{kind:>28}" for kind in GRADIENTS))
    (_, wide), *_ = distances.items()
    for name, row in distances.items():
        cells = [f"{distance:.3g} ({distance / wide[kind]:.2f})" for kind, distance in row.items()]
        print(f"{name:28}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
