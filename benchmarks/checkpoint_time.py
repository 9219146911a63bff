"""How long does a checkpoint take? ShardedAdamW and FSDP2 + torch.optim.AdamW save and load the same state through DCP.

    python benchmarks/checkpoint_time.py                       1 GB of state on 2 ranks
    python benchmarks/checkpoint_time.py --megabytes 20        quick

They take turns in one process group, in an order that rotates, with the same parameters and the same plain `dcp.save` and
`dcp.load` of model and optimizer, into fresh folders; pages that are still to be written are flushed before every turn,
outside the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vescale_optim import ShardedAdamW

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000, help="optimizer state of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        multiprocessing.spawn(measure, args=(options, folder), nprocs=options.ranks)


def candidates(num_layers: int) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))

    sharded, replicated, ours = model(), model(), model()
    for peer in (sharded, ours):
        for layer in (*peer, peer):
            fully_shard(layer, mesh=mesh)
    return {
        "FSDP2 + AdamW": (sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)),
        "FSDP2 + ShardedAdamW": (ours, ShardedAdamW(ours, mesh, lr=1e-3)),
        "ShardedAdamW": (replicated, ShardedAdamW(replicated, mesh, lr=1e-3)),
    }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    num_layers = max(1, round(options.megabytes * 1e6 / (8 * WIDTH * (WIDTH + 1))))
    named = candidates(num_layers)
    for model, optimizer in named.values():
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in named}
    for number in range(options.rounds + 1):
        names = list(named)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            model, optimizer = named[name]
            path = f"{folder}/{name.replace(' ', '_')}"
            saving = timed(lambda: dcp.save(state_of(model, optimizer), checkpoint_id=path))  # noqa: B023
            loading = timed(lambda: load(model, optimizer, path))  # noqa: B023
            if rank == 0:
                shutil.rmtree(path)
            if number:  # the first round warms up
                times[name]["save"].append(saving)
                times[name]["load"].append(loading)
    if rank == 0:
        report(times, num_layers, options)
    dist.barrier()
    dist.destroy_process_group()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def timed(function: Any) -> float:
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def report(times: dict[str, dict[str, list[float]]], num_layers: int, options: argparse.Namespace) -> None:
    peer = times["FSDP2 + AdamW"]
    state_megabytes = num_layers * WIDTH * (WIDTH + 1) * 8 / 1e6
    print(f"{num_layers} layers of {WIDTH} x {WIDTH}: {state_megabytes:.0f} MB of state, half as much of parameters")
    print(f"{options.ranks} ranks, 1 thread each, torch {torch.__version__}, {date.today()}, {options.rounds} rounds\n")
    print(f"{'':22}{'':6}{'ratio to FSDP2 + AdamW':>24}{'seconds, median [lowest, highest]':>36}")
    result = {}
    for name, kinds in times.items():
        for kind, values in kinds.items():
            ratios = [ours / theirs for ours, theirs in zip(values, peer[kind], strict=True)]
            ratio, median = statistics.median(ratios), statistics.median(values)
            print(f"{name:22}{kind:6}{ratio:>24.2f}{f'{median:.2f} [{min(values):.2f}, {max(values):.2f}]':>36}")
            result[f"{name} {kind}"] = {"ratio": ratio, "seconds": values}
    if options.json is not None:
        options.json.write_text(json.dumps({"state_megabytes": state_megabytes, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
