"""How long does an iteration under fully_shard take, and how much memory, against torch FSDP2 around the same model?

    python benchmarks/fully_shard.py --ranks 2              # starts its own ranks, 1 thread each
    torchrun --nproc-per-node 8 benchmarks/fully_shard.py   # or joins torchrun's, on CUDA where there is one per rank

Two models of about 100 M parameters, every layer wrapped: linear layers, whose gradient is as large as the layer, and a
GPT. Each in fp32, and in bf16 with fp32 reduction and fp32 shards. Muon gets smaller ones: its Newton-Schulz takes the time.
Both sides train the same batch in one process group and take turns; the slowest rank counts:

    barrier | forward backward step zero_grad | ... k times ... |

Memory is measured apart from time: bytes that torch allocates, from the construction of a candidate to the end of its second
iteration. Its transient peak is the peak minus what stays: parameter, gradient and optimizer state shards. Activations are
transient, and the same for all. Bytes copied are those that FSDP2's copy-in and copy-out kernels write, and those that
all copies write, casts included.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import peers
import ranks
import step_time
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_optim import ShardedMuon
from vescale_optim.sharding.fully_shard import fully_shard

LR = 1e-3

Policy = MixedPrecisionPolicy
POLICIES = {"fp32": Policy(), "bf16": Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


class LinearLayers(nn.Module):
    """Square linear layers with a nonlinearity between them; the loss is the mean square of the result."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def wrapped_modules(model: nn.Module) -> list[nn.Module]:
    """From the inside to the outside; embedding and head by themselves, as is good practice under FSDP2."""
    return [*model.layers, model] if isinstance(model, LinearLayers) else [model.token, *model.blocks, model.head, model]


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    if isinstance(model, GPT):
        return peers.split_for_muon(model)
    return list(model.parameters()), []


def ours_adamw(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> Optimizer:
    for module in wrapped_modules(model):
        fully_shard(module, mesh, mp_policy=policy)
    return AdamW(model.parameters(), lr=LR, fused=True)


def fsdp2_adamw(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> Optimizer:
    for module in wrapped_modules(model):
        fsdp2(module, mesh=mesh, mp_policy=policy)
    return AdamW(model.parameters(), lr=LR, fused=True)


def ours_muon(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> Optimizer:
    for module in wrapped_modules(model):
        fully_shard(module, mesh, optimizer=ShardedMuon, mp_policy=policy)
    return ShardedMuon(model, mesh, lr=LR, adamw_lr=LR)


def fsdp2_muon(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> Optimizer:
    for module in wrapped_modules(model):
        fsdp2(module, mesh=mesh, mp_policy=policy)
    matrices, others = matrices_and_others(model)
    parts = [Muon(matrices, lr=LR)] + ([AdamW(others, lr=LR, fused=True)] if others else [])
    return peers.Several(*parts)


@dataclass(frozen=True)
class Pair:
    """Ours and the peer; targets of time, transient peak and total peak, as ratios. `width` names the argument."""

    ours: str
    theirs: str
    width: str
    time_target: float
    transient_target: float = 0.7
    peak_target: float = 1.0


BUILDERS: dict[str, Callable[[nn.Module, DeviceMesh, Policy], Optimizer]] = {
    "fully_shard + AdamW": ours_adamw,
    "FSDP2 + AdamW": fsdp2_adamw,
    "fully_shard + ShardedMuon": ours_muon,
    "FSDP2 + torch.optim.Muon": fsdp2_muon,
}
PAIRS = [
    Pair("fully_shard + AdamW", "FSDP2 + AdamW", "width", 0.85),
    Pair("fully_shard + ShardedMuon", "FSDP2 + torch.optim.Muon", "muon_width", 0.6),
]


@dataclass
class Candidate:
    """A wrapped model with its optimizer, and what was measured of it on this rank, in seconds and bytes."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    persistent: int = 0
    peak: int = 0
    copied_by_fsdp: int = 0
    copied: int = 0
    seconds: list[float] = field(default_factory=list)

    def iterate(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    ranks.launch(run_rank, parse_arguments())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start when not under torchrun")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=1, help="k, iterations in a timed block")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per rank and iteration")
    parser.add_argument("--width", type=int, default=4096, help="of the 6 linear layers; the GPT has 3/8 of it")
    parser.add_argument("--muon-width", type=int, default=1024, help="the same for the pair with Muon")
    parser.add_argument("--layers", type=int, default=6, help="linear layers; the GPT has half as many blocks")
    parser.add_argument("--models", nargs="*", choices=["linear", "gpt"], default=["linear", "gpt"])
    parser.add_argument("--dtypes", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--only", nargs="*", default=None, help="pairs whose names contain one of these words")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_rank(local_rank: int, world_size: int, store: str | None, args: argparse.Namespace) -> None:
    device = ranks.join(local_rank, world_size, store, threads=args.threads, device=args.device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    pairs = [pair for pair in PAIRS if not args.only or any(word.lower() in pair.ours.lower() for word in args.only)]
    results = []
    for pair, kind, dtype in product(pairs, args.models, args.dtypes):
        results.append(compare(pair, kind, dtype, mesh, device, args))
        if dist.get_rank() == 0:
            show(results[-1])
    if dist.get_rank() == 0:
        setting = step_time.setting(argparse.Namespace(**vars(args), warm_up=2), device, world_size)
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        ranks.report({"setting": setting, "results": results}, args.json)
    ranks.leave()


def make_model(kind: str, width: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return LinearLayers(width, args.layers)
    own = 3 * width // 8
    config = GPTConfig(
        vocabulary=4 * width, context=min(128, args.tokens), layers=args.layers // 2, width=own, heads=max(1, own // 64)
    )
    return GPT(config)


def make_batch(kind: str, width: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(1 + dist.get_rank())
    if kind == "linear":
        return (torch.randn(args.tokens, width, device=device),)
    context = min(128, args.tokens)
    tokens = torch.randint(4 * width, (max(1, args.tokens // context), context + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def compare(
    pair: Pair, kind: str, dtype: str, mesh: DeviceMesh, device: torch.device, args: argparse.Namespace
) -> dict[str, Any]:
    """Everything about one model in one precision under one kind of optimizer."""
    width = getattr(args, pair.width)
    model, batch = make_model(kind, width, args).to(device), make_batch(kind, width, args, device)
    candidates = [
        measured_candidate(name, model, batch, mesh, POLICIES[dtype], device) for name in (pair.ours, pair.theirs)
    ]
    for candidate in candidates:
        with CopiedBytes() as copies:
            candidate.iterate(batch)
        candidate.copied_by_fsdp, candidate.copied = copies.by_fsdp, copies.total
    for round_number in range(args.rounds):
        for candidate in candidates if round_number % 2 else reversed(candidates):
            candidate.seconds.append(timed_block(candidate, batch, args.iterations, device))
    ours, theirs = rows = [
        {
            "name": c.name,
            "iteration_ms": [1e3 * seconds / args.iterations for seconds in c.seconds],
            "persistent_bytes": c.persistent,
            "peak_bytes": c.peak,
            "transient_bytes": c.peak - c.persistent,
            "copy_in_and_out_bytes": c.copied_by_fsdp,
            "copied_bytes": c.copied,
        }
        for c in candidates
    ]
    return {
        "model": kind,
        "dtype": dtype,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "iteration_ratio": [a / b for a, b in zip(ours["iteration_ms"], theirs["iteration_ms"], strict=True)],
        "transient_peak_ratio": ours["transient_bytes"] / theirs["transient_bytes"],
        "peak_ratio": ours["peak_bytes"] / theirs["peak_bytes"],
        "targets": [pair.time_target, pair.transient_target, pair.peak_target],
        "candidates": rows,
        "largest_difference": largest_difference(candidates[0].model, candidates[1].model),
    }


def measured_candidate(
    name: str, model: nn.Module, batch: tuple[Tensor, ...], mesh: DeviceMesh, policy: Policy, device: torch.device
) -> Candidate:
    """Build a candidate on a copy of the model, run it twice, and note the largest number of bytes alive."""
    with AllocatedBytes(device) as allocated:
        own = copy.deepcopy(model)
        candidate = Candidate(name, own, BUILDERS[name](own, mesh, policy))
        allocated.watch()
        for _ in range(2):
            candidate.iterate(batch)
    candidate.peak = allocated.peak
    params = list(own.parameters())
    shards = sum(local(p).untyped_storage().nbytes() for p in {storage_key(p): p for p in params}.values())
    candidate.persistent = 2 * shards + peers.state_bytes(candidate.optimizer)
    return candidate


def storage_key(param: Tensor) -> int:
    return local(param).untyped_storage()._cdata


def local(param: Tensor) -> Tensor:
    return getattr(param, "_local_tensor", param)


def timed_block(candidate: Candidate, batch: tuple[Tensor, ...], iterations: int, device: torch.device) -> float:
    """Seconds of the slowest rank for `iterations` iterations."""
    step_time.synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        candidate.iterate(batch)
    step_time.synchronize(device)
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a.detach().full_tensor() - b.detach().full_tensor()).abs().max().item() for a, b in pairs)


class AllocatedBytes:
    """Bytes that torch allocates inside, over what was alive before; `peak` counts from `watch` on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0

    def __enter__(self) -> AllocatedBytes:
        if self.device.type == "cuda":
            self._before = torch.cuda.memory_allocated()
        else:
            with step_time.muted_stderr():
                self._profile = torch.profiler.profile(profile_memory=True, acc_events=True)
                self._profile.__enter__()
        return self

    def watch(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._begin = time.time_ns()

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated() - self._before
            return
        with step_time.muted_stderr():
            self._profile.__exit__(*error)
        alive = 0
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            alive += event.nbytes()
            if event.start_ns() >= self._begin:
                self.peak = max(self.peak, alive)


class CopiedBytes(TorchDispatchMode):
    """Bytes that copies write: FSDP2's copy-in and copy-out kernels by themselves, and all ops that only move or cast."""

    BY_FSDP = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
    COPIES = ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::clone", "aten::_foreach_copy_")

    def __init__(self) -> None:
        super().__init__()
        self.by_fsdp = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in self.BY_FSDP:
            self.by_fsdp += self._written(func, args, kwargs or {}, result)
            self.total += self._written(func, args, kwargs or {}, result)
        elif name in self.COPIES:
            self.total += sum(local(t).nbytes for t in tree_leaves(result if result is not None else args[0]))
        return result

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any, result: Any) -> int:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if func._schema.name == "fsdp::all_gather_copy_in":
            return sum(t.nbytes for t in given["all_gather_inputs"])
        return sum(t.nbytes for t in tree_leaves(given["out"]))


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}, {result['dtype']}: {result['num_parameters']:,} parameters")
    ratios = {
        "iteration": statistics.median(result["iteration_ratio"]),
        "transient peak": result["transient_peak_ratio"],
        "total peak": result["peak_ratio"],
    }
    for (name, value), target in zip(ratios.items(), result["targets"], strict=True):
        text = step_time.spread(result["iteration_ratio"], ".2f") if name == "iteration" else f"{value:.2f}"
        print(f"    {name:16}{text:24}target {target:g}: {'met' if value <= target else 'missed'}")
    titles = f"{'MiB: stay':>12}{'transient':>11}{'peak':>8}{'copied in, out':>16}{'all copies':>12}"
    print(f"    {'':28}{'iteration, ms':>26}{titles}")
    for row in result["candidates"]:
        columns = ["persistent_bytes", "transient_bytes", "peak_bytes", "copy_in_and_out_bytes", "copied_bytes"]
        sizes = [f"{row[column] / 2**20:.0f}" for column in columns]
        line = f"    {row['name']:28}{step_time.spread(row['iteration_ms'], '.0f'):>26}{sizes[0]:>12}{sizes[1]:>11}"
        print(f"{line}{sizes[2]:>8}{sizes[3]:>16}{sizes[4]:>12}")
    print(f"    largest difference between the parameters of both: {result['largest_difference']:.2g}", flush=True)


if __name__ == "__main__":
    main()
