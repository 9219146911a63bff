"""One promise: `vescale-optim inspect` says what a checkpoint holds, and reads no tensor for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.checkpoints import Training
from tests.support.ranks import run_ranks
from tests.test_resume_is_exact import state_dict_of
from vescale_optim.cli import main


def save(rank: int, world_size: int, mesh: Any, path: str, kind: str, storage: str, flat: bool) -> None:
    run = Training(kind, storage, seed=0)
    run.train(range(3), {1: ("unused",)})
    dcp.save(state_dict_of(run, flatten_optimizer_state_dict=flat), checkpoint_id=path)


@pytest.mark.parametrize("flat", [False, True])
def test_the_table_says_rules_steps_sizes_and_chunks(flat: bool, tmp_path: Path, capsys: Any) -> None:
    run_ranks(2, save, str(tmp_path), "muon", "replicated", flat)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "muon version 1: 4 parameters, 1 at step 2, 3 at step 3" in text
    assert "adamw version 1: 1 parameters, 1 at step 3" in text
    assert "momentum=0.95" in text and "splits=None" in text
    # 20 x 6 fp32 numbers; what the two ranks wrote of them is all of them.
    (row,) = [line for line in lines if line and line[0].endswith("tall.momentum_buffer")]
    assert row[1:7] == ["float32", "20", "x", "6", "480", "B"]
    assert "scheduler" in text


def test_json_holds_every_chunk(tmp_path: Path, capsys: Any) -> None:
    run_ranks(2, save, str(tmp_path), "adamw", "fsdp2", False)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tensors = found["tensors"]
    tensor = tensors["optimizer.state.tall.exp_avg"]
    assert tensor["shape"] == [20, 6] and tensor["bytes"] == 480 and tensor["dtype"] == "float32"
    assert tensor["chunks"] == [[10, 6], [10, 6]]
    for entry in tensors.values():
        assert sum(map(math.prod, entry["chunks"])) == math.prod(entry["shape"])
    assert found["steps"] == {"optimizer": {"wide": 3, "tall": 3, "unused": 2, "stack": 3, "bias": 3}}
    group = found["groups"]["optimizer"]["tall"]
    assert group["algorithm"] == "adamw" and group["lr"] == pytest.approx(1e-3 / 4)


def save_two(rank: int, world_size: int, mesh: Any, path: str, flat: bool) -> None:
    """Two models with the same names; numbers of numpy, as schedulers that use it leave them."""
    import numpy

    first = Training("muon", "replicated", seed=0)
    second = Training("adamw", "replicated", seed=1)
    first.train(range(3))
    second.train(range(2))
    for group in second.optimizer.param_groups:
        group.update(lr=numpy.float64(0.5), eps=numpy.float32(0.25))
    state = {name: state_dict_of(run, flatten_optimizer_state_dict=flat) for name, run in [("g", first), ("d", second)]}
    for run_state in state.values():
        del run_state["scheduler"]
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("flat", [False, True])
def test_two_models_with_the_same_names_are_shown_apart(flat: bool, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("numpy")
    run_ranks(1, save_two, str(tmp_path), flat)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    first, second = text.index("g.optimizer:\n"), text.index("d.optimizer:\n")
    assert first < text.index("  muon version 1: 4 parameters, 4 at step 3") < second
    assert second < text.index("  adamw version 1: 5 parameters, 5 at step 2") < text.index("lr=0.5, ")
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["wide", "tall", "unused", "stack", "bias"]
    assert found["steps"] == {"g.optimizer": dict.fromkeys(names, 3), "d.optimizer": dict.fromkeys(names, 2)}
    groups = found["groups"]
    assert groups["g.optimizer"]["tall"]["algorithm"] == "muon" and groups["g.optimizer"]["tall"]["lr"] == 0.02 / 4
    assert groups["d.optimizer"]["tall"]["lr"] == 0.5 and groups["d.optimizer"]["tall"]["eps"] == 0.25


def test_what_is_no_checkpoint_is_an_error_of_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has no file .metadata" in capsys.readouterr().err
    for step in (1, 2):
        (tmp_path / f"{step:06d}").mkdir()
        (tmp_path / f"{step:06d}" / ".metadata").write_bytes(b"metadata")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds checkpoints and is none itself; give one of them: 000001, 000002" in capsys.readouterr().err
