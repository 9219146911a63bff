"""How long is a bare step of Shampoo, SOAP and 8-bit AdamW, on several ranks, on one, and of others on one?

    python benchmarks/suite_step.py --ranks 2           # starts its own ranks, 1 thread each, CPU
    pip install pytorch_optimizer heavyball torchao     # more rows; bitsandbytes is there anyway

Six matrices of 512x512 and two of 512x2048 get the same gradients everywhere; nothing but `step()` is timed. Candidates
take turns in an order that rotates. Those of one process run on rank 0 while the other ranks wait. Three figures:

    plain       a step that recomputes no root and no basis
    recompute   a step that recomputes all of them
    cycle       ten steps at a frequency of 10: the mean, and the longest step in means ("spike")

Ratios are to the second of a pair; at the end, parameters on several ranks and on one must be equal. How much faster
several ranks can be at all is measured beside it: a product that all ranks compute at once, over one rank alone. Where
cores share their vector units it comes near the number of ranks, and then nothing is gained by sharing the work.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from step_time import processor_name, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from vescale_optim import ShardedAdamW8bit, ShardedShampoo, ShardedSOAP

SHAPES = [(512, 512)] * 6 + [(512, 2048)] * 2
FREQUENCY = 10
NEVER = 10**9
LR = 1e-3
# Steps before the first timed one: longer than the turns of all tiles, so that with `NEVER` none is due any more.
WARM_UP = 12
# Of the measurement how fast ranks compute beside each other.
PRODUCTS = 10

Params = list[nn.Parameter]


@dataclass(frozen=True)
class Candidate:
    """How to build an optimizer, and how to tell it to recompute every so many steps."""

    build: Callable[[Params, DeviceMesh], Optimizer]
    set_frequency: Callable[[Optimizer, int], None] | None = None
    on_all_ranks: bool = False


def sharded_shampoo(params: Params, mesh: DeviceMesh) -> Optimizer:
    return ShardedShampoo(params, mesh, lr=LR, start_preconditioning_step=1, grad_sync="none")


def sharded_soap(params: Params, mesh: DeviceMesh) -> Optimizer:
    return ShardedSOAP(params, mesh, lr=LR, grad_sync="none")


def sharded_adamw8bit(params: Params, mesh: DeviceMesh) -> Optimizer:
    return ShardedAdamW8bit(params, mesh, lr=LR, grad_sync="none")


def their_shampoo(params: Params, mesh: DeviceMesh) -> Optimizer:
    from pytorch_optimizer.optimizer.shampoo import LayerWiseGrafting, ScalableShampoo

    return ScalableShampoo(
        params,
        lr=LR,
        start_preconditioning_step=1,
        preconditioning_compute_steps=FREQUENCY,
        block_size=1024,
        graft_type=LayerWiseGrafting.RMSPROP,
    )


def their_soap(params: Params, mesh: DeviceMesh) -> Optimizer:
    return importlib.import_module("pytorch_optimizer").SOAP(params, lr=LR)


def heavyball_soap(params: Params, mesh: DeviceMesh) -> Optimizer:
    heavyball = importlib.import_module("heavyball")
    # Its default tries kernels for many minutes on a CPU; nearly all the time of a step goes into products either way.
    heavyball.utils.compile_mode = None
    return heavyball.SOAP(params, lr=LR, precondition_frequency=FREQUENCY)


def bitsandbytes_adamw8bit(params: Params, mesh: DeviceMesh) -> Optimizer:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, lr=LR)


def torchao_adamw8bit(params: Params, mesh: DeviceMesh) -> Optimizer:
    return importlib.import_module("torchao.optim").AdamW8bit(params, lr=LR)


def set_in_groups(optimizer: Optimizer, frequency: int) -> None:
    for holder in [*optimizer.param_groups, *optimizer.state.values()]:
        if "precondition_frequency" in holder:
            holder["precondition_frequency"] = frequency


def set_compute_steps(optimizer: Optimizer, frequency: int) -> None:
    optimizer.preconditioning_compute_steps = frequency


def set_probability(optimizer: Optimizer, frequency: int) -> None:
    optimizer.precond_schedule = 1 / frequency


CANDIDATES = {
    "ShardedShampoo": Candidate(sharded_shampoo, set_in_groups, on_all_ranks=True),
    "ShardedShampoo, one process": Candidate(sharded_shampoo, set_in_groups),
    "pytorch_optimizer ScalableShampoo": Candidate(their_shampoo, set_compute_steps),
    "ShardedSOAP": Candidate(sharded_soap, set_in_groups, on_all_ranks=True),
    "ShardedSOAP, one process": Candidate(sharded_soap, set_in_groups),
    "pytorch_optimizer SOAP": Candidate(their_soap, set_in_groups),
    "heavyball SOAP, not compiled": Candidate(heavyball_soap, set_probability),
    "ShardedAdamW8bit": Candidate(sharded_adamw8bit, on_all_ranks=True),
    "ShardedAdamW8bit, one process": Candidate(sharded_adamw8bit),
    "bitsandbytes AdamW8bit": Candidate(bitsandbytes_adamw8bit),
    "torchao AdamW8bit": Candidate(torchao_adamw8bit),
}

# (ours, other, the ratio that we promise to stay under)
PROMISES = [
    ("ShardedShampoo", "ShardedShampoo, one process", 0.6),
    ("ShardedSOAP", "ShardedSOAP, one process", 0.6),
    ("ShardedShampoo, one process", "pytorch_optimizer ScalableShampoo", 0.9),
    ("ShardedSOAP, one process", "pytorch_optimizer SOAP", 0.9),
    ("ShardedSOAP, one process", "heavyball SOAP, not compiled", 0.9),
    ("ShardedAdamW8bit, one process", "bitsandbytes AdamW8bit", 0.6),
    ("ShardedAdamW8bit, one process", "torchao AdamW8bit", 0.6),
]


@dataclass
class Runner:
    """A candidate on its own copy of the parameters; without an optimizer on ranks that only wait."""

    name: str
    candidate: Candidate
    params: Params
    gradients: list[list[Tensor]]
    optimizer: Optimizer | None
    num_steps: int = 0
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    spikes: list[float] = field(default_factory=list)

    def steps(self, count: int, frequency: int) -> list[float]:
        """Milliseconds of every step on its slowest rank; other ranks than those of the candidate wait."""
        times = torch.zeros(count)
        dist.barrier()
        for number in range(count if self.optimizer is not None else 0):
            if self.candidate.set_frequency is not None:
                self.candidate.set_frequency(self.optimizer, frequency)
            for param, grad in zip(self.params, self.gradients[self.num_steps % len(self.gradients)], strict=True):
                param.grad = grad.clone()
            self.num_steps += 1
            if self.candidate.on_all_ranks:
                dist.barrier()
            start = time.perf_counter()
            self.optimizer.step()
            times[number] = 1e3 * (time.perf_counter() - start)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    def measure(self, count: int) -> None:
        if self.candidate.set_frequency is None:
            self._note("plain", statistics.mean(self.steps(count, NEVER)))
            return
        self._note("recompute", statistics.mean(self.steps(count, 1)))
        self._note("plain", statistics.mean(self.steps(count, NEVER)))
        cycle = self.steps(FREQUENCY, FREQUENCY)
        self._note("cycle", statistics.mean(cycle))
        self.spikes.append(max(cycle) / statistics.mean(cycle))

    def _note(self, phase: str, milliseconds: float) -> None:
        self.milliseconds.setdefault(phase, []).append(milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of each kind in a round")
    parser.add_argument("--only", nargs="*", help="candidates whose names contain one of these words")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks.launch(run_rank, args)


def run_rank(rank: int, world_size: int, store: str | None, args: argparse.Namespace) -> None:
    ranks.join(rank, world_size, store, device="cpu")
    meshes = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("all", "one"))
    runners, skipped = build_runners(meshes, args.only)
    for runner in runners:
        runner.steps(1, 1)
        runner.steps(WARM_UP - 1, NEVER)
    for round_number in range(args.rounds):
        for turn in range(len(runners)):
            runners[(round_number + turn) % len(runners)].measure(args.steps)
    slowdowns = {name: slowdown(getattr(torch, name), args.rounds) for name in ("float32", "bfloat16")}
    if rank == 0:
        result = summarize(runners, skipped) | {"setting": setting(args), "all_ranks_at_once": slowdowns}
        show(result)
        ranks.report(result, args.json)
    ranks.leave()


def build_runners(meshes: DeviceMesh, only: Sequence[str] | None) -> tuple[list[Runner], dict[str, str]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(4)]
    runners, skipped = [], {}
    for name, candidate in CANDIDATES.items():
        if only and not any(word.lower() in name.lower() for word in only):
            continue
        params = [nn.Parameter(value.clone()) for value in values]
        mesh = meshes["all" if candidate.on_all_ranks else "one"]
        try:
            optimizer = candidate.build(params, mesh) if candidate.on_all_ranks or dist.get_rank() == 0 else None
        except ImportError as error:
            skipped[name] = str(error)
            optimizer = None
        is_there = torch.tensor(float(optimizer is not None))
        dist.broadcast(is_there, 0)
        if is_there:
            runners.append(Runner(name, candidate, params, gradients, optimizer))
    return runners, skipped


def slowdown(dtype: torch.dtype, rounds: int) -> list[float]:
    """How many times as long a matrix product takes on the slowest rank when all ranks compute it at once."""
    left, right, out = (torch.ones(1024, 1024, dtype=dtype) for _ in range(3))

    def milliseconds(is_mine: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS if is_mine else 0):
            torch.mm(left, right, out=out)
        took = torch.tensor(1e3 * (time.perf_counter() - start))
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    milliseconds(True)
    pairs = [(milliseconds(True), milliseconds(dist.get_rank() == 0)) for _ in range(rounds)]
    return [together / alone for together, alone in pairs]


def summarize(runners: Sequence[Runner], skipped: dict[str, str]) -> dict[str, Any]:
    by_name = {runner.name: runner for runner in runners}
    ratios: dict[str, dict[str, Any]] = {}
    differences: dict[str, float] = {}
    for ours, other, promise in PROMISES:
        if ours not in by_name or other not in by_name:
            continue
        mine, theirs = by_name[ours].milliseconds, by_name[other].milliseconds
        ratios[f"{ours} / {other}"] = {
            "promise": promise,
            **{phase: [a / b for a, b in zip(mine[phase], theirs[phase], strict=True)] for phase in mine},
        }
    for name, runner in by_name.items():
        alone = by_name.get(f"{name}, one process")
        if alone is not None:
            pairs = zip(runner.params, alone.params, strict=True)
            differences[name] = max((a - b).abs().max().item() for a, b in pairs)
    rows = {name: {**runner.milliseconds, "spike": runner.spikes} for name, runner in by_name.items()}
    return {"ratios": ratios, "milliseconds": rows, "skipped": skipped, "difference_to_one_process": differences}


def show(result: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in result["setting"].items()))
    for name, why in result["skipped"].items():
        print(f"skipped {name}: {why}")
    phases, ranks = ("plain", "recompute", "cycle"), result["setting"]["ranks"]
    # Work shared by all ranks, all of it matrix products, relative to one rank that does it alone.
    shared = statistics.median(result["all_ranks_at_once"]["float32"]) / ranks
    print(f"\n{'ratio: median [lowest, highest] of rounds':66}" + "".join(f"{phase:>20}" for phase in phases))
    for name, ratio in result["ratios"].items():
        line = f"{name:66}" + "".join(f"{spread(ratio[p], '.2f') if p in ratio else '':>20}" for p in phases)
        # A cycle has no promise of its own: it is made of the other two.
        is_met = all(statistics.median(ratio[p]) <= ratio["promise"] for p in phases[:2] if p in ratio)
        ours, other = name.split(" / ")
        limit = f" (products shared by {ranks} ranks: {shared:.2f})" if other == f"{ours}, one process" else ""
        print(f"{line}   promised {ratio['promise']:.1f}: {'met' if is_met else 'missed'}{limit}")
    if ranks > 1:
        slowdowns = ", ".join(f"{spread(ratios, '.2f')} in {name}" for name, ratios in result["all_ranks_at_once"].items())
        print(f"a matrix product on {ranks} ranks at once over one rank alone: {slowdowns}")
    print(f"\n{'ms of a step':40}" + "".join(f"{phase:>24}" for phase in (*phases, "spike")))
    for name, row in result["milliseconds"].items():
        cells = [spread(row[p], ".1f") if row.get(p) else "" for p in phases]
        cells.append(spread(row["spike"], ".2f") if row["spike"] else "")
        print(f"{name:40}" + "".join(f"{cell:>24}" for cell in cells))
    print()
    for name, difference in result["difference_to_one_process"].items():
        print(f"largest difference between the parameters of {name} on all ranks and on one: {difference:.2g}")


def setting(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": processor_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "ranks": args.ranks,
        "threads": 1,
        "warm-up": WARM_UP,
        "rounds": args.rounds,
        "steps": args.steps,
    }


if __name__ == "__main__":
    main()
