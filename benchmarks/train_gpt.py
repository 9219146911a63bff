"""Does it train? A small GPT on the standard library's sources, with any optimizers of the suite, in a plain loop.

    torchrun --nproc-per-node 2 benchmarks/train_gpt.py --optimizer muon
    torchrun --nproc-per-node 2 benchmarks/train_gpt.py --optimizer adamw adamw8bit muon shampoo soap

Runs on CPU (gloo) or CUDA (NCCL), also as one plain `python benchmarks/train_gpt.py`. Every optimizer sees the same tokens.
Writes each run to benchmarks/results/train_gpt/NAME.json and the curves of all runs made so far to loss.png beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from gpt import GPT, Batches, GPTConfig, Text, standard_library_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from vescale_optim import ShardedAdamW, ShardedAdamW8bit, ShardedMuon, ShardedShampoo, ShardedSOAP

Built = tuple[nn.Module, Optimizer]


def adamw(model: nn.Module, mesh: DeviceMesh, *, lr: float) -> Built:
    return model, ShardedAdamW(model, mesh, lr=lr)


def adamw8bit(model: nn.Module, mesh: DeviceMesh, *, lr: float) -> Built:
    return model, ShardedAdamW8bit(model, mesh, lr=lr)


def muon(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> Built:
    return model, ShardedMuon(model, mesh, lr=lr, adamw_lr=adamw_lr)


def shampoo(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> Built:
    return model, ShardedShampoo(model, mesh, lr=lr, adamw_lr=adamw_lr)


def soap(model: nn.Module, mesh: DeviceMesh, *, lr: float, adamw_lr: float) -> Built:
    return model, ShardedSOAP(model, mesh, lr=lr, adamw_lr=adamw_lr)


# name: (constructor, its default learning rates)
OPTIMIZERS: dict[str, tuple[Callable[..., Built], dict[str, float]]] = {
    "adamw": (adamw, {"lr": 3e-3}),
    "adamw8bit": (adamw8bit, {"lr": 3e-3}),
    "muon": (muon, {"lr": 0.02, "adamw_lr": 3e-3}),
    "shampoo": (shampoo, {"lr": 3e-3, "adamw_lr": 3e-3}),
    "soap": (soap, {"lr": 1e-2, "adamw_lr": 3e-3}),
    "ddp-muon": (peers.ddp_muon, {"lr": 0.02, "adamw_lr": 3e-3}),
    "ddp-adamw": (peers.ddp_adamw, {"lr": 3e-3}),
}


def main() -> None:
    args = parse_arguments()
    device, _, world_size = start_process_group(args.device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    text = standard_library_text()
    for name in args.optimizer:
        run = train(name, text, mesh, device, args)
        if mesh.get_rank() == 0:
            report(run, args.out, args.picture or args.out / "loss.png")
    dist.barrier()
    dist.destroy_process_group()


def train(name: str, text: Text, mesh: DeviceMesh, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Train a fresh model, the same one for every optimizer, and return what happened."""
    rank, world_size = mesh.get_rank(), mesh.size()
    torch.manual_seed(args.seed)
    config = GPTConfig(
        context=args.context, layers=args.layers, width=args.width, heads=args.heads, tied=args.tied
    )
    model = GPT(config).to(device)
    num_parameters = model.num_parameters()

    build, learning_rates = OPTIMIZERS[name]
    learning_rates = learning_rates | ({} if args.lr is None else {"lr": args.lr})
    model, optimizer = build(model, mesh, **learning_rates)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, args.steps))

    where = dict(context=args.context, batch=args.batch, rank=rank, world_size=world_size)
    batches = Batches(text.train, seed=args.seed, **where)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16")

    def validate() -> float:
        fixed = Batches(text.validation, seed=1, **where)
        model.eval()
        with torch.no_grad(), autocast:
            losses = [model(*fixed.next(device)) for _ in range(args.validation_batches)]
        model.train()
        return mean_over_ranks(torch.stack(losses).mean())

    log: list[dict[str, float]] = []
    train_loss = torch.zeros((), device=device)
    seconds = window_seconds = 0.0
    if rank == 0:
        print(
            f"{name}, {in_words(learning_rates)}: {num_parameters:,} parameters, {len(text.train) / 1e6:.1f} MB of text, "
            f"{world_size} x {device.type}"
        )
    bar = tqdm(total=args.steps, disable=rank != 0, mininterval=0.5 if sys.stderr.isatty() else 15, unit="step")
    for step in range(args.steps + 1):
        if step % args.validate_every == 0 or step == args.steps:
            since = max(1, step - (log[-1]["step"] if log else 0))
            point = {
                "step": step,
                "tokens": step * args.batch * args.context * world_size,
                "seconds": seconds,
                "validation_loss": validate(),
                "train_loss": mean_over_ranks(train_loss / since) if step else math.nan,
                "tokens_per_second": since * args.batch * args.context * world_size / window_seconds if step else math.nan,
            }
            log.append(point)
            train_loss.zero_()
            window_seconds = 0.0
            speed = f", {point['tokens_per_second']:,.0f} tokens/s" if step else ""
            bar.set_postfix_str(f"validation {point['validation_loss']:.3f}{speed}")
        if step == args.steps:
            break

        start = time.perf_counter()
        tokens, targets = batches.next(device)
        with autocast:
            loss = model(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        train_loss += loss.detach()
        if device.type == "cuda":
            torch.cuda.synchronize()
        window_seconds += time.perf_counter() - start
        seconds += time.perf_counter() - start
        bar.update()
    bar.close()

    return {
        "name": args.name or default_name(name, args, device, world_size),
        "optimizer": name,
        "learning_rates": learning_rates,
        "model": asdict(config),
        "num_parameters": num_parameters,
        "world_size": world_size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": args.dtype,
        "batch_per_rank": args.batch,
        "torch": torch.__version__,
        "state_bytes_per_rank": gather_numbers(peers.state_bytes(optimizer), device),
        "log": log,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["muon"], help="trained one after the other")
    parser.add_argument("--lr", type=float, help="instead of the optimizer's default")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="embedding and output head share their weight")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one for each local rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=int, default=25)
    parser.add_argument("--validation-batches", type=int, default=4)
    parser.add_argument("--name", help="name of the one run; the same name replaces it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "train_gpt")
    parser.add_argument("--picture", type=Path, help="where the curves go; default: loss.png under --out")
    args = parser.parse_args()
    if args.name and len(args.optimizer) > 1:
        parser.error("--name is for one optimizer")
    args.unusual = [
        f"{key.replace('_', '-')}{'' if value is True else value}"
        for key, value in vars(args).items()
        if key in ("lr", "steps", "batch", "context", "layers", "width", "heads", "tied", "dtype", "seed")
        and value != parser.get_default(key)
    ]
    return args


def default_name(optimizer: str, args: argparse.Namespace, device: torch.device, world_size: int) -> str:
    return "_".join([optimizer, f"{world_size}x{device.type}", *args.unusual])


def start_process_group(device_type: str | None) -> tuple[torch.device, int, int]:
    """Join torchrun's group, or be a group of one without torchrun."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device_type is None:
        needed = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device_type = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= needed else "cpu"
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, dist.get_rank(), dist.get_world_size()


def schedule(step: int, steps: int) -> float:
    """Learning rate relative to its peak: linear warm-up over 5 % of the steps, then a half cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def gather_numbers(number: int, device: torch.device) -> list[int]:
    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number], device=device))
    return [int(n) for n in numbers]


def report(run: dict[str, Any], directory: Path, picture: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{run['name']}.json"
    file.write_text(json.dumps(run, indent=1).replace("NaN", "null"))
    first, last = run["log"][0], run["log"][-1]
    print(f"validation loss {first['validation_loss']:.3f} -> {last['validation_loss']:.3f} in {last['seconds']:.0f} s")
    per_rank = ", ".join(f"{n / 2**20:.2f}" for n in run["state_bytes_per_rank"])
    print(f"optimizer state per rank: {per_rank} MiB")
    runs = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    plot(runs, picture)
    print(f"wrote {file} and, with {len(runs)} run(s), {picture}")


def plot(runs: list[dict[str, Any]], picture: Path) -> None:
    """Validation loss of all runs over tokens, the highest first in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    for run in sorted(runs, key=lambda run: -run["log"][-1]["validation_loss"]):
        losses = [point["validation_loss"] for point in run["log"]]
        # 8 bits lie on top of 32, and peers on top of ours.
        line = "--" if run["optimizer"] == "adamw8bit" or run["optimizer"].startswith("ddp") else "-"
        label = f"{losses[-1]:.3f}  {run['name'].replace('_', ' ')}, {in_words(run['learning_rates'])}"
        axis.plot([point["tokens"] * 1e-6 for point in run["log"]], losses, line, label=label)
    # The drop from a uniform guess would press all that matters into the lower third.
    top = max((run["log"][1:] or run["log"])[0]["validation_loss"] for run in runs) + 0.1
    axis.set(xlabel="million tokens", ylabel="validation loss, nats per byte", ylim=(None, top))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def in_words(learning_rates: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in learning_rates.items())


if __name__ == "__main__":
    main()
