"""How long do gradient synchronisation and the optimizer step take, against what a user would run instead?

    python benchmarks/step_time.py --ranks 2              # starts its own ranks, 1 thread each
    torchrun --nproc-per-node 8 benchmarks/step_time.py   # or joins torchrun's, on CUDA where there is one per rank

All candidates train the same GPT (25 M parameters by default) on the same batch, in one process group, taking turns in an
order that rotates. What is timed, on every rank at once, is a block of k whole iterations and one more forward:

    barrier | forward backward step zero_grad | ... k times ... | forward |      the slowest rank's time counts

The last forward pays for what a step leaves running, such as an all-gather of the parameters that overlaps the next
forward; nothing is hidden behind the end of the clock. The same block without any synchronisation and without a step is
timed in every round as well ("plain"). Then

    synchronisation + step  =  (block - median plain block) / k          what the candidate adds to forward and backward
    iteration               =  (block - median forward) / k              what the user waits for

Communication hidden behind backward therefore counts only as far as it slows backward down. Gradients, shapes, learning
rates and number of steps are the same, and at the end the parameters of each pair that should agree are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers
import psutil
import ranks
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from vescale_optim import ShardedAdamW, ShardedAdamW8bit, ShardedMuon, ShardedShampoo, ShardedSOAP, muon_param_groups

LR, ADAMW_LR = 1e-3, 1e-4

Build = Callable[[nn.Module, DeviceMesh], tuple[nn.Module, Optimizer]]


def sharded_muon(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    return model, ShardedMuon(model, mesh, lr=LR, adamw_lr=ADAMW_LR)


def sharded_adamw(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    return model, ShardedAdamW(model, mesh, lr=ADAMW_LR)


def sharded_adamw8bit(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    return model, ShardedAdamW8bit(model, mesh, lr=ADAMW_LR)


def sharded_shampoo(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    # Embedding and head to AdamW, as for Muon: their factors would be the work of the whole model once more.
    return model, ShardedShampoo(muon_param_groups(model), mesh, lr=LR, start_preconditioning_step=1)


def sharded_soap(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    return model, ShardedSOAP(muon_param_groups(model), mesh, lr=LR)


@dataclass(frozen=True)
class Comparison:
    """One of ours against its peers; `target` is the ratio to the first peer that we promise to stay under, if any.

    Where `is_same`, the first peer computes the same update, so that the parameters of both must agree.
    """

    name: str
    build: Build
    peers: dict[str, Build]
    target: float | None = None
    is_same: bool = True


COMPARISONS = [
    Comparison(
        "ShardedMuon",
        sharded_muon,
        {
            "DDP + torch.optim.Muon": lambda model, mesh: peers.ddp_muon(model, mesh, lr=LR, adamw_lr=ADAMW_LR),
            "FSDP2 + torch.optim.Muon": lambda model, mesh: peers.fsdp2_muon(model, mesh, lr=LR, adamw_lr=ADAMW_LR),
            "FSDP2 + muon-fsdp2": lambda model, mesh: peers.fsdp2_muon_fsdp2(model, mesh, lr=LR, adamw_lr=ADAMW_LR),
        },
        target=0.6,
    ),
    Comparison(
        "ShardedAdamW",
        sharded_adamw,
        {
            "DDP + AdamW(fused)": lambda model, mesh: peers.ddp_adamw(model, mesh, lr=ADAMW_LR),
            "DDP + ZeroRedundancyOptimizer": lambda model, mesh: peers.zero_adamw(model, mesh, lr=ADAMW_LR),
        },
        target=1.0,
    ),
    Comparison(
        "ShardedAdamW8bit",
        sharded_adamw8bit,
        {"DDP + bitsandbytes AdamW8bit": lambda model, mesh: peers.ddp_adamw8bit(model, mesh, lr=ADAMW_LR)},
        is_same=False,  # bitsandbytes quantises differently
    ),
    # Their bare steps have peers in suite_step.py.
    Comparison("ShardedShampoo", sharded_shampoo, {}),
    Comparison("ShardedSOAP", sharded_soap, {}),
]


@dataclass
class Candidate:
    """A model and its optimizer, with what was measured of them on this rank."""

    name: str
    module: nn.Module
    optimizer: Optimizer | None
    blocks: list[float] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    added_bytes: int = 0

    def iterate(self, batch: tuple[Tensor, Tensor]) -> None:
        self.module(*batch).backward()
        if self.optimizer is None:
            self.module.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    ranks.launch(run_rank, parse_arguments())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start when not under torchrun")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=2, help="k, iterations in a timed block")
    parser.add_argument("--warm-up", type=int, default=2, help="iterations of each candidate before the first round")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per rank and iteration, in sequences of 128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=6144)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    parser.add_argument("--only", nargs="*", default=None, help="candidates whose names contain one of these words")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_rank(local_rank: int, world_size: int, store: str | None, args: argparse.Namespace) -> None:
    device = ranks.join(local_rank, world_size, store, threads=args.threads, device=args.device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))

    context = min(128, args.tokens)
    config = GPTConfig(
        vocabulary=args.vocabulary, context=context, layers=args.layers, width=args.width, heads=args.width // 64
    )
    torch.manual_seed(0)
    model = GPT(config).to(device)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(args.vocabulary, (max(1, args.tokens // context), context + 1), device=device)
    batch = (tokens[:, :-1], tokens[:, 1:])

    plain = Candidate("plain", copy.deepcopy(model), None)
    candidates, skipped = build_candidates(model, mesh, args.only)
    for candidate in [plain, *candidates]:
        before = memory_in_use(device)
        for _ in range(args.warm_up):
            candidate.iterate(batch)
        candidate.collectives = count_collectives(candidate, batch)
        candidate.added_bytes += memory_in_use(device) - before
        if candidate.optimizer is not None:
            candidate.state_bytes = peers.state_bytes(candidate.optimizer)

    forwards = []
    turns = [plain, *candidates]
    for round_number in range(args.rounds):
        forwards.append(timed_block(plain, batch, 0, device))
        for turn in range(len(turns)):
            candidate = turns[(round_number + turn) % len(turns)]
            candidate.blocks.append(timed_block(candidate, batch, args.iterations, device))

    differences = compare_results({c.name: c for c in candidates})
    memory = gather({c.name: [c.state_bytes, c.added_bytes] for c in candidates})
    if dist.get_rank() == 0:
        result = summarize(plain, forwards, candidates, memory, args.iterations)
        result |= {"skipped": skipped, "largest_parameter_difference": differences, "model": asdict(config)}
        result |= {"num_parameters": model.num_parameters(), "setting": setting(args, device, world_size)}
        show(result)
        ranks.report(result, args.json)
    ranks.leave()


def build_candidates(
    model: nn.Module, mesh: DeviceMesh, only: list[str] | None
) -> tuple[list[Candidate], dict[str, str]]:
    """Every candidate on its own copy of the model, and why some are missing."""
    candidates, skipped = [], {}
    builders = {name: build for c in COMPARISONS for name, build in [(c.name, c.build), *c.peers.items()]}
    for name, build in builders.items():
        if only and not any(word.lower() in name.lower() for word in only):
            continue
        before = memory_in_use(mesh_device(model))
        own = copy.deepcopy(model)
        try:
            module, optimizer = build(own, mesh)
        except ImportError as error:
            skipped[name] = str(error)
            continue
        candidates.append(Candidate(name, module, optimizer, added_bytes=memory_in_use(mesh_device(model)) - before))
    return candidates, skipped


def timed_block(candidate: Candidate, batch: tuple[Tensor, Tensor], iterations: int, device: torch.device) -> float:
    """Seconds of the slowest rank for `iterations` iterations and one more forward."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        candidate.iterate(batch)
    with torch.no_grad():
        candidate.module(*batch)
    synchronize(device)
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def count_collectives(candidate: Candidate, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Collectives of one iteration and the forward after it, by kind; the profiler sees those that C++ starts, too."""
    with muted_stderr(), torch.autograd.profiler.profile() as profile:
        candidate.iterate(batch)
        with torch.no_grad():
            candidate.module(*batch)
        dist.barrier()
    names = [event.name.split(":", 1)[1] for event in profile.function_events if event.name.startswith(("gloo:", "nccl:"))]
    counts = Counter(names)
    counts.pop("barrier", None)
    return dict(counts)


def compare_results(candidates: dict[str, Candidate]) -> dict[str, float]:
    """Largest parameter difference between ours and its DDP peer after equally many steps on the same batch."""
    differences = {}
    for comparison in COMPARISONS:
        first_peer = next(iter(comparison.peers), None)
        if not comparison.is_same or comparison.name not in candidates or first_peer not in candidates:
            continue
        ours, theirs = (candidates[name].module.parameters() for name in (comparison.name, first_peer))
        differences[comparison.name] = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    return differences


def summarize(
    plain: Candidate,
    forwards: list[float],
    candidates: list[Candidate],
    memory: list[dict[str, list[int]]],
    iterations: int,
) -> dict[str, Any]:
    plain_block, forward = statistics.median(plain.blocks), statistics.median(forwards)
    rows = {}
    for candidate in candidates:
        rows[candidate.name] = {
            "sync_and_step_ms": [1e3 * (block - plain_block) / iterations for block in candidate.blocks],
            "iteration_ms": [1e3 * (block - forward) / iterations for block in candidate.blocks],
            "collectives": candidate.collectives,
            "state_bytes_per_rank": [of_rank[candidate.name][0] for of_rank in memory],
            "added_bytes_per_rank": [of_rank[candidate.name][1] for of_rank in memory],
        }
    ratios = {}
    for comparison in COMPARISONS:
        for number, peer in enumerate(comparison.peers):
            if comparison.name not in rows or peer not in rows:
                continue
            ours, theirs = rows[comparison.name], rows[peer]
            ratios[f"{comparison.name} / {peer}"] = {
                key: [a / b for a, b in zip(ours[key], theirs[key], strict=True)]
                for key in ("sync_and_step_ms", "iteration_ms")
            } | {"target": comparison.target if number == 0 else None}
    plain_ms = [1e3 * (block - forward) / iterations for block in plain.blocks]
    return {"ratios": ratios, "candidates": rows, "plain_iteration_ms": plain_ms}


def show(result: dict[str, Any]) -> None:
    given = result["setting"]
    print(f"{result['num_parameters']:,} parameters, {result['model']}")
    print(", ".join(f"{key} {value}" for key, value in given.items()))
    for name, why in result["skipped"].items():
        print(f"skipped {name}: {why}")
    print(f"\nplain forward + backward: {spread(result['plain_iteration_ms'], '.1f')} ms")

    print(f"\n{'ratio: median [lowest, highest] of rounds':52}{'sync + step':>22}{'iteration':>22}")
    for name, ratio in result["ratios"].items():
        line = f"{name:52}{spread(ratio['sync_and_step_ms'], '.2f'):>22}{spread(ratio['iteration_ms'], '.2f'):>22}"
        if ratio["target"] is not None:
            is_met = statistics.median(ratio["sync_and_step_ms"]) <= ratio["target"]
            line += f"   target {ratio['target']:.1f}: {'met' if is_met else 'missed'}"
        print(line)

    print(f"\n{'ms':32}{'sync + step':>26}{'iteration':>26}")
    for name, row in result["candidates"].items():
        print(f"{name:32}{spread(row['sync_and_step_ms'], '.1f'):>26}{spread(row['iteration_ms'], '.1f'):>26}")

    print(f"\n{'MiB on each rank':32}{'optimizer state':>24}{'added by the candidate':>26}   collectives per iteration")
    for name, row in result["candidates"].items():
        state, added = (mebibytes(row[key]) for key in ("state_bytes_per_rank", "added_bytes_per_rank"))
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(row["collectives"].items())) or "none"
        print(f"{name:32}{state:>24}{added:>26}   {sum(row['collectives'].values())}: {counts}")
    for name, difference in result["largest_parameter_difference"].items():
        print(f"\nlargest difference between the parameters of {name} and its DDP peer: {difference:.2g}", end="")
    print()


def setting(args: argparse.Namespace, device: torch.device, world_size: int) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "ranks": world_size,
        "threads": args.threads,
        "tokens per rank": args.tokens,
        "warm-up": args.warm_up,
        "rounds": args.rounds,
        "iterations per block": args.iterations,
    }


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def mebibytes(values: list[int]) -> str:
    return " ".join(f"{value / 2**20:.1f}" for value in values)


@contextlib.contextmanager
def muted_stderr() -> Iterator[None]:
    """torch 2.13's profiler prints a line of its own when it starts and when it stops."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mesh_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def memory_in_use(device: torch.device) -> int:
    """Bytes allocated on the card, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
