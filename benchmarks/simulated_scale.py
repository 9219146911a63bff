"""How long does it take to plan and construct ShardedMuon for the largest published models on thousands of ranks, as rank r?

    python benchmarks/simulated_scale.py [--model NAME] [--ranks 1024] [--rank 7] [--plan-only] [--json FILE]

Planning a whole model for 1,024 ranks must take less than 10 s; more makes the exit status 1.

One process stands for rank r of torch's fake process group; every combination runs in a process of its own, so that peak
memory is its own. Three phases, with CPU seconds and resident memory:

    declare     the optimizer's own constructor up to its groups: routing, blocks, FLOPs and state of every parameter
    plan        the buckets of ReplicatedStorage (`form_buckets`), the work of the real constructor
    construct   what that constructor then allocates on rank r: the gradient shards of every bucket and the momentum, as
                RaggedTensors over the whole mesh, on the meta device

What is left out, because it needs the bytes of the parameters: copying them into the global buffers, and comparing them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import platform
import resource
import time
from pathlib import Path
from typing import Any

MOST_PLAN_SECONDS = {1024: 10.0}
MODELS = ("deepseek-v3-671b", "kimi-k2")
RANKS = (1024, 10240)


def parameters_of(shapes: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of a model of `model_shapes.json`, the embedding first and the head last."""
    groups = {name: group for group in shapes["distinct_groups"] for name in group["groups"]}
    layers = sorted((name for name in groups if name.startswith("layers.")), key=lambda name: int(name.split(".")[1]))
    outside = [name for name in groups if name not in layers]
    result = []
    for name in [*(n for n in outside if n != "head"), *layers, *(n for n in outside if n == "head")]:
        for kind, entry in enumerate(groups[name]["distinct_shapes"]):
            result += [(f"{name}.{kind}.{copy}", tuple(entry["shape"])) for copy in range(entry["count"])]
    return result


def measure(model: str, shapes: dict[str, Any], num_ranks: int, rank: int, plan_only: bool) -> dict[str, Any]:
    """One combination, in this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from vescale_optim import ShardedMuon
    from vescale_optim.capacity.declared import declare
    from vescale_optim.capacity.model_shapes import ModelShapes
    from vescale_optim.capacity.storages import default_bucket_bytes, plan_replicated

    phases = _Phases()
    named = [
        # As a list of names the model has no modules: say which tensors are embeddings and heads.
        (name if name.startswith("layers.") else f"{name.split('.')[0]}.weight" if len(shape) == 2 else name, shape)
        for name, shape in parameters_of(shapes)
    ]
    parameters = tuple(
        (name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))) for name, shape in named
    )
    phases.end("parameters")
    declaration = declare(ModelShapes(model, parameters), ShardedMuon)
    phases.end("declare")
    plan = plan_replicated(declaration, num_ranks, default_bucket_bytes(num_ranks))
    phases.end("plan")
    held = None
    if not plan_only:
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        held = construct(plan, init_device_mesh("cpu", (num_ranks,)))
        phases.end("construct")
        dist.destroy_process_group()
    flops = plan.owners.flops
    numel = sum(bucket.plan.numel for bucket in plan.buckets)
    return {
        "model": model,
        "ranks": num_ranks,
        "rank": rank,
        "tensors": len(parameters),
        "buckets": len(plan.buckets),
        "padding": sum(bucket.plan.padding for bucket in plan.buckets) / numel,
        "balance": max(flops) / (sum(flops) / len(flops)),
        "state_tensors": held,
        **phases.measured,
    }


class _Phases:
    """CPU seconds of each phase, and the peak of resident memory up to its end."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        self._began = time.process_time()

    def end(self, name: str) -> None:
        now = time.process_time()
        self.measured[f"{name}_seconds"] = now - self._began
        self.measured[f"{name}_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        self._began = now


def construct(plan: Any, mesh: Any) -> int:
    """Gradient shards and state of this rank on the meta device; returns the number of RaggedTensors."""
    import torch

    from vescale_optim import RaggedShard, RaggedTensor
    from vescale_optim.sharding.dbuffer import DBuffer

    group, device = mesh.get_group(), torch.device("meta")
    made = []
    for bucket in plan.buckets:
        grads = DBuffer(bucket.plan, group, bucket.dtype, device)
        for slot, tensor in enumerate(bucket.tensors):
            placement = RaggedShard.from_numels(tensor.shape, bucket.plan.shares(slot))
            made.append(RaggedTensor.from_local(grads.shard_view(slot), mesh, placement, tensor.shape))
            for spec in tensor.state:
                local = torch.zeros(grads.shard_view(slot).numel(), dtype=spec.dtype, device=device)
                made.append(RaggedTensor.from_local(local, mesh, placement, tensor.shape))
    return len(made)


def _in_a_process(queue: Any, arguments: tuple[Any, ...]) -> None:
    queue.put(measure(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"default {', '.join(MODELS)}; may be repeated")
    parser.add_argument("--ranks", type=int, action="append", help=f"default {', '.join(map(str, RANKS))}; may be repeated")
    parser.add_argument("--rank", type=int, default=7, help="which rank this process stands for; default 7")
    parser.add_argument("--plan-only", action="store_true", help="leave the construction out")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    models = json.loads(Path(__file__).with_name("model_shapes.json").read_text())
    rows = []
    print("model              ranks  tensors  buckets  padding  FLOPs    seconds: declare    plan  construct   peak GB")
    for model in arguments.model or MODELS:
        if model not in models:
            parser.error(f"no model {model!r}; give one of {', '.join(models)}")
        for num_ranks in arguments.ranks or RANKS:
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            given = (model, models[model], num_ranks, arguments.rank, arguments.plan_only)
            process = context.Process(target=_in_a_process, args=(queue, given))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{model} on {num_ranks} ranks failed with exit code {process.exitcode}")
            row = queue.get()
            rows.append(row)
            constructed = f"{row['construct_seconds']:9.1f}" if "construct_seconds" in row else "        -"
            peak = max(value for name, value in row.items() if name.endswith("_peak_gb"))
            print(
                f"{model:17}  {num_ranks:5,}  {row['tensors']:7,}  {row['buckets']:7}  {row['padding']:7.2%}  "
                f"{row['balance']:5.2f}             {row['declare_seconds']:7.1f}  {row['plan_seconds']:6.1f}  {constructed}"
                f"   {peak:7.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(
        f"{time.strftime('%Y-%m-%d')}, python {platform.python_version()}, torch {importlib.metadata.version('torch')}, "
        "one process, CPU seconds; memory includes torch itself"
    )
    slow = [row for row in rows if row["plan_seconds"] > MOST_PLAN_SECONDS.get(row["ranks"], math.inf)]
    for row in slow:
        print(f"MISS  {row['model']} on {row['ranks']:,} ranks: planned in {row['plan_seconds']:.1f} s")
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()
