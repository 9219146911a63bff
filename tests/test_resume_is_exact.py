"""One promise: a run that is saved and resumed equals the run that was not interrupted, bit for bit.

Whatever the ranks and the storage are before and after, through torch.distributed.checkpoint and its helpers alone.
Gradients belong to logical tensors (`tests.support.checkpoints`), so the uninterrupted run is the same at any world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoints import OPTIMIZERS, STORAGES, Training
from tests.support.models import loss_of, make_batch, make_model
from tests.support.ranks import run_ranks
from tests.support.sharded_models import differences
from tests.support.thinned import thinned
from vescale_optim import ShardedMuon
from vescale_optim.sharding.fully_shard import fully_shard

# Every cell of optimizer x storage has some of the changes, and every change meets every storage and every optimizer.
CHANGES = [(2, 2), (2, 4), (4, 1), (1, 2), (2, 8)]
# The first resumed step has no gradient for this one.
UNUSED = {3: ("unused",)}
Record = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]


def state_dict_of(run: Training, **options: Any) -> dict[str, Any]:
    said = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(run.module, options=said),
        "optimizer": get_optimizer_state_dict(run.module, run.optimizer, options=said),
        "scheduler": run.scheduler.state_dict(),
    }


def load_into(run: Training, state: dict[str, Any], **options: Any) -> None:
    said = StateDictOptions(**options)
    set_model_state_dict(run.module, state["model"], options=said)
    set_optimizer_state_dict(run.module, run.optimizer, state["optimizer"], options=said)
    run.scheduler.load_state_dict(state["scheduler"])


def saved(rank: int, world_size: int, mesh: Any, path: str, kind: str, storage: str, options: dict[str, Any]) -> Record:
    """Three steps, a checkpoint, three more: state at the checkpoint, losses and state after it."""
    run = Training(kind, storage, seed=0, **options)
    run.train(range(3))
    dcp.save(state_dict_of(run), checkpoint_id=path)
    return run.state(), run.train(range(3, 6), UNUSED), run.state()


def resumed(rank: int, world_size: int, mesh: Any, path: str, kind: str, storage: str, options: dict[str, Any]) -> Record:
    """From other values: the checkpoint, three steps more."""
    run = Training(kind, storage, seed=7, **options)
    state = state_dict_of(run)
    dcp.load(state, checkpoint_id=path)
    load_into(run, state)
    return run.state(), run.train(range(3, 6), UNUSED), run.state()


def assert_same(found: Record, expected: Record) -> None:
    for index in (0, 2):
        assert {k: v.dtype for k, v in found[index].items()} == {k: v.dtype for k, v in expected[index].items()}
        assert differences(found[index], expected[index]) == {}
    assert found[1] == expected[1]


def assert_resumes(
    path: Path, change: tuple[int, int], kind: str, first: str, second: str, **options: Any
) -> tuple[Record, list[Record]]:
    before, after = change
    expected, *others = run_ranks(before, saved, str(path), kind, first, options)
    for other in others:
        assert_same(other, expected)
    found = run_ranks(after, resumed, str(path), kind, second, options)
    for record in found:
        assert_same(record, expected)
    return expected, found


CELLS = [
    (kind, storage, CHANGES[(row + column + offset) % len(CHANGES)])
    for row, kind in enumerate(OPTIMIZERS)
    for column, storage in enumerate(STORAGES)
    for offset in (0, 2)
]


@pytest.mark.parametrize(("kind", "storage", "change"), thinned(CELLS, 3), ids=str)
def test_resumed_run_equals_the_uninterrupted_one(
    kind: str, storage: str, change: tuple[int, int], tmp_path: Path
) -> None:
    (at_save, losses, end), _ = assert_resumes(tmp_path, change, kind, storage, storage)
    assert any(not torch.equal(at_save[name], end[name]) for name in at_save) and losses[0] != losses[-1]


# Optimizers take turns over the storages; 8-bit state, with dtypes of its own, meets all.
BF16_CELLS = [(kind, STORAGES[number % 3]) for number, kind in enumerate(OPTIMIZERS)]
BF16_CELLS += [("adamw8bit", storage) for storage in STORAGES if ("adamw8bit", storage) not in BF16_CELLS]


@pytest.mark.parametrize(("kind", "storage"), thinned(BF16_CELLS, 3))
def test_resumed_run_of_bf16_parameters_keeps_every_dtype(kind: str, storage: str, tmp_path: Path) -> None:
    (at_save, _, _), _ = assert_resumes(tmp_path, (2, 4), kind, storage, storage, dtype=torch.bfloat16)
    assert at_save["tall"].dtype == torch.bfloat16
    wide = {"shampoo": "tall.factors", "soap": "tall.factors", "adamw8bit": "tall.absmax1"}
    if kind in wide:
        assert at_save[wide[kind]].dtype == torch.float32
    if kind == "adamw8bit":
        assert at_save["tall.state1"].dtype == torch.uint8


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
@pytest.mark.parametrize("storage", ["replicated", "fsdp2"])
def test_master_copies_are_part_of_a_checkpoint(kind: str, storage: str, tmp_path: Path) -> None:
    options = dict(dtype=torch.bfloat16, master_dtype=torch.float32)
    (at_save, _, _), _ = assert_resumes(tmp_path, (2, 4), kind, storage, storage, **options)
    assert not torch.equal(at_save["tall.master"], at_save["tall"].float())


MOVES = [(first, second) for first in STORAGES for second in STORAGES if first != second]
# Every move, and two of them for every optimizer.
MOVED = [(kind, *MOVES[(number + offset) % 6]) for number, kind in enumerate(OPTIMIZERS) for offset in (0, 3)]


@pytest.mark.parametrize(("kind", "first", "second"), thinned(MOVED, 3))
def test_checkpoint_of_one_storage_resumes_in_another(kind: str, first: str, second: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, (2, 4), kind, first, second)


# -- torch's helpers --------------------------------------------------------------------------------------------------

HELPERS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "flat": dict(flatten_optimizer_state_dict=True),
    "cpu_offload": dict(cpu_offload=True),
    "full": dict(full_state_dict=True),
    "full, cpu_offload": dict(full_state_dict=True, cpu_offload=True),
    "full, broadcast_from_rank0": dict(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True),
}


def through_helpers(rank: int, world_size: int, mesh: Any, kind: str, storage: str, options: dict[str, Any]) -> None:
    run = Training(kind, storage, seed=0)
    run.train(range(3))
    reading = {key: value for key, value in options.items() if key != "broadcast_from_rank0"}
    state = state_dict_of(run, **reading)
    if options.get("full_state_dict") and options.get("cpu_offload"):
        # Only rank 0 has it then; without a broadcast every rank reads it, as from one file.
        box = [state if rank == 0 else None]
        dist.broadcast_object_list(box)
        state = box[0] if rank == 0 or "broadcast_from_rank0" not in options else {**box[0], "model": {}, "optimizer": {}}
    other = Training(kind, storage, seed=7)
    loading = {key: value for key, value in options.items() if key != "cpu_offload"}
    load_into(other, state, **loading)
    assert differences(other.state(), run.state()) == {}
    assert other.train(range(3, 5), UNUSED) == run.train(range(3, 5), UNUSED)


@pytest.mark.parametrize("helper", thinned(HELPERS, 3))
@pytest.mark.parametrize("storage", STORAGES)
def test_state_passes_through_the_helpers_of_torch(storage: str, helper: str) -> None:
    # SOAP keeps state of units, and beside it AdamW's, of the shape of parameters.
    run_ranks(2, through_helpers, "soap", storage, HELPERS[helper])


def load_asynchronously(rank: int, world_size: int, mesh: Any, storage: str, path: str) -> None:
    run = Training("muon", storage, seed=0)
    run.train(range(3))
    expected = run.state()
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(state_dict_of(run), checkpoint_id=path, process_group=group)
    # Training goes on while it is written.
    run.train(range(3, 5))
    saving.result()
    other = Training("muon", storage, seed=7)
    state = state_dict_of(other)
    dcp.load(state, checkpoint_id=path)
    load_into(other, state)
    assert differences(other.state(), expected) == {}
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("storage", STORAGES)
def test_asynchronous_save_keeps_the_values_of_its_moment(storage: str, tmp_path: Path) -> None:
    run_ranks(2, load_asynchronously, storage, str(tmp_path))


class Communications(TorchDispatchMode):
    """The names of the collectives that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def communications(rank: int, world_size: int, mesh: Any, kind: str, storage: str) -> list[str]:
    """While all state is taken and its local values are read."""
    run = Training(kind, storage, seed=0)
    run.train(range(2))
    with Communications() as taking:
        state = state_dict_of(run)
        values = [value for entry in state["optimizer"]["state"].values() for value in entry.values() if value.ndim]
        held = sum(value.to_local().numel() for value in values)
    with Communications() as gathering:
        values[0].full_tensor()
    assert held and gathering.seen
    return taking.seen


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["adamw8bit", "soap"])
def test_sharded_state_is_taken_without_communication(kind: str, storage: str) -> None:
    assert run_ranks(2, communications, kind, storage) == [[], []]


# -- a user's loop ----------------------------------------------------------------------------------------------------


def losses_of_a_model(rank: int, world_size: int, mesh: Any, storage: str, path: str) -> tuple[list[float], list[float]]:
    """Losses of a real model with schedule and GradScaler, one step of which overflows: uninterrupted, and resumed."""

    def build(seed: int) -> dict[str, Any]:
        model, wrapped = make_model("gpt")
        with torch.no_grad():
            for param in model.parameters():
                param.add_(seed)
        if storage != "replicated":
            for module in (*map(model.get_submodule, wrapped), model):
                fsdp2(module, mesh=mesh) if storage == "fsdp2" else fully_shard(module, mesh, optimizer=ShardedMuon)
        optimizer = ShardedMuon(model, mesh, lr=0.02)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
        }

    def train(run: dict[str, Any], steps: range) -> list[float]:
        losses = []
        for step in steps:
            inputs, targets = (t[rank * 2 :][:2] for t in make_batch("gpt", 2 * world_size, seed=step))
            loss = loss_of(run["model"](inputs), targets)
            scaled = run["scaler"].scale(loss)
            # An overflow right before the checkpoint: the scale it leaves behind belongs to it.
            (scaled * float("inf") if step == 2 else scaled).backward()
            run["scaler"].step(run["optimizer"])
            run["scaler"].update()
            run["scheduler"].step()
            run["optimizer"].zero_grad()
            losses.append(loss.item())
        return [*losses, run["scaler"].get_scale(), run["optimizer"].param_groups[0]["lr"]]

    def state_of(run: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(run["model"]),
            "optimizer": get_optimizer_state_dict(run["model"], run["optimizer"]),
            "scheduler": run["scheduler"].state_dict(),
            "scaler": run["scaler"].state_dict(),
        }

    first = build(0)
    train(first, range(3))
    dcp.save(state_of(first), checkpoint_id=path)
    second = build(1)
    state = state_of(second)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(second["model"], state["model"])
    set_optimizer_state_dict(second["model"], second["optimizer"], state["optimizer"])
    second["scheduler"].load_state_dict(state["scheduler"])
    second["scaler"].load_state_dict(state["scaler"])
    return train(first, range(3, 7)), train(second, range(3, 7))


@pytest.mark.parametrize("storage", STORAGES)
def test_next_losses_of_a_model_are_those_of_the_uninterrupted_run(storage: str, tmp_path: Path) -> None:
    for uninterrupted, other in run_ranks(2, losses_of_a_model, storage, str(tmp_path)):
        assert other == uninterrupted and len(set(uninterrupted[:4])) == 4
