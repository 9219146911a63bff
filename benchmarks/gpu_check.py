"""Does it hold on one CUDA device? What the tests check on CPU, on CUDA with NCCL, then timings and a table.

    python benchmarks/gpu_check.py                 # under 6 minutes; exits 1 where a check fails
    python benchmarks/gpu_check.py --only memory   # checks whose names contain a word
    python benchmarks/gpu_check.py --device cpu    # tries the script itself: small, without the checks that need a card

Without a device it says so and exits 0. Writes benchmarks/results/gpu_check.json. A check is a function with `@check`: it
returns what it measured and raises AssertionError where a promise is broken. New ones are added below the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

# Also without an installation: a machine with the card may have no network.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import peers
from gpt import GPT, GPTConfig

from tests.support import values
from tests.support.reference import OneDevice, adamw, muon, muon_for_matrices
from tests.support.reference8bit import OneDevice8bit
from tests.support.reference_shampoo import Shampoo
from tests.support.reference_soap import SOAP
from vescale_optim import ShardedAdamW, ShardedAdamW8bit, ShardedMuon, ShardedShampoo, ShardedSOAP
from vescale_optim.optimizers import adamw8bit
from vescale_optim.optimizers.orthogonalize import newton_schulz_flops, orthogonalize

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where the checks run; `is_small` shrinks the models so that a CPU can try the script."""

    device: torch.device
    mesh: DeviceMesh
    is_small: bool

    def gpt(self, **sizes: Any) -> GPT:
        """A GPT-2 sized model (163 M parameters), by default."""
        config = GPTConfig(**{"vocabulary": 50304, "context": 256, "layers": 12, "width": 768, "heads": 12} | sizes)
        if self.is_small:
            config = GPTConfig(vocabulary=256, context=32, layers=2, width=64, heads=2)
        torch.manual_seed(0)
        return GPT(config).to(self.device)

    def batch(self, model: GPT, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(model.config.vocabulary, (4, model.config.context + 1), generator=generator)
        tokens = tokens.to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Outcome:
    """What became of a check: "passed", "failed", or "skipped" where it needs a card."""

    name: str
    status: str
    seconds: float = 0.0
    numbers: Numbers = field(default_factory=dict)
    fault: str = ""


# In square tiles of 16 rows.
TILED_SHAPES: dict[str, tuple[int, ...]] = {"stack": (3, 16, 16), "even": (48, 32), "bias": (13,)}

# (dtype of the parameters, of their master copy)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "bf16, fp32 master": (torch.bfloat16, torch.float32),
}
TILED = dict(shapes=TILED_SHAPES, reference_device="cpu", precisions=["fp32", "bf16"])

CHECKS: list[Callable[[Bench], Numbers]] = []
NEED_A_CARD: set[str] = set()


def check(function: Callable[[Bench], Numbers]) -> Callable[[Bench], Numbers]:
    CHECKS.append(function)
    return function


def check_on_card(function: Callable[[Bench], Numbers]) -> Callable[[Bench], Numbers]:
    NEED_A_CARD.add(function.__name__)
    return check(function)


# -- what the tests check --------------------------------------------------------------------------------------------


@check
def muon_equals_torch(bench: Bench) -> Numbers:
    """Batched CUDA kernels round differently from single ones, so the bound is bf16 noise of the update."""

    def build(parameters: Any, **options: Any) -> Optimizer:
        return ShardedMuon(parameters, bench.mesh, lr=0.02, adamw_lr=1e-3, **options)

    rules = muon_for_matrices(muon(lr=0.02), adamw(lr=1e-3))
    return errors_against_reference(bench, build, partial(OneDevice, rules=rules), bound=0.05)


@check
def adamw_equals_torch_bit_for_bit(bench: Bench) -> Numbers:
    def build(parameters: Any, **options: Any) -> Optimizer:
        return ShardedAdamW(parameters, bench.mesh, lr=1e-3, **options)

    reference = partial(OneDevice, rules=lambda name, value: adamw(lr=1e-3))
    return errors_against_reference(bench, build, reference, bound=0.0)


@check
def adamw8bit_follows_the_reference(bench: Bench) -> Numbers:
    """Codes of bitsandbytes' kernel differ from the nearest ones at ties, and where they keep a sign."""

    def build(parameters: Any, **options: Any) -> Optimizer:
        return ShardedAdamW8bit(parameters, bench.mesh, lr=1e-3, **options)

    reference = partial(OneDevice8bit, lr=1e-3)
    return errors_against_reference(bench, build, reference, bound=0.05, reference_device="cpu")


@check
def shampoo_follows_the_reference(bench: Bench) -> Numbers:
    """Tiles in batches on the card, one by one on the CPU. Eigenvalues are lifted to 1e-2, so that rounding stays small."""
    arguments = dict(lr=0.01, matrix_eps=1e-2, momentum=0.9)

    def build(parameters: Any, **options: Any) -> Optimizer:
        kinds = dict(max_preconditioner_dim=16, precondition_frequency=2)
        return ShardedShampoo(parameters, bench.mesh, **arguments, **kinds, **options)

    reference = partial(Shampoo, block=16, frequency=2, **arguments)
    return errors_against_reference(bench, build, reference, bound=0.02, **TILED)


@check
def soap_follows_the_reference(bench: Bench) -> Numbers:
    """Square tiles: the eigenvectors of a factor without full rank are arbitrary."""

    def build(parameters: Any, **options: Any) -> Optimizer:
        kinds = dict(max_precond_dim=16, precondition_frequency=2)
        return ShardedSOAP(parameters, bench.mesh, lr=0.01, **kinds, **options)

    reference = partial(SOAP, block=16, frequency=2, lr=0.01)
    return errors_against_reference(bench, build, reference, bound=0.02, **TILED)


def errors_against_reference(
    bench: Bench,
    build: Callable[..., Optimizer],
    reference: Callable[..., Any],
    *,
    bound: float,
    shapes: Mapping[str, tuple[int, ...]] = values.MIXED_SHAPES,
    reference_device: str | None = None,
    precisions: Sequence[str] = tuple(PRECISIONS),
) -> Numbers:
    """Error of the worst parameter relative to the distance it moved in five steps, by precision.

    Args:
        reference: makes it from the first values, and `master_dtype` where there is one.
        reference_device: where it computes; None for the device that is checked.
        precisions: keys of `PRECISIONS`.
    """
    beside = bench.device if reference_device is None else torch.device(reference_device)
    numbers = {}
    for label in precisions:
        dtype, master = PRECISIONS[label]
        start = values.parameter_values(shapes, dtype=dtype)
        module = values.parameter_module(to_device(start, bench.device))
        optimizer = build(module.named_parameters(), master_dtype=master)
        expected = reference(to_device(start, beside), **({} if master is None else {"master_dtype": master}))
        for step in range(5):
            grads = values.rank_gradients(shapes, 1, seed=step, dtype=dtype).mean
            values.backward(module.named_parameters(), to_device(grads, bench.device))
            optimizer.step()
            optimizer.zero_grad()
            expected.step(to_device(grads, beside))
        errors = {
            name: relative_error(param.cpu(), expected.params[name].cpu(), start[name])
            for name, param in module.named_parameters()
        }
        worst = max(errors, key=errors.__getitem__)
        numbers[label] = errors[worst]
        # A parameter in bf16 may be rounded to its other neighbour.
        allowed = bound if dtype == torch.float32 else 2 * bound
        assert errors[worst] <= allowed, f"{label}: '{worst}' is off by {errors[worst]:.2g}, allowed {allowed:.2g}"
    return numbers


@check
def the_8bit_kernel_takes_the_steps_of_the_torch_path(bench: Bench) -> Numbers:
    """bitsandbytes' fused kernel against the same step in torch operations, on one large run of blocks."""
    # On a CPU bitsandbytes quantises coarsely, so that only the first step, from zero state, is the same.
    numel, steps = (10_000, 1) if bench.is_small else (4_000_001, 5)
    group = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).to(bench.device)
    runs = [zero_run(start.clone()) for _ in range(2)]
    for step in range(1, steps + 1):
        gradient = torch.randn(numel, generator=generator).to(bench.device)
        runs = [run._replace(grad=gradient, step=step) for run in runs]
        adamw8bit.update(runs[0], group)
        adamw8bit.update_fused(runs[1], group)
    expected, found = runs
    error = relative_error(found.param, expected.param, start)
    codes = [(getattr(found, n) != getattr(expected, n)).float().mean().item() for n in ("state1", "state2")]
    assert error < 0.02, f"parameters are off by {error:.2g} of the distance they moved, allowed 0.02"
    assert int(found.state2.min()) >= 1, "codes of the second moment fell to 0"
    return {"error": error, "share of other codes, first and second moment": codes}


def zero_run(param: Tensor) -> adamw8bit.Run:
    layout, device = adamw8bit.FlatLayout(256), param.device
    zero = adamw8bit.codebook(is_signed=True, device=torch.device("cpu")).zero
    codes = [torch.full(param.shape, code, dtype=torch.uint8, device=device) for code in (zero, 0)]
    scales = [torch.zeros(-(-param.numel() // 256), device=device) for _ in range(2)]
    return adamw8bit.Run(param, param, *codes, *scales, 1, layout, layout.blocks(param.shape), 0)


@check
def reentrant_checkpointing_changes_nothing(bench: Bench) -> Numbers:
    """Layers whose forward runs again inside backward, in a backward of its own: the same losses and parameters."""
    losses: list[list[float]] = []
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(bench.device)
        optimizer = ShardedMuon(layers, bench.mesh, lr=0.02, bucket_mib=0.02)
        inputs = torch.randn(32, 64, device=bench.device)
        losses.append([])
        for _ in range(4):
            hidden = inputs.clone().requires_grad_()
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=True) if is_checkpointed else layer(hidden)
                hidden = hidden.relu()
            loss = (hidden - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        results.append({name: param.detach().clone() for name, param in layers.named_parameters()})
    difference = max((results[1][name] - value).abs().max().item() for name, value in results[0].items())
    assert losses[0][-1] < losses[0][0], f"the loss does not fall: {losses[0]}"
    assert difference < 1e-5, f"parameters differ by {difference:.2g}; losses {losses}"
    return {"largest difference of parameters": difference, "losses": losses[1]}


@check
def training_follows_torch(bench: Bench) -> Numbers:
    """Six steps of the plain loop with clipping on one batch, losses side by side with torch's optimizers."""
    numbers = {}
    for name, ours, theirs in (
        ("ShardedMuon", lambda m: ShardedMuon(m, bench.mesh, lr=5e-3, adamw_lr=3e-4), muon_of_torch),
        ("ShardedAdamW", lambda m: ShardedAdamW(m, bench.mesh, lr=3e-4), adamw_of_torch),
    ):
        losses: list[list[float]] = []
        for build in (ours, theirs):
            model = bench.gpt(layers=4, vocabulary=4096)
            optimizer = build(model)
            batch = bench.batch(model)
            losses.append([])
            for _ in range(6):
                loss = model(*batch)
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
        first, last = losses[0][0], losses[0][-1]
        difference = max(abs(a - b) for a, b in zip(*losses, strict=True)) / first
        numbers |= {f"{name}, first and last loss": [first, last], f"{name}, difference / first loss": difference}
        assert last < 0.98 * first, f"{name}: loss {first:.3f} -> {last:.3f}"
        assert difference < 0.01, f"{name}: losses differ from torch's by {difference:.2%} of the first"
    return numbers


def muon_of_torch(model: GPT) -> Optimizer:
    return peers.muon_and_adamw(model, lr=5e-3, adamw_lr=3e-4)


def adamw_of_torch(model: GPT) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-4, fused=True)


@check
def clipping_sees_the_true_norm(bench: Bench) -> Numbers:
    norms = []
    for build in (lambda m: ShardedMuon(m, bench.mesh), adamw_of_torch):
        model = bench.gpt(layers=2, vocabulary=1024)
        optimizer = build(model)
        model(*bench.batch(model)).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        after = clip_grad_norm_(model.parameters(), 1e9)
        norms.append([float(n.full_tensor() if hasattr(n, "full_tensor") else n) for n in (norm, after)])
        optimizer.zero_grad()
    ours, theirs = norms
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(ours, theirs, strict=True)), f"{ours}, torch says {theirs}"
    return {"norm": ours[0], "after clipping": ours[1]}


@check
def an_inf_skips_the_step(bench: Bench) -> Numbers:
    """GradScaler finds an inf in one gradient: parameters and state keep their bits."""
    model = bench.gpt(layers=2, vocabulary=1024)
    optimizer = ShardedMuon(model, bench.mesh, lr=0.01)
    scaler = torch.amp.GradScaler(bench.device.type, init_scale=2.0**10)
    for is_broken in (False, True, False):
        before = snapshot(model, optimizer)
        scaler.scale(model(*bench.batch(model)) * (float("inf") if is_broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [name for name, value in snapshot(model, optimizer).items() if not torch.equal(value, before[name])]
        assert bool(changed) != is_broken, f"inf: {is_broken}, changed: {changed[:3]}"
    return {"scale": scaler.get_scale()}


@check
def accumulation_equals_one_batch(bench: Bench) -> Numbers:
    """Four micro-batches with exact sums, with and without no_sync(), give the bits of one batch."""
    grads = values.rank_gradients(values.MIXED_SHAPES, 1, micro_batches=4)
    results = []
    for parts, is_deferred in ((1, False), (4, False), (4, True)):
        module = values.parameter_module(to_device(values.parameter_values(values.MIXED_SHAPES), bench.device))
        optimizer = ShardedMuon(module.named_parameters(), bench.mesh, lr=0.02)
        for part in range(parts):
            given = to_device(grads.of_rank(0, part) if parts > 1 else grads.of_rank(0), bench.device)
            if is_deferred and part < parts - 1:
                with optimizer.no_sync():
                    values.backward(module.named_parameters(), given)
            else:
                values.backward(module.named_parameters(), given)
        optimizer.step()
        results.append({name: p.detach().clone() for name, p in module.named_parameters()})
    for result in results[1:]:
        different = [name for name in result if not torch.equal(result[name], results[0][name])]
        assert not different, f"accumulation changes {different}"
    return {"micro-batches": 4}


@check
def resuming_is_exact(bench: Bench) -> Numbers:
    """Three steps, or two, a state_dict in a new optimizer, and one: the same bits."""

    def steps(module: nn.Module, optimizer: Optimizer, seeds: range) -> None:
        for seed in seeds:
            grads = values.rank_gradients(values.MIXED_SHAPES, 1, seed=seed).mean
            values.backward(module.named_parameters(), to_device(grads, bench.device))
            optimizer.step()
            optimizer.zero_grad()

    module = values.parameter_module(to_device(values.parameter_values(values.MIXED_SHAPES), bench.device))
    optimizer = ShardedMuon(module.named_parameters(), bench.mesh, lr=0.02)
    steps(module, optimizer, range(2))
    resumed = values.parameter_module({name: p.detach() for name, p in module.named_parameters()})
    resumed_optimizer = ShardedMuon(resumed.named_parameters(), bench.mesh, lr=0.02)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    steps(module, optimizer, range(2, 3))
    steps(resumed, resumed_optimizer, range(2, 3))
    different = [name for name, p in module.named_parameters() if not torch.equal(p, resumed[name])]
    assert not different, f"resuming changes {different}"
    return {"parameters": len(values.MIXED_SHAPES)}


# -- memory and the host ---------------------------------------------------------------------------------------------


@check_on_card
def memory_is_flat_over_50_steps(bench: Bench) -> Numbers:
    model = bench.gpt()
    optimizer = ShardedMuon(model, bench.mesh, lr=0.01)
    batch = bench.batch(model)
    reserved, allocated = [], []
    for _ in range(50):
        model(*batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_reserved(bench.device))
        allocated.append(torch.cuda.memory_allocated(bench.device))
    numbers = {
        "reserved after 4 and 50 steps, GiB": [reserved[3] / 2**30, reserved[-1] / 2**30],
        "allocated after 4 and 50 steps, GiB": [allocated[3] / 2**30, allocated[-1] / 2**30],
        "optimizer state, GiB": peers.state_bytes(optimizer) / 2**30,
    }
    assert reserved[-1] == reserved[3] and allocated[-1] <= allocated[3], f"memory grows: {numbers}"
    return numbers


@check_on_card
def step_never_waits_for_the_device(bench: Bench) -> Numbers:
    """torch's sync debug mode sees no implicit wait in step(), and step() returns while the card still sleeps."""
    numbers = {}
    for name, kind in (("ShardedMuon", ShardedMuon), ("ShardedAdamW", ShardedAdamW)):
        model = bench.gpt()
        optimizer = kind(model, bench.mesh)
        batch = bench.batch(model)
        for _ in range(3):
            train_step(model, optimizer, batch)
        model(*batch).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()

        model(*batch).backward()
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(2_000_000_000)  # a second or so of a card's clock
        optimizer.step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        total = time.perf_counter() - start
        optimizer.zero_grad()
        numbers[f"{name}, host and device ms"] = [1e3 * host, 1e3 * total]
        assert host < 0.5 * total, f"{name}: step() took {host:.3f} s on the host, {total:.3f} s until the card was done"
    return numbers


# -- timings ---------------------------------------------------------------------------------------------------------


@check
def muon_step_time(bench: Bench) -> Numbers:
    return step_times(bench, lambda m: ShardedMuon(m, bench.mesh, lr=5e-3, adamw_lr=3e-4), muon_of_torch)


@check
def adamw_step_time(bench: Bench) -> Numbers:
    return step_times(bench, lambda m: ShardedAdamW(m, bench.mesh, lr=3e-4), adamw_of_torch)


def step_times(bench: Bench, ours: Callable[[GPT], Optimizer], theirs: Callable[[GPT], Optimizer]) -> Numbers:
    """Median ms of step() alone and of whole iterations, ours and torch's taking turns."""
    candidates = []
    for build in (ours, theirs):
        model = bench.gpt()
        candidates.append((model, build(model), bench.batch(model)))
    times: dict[str, list[list[float]]] = {"step": [[], []], "iteration": [[], []]}
    for round_number in range(3 if bench.is_small else 13):
        for number, (model, optimizer, batch) in enumerate(candidates):
            bench.synchronize()
            start = time.perf_counter()
            model(*batch).backward()
            bench.synchronize()
            middle = time.perf_counter()
            optimizer.step()
            bench.synchronize()
            step = time.perf_counter() - middle
            optimizer.zero_grad()
            bench.synchronize()
            iteration = time.perf_counter() - start
            if round_number >= 3 or bench.is_small:
                times["step"][number].append(1e3 * step)
                times["iteration"][number].append(1e3 * iteration)
    numbers = {}
    for what, (mine, other) in times.items():
        numbers[f"{what}, ratio to torch"] = statistics.median(mine) / statistics.median(other)
        numbers[f"{what}, ms ours and torch"] = [statistics.median(mine), statistics.median(other)]
        numbers[f"{what}, ms lowest and highest of ours"] = [min(mine), max(mine)]
    return numbers


@check
def newton_schulz_rate(bench: Bench) -> Numbers:
    """TFLOP/s of the orthogonalisation, counted as the classical iteration, against a large bf16 product."""
    size = 256 if bench.is_small else 8192
    left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * size**3 / milliseconds(bench, lambda: left @ right) / 1e9
    numbers = {"matmul, TFLOP/s": peak}
    shapes = [(2, 64, 128)] if bench.is_small else [(24, 768, 768), (12, 768, 3072), (4, 4096, 4096), (2, 4096, 11008)]
    for shape in shapes:
        matrices = torch.randn(shape, device=bench.device)
        rate = shape[0] * newton_schulz_flops(*shape[1:]) / milliseconds(bench, lambda m=matrices: orthogonalize(m)) / 1e9
        numbers[f"{'x'.join(map(str, shape))}, TFLOP/s and share"] = [rate, rate / peak]
    return numbers


# -- running them ----------------------------------------------------------------------------------------------------


def milliseconds(bench: Bench, function: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call, after three that do not count."""
    times = []
    for repeat in range(3 + repeats):
        bench.synchronize()
        start = time.perf_counter()
        function()
        bench.synchronize()
        if repeat >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def train_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in tensors.items()}


def relative_error(result: Tensor, expected: Tensor, start: Tensor) -> float:
    distance = (expected.float() - start.float()).norm().clamp(min=1e-30)
    return ((result.detach().float() - expected.float()).norm() / distance).item()


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            tensors[f"state {number} {name}"] = local.detach().clone()
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="checks whose names contain one of these words")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to check (--device cpu tries the script itself)")
        return 0
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    bench = Bench(device, mesh, is_small=device.type == "cpu")

    chosen = [c for c in CHECKS if not args.only or any(word in c.__name__ for word in args.only)]
    outcomes = []
    for function in chosen:
        outcomes.append(run(function, bench))
        print(f"{outcomes[-1].status:8} {outcomes[-1].seconds:6.1f} s  {function.__name__}", flush=True)
    show(outcomes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = {"date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record | {"checks": [asdict(outcome) for outcome in outcomes]}, indent=1))
    print(f"\n{name}, torch {torch.__version__}; wrote {args.json}")
    dist.barrier()
    dist.destroy_process_group()
    return int(any(outcome.status == "failed" for outcome in outcomes))


def run(function: Callable[[Bench], Numbers], bench: Bench) -> Outcome:
    name = function.__name__
    if name in NEED_A_CARD and bench.device.type != "cuda":
        return Outcome(name, "skipped")
    start = time.perf_counter()
    try:
        numbers = function(bench)
        bench.synchronize()
        return Outcome(name, "passed", time.perf_counter() - start, numbers)
    except Exception as error:
        fault = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
        return Outcome(name, "failed", time.perf_counter() - start, fault=fault)
    finally:
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def show(outcomes: list[Outcome]) -> None:
    print()
    for outcome in outcomes:
        print(f"{outcome.status:8} {outcome.name.replace('_', ' ')}")
        for label, value in outcome.numbers.items():
            shown = ", ".join(f"{v:.4g}" for v in (value if isinstance(value, list) else [value]))
            print(f"         {label:46} {shown}")
        for line in outcome.fault.rstrip().splitlines():
            print(f"         {line}")


if __name__ == "__main__":
    sys.exit(main())
