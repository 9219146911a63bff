"""One promise: a save that was killed, a file that was cut, state that does not fit: no harm is done, nothing changes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.support.checkpoints import Training
from tests.support.ranks import run_ranks
from tests.support.sharded_models import differences
from tests.support.thinned import thinned
from tests.test_resume_is_exact import load_into, state_dict_of
from vescale_optim import ShardedMuon, ShardedOptimizer, check_checkpoint, latest_checkpoint

SAVER_SHAPES = {f"w{number}": (128, 128) for number in range(8)}


def save_for_ever(folder: Path, store: Path, announce: Connection) -> None:
    """A step, a save, a step, ... in a process of its own; tells the number of every save that returned."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    run = Training("adamw", "replicated", seed=0, shapes=SAVER_SHAPES)
    for number in range(10_000):
        run.train(range(number, number + 1))
        dcp.save(state_dict_of(run), checkpoint_id=str(folder / f"{number:06d}"))
        announce.send(number)


def loaded_step(rank: int, world_size: int, mesh: Any, path: str) -> tuple[float, bool]:
    """The step of a checkpoint, and whether training to that step gives what is in it."""
    run = Training("adamw", "replicated", seed=7, shapes=SAVER_SHAPES)
    state = state_dict_of(run)
    check_checkpoint(path, state, run.module, run.optimizer)
    dcp.load(state, checkpoint_id=path)
    load_into(run, state)
    found = run.state()
    step = found["w0.step"].item()
    expected = Training("adamw", "replicated", seed=0, shapes=SAVER_SHAPES)
    expected.train(range(int(step)))
    return step, differences(found, expected.state()) == {}


@pytest.mark.parametrize("num_kills", thinned([6, 20], 2))
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(num_kills: int, tmp_path: Path) -> None:
    """SIGKILL at random moments of a process that does little but save."""
    # Imports once: every process is a fork of one that has them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    randomness = random.Random(0)
    num_unfinished = 0
    for attempt in range(num_kills):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        announced, announce = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(folder, tmp_path / f"store{attempt}", announce))
        process.start()
        announce.close()
        assert announced.recv() == 0
        process.join(randomness.uniform(0, 0.2))
        process.kill()
        process.join()
        last = 0
        with contextlib.suppress(EOFError):
            while True:
                last = announced.recv()
        path = latest_checkpoint(folder)
        num_unfinished += len(list(folder.iterdir())) > int(path.name) + 1
        ((step, is_right),) = run_ranks(1, loaded_step, str(path))
        assert is_right and step >= last + 1
        shutil.rmtree(folder)
    # Else no save was ever killed.
    assert num_unfinished >= num_kills // 10


def test_the_latest_checkpoint_is_the_last_that_was_finished(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match=r"latest_checkpoint found no finished save"):
        check_checkpoint(latest_checkpoint(tmp_path), {})
    for number, name in enumerate(["b", "a", "lost its bytes", "unfinished"]):
        (tmp_path / name).mkdir()
        if name != "unfinished":
            (tmp_path / name / ".metadata").write_bytes(b"" if name == "lost its bytes" else b"metadata")
            os.utime(tmp_path / name / ".metadata", (number, number))
    assert latest_checkpoint(tmp_path) == tmp_path / "a"


def save(rank: int, world_size: int, mesh: Any, path: str, kind: str, flat: bool, arguments: dict[str, Any]) -> None:
    run = Training(kind, "replicated", seed=0, **arguments)
    run.train(range(2))
    dcp.save(state_dict_of(run, flatten_optimizer_state_dict=flat), checkpoint_id=path)


def refused(
    rank: int, world_size: int, mesh: Any, path: str, kind: str, flat: bool, arguments: dict[str, Any]
) -> tuple[str, bool]:
    run = Training(kind, "replicated", seed=7, **arguments)
    before: dict[str, Tensor] = run.state()
    state = state_dict_of(run, flatten_optimizer_state_dict=flat)
    with pytest.raises(ValueError) as error:
        check_checkpoint(path, state, run.module, run.optimizer)
    return str(error.value), differences(run.state(), before) == {}


def cut_file(path: Path) -> None:
    file = next(path.glob("__1_*"))
    os.truncate(file, file.stat().st_size - 100)


def remove_file(path: Path) -> None:
    next(path.glob("__1_*")).unlink()


def cut_metadata(path: Path) -> None:
    os.truncate(path / ".metadata", 500)


def flip_module(path: Path) -> None:
    """One bit: the pickle asks for a module that does not exist."""
    flip(path, b"torch.distributed.checkpoint.metadata")


def flip_attribute(path: Path) -> None:
    """One bit: it unpickles, but a chunk has no place."""
    flip(path, b"offset")


def flip_entry(path: Path) -> None:
    """One bit: the chunk of an entry is that of another."""
    flip(path, b"optimizer.param_groups.0.lr")


def flip(path: Path, word: bytes) -> None:
    content = bytearray((path / ".metadata").read_bytes())
    content[content.rindex(word)] ^= 1
    (path / ".metadata").write_bytes(content)


def remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


DAMAGE = {
    "a file is cut": (cut_file, "__1_0.distcp has"),
    "a file is missing": (remove_file, "__1_0.distcp is missing"),
    "the metadata are cut": (cut_metadata, "cannot be read"),
    "the metadata name another module": (flip_module, ".metadata cannot be read"),
    "the metadata name another attribute": (flip_attribute, ".metadata cannot be read"),
    "the metadata name another entry": (flip_entry, "'optimizer.param_groups.0.lr' of"),
    "the save did not finish": (remove_metadata, "has no file .metadata"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(damage: str, tmp_path: Path) -> None:
    run_ranks(2, save, str(tmp_path), "muon", False, {})
    harm, text = DAMAGE[damage]
    harm(tmp_path)
    for message, is_unchanged in run_ranks(2, refused, str(tmp_path), "muon", False, {}):
        assert text in message and "earlier" in message and is_unchanged


MISMATCHES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[str, ...]]] = {
    "tiles": ("soap", {}, "soap", dict(max_precond_dim=4), ("factors", "shape")),
    "shapes": ("muon", {}, "muon", dict(shapes={"wide": (3, 11)}), ("'model.wide'", "(3, 10)", "(3, 11)")),
    "parameters": ("muon", {}, "muon", dict(shapes={"other": (3, 10)}), ("no entry 'model.other'",)),
    "codes": ("adamw8bit", {}, "adamw8bit", dict(min_8bit_size=1000), ("state1'", "torch.uint8", "torch.float32")),
    "optimizer": ("muon", {}, "adamw", {}, ("no entry", "exp_avg")),
    "splits": (
        "muon",
        dict(groups=dict(tall=dict(splits=(12, 8)))),
        "muon",
        dict(groups=dict(tall=dict(splits=(8, 12)))),
        ("'tall'", "splits is (12, 8)", "(8, 12) here"),
    ),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_checkpoint_of_something_else_is_refused_before_anything_changes(
    mismatch: str, flat: bool, tmp_path: Path
) -> None:
    kind, arguments, other, others, texts = MISMATCHES[mismatch]
    run_ranks(2, save, str(tmp_path), kind, flat, arguments)
    for message, is_unchanged in run_ranks(2, refused, str(tmp_path), other, flat, others):
        assert is_unchanged
        for text in texts:
            assert text in message


def accepted(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> list[str]:
    run = Training("soap", "replicated", seed=7, lr=torch.tensor(0.5))
    state = state_dict_of(run, flatten_optimizer_state_dict=flat)
    return sorted(check_checkpoint(path, state, run.module, run.optimizer).groups()["optimizer"])


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_that_fits_passes_at_any_world_size(flat: bool, tmp_path: Path) -> None:
    run_ranks(2, save, str(tmp_path), "soap", flat, dict(lr=torch.tensor(0.1)))
    assert run_ranks(4, accepted, str(tmp_path), flat) == [["bias", "stack", "tall", "unused", "wide"]] * 4


def checked_with_numpy_rates(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> list[Any]:
    import numpy

    run = Training("adamw", "replicated", seed=0, lr=numpy.float64(0.5), eps=numpy.float32(0.25))
    state = {"optimizer": get_optimizer_state_dict(run.module, run.optimizer, options=options_of(flat))}
    dcp.save(state, checkpoint_id=path)
    group = check_checkpoint(path, state, run.module, run.optimizer).groups()["optimizer"]["tall"]
    return [group["lr"], group["eps"]]


def options_of(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


@pytest.mark.parametrize("flat", [False, True])
def test_rates_that_numpy_computed_are_plain_values(flat: bool, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    assert run_ranks(1, checked_with_numpy_rates, str(tmp_path), flat) == [[0.5, 0.25]]


def two_models(splits: tuple[int, int], **options: Any) -> tuple[Training, Training, dict[str, Any]]:
    """Parameters of both have the same names."""
    first = Training("muon", "replicated", seed=0, groups=dict(tall=dict(splits=splits)))
    second = Training("adamw", "replicated", seed=1)
    return first, second, {"g": state_dict_of(first, **options), "d": state_dict_of(second, **options)}


def messages_for_two_models(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> list[str]:
    options = dict(flatten_optimizer_state_dict=flat)
    dcp.save(two_models((12, 8), **options)[2], checkpoint_id=path)
    messages = []
    for splits in [(12, 8), (8, 12)]:
        *runs, state = two_models(splits, **options)
        messages += [message_of(path, state, run.module, run.optimizer) for run in runs]
    return messages


def message_of(path: str, state: dict[str, Any], model: nn.Module, optimizer: ShardedOptimizer) -> str:
    try:
        check_checkpoint(path, state, model, optimizer)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flat", [False, True])
def test_two_models_with_the_same_names_are_compared_each_with_its_own(flat: bool, tmp_path: Path) -> None:
    ((same, same_second, other, other_second),) = run_ranks(1, messages_for_two_models, str(tmp_path), flat)
    assert [same, same_second, other_second] == ["", "", ""]
    assert "splits is (12, 8) in the checkpoint and (8, 12) here" in other


class Block(nn.Module):
    """A module of its own called `module`, whose name is no wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 12, bias=False)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda block: block,
    "DDP": DistributedDataParallel,
    "torch.compile": torch.compile,
    "activation checkpoints": lambda block: nn.Sequential(checkpoint_wrapper(block)),
    "DDP of activation checkpoints": lambda block: DistributedDataParallel(nn.Sequential(checkpoint_wrapper(block))),
    "torch.compile of DDP": lambda block: torch.compile(DistributedDataParallel(block)),
}


def message_for_wrapped(rank: int, world_size: int, mesh: Any, path: str, wrapper: str) -> str:
    found = {}
    for splits in [(8, 4), (4, 8)]:
        model = WRAPPERS[wrapper](Block())
        group = {"params": list(model.named_parameters()), "splits": splits}
        optimizer = ShardedMuon([group], mesh, grad_sync="none")
        found[splits] = model, optimizer, {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(found[8, 4][2], checkpoint_id=path)
    model, optimizer, state = found[4, 8]
    return message_of(path, state, model, optimizer)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_rules_are_compared_under_any_wrapper(wrapper: str, tmp_path: Path) -> None:
    (message,) = run_ranks(1, message_for_wrapped, str(tmp_path), wrapper)
    assert "splits is (8, 4) in the checkpoint and (4, 8) here" in message


class App:
    """As in torch's tutorial: an object that DCP asks for its state."""

    def __init__(self, run: Training) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return state_dict_of(self.run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self.run, state)


def messages_for_objects(rank: int, world_size: int, mesh: Any, path: str) -> list[str]:
    def build(splits: tuple[int, int]) -> tuple[Training, dict[str, Any]]:
        run = Training("muon", "replicated", seed=0, groups=dict(tall=dict(splits=splits)))
        return run, {"app": App(run), "scheduler": run.scheduler}

    dcp.save(build((12, 8))[1], checkpoint_id=path)
    return [message_of(path, state, run.module, run.optimizer) for run, state in map(build, [(12, 8), (8, 12)])]


def test_objects_with_a_state_dict_are_asked_for_it(tmp_path: Path) -> None:
    ((same, other),) = run_ranks(1, messages_for_objects, str(tmp_path))
    assert same == "" and "splits is (12, 8) in the checkpoint and (8, 12) here" in other
