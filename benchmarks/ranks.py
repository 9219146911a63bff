"""Ranks of a benchmark: started here or by torchrun, joined in one process group, and what they report.

    launch(run_rank, args)                              calls run_rank(local_rank, world_size, store, args) on every rank
        device = join(local_rank, world_size, store)    in there, first
        report(result, args.json)                       on rank 0
        leave()                                         last
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RunRank = Callable[[int, int, str | None, argparse.Namespace], None]


def launch(run_rank: RunRank, args: argparse.Namespace) -> None:
    """Run `run_rank` as this rank of torchrun, or on `args.ranks` processes started here."""
    if "RANK" in os.environ:
        run_rank(int(os.environ.get("LOCAL_RANK", 0)), int(os.environ["WORLD_SIZE"]), None, args)
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, args=(args.ranks, f"{directory}/store", args), nprocs=args.ranks)


def join(
    local_rank: int, world_size: int, store: str | None, *, threads: int = 1, device: str | None = None
) -> torch.device:
    """Make the process group; the device of this rank, CUDA where there is one for each unless `device` says otherwise."""
    torch.set_num_threads(threads)
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    chosen = torch.device(device or ("cuda" if enough else "cpu"))
    if chosen.type == "cuda":
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=local_rank, world_size=world_size)
    return chosen


def leave() -> None:
    """End the process group; without the barrier first, gloo aborts now and then (torch 2.13)."""
    dist.barrier()
    dist.destroy_process_group()


def report(result: Any, path: Path | None) -> None:
    """Write a result as JSON where a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
        print(f"wrote {path}")
