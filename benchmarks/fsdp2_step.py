"""How long does a Muon step take on a model that FSDP2 has sharded, against the Muons that people use there?

    python benchmarks/fsdp2_step.py --ranks 2 [--json FILE]

Three models: (a) eight layers of 768x256, 256x256, 1024x256, 256x1024 with an embedding, a head and 1-D parameters on
AdamW; (b) 24 matrices of 512x512 to 1024x4096; (c) 200 matrices of 128x128. `fully_shard` wraps each layer and the root;
gradients are set once, the same for all; nothing but `optimizer.step()` is timed, on all ranks at once, and the slowest
rank counts. Candidates take turns in one process group. Messages of one step are what the groups themselves count.

Peers from PyPI (muon-fsdp2, dtensor-muon, muonium) take part where they are installed and run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from peers import Several
from step_time import processor_name, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from vescale_optim import ShardedMuon

LR, ADAMW_LR = 1e-3, 1e-4


class Layers(nn.Module):
    """Matrices in layers, and what a model has around them; never run, only stepped."""

    def __init__(self, layers: list[list[tuple[int, int]]], width: int = 0, vocabulary: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList([nn.Parameter(0.02 * torch.randn(shape)) for shape in layer]) for layer in layers
        )
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, width)
            self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in layers])
            self.head = nn.Linear(width, vocabulary, bias=False)

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(matrices, what goes to AdamW)."""
        matrices = list(self.layers.parameters())
        chosen = {id(param) for param in matrices}
        return matrices, [param for param in self.parameters() if id(param) not in chosen]


def transformer() -> Layers:
    return Layers([[(768, 256), (256, 256), (1024, 256), (256, 1024)]] * 8, width=256, vocabulary=4096)


def large_matrices() -> Layers:
    return Layers([[(512, 512), (512, 2048), (1024, 1024), (1024, 4096)]] * 6)


def small_matrices() -> Layers:
    return Layers([[(128, 128)] * 20] * 10)


MODELS: dict[str, Callable[[], Layers]] = {"a": transformer, "b": large_matrices, "c": small_matrices}


def ours(model: Layers, mesh: DeviceMesh) -> ShardedMuon:
    matrices, others = model.split()
    groups = [{"params": matrices}] + ([{"params": others, "algorithm": "adamw"}] if others else [])
    return ShardedMuon(groups, mesh, lr=LR, adamw_lr=ADAMW_LR)


def torch_muon(model: Layers, mesh: DeviceMesh) -> Several:
    return _with_adamw(torch.optim.Muon, model)


def muon_fsdp2(model: Layers, mesh: DeviceMesh) -> Optimizer:
    from muon_fsdp2 import Muon

    matrices, others = model.split()
    groups = [dict(params=matrices, lr=LR, use_muon=True, rms_scale=False, weight_decay=0.1)]
    return Muon(groups + ([dict(params=others, lr=ADAMW_LR, use_muon=False)] if others else []))


def dtensor_muon(model: Layers, mesh: DeviceMesh) -> Several:
    from dtensor_muon import Muon

    return _with_adamw(Muon, model)


def muonium(model: Layers, mesh: DeviceMesh) -> Several:
    from muonium import Muon

    return _with_adamw(Muon, model)


def _with_adamw(muon: type[Optimizer], model: Layers) -> Several:
    matrices, others = model.split()
    rest = [AdamW(others, lr=ADAMW_LR, fused=True)] if others else []
    return Several(muon(matrices, lr=LR), *rest)


CANDIDATES: dict[str, Callable[[Layers, DeviceMesh], Any]] = {
    "ShardedMuon": ours,
    "torch.optim.Muon": torch_muon,
    "muon-fsdp2": muon_fsdp2,
    "dtensor-muon": dtensor_muon,
    "muonium": muonium,
}

# What we promise to stay under, on 2 CPU ranks: ratio to a peer; "best" is the fastest one that runs.
TARGETS = {("a", "muon-fsdp2"): 0.40, ("a", "torch.optim.Muon"): 0.13, ("c", "best"): 0.6}


@dataclass
class Candidate:
    """One optimizer over its own sharded copy of a model."""

    name: str
    model: Layers
    optimizer: Any
    gradients: list[Tensor]
    seconds: list[float] = field(default_factory=list)
    messages: int = 0

    def give_gradients(self) -> None:
        """The same every time; some peers edit or drop them."""
        for param, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            param.grad = DTensor.from_local(
                gradient.clone(), param.device_mesh, param.placements, run_check=False, shape=param.shape,
                stride=param.stride(),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--json", type=Path)
    ranks.launch(run_rank, parser.parse_args())


def run_rank(rank: int, world_size: int, store: str | None, args: argparse.Namespace) -> None:
    ranks.join(rank, world_size, store, threads=args.threads, device="cpu")
    mesh = init_device_mesh("cpu", (world_size,))
    results = {name: measure(MODELS[name], mesh, args) for name in args.models}
    if rank == 0:
        setting = {
            "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "device": processor_name(),
            "ranks": world_size, "threads": args.threads, "warm-up": args.warm_up, "rounds": args.rounds,
        }
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        for name, result in results.items():
            show(name, result)
        ranks.report({"setting": setting, "models": results}, args.json)
    ranks.leave()


def measure(make_model: Callable[[], Layers], mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, Any]:
    candidates, skipped = [], {}
    for name in args.only:
        torch.manual_seed(0)
        model = make_model()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        gradients = [torch.randn(param._local_tensor.shape, generator=generator) for param in model.parameters()]
        try:
            candidate = Candidate(name, model, CANDIDATES[name](model, mesh), gradients)
            for _ in range(args.warm_up):
                candidate.give_gradients()
                candidate.optimizer.step()
        except Exception as error:  # peers fail in many ways; a benchmark says so and goes on
            if name == "ShardedMuon":
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        candidates.append(candidate)
    for candidate in candidates:
        candidate.messages = count_messages(candidate)
    for round_number in range(args.rounds):
        for turn in range(len(candidates)):
            candidate = candidates[(round_number + turn) % len(candidates)]
            candidate.seconds.append(timed_step(candidate))
    return {
        "num_elements": sum(param.numel() for param in make_model().parameters()),
        "ms": {candidate.name: [1e3 * value for value in candidate.seconds] for candidate in candidates},
        "messages": {candidate.name: candidate.messages for candidate in candidates},
        "skipped": skipped,
    }


def timed_step(candidate: Candidate) -> float:
    """Seconds of the slowest rank."""
    candidate.give_gradients()
    dist.barrier()
    start = time.perf_counter()
    candidate.optimizer.step()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def count_messages(candidate: Candidate) -> int:
    """Collectives and messages that this rank takes part in during one step.

    Not by the profiler (torch 2.13): it ends the record of an asynchronous collective on gloo's thread.
    """
    candidate.give_gradients()
    before = numbers_of_messages()
    candidate.optimizer.step()
    return sum(number - before[group] for group, number in numbers_of_messages().items())


def numbers_of_messages() -> dict[dist.ProcessGroup, int]:
    """By group, how many collectives and messages it has seen."""
    return {group: group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map}


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\nmodel ({name}), {result['num_elements']:,} elements")
    own = result["ms"]["ShardedMuon"]
    medians = {peer: statistics.median(values) for peer, values in result["ms"].items()}
    best = min((peer for peer in medians if peer != "ShardedMuon"), key=medians.__getitem__, default=None)
    print(f"  {'':22}{'ms':>28}{'ours / it':>28}{'messages':>12}")
    for peer, values in result["ms"].items():
        ratio = "" if peer == "ShardedMuon" else spread([a / b for a, b in zip(own, values, strict=True)], ".2f")
        print(f"  {peer:22}{spread(values, '.1f'):>28}{ratio:>28}{result['messages'][peer]:>12}", end="")
        for key in (peer, "best" if peer == best else None):
            target = TARGETS.get((name, key))
            if target is not None:
                met = medians["ShardedMuon"] / medians[peer] <= target
                print(f"   target {target}: {'met' if met else 'missed'}", end="")
        print()
    for peer, why in result["skipped"].items():
        print(f"  {peer:22} does not run: {why}")


if __name__ == "__main__":
    main()
