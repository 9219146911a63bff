"""destroy_process_group ends the threads of our process groups, although optimizer and model are still there.

A thread of gloo that outlives the interpreter and then frees a tensor aborts the process ("terminate called without an
active exception"), after a training run that went well. A DeviceMesh keeps the groups of its axes (torch 2.13).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale_optim import ShardedAdamW8bit, ShardedMuon, ShardedSOAP, clip_grad_norm_, fully_shard


def num_threads() -> int:
    """Of all process groups on gloo."""
    return sum((task / "comm").read_text().strip() == "pt_gloo_runloop" for task in Path("/proc/self/task").iterdir())


def leave_meshes(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meshes", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
    gc.collect()
    (Path(folder) / f"meshes{rank}").write_text(f"{num_threads()} {mesh.size()}")


def train_and_leave(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/train", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), mesh, optimizer=ShardedMuon)
    placed = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    copied = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Replicate()]))
    kept = [
        ShardedMuon(plain, mesh),
        ShardedMuon(sharded, mesh),
        ShardedSOAP([placed], mesh),
        ShardedAdamW8bit([copied], mesh, min_8bit_size=1),
    ]
    for _ in range(2):
        (plain(torch.ones(2, 8)).sum() + sharded(torch.ones(2, 8)).sum()).backward()
        placed.grad, copied.grad = torch.ones_like(placed), torch.ones_like(copied)
        for optimizer in kept:
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    kept.append(kept[0].full_state_dict())
    while_training = num_threads()
    dist.destroy_process_group()
    gc.collect()
    (Path(folder) / f"train{rank}").write_text(f"{num_threads()} {while_training}")
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        kept[0].step()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads by /proc")
def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    for leave in (leave_meshes, train_and_leave):
        mp.spawn(leave, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        of_torch, _ = map(int, (tmp_path / f"meshes{rank}").read_text().split())
        left, while_training = map(int, (tmp_path / f"train{rank}").read_text().split())
        assert left == of_torch < while_training
