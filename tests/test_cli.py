"""`python -m vescale_optim plan`: what it reads, what it prints, and that its figures are those of the real optimizer."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from vescale_optim import Blocks, ShardedMuon, ShardedOptimizer
from vescale_optim.capacity import model_shapes
from vescale_optim.capacity.amounts import format_bytes, format_flops
from vescale_optim.capacity.declared import declare, find_optimizer
from vescale_optim.capacity.model_shapes import ModelShapes, read_model
from vescale_optim.capacity.report import report_on
from vescale_optim.capacity.setting import Setting
from vescale_optim.capacity.storages import plan_replicated, plan_sharded
from vescale_optim.cli import main
from vescale_optim.sharding.fully_sharded.layout import choose_layout

WIDTH, LAYERS, VOCABULARY = 64, 4, 512


class Decoder(nn.Module):
    """The parameters of a small LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q_proj": nn.Linear(WIDTH, WIDTH, bias=False),
                    "k_proj": nn.Linear(WIDTH, WIDTH // 4, bias=False),
                    "up_proj": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                    "down_proj": nn.Linear(3 * WIDTH, WIDTH, bias=False),
                    "norm": nn.LayerNorm(WIDTH, bias=False),
                }
            )
            for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def shapes() -> list[tuple[str, list[int]]]:
    return [(name, list(param.shape)) for name, param in Decoder().named_parameters()]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(shapes()))
    return path


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


# -- what it prints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("more", [(), ("--block-rows", "16"), ("--block-rows", "4", "--replicas", "2")])
def test_tables_fit_100_columns_and_say_everything(
    listed: Path, capsys: Any, optimizer: str, more: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, "--model", str(listed), "--ranks", "8", "--optimizer", optimizer, *more)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    storage = "sharded" if more else "replicated"
    for words in (
        f"storage: {storage}", "padding", "lower bound", "parameters", "gradients", "state", "communication buffers",
        "owners", "reduce-scatter", "all-gather", "published single-buffer plan", "FSDP2", "Megatron-FSDP",
    ):  # fmt: skip
        assert words in out, words
    assert ("all-reduce over replicas" in out) == ("--replicas" in more)
    assert ("units to owners and back" in out) == (optimizer == "muon" and bool(more))


def test_figures_and_pictures_are_written(listed: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    plot, figures = tmp_path / "out.png", tmp_path / "out.json"
    arguments = ("--model", str(listed), "--ranks", "8", "--sweep", "2..8", "--plot", str(plot), "--json", str(figures))
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for path in (plot, tmp_path / "out-sweep.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in out
    found = json.loads(figures.read_text())
    assert found["numel"] == sum(param.numel() for param in Decoder().parameters())
    assert [point["num_ranks"] for point in found["sweep"]] == [2, 4, 8]
    assert {"buckets", "memory", "traffic", "peers", "balance", "padding", "storage_reason"} <= set(found)
    assert found["setting"]["num_ranks"] == 8


def test_it_runs_as_a_module_without_a_process_group(listed: Path) -> None:
    command = [sys.executable, "-m", "vescale_optim", "plan", "--model", str(listed), "--ranks", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1,024 ranks" in done.stdout


# -- figures ---------------------------------------------------------------------------------------------------------


def plans_of_optimizer(rank: int, world_size: int, mesh: Any, bucket_mib: float) -> Any:
    optimizer = ShardedMuon(Decoder(), mesh, bucket_mib=bucket_mib)
    return [bucket.plan for bucket in optimizer._storages["replicated"].buckets], optimizer._storages["replicated"].loads


@pytest.mark.parametrize("bucket_mib", [0.05, 16])
def test_the_plan_is_the_one_that_the_optimizer_makes(bucket_mib: float) -> None:
    ((plans, loads), _) = run_ranks(2, plans_of_optimizer, bucket_mib)
    with torch.device("meta"):
        module = Decoder()
    declaration = declare(ModelShapes("tiny", tuple(module.named_parameters()), module), ShardedMuon)
    found = plan_replicated(declaration, 2, int(bucket_mib * 2**20))
    assert [bucket.plan for bucket in found.buckets] == plans
    assert list(found.owners.flops) == loads


def test_a_list_of_names_is_routed_as_the_module(listed: Path) -> None:
    with torch.device("meta"):
        module = Decoder()
    of_module = declare(ModelShapes("tiny", tuple(module.named_parameters()), module), ShardedMuon)
    of_list = declare(read_model(str(listed), torch.float32), ShardedMuon)
    assert {t.name: t.algorithm for t in of_list.tensors} == {t.name: t.algorithm for t in of_module.tensors}
    assert "embed_tokens.weight, lm_head.weight" in of_list.notes[0]


def test_bytes_are_those_that_a_hand_would_count(listed: Path) -> None:
    declaration = declare(read_model(str(listed), torch.bfloat16), ShardedMuon)
    numel = sum(tensor.units.numel for tensor in declaration.tensors)
    adamw = sum(tensor.units.numel for tensor in declaration.tensors if tensor.algorithm == "adamw")
    report = report_on("tiny", declaration, Setting(num_ranks=2, storage="replicated"))
    memory = {row.name: row for row in report.memory}
    assert sum(row.padding for row in report.buckets) == 0
    assert memory["parameters"].largest == 2 * numel
    assert memory["gradients"].mean == 2 * numel / 2
    # Momentum for matrices, two moments for the others, in bf16.
    assert memory["state"].mean == (2 * numel + 2 * adamw) / 2
    traffic = {row.name: row.mean for row in report.traffic}
    assert traffic["reduce-scatter of gradients"] == traffic["all-gather of parameters"] == 2 * numel / 2
    wide = report_on("tiny", declaration, Setting(num_ranks=2, storage="replicated", master_dtype=torch.float32))
    extra = {row.name: row.mean for row in wide.memory}["state"] - memory["state"].mean
    assert extra == 4 * numel / 2


def test_units_travel_as_the_formula_says(listed: Path) -> None:
    """2 (N - 1) / N^2 elements per element of a matrix, in bf16."""
    declaration = declare(read_model(str(listed), torch.float32), ShardedMuon)
    matrices = sum(tensor.units.numel for tensor in declaration.tensors if tensor.units.cost)
    report = report_on("tiny", declaration, Setting(num_ranks=4, storage="sharded", block_rows=1))
    (exchanged,) = (row.mean for row in report.traffic if row.name == "units to owners and back")
    assert exchanged == pytest.approx(2 * 2 * matrices * 3 / 16)


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_no_other_planner_pads_less(tmp_path: Path, num_ranks: int, block_rows: int) -> None:
    path = tmp_path / "wide.json"
    path.write_text(json.dumps([(name, [32 * size for size in shape]) for name, shape in shapes()]))
    declaration = declare(read_model(str(path), torch.bfloat16), ShardedMuon)
    report = report_on("wide", declaration, Setting(num_ranks=num_ranks, block_rows=block_rows))
    ours = report.peers[0].padding
    assert ours == pytest.approx(report.padding_fraction)
    # Ours aligns every shard, and has few segments where more would pad less than their latency is worth.
    slack = (1 << 16) * (LAYERS + 1) / report.numel
    for row in report.peers:
        # Planners that cut through blocks do not keep what this optimizer needs.
        if row.name != "FSDP2 as it is":
            assert ours <= row.padding + slack, row


def test_storage_is_replicated_where_it_fits_a_device(listed: Path, capsys: Any) -> None:
    _, out, _ = run(capsys, "--model", str(listed), "--ranks", "4")
    assert "storage: replicated" in out
    _, out, _ = run(capsys, "--model", str(listed), "--ranks", "4", "--device-gib", "0.0001")
    assert "storage: sharded" in out
    assert "exceed the 107 kB of a device" in " ".join(out.split())


def test_buffers_count_where_parameters_are_to_fit(listed: Path) -> None:
    declaration = declare(read_model(str(listed), torch.bfloat16), ShardedMuon)
    memory = {row.name: row.largest for row in report_on("tiny", declaration, Setting(num_ranks=4)).memory}
    without = memory["total"] - memory["communication buffers"]
    for room, storage in ((memory["total"], "replicated"), (memory["total"] - 1, "sharded"), (without, "sharded")):
        assert report_on("tiny", declaration, Setting(num_ranks=4, device_bytes=room)).storage == storage


def test_what_does_not_fit_a_device_is_said(listed: Path, capsys: Any) -> None:
    _, out, _ = run(capsys, "--model", str(listed), "--ranks", "4")
    assert "give more --ranks" not in out
    _, out, _ = run(capsys, "--model", str(listed), "--ranks", "4", "--device-gib", "0.0001")
    words = " ".join(out.split())
    # Two layers whole take more than that, so that more ranks would not help.
    assert "exceed the 107 kB of a device; the communication buffers alone need" in words
    assert "wrap smaller modules than whole layers" in words
    declaration = declare(read_model(str(listed), torch.bfloat16), ShardedMuon)
    sharded = Setting(num_ranks=4, storage="sharded")
    memory = {row.name: row.largest for row in report_on("tiny", declaration, sharded).memory}
    room = str((memory["total"] + memory["communication buffers"]) / 2 / 2**30)
    _, out, _ = run(capsys, "--model", str(listed), "--ranks", "4", "--storage", "sharded", "--device-gib", room)
    assert "of a device; give more --ranks" in " ".join(out.split())


def test_a_unit_too_costly_for_any_balance_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([["layers.0.large", [512, 512]], *([f"layers.0.{i}", [32, 32]] for i in range(15))]))
    _, out, _ = run(capsys, "--model", str(path), "--ranks", "16")
    (line,) = (line for line in " ".join(out.split()).split("owners: ")[1:])
    # Newton-Schulz costs as the third power of the width: 16 ranks, 1 + 15 / 4096 of the large matrix in all.
    assert f"{16 / (1 + 15 / 4096):.3f} times the mean" in line
    assert f"the costliest unit, which cannot be divided, is {16 / (1 + 15 / 4096):.3f} alone" in line


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (999, "999 B"), (3.4e9, "3.40 GB"), (12.54e6, "12.5 MB"), (1.342e15, "1,342 TB")]
)
def test_bytes_are_short(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize("value, text", [(0, "0.00 MFLOP"), (5.5e12, "5.50 TFLOP"), (1.342e18, "1,342 PFLOP")])
def test_flops_are_short(value: float, text: str) -> None:
    assert format_flops(value) == text


# -- what it reads ---------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    """Heads as safetensors has them; the values are left out."""
    head = {"__metadata__": {"format": "pt"}}
    head |= {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    content = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)


def as_pairs(path: Path) -> str:
    path.write_text(json.dumps(shapes()))
    return str(path)


def as_entries(path: Path) -> str:
    path.write_text(json.dumps([{"name": name, "shape": shape} for name, shape in shapes()]))
    return str(path)


def as_mapping(path: Path) -> str:
    path.write_text(json.dumps(dict(shapes())))
    return str(path)


def as_index(path: Path) -> str:
    tensors = dict(shapes())
    names = list(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        write_safetensors(path.parent / file, {name: tensors[name] for name in part})
    index = path.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in files.items() for name in part}}))
    return str(index)


def as_folder_of_files(path: Path) -> str:
    as_index(path)
    (path.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(path.parent)


def as_code(path: Path) -> str:
    return "tests.test_cli:Decoder"


@pytest.mark.parametrize("write", [as_pairs, as_entries, as_mapping, as_index, as_folder_of_files, as_code])
def test_every_source_gives_the_same_shapes(
    write: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_shapes, "_has_transformers", lambda: False)
    model = read_model(write(tmp_path / "tiny.json"), torch.bfloat16)
    assert {name: list(param.shape) for name, param in model.parameters} == dict(shapes())
    assert all(param.is_meta and param.dtype == torch.bfloat16 for _, param in model.parameters)


def test_a_config_is_built_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny", "architectures": ["Decoder"]}))
    stand_in = types.ModuleType("transformers")
    stand_in.AutoConfig = types.SimpleNamespace(from_pretrained=lambda path, local_files_only: path)
    stand_in.AutoModelForCausalLM = types.SimpleNamespace(from_config=lambda settings: Decoder())
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(model_shapes, "_has_transformers", lambda: True)
    for source in (tmp_path, tmp_path / "config.json"):
        model = read_model(str(source), torch.bfloat16)
        assert model.module is not None
        assert [name for name, _ in model.parameters] == [name for name, _ in shapes()]
        assert all(param.is_meta for _, param in model.parameters)


def test_a_config_says_which_class_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    stand_in = types.ModuleType("transformers")
    settings = types.SimpleNamespace(architectures=["DecoderForSomething"])
    stand_in.AutoConfig = types.SimpleNamespace(from_pretrained=lambda path, local_files_only: settings)
    stand_in.AutoModelForCausalLM = types.SimpleNamespace(from_config=lambda settings: nn.Linear(2, 2))
    stand_in.DecoderForSomething = lambda settings: Decoder()
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(model_shapes, "_has_transformers", lambda: True)
    assert type(read_model(str(tmp_path), torch.bfloat16).module) is Decoder
    settings.architectures = ["OfAnotherPackage"]
    assert type(read_model(str(tmp_path), torch.bfloat16).module) is nn.Linear


def test_layers_are_found_in_names() -> None:
    assert model_shapes.layer_of("model.layers.3.mlp.experts.7.up_proj.weight") == "model.layers.3"
    assert model_shapes.layer_of("h.11.qkv.weight") == "h.11"
    assert model_shapes.layer_of("model.norm.weight") == ""


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "nowhere"), "is no file or folder; give a folder with config.json"),
        (("--model", "nowhere:build"), "cannot be imported"),
        (("--model", "builtins:list"), "it must return the model"),
        (("--optimizer", "sgd"), "is not known; give one of"),
        (("--optimizer", "torch.optim:SGD"), "is not known; give one of"),
        (("--sweep", "8-64"), "for example 8..1024"),
        (("--storage", "replicated", "--replicas", "2"), "--ranks 16 --replicas 1"),
        (("--json", "/nowhere/at/all.json"), "is no folder; make it first"),
    ],
)
def test_mistakes_are_named_with_the_way_out(
    listed: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    model = () if "--model" in arguments else ("--model", str(listed))
    code, _, err = run(capsys, *model, "--ranks", "8", *arguments)
    assert code == 2
    assert message in err


def test_a_config_without_transformers_names_the_way_out(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(model_shapes, "_has_transformers", lambda: False)
    code, _, err = run(capsys, "--model", str(tmp_path), "--ranks", "8")
    assert code == 2
    assert "pip install transformers" in err and "module:callable" in err


def test_an_index_without_its_files_names_the_way_out(tmp_path: Path, capsys: Any) -> None:
    index = as_index(tmp_path / "tiny.json")
    (tmp_path / "b.safetensors").unlink()
    code, _, err = run(capsys, "--model", index, "--ranks", "8")
    assert code == 2
    assert "b.safetensors, which is not beside it" in err


@pytest.mark.parametrize("content", ['[["a", [2, -1]]]', '[["a", "b"]]', "[7]", "[]", '[["a", [1]], ["a", [2]]]', "no"])
def test_a_wrong_list_is_refused(tmp_path: Path, capsys: Any, content: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    code, _, err = run(capsys, "--model", str(path), "--ranks", "8")
    assert code == 2
    assert str(path) in err


def test_every_optimizer_of_the_package_can_be_planned(listed: Path) -> None:
    model = read_model(str(listed), torch.bfloat16)
    for name in ("muon", "adamw", "vescale_optim.optimizers.adamw:ShardedAdamW"):
        declaration = declare(model, find_optimizer(name))
        report = report_on("tiny", declaration, Setting(num_ranks=4))
        assert {row.name: row.largest for row in report.memory}["state"] > 0


class RowDirections(ShardedOptimizer):
    """Needs whole rows, and does not say what they cost."""

    def __init__(self, params: Any, mesh: Any, **options: Any) -> None:
        super().__init__(params, mesh, dict(lr=0.1), **options)

    def blocks(self, shape: Any, group: Any) -> Blocks:
        return Blocks.rows(shape, 1)

    def compute(self, units: Any, group: Any) -> list[torch.Tensor]:
        return [entry.values.clone() for entry in units]

    def apply(self, shards: Any, directions: Any, group: Any) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_layer_is_stored_as_fully_shard_would(num_ranks: int, dtype: torch.dtype) -> None:
    decided = set()
    for shapes in ([(96, 96)] * 4, [(96, 288), (96, 96), (384, 96)], [(64, 64), (64, 8)], [(300, 7)]):
        params = tuple((f"layers.0.w{i}", nn.Parameter(torch.empty(s, dtype=dtype))) for i, s in enumerate(shapes))
        declaration = declare(ModelShapes("model", params), ShardedMuon)
        (bucket,) = plan_sharded(declaration, num_ranks).buckets
        chosen = choose_layout([Blocks.matrices(shape) for shape in shapes], num_ranks, dtype.itemsize)
        assert bucket.keeps_units == (chosen.kind == "units")
        decided.add(chosen.kind)
    assert decided == {"units", "rows"} or num_ranks not in (2, 4)


def test_owners_of_a_rule_that_names_no_cost() -> None:
    params = (("layers.0.w", nn.Parameter(torch.empty(100, 8))),)
    declaration = declare(ModelShapes("model", params), RowDirections)
    assert plan_sharded(declaration, 2).owners.flops == (400.0, 400.0)
