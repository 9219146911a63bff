"""One promise: a model under fully_shard trains as on one device, whatever it is made of and however it is run.

The reference is the same model, unwrapped, on the concatenated batch. Sums over ranks and over the batch run in another
order than on one device, so values agree to rounding; where gradients are chosen so that sums are exact, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.support.models import KINDS, loss_of, make_batch, make_model
from tests.support.ranks import run_ranks
from tests.support.values import MIXED_SHAPES, parameter_values, rank_gradients
from vescale_optim import ShardedAdamW, ShardedAdamW8bit, ShardedMuon, ShardedShampoo, ShardedSOAP
from vescale_optim.sharding import ragged_torch_2_11
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.fully_shard import FullyShardedModule, fully_shard
from vescale_optim.sharding.fully_sharded.group import Form, ShardedGroup
from vescale_optim.sharding.ragged import RaggedTensor

STEPS = 6
BATCH = 4
# AdamW divides by the root of the second moment: a rounding error of a tiny gradient becomes one of the whole step.
LR = 1e-2


def whole_matrices(name: str, shape: torch.Size) -> Blocks:
    """What Muon declares, without routing: every matrix whole, the rest anywhere."""
    return Blocks.matrices(shape, flatten="conv" if len(shape) == 4 else None) if len(shape) > 1 else Blocks.elements(shape)


def wrap(model: nn.Module, names: list[str], mesh: DeviceMesh, **options: Any) -> nn.Module:
    options = {"optimizer": whole_matrices, **options}
    for name in names:
        fully_shard(model.get_submodule(name), mesh, **options)
    return fully_shard(model, mesh, **options)


def make_mesh(mesh: DeviceMesh, kind: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else mesh


def checkpoint_layers(model: nn.Module, names: list[str], kind: str) -> None:
    """Recompute every wrapped layer in backward: around its hooks ("outside..."), or within ("inside")."""
    for name in names:
        layer = model.get_submodule(name)
        parent, _, attribute = name.rpartition(".")
        if kind == "inside":
            layer.forward = Recomputed(layer.forward, use_reentrant=False)
        else:
            model.get_submodule(parent)[int(attribute)] = Outside(layer, use_reentrant=kind == "outside reentrant")


class Recomputed:
    def __init__(self, function: Callable[..., Tensor], use_reentrant: bool) -> None:
        self.function, self.use_reentrant = function, use_reentrant

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.function, x, use_reentrant=self.use_reentrant)


class Outside(nn.Module):
    def __init__(self, layer: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.run = Recomputed(layer, use_reentrant)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def full_values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().full_tensor() if isinstance(p, RaggedTensor) else p.detach() for n, p in model.named_parameters()}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, RaggedTensor) else value


def train(
    rank: int,
    world_size: int,
    mesh: DeviceMesh,
    kind: str,
    *,
    mesh_kind: str = "1-D",
    micro_batches: int = 1,
    accumulate: str = "",
    recompute: str = "",
    compiled: bool = False,
    frozen: str = "",
    clip: float | None = None,
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of this rank's part of every batch."""
    mesh = make_mesh(mesh, mesh_kind)
    model, names = make_model(kind)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    if compiled:
        for name in names:
            model.get_submodule(name).compile(backend="aot_eager")
    if recompute == "inside":
        checkpoint_layers(model, names, recompute)
    wrap(model, names, mesh, mp_policy=policy, reshard_after_forward=reshard)
    if recompute.startswith("outside"):
        checkpoint_layers(model, names, recompute)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for step in range(STEPS):
        inputs, targets = make_batch(kind, BATCH * micro_batches * world_size, seed=step)
        share = BATCH * micro_batches
        inputs, targets = (t[rank * share : (rank + 1) * share].chunk(micro_batches) for t in (inputs, targets))
        loss = torch.zeros(())
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            if accumulate == "no sync":
                model.set_requires_gradient_sync(is_last)
            if accumulate == "no all-reduce":
                model.set_requires_all_reduce(is_last)
            part = loss_of(model(inputs[micro]), targets[micro]) / micro_batches
            part.backward()
            loss = loss + part.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name.replace(".layer.", "."): value for name, value in full_values(model).items()}


def train_alone(
    kind: str, world_size: int, micro_batches: int = 1, frozen: str = "", clip: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one device, whole batches."""
    model, _ = make_model(kind)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for step in range(STEPS):
        inputs, targets = make_batch(kind, BATCH * micro_batches * world_size, seed=step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_values(model)


def assert_trains_alike(
    results: list[tuple[list[float], dict[str, Tensor]]],
    expected: tuple[list[float], dict[str, Tensor]],
    tolerance: float = 2e-4,
) -> None:
    means = [sum(values) / len(values) for values in zip(*(losses for losses, _ in results), strict=True)]
    torch.testing.assert_close(means, expected[0], rtol=tolerance, atol=tolerance)
    for _, values in results:
        assert values.keys() == expected[1].keys()
        for name, value in expected[1].items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_model_trains_as_on_one_device(kind: str, world_size: int) -> None:
    assert_trains_alike(run_ranks(world_size, train, kind), train_alone(kind, world_size))


def _train(rank: int, world_size: int, mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> Any:
    return train(rank, world_size, mesh, kind, **options)


@pytest.mark.parametrize(
    ("world_size", "kind", "options"),
    [
        (4, "tied", dict(mesh_kind="hsdp")),
        (4, "moe", dict(mesh_kind="hsdp", micro_batches=3, accumulate="no all-reduce")),
        (4, "gpt", dict(mesh_kind="hsdp", micro_batches=2)),
        (2, "gpt", dict(micro_batches=3)),
        (2, "moe", dict(micro_batches=3, accumulate="no sync")),
        (2, "gpt", dict(recompute="inside")),
        (2, "gpt", dict(recompute="outside")),
        (2, "moe", dict(recompute="outside reentrant")),
        (2, "gpt", dict(compiled=True)),
        (2, "gpt", dict(frozen="blocks.1")),
        (2, "gpt", dict(frozen="token")),
        (2, "gpt", dict(clip=0.3)),
        (2, "conv", dict(reshard=False)),
        (2, "conv", dict(reshard=True)),
    ],
    ids=str,
)
def test_way_of_training_gives_what_one_device_gives(world_size: int, kind: str, options: dict[str, Any]) -> None:
    alone = {key: options[key] for key in ("micro_batches", "frozen", "clip") if key in options}
    assert_trains_alike(run_ranks(world_size, _train, kind, options), train_alone(kind, world_size, **alone))


# -- bit for bit: every rank's part of the batch, computed on one device with the same kernels ------------------------


def train_in_parts(
    kind: str, world_size: int, policy: MixedPrecisionPolicy | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """One device plays all ranks in turn; the mean is a sum in rank order in fp32 and one division."""
    model, _ = make_model(kind)
    dtype = (policy and policy.param_dtype) or torch.float32
    worker, _ = make_model(kind, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    losses = []
    for step in range(STEPS):
        parts, loss = [], 0.0
        for rank in range(world_size):
            inputs, targets = (t[rank * BATCH :][:BATCH] for t in make_batch(kind, BATCH * world_size, seed=step))
            for param, master in zip(worker.parameters(), model.parameters(), strict=True):
                param.data.copy_(master.data)
                param.grad = None
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            part = loss_of(worker(inputs), targets)
            part.backward()
            loss += part.item() / world_size
            parts.append([param.grad for param in worker.parameters()])
        for master, *grads in zip(model.parameters(), *parts, strict=True):
            known = [torch.zeros_like(master) if grad is None else grad.float() for grad in grads]
            total = known[0].clone()
            for grad in known[1:]:
                total += grad
            master.grad = None if all(grad is None for grad in grads) else total / world_size
        optimizer.step()
        losses.append(loss)
    return losses, full_values(model)


def train_fused(
    rank: int, world_size: int, mesh: DeviceMesh, kind: str, policy: MixedPrecisionPolicy | None
) -> dict[str, Tensor]:
    model, names = make_model(kind)
    wrap(model, names, mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(STEPS):
        inputs, targets = (t[rank * BATCH :][:BATCH] for t in make_batch(kind, BATCH * world_size, seed=step))
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("world_size", "kind", "policy"),
    [(2, "gpt", None), (3, "moe", None), (2, "conv", None), (2, "gpt", BF16), (3, "moe", BF16), (4, "tied", BF16)],
)
def test_parameters_equal_those_of_one_device_bit_for_bit(world_size: int, kind: str, policy: Any) -> None:
    _, expected = train_in_parts(kind, world_size, policy)
    for values in run_ranks(world_size, train_fused, kind, policy):
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


class GivenGradients(nn.Module):
    """A module whose gradients are the given ones; names without one are not used."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})

    def forward(self, grads: dict[str, Tensor | None]) -> Tensor:
        used = [(p, grads[n]) for n, p in self.values.items() if grads.get(n) is not None]
        return torch.stack([(p * g).sum().float() for p, g in used]).sum()


UNUSED = {"wide": (0,), "stack": (0, 1, 2, 3), "bias": (1,)}


def train_given(
    rank: int, world_size: int, mesh: DeviceMesh, dtype: torch.dtype, micro_batches: int, sync: bool, hsdp: bool, units: str
) -> dict[str, Tensor]:
    mesh = make_mesh(mesh, "hsdp" if hsdp else "1-D")
    module = GivenGradients(parameter_values(MIXED_SHAPES, dtype=dtype))
    blocks = {
        "matrices": whole_matrices,
        "rows": lambda name, shape: Blocks.rows(shape, 1),
        "elements": lambda name, shape: Blocks.elements(shape),
    }[units]
    fully_shard(module, mesh, optimizer=lambda name, shape: blocks(name, shape))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5, foreach=True)
    for step in range(3):
        grads = rank_gradients(
            MIXED_SHAPES, world_size, seed=step, micro_batches=micro_batches, dtype=dtype, unused=UNUSED
        )
        for micro in range(micro_batches):
            module.set_requires_gradient_sync(sync or micro == micro_batches - 1)
            module(grads.of_rank(rank, micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(module)


@pytest.mark.parametrize(
    ("world_size", "dtype", "micro_batches", "sync", "hsdp", "units"),
    [
        (2, torch.float32, 1, True, False, "matrices"),
        (3, torch.float32, 3, True, False, "rows"),
        (4, torch.float32, 2, False, False, "elements"),
        (4, torch.float32, 2, True, True, "matrices"),
        (4, torch.float32, 3, False, True, "rows"),
        (2, torch.bfloat16, 2, True, False, "matrices"),
        (3, torch.bfloat16, 2, False, False, "elements"),
    ],
)
def test_given_gradients_update_as_on_one_device_bit_for_bit(
    world_size: int, dtype: torch.dtype, micro_batches: int, sync: bool, hsdp: bool, units: str
) -> None:
    alone = {name: nn.Parameter(value) for name, value in parameter_values(MIXED_SHAPES, dtype=dtype).items()}
    optimizer = torch.optim.SGD(alone.values(), lr=0.5, momentum=0.5, foreach=True)
    for step in range(3):
        mean = rank_gradients(
            MIXED_SHAPES, world_size, seed=step, micro_batches=micro_batches, dtype=dtype, unused=UNUSED
        ).mean
        for name, param in alone.items():
            param.grad = mean[name]
        optimizer.step()
    for values in run_ranks(world_size, train_given, dtype, micro_batches, sync, hsdp, units):
        for name, param in alone.items():
            assert torch.equal(values[f"values.{name}"], param.detach()), name


# -- odd modules and odd loops ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Writes into its input, returns a dict with a view and two outputs, takes keywords, has an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        x.mul_(2)
        y = self.inner(x) * scale
        return {"view": y.view(2, -1, 8), "pair": (y.sum(), y.detach())}


class Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.odd = Odd()
        self.skipped = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        result = self.odd(self.first(x), scale=self.scale)
        y = self.twice(torch.relu(self.twice(result["view"].flatten(0, 1))))
        return y.square().mean() + 0.1 * result["pair"][0] + result["pair"][1].sum()


def run_oddities(
    rank: int, world_size: int, mesh: DeviceMesh | None, loop: str
) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model: Any = Oddities()
    if mesh is not None:
        wrap(model, ["first", "odd", "skipped", "twice"], mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    without, kept = [], []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        if loop == "two forwards, one backward":
            (model(x) + model(x + 1)).backward()
        elif loop == "two forwards, two backwards":
            losses = [model(x), model(x + 1)]
            for loss in losses:
                loss.backward()
        elif loop == "backward twice":
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        elif loop == "evaluation between":
            with torch.no_grad():
                model(x)
            with torch.inference_mode():
                model(x)
            model(x).backward()
        elif loop == "a part alone":
            model.twice(x).sum().backward()
            model(x).backward()
        elif loop == "gradient of the input":
            x.requires_grad_()
            torch.autograd.grad(model(x), x)
            model(x).backward()
        elif loop == "gathered by hand":
            if mesh is not None:
                model.twice.unshard()
                model.unshard()
                assert not isinstance(model.twice.weight, RaggedTensor)
            model(x).backward()
        elif loop == "stays whole":
            if mesh is not None:
                model.set_reshard_after_backward(False)
            model(x).backward()
            if mesh is not None:
                for module in model.modules():
                    if isinstance(module, FullyShardedModule):
                        module.reshard()
        elif loop == "edited gradients between":
            model(x).backward()
            model.twice.weight.grad = None
            model.twice.bias.grad = model.twice.bias.grad * 2
            model(x).backward()
        elif loop == "gradient taken away":
            model(x).backward()
            taken = model.twice.weight.grad
            before = whole(taken).clone()
            model.twice.weight.grad = None
            model(x).backward()
            assert torch.equal(whole(taken), before)
        elif loop == "old gradients put back":
            model(x).backward()
            taken = [param.grad for param in model.twice.parameters()]
            before = whole(taken[1]).clone()
            model.zero_grad()
            model(x).backward()
            model.twice.weight.grad = taken[0]
            model(x).backward()
            assert torch.equal(whole(taken[1]), before)
        elif loop == "gradient shared by two modules":
            model(x).backward()
            model.first.weight.grad = model.twice.weight.grad
            model(x).backward()
            model.first.weight.grad = None
        elif loop == "penalty of full parameters":
            penalty = sum(whole(param).square().sum() for param in model.parameters())
            (model(x) + penalty).backward()
        elif loop == "penalty of local parts, twice":
            for _ in range(2):
                parts = [p.to_local() if isinstance(p, RaggedTensor) else p for p in model.parameters()]
                (sum(part.square().sum() for part in parts) + model(x)).backward()
        elif loop == "penalty of sums over shards":
            penalty = sum(param.square().sum() + param.abs().mean() for param in model.parameters())
            (model(x) + penalty).backward()
        elif loop == "one rank keeps outputs":
            kept.append(model.twice(x))
            if rank > 0:
                kept.clear()
            model(x + 1).backward()
        elif loop == "frozen for a while":
            model.first.requires_grad_(step % 2 == 0)
            model(x).backward()
        without = [name for name, param in model.named_parameters() if param.grad is None]
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model), without


LOOPS = [
    "two forwards, one backward",
    "two forwards, two backwards",
    "backward twice",
    "evaluation between",
    "a part alone",
    "gradient of the input",
    "gathered by hand",
    "stays whole",
    "edited gradients between",
    "frozen for a while",
    "gradient taken away",
    "old gradients put back",
    "one rank keeps outputs",
    "gradient shared by two modules",
    "penalty of full parameters",
    "penalty of local parts, twice",
    "penalty of sums over shards",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_odd_modules_and_loops_give_what_one_device_gives(loop: str) -> None:
    if ragged_torch_2_11.IS_NEEDED and loop.startswith("penalty"):
        pytest.skip("torch 2.11 accumulates by stock DTensor ops")
    expected, without = run_oddities(0, 1, None, loop)
    for values, sharded_without in run_ranks(2, run_oddities, loop):
        assert sharded_without == without
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@dataclasses.dataclass
class Result:
    values: Tensor
    aside: Tensor | None = dataclasses.field(init=False, default=None)


class Returns(nn.Module):
    """Returns a view of its parameter, the parameter, and in a dataclass a field and an attribute set after its making."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.linspace(0, 1, 64).view(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Result]:
        result: Any = Result(torch.tanh(self.inner(x)).view(-1, 8))
        result.aside = self.inner(x)
        result.more, result.note = result.aside * 2, "kept"
        return self.position[:4], self.position, result


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = Returns(), Returns(), nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for module in (self.first, self.second):
            view, position, result = module(x)
            assert result.note == "kept"
            x = (result.values + view + result.aside) @ position + result.more
        return x, self.scale


def train_with_returned(rank: int, world_size: int, mesh: DeviceMesh | None) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model: Any = UsesReturned()
    if mesh is not None:
        wrap(model, ["first", "second"], mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(2):
        x, scale = model(torch.full((4, 8), step + 1.0))
        (x * scale).mean().backward()
        assert float(scale.detach().sum()) <= 16.0
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        x, scale = model(torch.ones(4, 8))
    return full_values(model), x * scale


def test_returned_parameters_and_dataclasses_give_what_one_device_gives() -> None:
    expected = train_with_returned(0, 1, None)
    for result in run_ranks(2, train_with_returned):
        torch.testing.assert_close(result, expected)


class KeepsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        self.loss = self.head(x.detach()).sum()
        return y


def keep_loss(rank: int, world_size: int, mesh: DeviceMesh) -> None:
    model = nn.Sequential(KeepsLoss(), KeepsLoss(), nn.Linear(8, 8))
    wrap(model, ["0", "1", "2"], mesh)
    y = model(torch.ones(4, 8))
    with pytest.raises(RuntimeError, match="storage of size 0"):
        (y.sum() + model[0].loss + model[1].loss).backward()


def test_loss_in_an_attribute_raises_rather_than_use_parameters_on_their_way() -> None:
    run_ranks(2, keep_loss)


class Sometimes(nn.Module):
    """Uses its parameter only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        return x * self.weight if is_used else x * 1


def use_on_one_rank(rank: int, world_size: int, mesh: DeviceMesh, syncs: bool) -> list[Tensor | None]:
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "sometimes": Sometimes(), "never": Sometimes()})
    for module in model.values():
        fully_shard(module, mesh, mp_policy=BF16)
    results = []
    for step in range(2):
        for micro in range(2):
            for module in model.values():
                module.set_requires_gradient_sync(syncs or micro == 1)
            x = model["first"](torch.ones(2, 16))
            x = model["sometimes"](x, is_used=rank == 0 and micro == step)
            model["never"](x, is_used=False).sum().backward()
        results += [model[name].weight.grad for name in ("sometimes", "never")]
        results[-2] = results[-2].full_tensor() / x.detach().float().sum(0)
        for module in model.values():
            module.zero_grad()
    return results


@pytest.mark.parametrize("syncs", [True, False])
def test_module_whose_parameters_one_rank_uses(syncs: bool) -> None:
    for first, without, second, still_without in run_ranks(2, use_on_one_rank, syncs):
        # The mean of a gradient and of none.
        torch.testing.assert_close(first, torch.full((16,), 0.5), rtol=1e-2, atol=0)
        torch.testing.assert_close(second, torch.full((16,), 0.5), rtol=1e-2, atol=0)
        assert without is None and still_without is None


class Failing(nn.Module):
    """Raises in forward or backward where it is told to."""

    fails = ""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ArithmeticError("forward")
        y = self.module(x)
        if self.fails == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Tensor) -> None:
        raise ArithmeticError("backward")


def train_with_failures(rank: int, world_size: int, mesh: DeviceMesh, fails: str) -> dict[str, Tensor]:
    model, names = make_model("gpt")
    model.blocks[1].mlp = Failing(model.blocks[1].mlp)
    wrap(model, names, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(3):
        inputs, targets = (t[rank * BATCH :][:BATCH] for t in make_batch("gpt", BATCH * world_size, seed=step))
        if fails:
            model.blocks[1].mlp.fails = fails
            with pytest.raises(ArithmeticError):
                loss_of(model(inputs), targets).backward()
            model.blocks[1].mlp.fails = ""
            if step == 1:
                assert all(isinstance(value, RaggedTensor) for value in model.state_dict().values())
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert memory_of(model).bytes_out == 0
    return full_values(model)


def memory_of(model: nn.Module) -> Any:
    return model.__dict__["_fully_sharded_state"].schedule.memory


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_failed_iteration_leaves_nothing_behind(fails: str) -> None:
    for values, expected in zip(
        run_ranks(2, train_with_failures, fails), run_ranks(2, train_with_failures, ""), strict=True
    ):
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


# -- initialising, saving, loading -----------------------------------------------------------------------------------


def build_on_meta(rank: int, world_size: int, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    with torch.device("meta"):
        model, names = make_model("conv")
    if mesh is not None:
        wrap(model, names, mesh)
        with pytest.raises(RuntimeError, match="on the meta device"):
            model(torch.zeros(1, 3, 8, 8))
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if mesh is not None else None
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if mesh is not None:
        assert all(before[name] is param for name, param in model.named_parameters())
        initial = full_values(model)
        model(torch.ones(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        changed = full_values(model)
        assert all(not torch.equal(changed[name], value) for name, value in initial.items() if "head" in name)
        return initial
    return full_values(model)


def test_module_on_meta_is_initialised_as_on_one_device() -> None:
    expected = build_on_meta(0, 1, None)
    for values in run_ranks(2, build_on_meta):
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


def convert(rank: int, world_size: int, mesh: DeviceMesh) -> None:
    model, names = make_model("tied")
    expected = {name: value.to(torch.bfloat16) for name, value in full_values(model).items()}
    wrap(model, names, mesh)
    params = list(model.parameters())
    model.to(torch.bfloat16)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model.head.weight is model.token.weight
    assert all(torch.equal(value, expected[name]) for name, value in full_values(model).items())
    storages = {p._local_tensor.untyped_storage().data_ptr() for p in params if p._local_tensor.numel()}
    assert len(storages) <= 4  # one per wrapped module
    loss_of(model(make_batch("tied", 2, seed=0)[0]), make_batch("tied", 2, seed=0)[1]).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in params)


def test_conversion_keeps_parameters_and_flat_buffers() -> None:
    run_ranks(2, convert)


def load(rank: int, world_size: int, mesh: DeviceMesh, how: str, directory: str) -> None:
    source, names = make_model("gpt")
    expected = full_values(source)
    full = {name: value.clone() for name, value in source.state_dict().items()}
    wrap(source, names, mesh)
    target, _ = make_model("gpt")
    with torch.no_grad():
        for param in target.parameters():
            param.zero_()
    # Another layout than the source's, as another optimizer or number of ranks would give.
    wrap(target, names[:2], mesh, optimizer=None)
    if how == "shards":
        target.load_state_dict(source.state_dict())
    elif how == "full":
        target.load_state_dict(full)
    elif how == "assign":
        target.load_state_dict(full, assign=True)
    elif how == "full, helper of torch":
        set_model_state_dict(target, full, options=StateDictOptions(full_state_dict=True))
    elif how == "rank 0":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(target, full if rank == 0 else {}, options=options)
    elif how == "full by torch":
        gathered = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        assert all(type(value) is Tensor for value in gathered.values())
        target.load_state_dict(gathered)
    else:
        dcp.save({"model": source.state_dict()}, checkpoint_id=directory)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=directory)
        target.load_state_dict(state["model"])
    for name, value in full_values(target).items():
        assert torch.equal(value, expected[name]), name
    for module in target.modules():
        if isinstance(module, FullyShardedModule):
            module.unshard()
    assert all(torch.equal(param, expected[name]) for name, param in target.named_parameters())


@pytest.mark.parametrize(
    "how", ["shards", "full", "assign", "full, helper of torch", "rank 0", "full by torch", "checkpoint"]
)
def test_state_dicts_of_any_layout_load(how: str, tmp_path: Any) -> None:
    run_ranks(2, load, how, str(tmp_path))


def replicas(rank: int, world_size: int, mesh: DeviceMesh) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Linear(5, 7)
    fully_shard(model, make_mesh(mesh, "hsdp"))
    return [param._local_tensor for param in model.parameters()]


def test_replicas_start_with_the_same_values() -> None:
    results = run_ranks(4, replicas)
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(results[first], results[second], strict=True))


# -- memory ----------------------------------------------------------------------------------------------------------


def storages_alive() -> dict[int, torch.UntypedStorage]:
    """Storages of all tensors, by address."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if isinstance(obj, Tensor)]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == "cpu"}


def bytes_alive() -> int:
    return sum(storage.nbytes() for storage in storages_alive().values())


def measure(rank: int, world_size: int, mesh: DeviceMesh) -> None:
    model, names = make_model("moe")
    wrap(model, names, mesh, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    inputs, targets = make_batch("moe", BATCH, seed=rank)
    sizes = []
    for step in range(50):
        if step % 10 == 9:  # and a forward that takes another way
            with torch.no_grad():
                model(inputs)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2 and step % 8 == 2:
            sizes.append((bytes_alive(), memory_of(model).bytes_held))
        assert memory_of(model).bytes_out == 0
        assert all(isinstance(param, RaggedTensor) for param in model.parameters())
    assert len(set(sizes)) == 1, sizes
    total = sum(param.numel() for param in model.parameters())
    storages = [p._local_tensor.untyped_storage() for p in model.parameters()]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert 4 * total / world_size <= sum(held.values()) <= 1.25 * 4 * total / world_size


def record_schedule(rank: int, world_size: int, mesh: DeviceMesh) -> tuple[str, int, int]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    wrap(model, ["0", "1", "2", "3"], mesh)
    memory = memory_of(model)
    names = {id(model[i].__dict__["_fully_sharded_state"].groups[0]): str(i) for i in range(4)}
    events: list[str] = []

    def recorded(name: str, mark: str, is_noted: Callable[[Any], bool]) -> Callable[[Any], None]:
        original = getattr(ShardedGroup, name)

        def method(group: ShardedGroup) -> None:
            if is_noted(group):
                events.append(mark + names[id(group)])
            original(group)

        return method

    methods = {
        "start_gather": recorded("start_gather", "g", lambda group: group.form is Form.SHARDED),
        "finish_gather": recorded("finish_gather", "w", lambda group: group.form is Form.GATHERING),
        "start_reduce": recorded("start_reduce", "r", lambda group: True),
    }
    x = torch.randn(8, 64)
    model(x).sum().backward()
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(ShardedGroup, name, method)
        y = model(x)
        events.append("|")
        y.sum().backward()
    return " ".join(events), memory.bytes_held, model[0].__dict__["_fully_sharded_state"].groups[0].gathered_bytes


def test_next_module_is_gathered_early_and_gradients_leave_during_backward() -> None:
    for events, held, one in run_ranks(2, record_schedule):
        # g: gather, w: wait for it, r: reduce-scatter. On gloo a backward gathers the module before once it has room.
        assert events == "g0 w0 g1 w1 g2 w2 g3 w3 | g3 w3 r3 g2 w2 r2 g1 w1 r1 g0 w0 r0"
        assert held <= 2 * one


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_is_flat_and_shards_are_their_share(world_size: int) -> None:
    run_ranks(world_size, measure)


def drop_and_keep_gradients(rank: int, world_size: int, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.Linear(128, 96))
    wrap(model, ["0", "1"], mesh)
    x = torch.ones(4, 96)
    model(x).sum().backward()
    held = {storage_of(param.grad)._cdata: storage_of(param.grad).nbytes() for param in model.parameters()}
    assert sum(held.values()) >= 4 * sum(param.numel() for param in model.parameters()) / world_size
    assert held.keys() <= storages_alive().keys()
    model.zero_grad()
    assert held.keys().isdisjoint(storages_alive())

    def backward() -> None:
        model(x).sum().backward()

    backward()
    once = [param.grad.full_tensor() for param in model.parameters()]
    place = model[0].weight.grad._local_tensor.data_ptr()
    model[0].bias.grad = None
    model[1].weight.grad = model[1].weight.grad * 2
    backward()
    expected = [2 * once[0], once[1], 3 * once[2], 2 * once[3]]
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad.full_tensor(), gradient)
    assert model[0].weight.grad._local_tensor.data_ptr() == place


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return tensor._local_tensor.untyped_storage()


def test_dropped_gradients_free_their_memory_and_kept_ones_stay_in_place() -> None:
    run_ranks(2, drop_and_keep_gradients)


def delete(rank: int, world_size: int, mesh: DeviceMesh, fails: bool) -> None:
    model, names = make_model("tied")
    wrap(model, names, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    inputs, targets = make_batch("tied", BATCH, seed=rank)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if fails:
        model.train()
        loss = loss_of(model(inputs), targets)  # never backwarded
    state = model.__dict__["_fully_sharded_state"]
    watched = [model, state, state.schedule, state.groups[0], state.groups[0].shards, *model.parameters()]
    watched += [slot.whole for slot in state.groups[0].slots]
    references = [weakref.ref(obj) for obj in watched]
    gc.collect()
    gc.disable()
    try:
        del model, state, watched, loss
        optimizer.param_groups.clear()
        optimizer.state.clear()
        assert [reference() for reference in references if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_deleting_model_and_optimizer_frees_everything_at_once(fails: bool) -> None:
    run_ranks(2, delete, fails)


# -- errors ----------------------------------------------------------------------------------------------------------


def misuse(rank: int, world_size: int, mesh: DeviceMesh) -> None:
    model, _ = make_model("tied")
    fully_shard(model.head, mesh)
    with pytest.raises(ValueError, match=r"'token\.weight' .* is shared with 'weight' of a module wrapped before"):
        fully_shard(model, mesh)
    with pytest.raises(ValueError, match="wrapped already"):
        fully_shard(model.head, mesh)
    with pytest.raises(ValueError, match="has no forward"):
        fully_shard(model.blocks, mesh)
    with pytest.raises(TypeError, match="cannot be deep-copied"):
        copy.deepcopy(model.head)
    distributed = nn.Linear(4, 4)
    distributed.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="is a DTensor"):
        fully_shard(distributed, mesh)


def test_misuse_is_named() -> None:
    run_ranks(2, misuse)


def describe(rank: int, world_size: int, mesh: DeviceMesh) -> str:
    model, _ = make_model("gpt")
    fully_shard(model.blocks[0], mesh, optimizer=whole_matrices)
    fully_shard(model.blocks[1].attention.query, mesh, optimizer=whole_matrices)
    fully_shard(model, mesh)
    return model.describe()


def test_description_says_how_much_and_why() -> None:
    root, block, matrix = run_ranks(4, describe)[0].splitlines()
    assert root.startswith("(the module): ") and root.endswith("% padding)")
    assert block.startswith("blocks.0: 10 parameters, 12,416 elements float32, trained;")
    # One matrix on four ranks: whole on one of them, it would pad 300 %.
    assert "1,024 bytes on each of 4 ranks, rows, units have to travel" in matrix
    assert "whole units pad 300.0 %" in matrix


# -- with the sharded optimizers, and a model of transformers -----------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (ShardedMuon, dict(lr=0.02)),
    "shampoo": (ShardedShampoo, dict(lr=1e-3, max_preconditioner_dim=16, precondition_frequency=2)),
    "soap": (ShardedSOAP, dict(lr=1e-3, max_precond_dim=16, precondition_frequency=2)),
    "adamw8bit": (ShardedAdamW8bit, dict(lr=1e-3)),
    "adamw": (ShardedAdamW, dict(lr=1e-3)),
}


def compare_with_replicated(rank: int, world_size: int, mesh: DeviceMesh, name: str, kind: str, mesh_kind: str) -> float:
    """The largest difference to the same optimizer over plain parameters, which other tests hold against one device."""
    optimizer_class, options = OPTIMIZERS[name]
    plain, names = make_model(kind)
    sharded, _ = make_model(kind)
    own_mesh = make_mesh(mesh, mesh_kind)
    if mesh_kind == "hsdp":
        # Replicas with the same data: their mean is exact.
        mesh = own_mesh["shard"]
        rank = mesh.get_local_rank()
    wrap(sharded, names, own_mesh, optimizer=optimizer_class)
    trained = [(plain, optimizer_class(plain, mesh, **options)), (sharded, optimizer_class(sharded, own_mesh, **options))]
    for step in range(STEPS):
        inputs, targets = (t[rank * BATCH :][:BATCH] for t in make_batch(kind, BATCH * world_size, seed=step))
        for model, optimizer in trained:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = full_values(plain)
    return max((value - expected[key]).abs().max().item() for key, value in full_values(sharded).items())


@pytest.mark.parametrize(
    ("world_size", "kind", "mesh_kind"),
    [(2, "gpt", "1-D"), (4, "moe", "1-D"), (2, "tied", "1-D"), (4, "gpt", "hsdp")],
)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_sharded_optimizers_update_as_on_plain_parameters(
    name: str, world_size: int, kind: str, mesh_kind: str
) -> None:
    assert max(run_ranks(world_size, compare_with_replicated, name, kind, mesh_kind)) == 0.0


def train_llama(rank: int, world_size: int, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    if mesh is not None:
        wrap(model, [f"model.layers.{i}" for i in range(2)], mesh)
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        tokens = torch.randint(64, (BATCH, 10), generator=torch.Generator().manual_seed(step))
        mine = tokens if mesh is None else tokens.chunk(world_size)[rank]
        model(input_ids=mine, labels=mine).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


def test_llama_of_transformers_trains_as_on_one_device() -> None:
    pytest.importorskip("transformers")
    expected = train_llama(0, 1, None)
    for values in run_ranks(2, train_llama):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
