"""The command line: `vescale-optim`, also `python -m vescale_optim`. No GPU and no process group are needed.

    plan --model DIR_OR_FILE_OR_CODE --ranks 128 --optimizer muon --dtype bf16

prints what a model costs under an optimizer on that many ranks: padding and what drives it, memory, traffic, the balance
of owners, and how other planners fare on the same blocks.

    inspect CHECKPOINT

prints what a checkpoint holds: rules, steps and hyperparameters of its optimizer, and every tensor with its size and the
chunks that ranks wrote of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vescale_optim.capacity.declared import declare, find_optimizer, known_optimizers
from vescale_optim.capacity.model_shapes import read_model
from vescale_optim.capacity.report import CapacityReport, SweepPoint, report_on, sweep
from vescale_optim.capacity.setting import Setting
from vescale_optim.capacity.tables import render, render_sweep
from vescale_optim.checkpoints import read_contents
from vescale_optim.checkpoints import tables as checkpoint_tables

SHOWN_TENSORS = 40
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 where all went well, 2 for arguments that cannot be followed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, `head` or a pager, has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def run_plan(options: argparse.Namespace) -> None:
    """Read, declare, plan, and show in all the ways that were asked for."""
    sweep_ranks = _range_of_ranks(options.sweep) if options.sweep else []
    for path in (options.json, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path} cannot be written: {path.resolve().parent} is no folder; make it first")
    setting = Setting(
        num_ranks=options.ranks,
        num_replicas=options.replicas,
        storage=options.storage,
        block_rows=options.block_rows,
        bucket_bytes=int(options.bucket_mib * 2**20) if options.bucket_mib else None,
        device_bytes=options.device_gib * 2**30,
        master_dtype=DTYPES.get(options.master_dtype),
        grad_dtype=DTYPES.get(options.grad_dtype),
    )
    model = read_model(options.model, DTYPES[options.dtype])
    own_options = {} if options.head is None else {"head": options.head}
    declaration = declare(model, find_optimizer(options.optimizer), master_dtype=setting.master_dtype, **own_options)
    report = report_on(model.label, declaration, setting)
    print(render(report))
    print(f"\nplanned in {report.plan_seconds:.2f} s")
    points: list[SweepPoint] = []
    if sweep_ranks:
        points = sweep(model.label, declaration, setting, sweep_ranks, report.storage)
        print(f"\n{render_sweep(points)}")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(report, points), indent=1) + "\n")
        print(f"figures: {options.json}")
    if options.plot is not None or points:
        _draw(report, points, options.plot, options.bucket)


def run_inspect(options: argparse.Namespace) -> None:
    """Read the metadata of a checkpoint and show it."""
    contents = read_contents(options.checkpoint)
    if options.json:
        print(json.dumps(checkpoint_tables.as_json(contents), indent=1))
    else:
        print(checkpoint_tables.render(contents, None if options.all else SHOWN_TENSORS))


def _draw(report: CapacityReport, points: Sequence[SweepPoint], plot: Path | None, bucket: int | None) -> None:
    from vescale_optim.capacity import pictures

    if plot is not None:
        last = len(report.plan.buckets) - 1
        if bucket is not None and not 0 <= bucket <= last:
            raise ValueError(f"there is no line {bucket} in the table of buckets; give 0 to {last}")
        pictures.draw_bucket(report, pictures.bucket_to_draw(report) if bucket is None else bucket, plot)
        print(f"picture of a bucket: {plot}")
    if points:
        path = plot.with_name(f"{plot.stem}-sweep{plot.suffix}") if plot is not None else Path(f"{report.model}-sweep.png")
        pictures.draw_sweep(report, points, path)
        print(f"picture of the sweep: {path}")


def as_json(report: CapacityReport, points: Sequence[SweepPoint]) -> dict[str, Any]:
    """All figures as plain values; sizes in elements and bytes, padding of peers as a fraction."""
    setting = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in dataclasses.asdict(report.setting).items()
    }
    result = {
        field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.name != "plan"
    }
    for name in ("buckets", "memory", "traffic", "peers"):
        result[name] = [dataclasses.asdict(row) for row in result[name]]
    return {
        **result,
        "setting": setting,
        "padding": report.padding_fraction,
        "balance": report.balance,
        "sweep": [dataclasses.asdict(point) for point in points],
    }


def _range_of_ranks(text: str) -> list[int]:
    """"8..1024": 8, 16, 32, ... and 1024."""
    first, separator, last = text.partition("..")
    try:
        low, high = int(first), int(last)
    except ValueError:
        low = high = 0
    if not separator or not 1 <= low <= high:
        raise ValueError(f"--sweep is {text!r}; give two numbers of ranks, for example 8..1024")
    ranks = [low * 2**power for power in range((high // low).bit_length())]
    return ranks if ranks[-1] == high else [*ranks, high]


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vescale-optim", description="Optimizers for sharded training: tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="what a model costs on many ranks: padding, memory, traffic, balance",
        description=(
            "Plans a model for an optimizer and a number of ranks, without GPUs or a process group, and prints padding, "
            "memory, traffic, the balance of owners, and how other planners fare."
        ),
    )
    plan.add_argument(
        "--model",
        required=True,
        help="a folder with config.json (needs transformers), a safetensors index or file, a JSON list of names and "
        "shapes, or module:callable that builds the model",
    )
    plan.add_argument("--ranks", type=_positive, required=True, help="devices that shard one replica")
    plan.add_argument("--replicas", type=_positive, default=1, help="devices that hold the same shards (HSDP); default 1")
    plan.add_argument("--optimizer", default="muon", help=f"{', '.join(known_optimizers())}, or module:Class; default muon")
    plan.add_argument("--head", help="output head of a module:callable model, for muon, where the module does not say")
    plan.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the parameters; default bf16")
    plan.add_argument("--master-dtype", choices=("fp32",), help="a wider copy of the parameters, sharded")
    plan.add_argument("--grad-dtype", choices=DTYPES, help="of the gradients; default that of the parameters")
    plan.add_argument(
        "--storage",
        choices=("auto", "replicated", "sharded"),
        default="auto",
        help="where parameters live; auto: replicated where that fits a device, else sharded",
    )
    plan.add_argument("--device-gib", type=float, default=80, help="memory of a device, for auto; default 80")
    plan.add_argument("--block-rows", type=_positive, help="sharded parameters are cut only between blocks of these rows")
    plan.add_argument("--bucket-mib", type=float, help="size of a bucket of replicated parameters")
    plan.add_argument("--json", type=Path, help="write all figures to this file")
    plan.add_argument("--plot", type=Path, help="draw one bucket into this PNG: ranks as rows, padding hatched")
    plan.add_argument("--bucket", type=int, help="which line of the table --plot draws; default the one that pads most")
    plan.add_argument("--sweep", metavar="LOW..HIGH", help="the same over numbers of ranks, as a table and a PNG")
    plan.set_defaults(run=run_plan)
    inspect = commands.add_parser(
        "inspect",
        help="what a checkpoint holds: rules, steps, tensors, chunks",
        description="Prints what a checkpoint folder of torch.distributed.checkpoint holds, without loading its tensors.",
    )
    inspect.add_argument("checkpoint", type=Path, help="the folder given to dcp.save as checkpoint_id")
    inspect.add_argument("--all", action="store_true", help=f"list all tensors, not the first {SHOWN_TENSORS}")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")
    inspect.set_defaults(run=run_inspect)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
