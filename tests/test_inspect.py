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
    assert found["steps"] == {"wide": 3, "tall": 3, "unused": 2, "stack": 3, "bias": 3}
    assert found["groups"]["tall"]["algorithm"] == "adamw" and found["groups"]["tall"]["lr"] == pytest.approx(1e-3 / 4)


def test_what_is_no_checkpoint_is_an_error_of_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has no file .metadata" in capsys.readouterr().err
