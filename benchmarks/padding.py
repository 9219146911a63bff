"""How much do planners pad when shards must keep blocks of rows whole? Published models, layer by layer, no GPU needed.

    python benchmarks/padding.py [--model NAME] [--json FILE] [--markdown]

For every distinct layer of the models in `model_shapes.json`, for blocks of 1, 16, 32 and 128 rows (a row is the last
axis, a 1-D tensor is one row; 8 elements of alignment), on 8 to 1,024 ranks: padding in percent of the parameters,

    ours         plan_buffer, and how far above the lower bound, which no order and no segments can beat
    published, fsdp2, megatron    see `vescale_optim/capacity/peers.py`; all keep the same blocks whole
    plain        torch FSDP2 as it is, beside them at blocks of 1 row; it cuts 1-D tensors by element
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vescale_optim.capacity.peers import BlockedTensor, fsdp2_numel, megatron_numel, plain_fsdp2_numel, published_numel
from vescale_optim.sharding.planner import TensorBlocks, plan_buffer

BLOCK_ROWS = (1, 16, 32, 128)
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
ALIGN = 8

# Padding that a first prototype reached, and the published planner's: what to beat.
TARGETS = {
    ("llama-3-70b", "layers.0", 32, 64): 2.1,
    ("llama-3-70b", "layers.0", 32, 128): 2.1,
    ("gpt-oss-120b", "layers.0", 16, 1024): 2.1,
    ("gpt-oss-120b", "layers.0", 128, 1024): 23.0,
    ("deepseek-v3-671b", "layers.0", 16, 64): 0.9,
    ("deepseek-v3-671b", "layers.0", 16, 128): 4.7,
    ("deepseek-v3-671b", "layers.0", 16, 256): 9.4,
    ("qwen3-32b", "layers.0", 16, 128): 7.2,
}


@dataclass(frozen=True)
class Row:
    """Padding in percent of the parameters. `group`: the first of the layers that are alike; seconds are of the CPU."""

    model: str
    group: str
    num_groups: int
    block_rows: int
    ranks: int
    ours: float
    published: float
    fsdp2: float
    megatron: float
    plain_fsdp2: float | None
    lower_bound: float
    segments: int
    driver: str
    plan_seconds: float


def read_models() -> dict[str, dict]:
    """Shapes of the published models, by name."""
    return json.loads(Path(__file__).with_name("model_shapes.json").read_text())


def measure(model: str, group: dict, block_rows: int, ranks: int) -> Row:
    shapes = [tuple(entry["shape"]) for entry in group["distinct_shapes"] for _ in range(entry["count"])]
    tensors = [BlockedTensor.rows(shape, block_rows) for shape in shapes]
    total = sum(tensor.numel for tensor in tensors)
    units = [TensorBlocks(tensor.numel, tensor.block) for tensor in tensors]
    seconds: list[float] = []
    # Long ones are timed again: on a busy machine a second of CPU may do half the work.
    while not seconds or (min(seconds) > 0.1 and len(seconds) < 3):
        began = time.process_time()
        plan = plan_buffer(units, ranks, align=ALIGN)
        seconds.append(time.process_time() - began)

    def percent(numel: int) -> float:
        return 100 * (numel / total - 1)

    return Row(
        model=model,
        group=group["groups"][0],
        num_groups=len(group["groups"]),
        block_rows=block_rows,
        ranks=ranks,
        ours=percent(plan.numel),
        published=percent(published_numel(tensors, ranks, ALIGN)),
        fsdp2=percent(fsdp2_numel(tensors, ranks)),
        megatron=percent(megatron_numel(tensors, ranks)),
        plain_fsdp2=percent(plain_fsdp2_numel(tensors, ranks)) if block_rows == 1 else None,
        lower_bound=percent(plan.lower_bound),
        segments=len(plan.segments),
        driver=plan.driver,
        plan_seconds=min(seconds),
    )


def measure_all(models: dict[str, dict]) -> Iterator[Row]:
    for model, shapes in models.items():
        for group in shapes["distinct_groups"]:
            for block_rows in BLOCK_ROWS:
                for ranks in RANKS:
                    yield measure(model, group, block_rows, ranks)


def print_table(rows: Iterator[Row]) -> list[Row]:
    """Prints rows as they come, a heading for every layer; returns them."""
    done: list[Row] = []
    for row in rows:
        if not done or (done[-1].model, done[-1].group) != (row.model, row.group):
            alike = f" and {row.num_groups - 1} alike" if row.num_groups > 1 else ""
            print(f"\n{row.model}, {row.group}{alike}: padding in %")
            print("  rows  ranks      ours   above bound  segments  published      fsdp2   megatron      plain")
        plain = "" if row.plain_fsdp2 is None else f"{row.plain_fsdp2:9.2f}"
        gap = row.ours - row.lower_bound
        print(
            f"  {row.block_rows:4d}  {row.ranks:5d}  {row.ours:8.2f}  {'optimal' if gap < 5e-7 else f'{gap:.2f}':>12}"
            f"  {row.segments:8d}  {row.published:9.2f}  {row.fsdp2:9.2f}  {row.megatron:9.2f}  {plain}"
        )
        done.append(row)
    return done


def print_summary(rows: Sequence[Row]) -> bool:
    """The claims, each with what was found; whether all hold."""
    claims = []
    for name in ("published", "fsdp2", "megatron"):
        worse = [row for row in rows if row.ours > getattr(row, name) + 1e-9]
        better = sum(row.ours < getattr(row, name) - 1e-9 for row in rows)
        claims.append((not worse, f"never worse than {name}: worse in {len(worse)}, better in {better} of {len(rows)}"))
    by_key = {(row.model, row.group, row.block_rows, row.ranks): row for row in rows}
    for key, target in TARGETS.items():
        if key in by_key:
            row = by_key[key]
            text = f"{row.ours:.2f} % (bound {row.lower_bound:.2f} %, published {row.published:.0f} %)"
            claims.append(
                (
                    row.ours <= target,
                    f"{' '.join(map(str, key[:2]))}, {key[2]} rows, {key[3]}: {text}, at most {target}",
                )
            )
    slowest = max(rows, key=lambda row: row.plan_seconds)
    claims.append(
        (
            slowest.plan_seconds < 0.3,
            f"slowest plan {slowest.plan_seconds:.3f} s of CPU ({slowest.model} {slowest.group}, "
            f"{slowest.block_rows} rows, {slowest.ranks} ranks); at most 0.3 s",
        )
    )
    print()
    for holds, text in claims:
        print(f"{'ok  ' if holds else 'MISS'}  {text}")
    gaps = sorted(((row.ours - row.lower_bound, row) for row in rows), key=lambda entry: entry[0])
    print(
        f"proven optimal: {sum(gap < 5e-7 for gap, _ in gaps)} of {len(rows)}; "
        f"mean above the lower bound {sum(gap for gap, _ in gaps) / len(gaps):.3f} percentage points; largest:"
    )
    for gap, row in gaps[:-6:-1]:
        print(f"  {gap:5.2f}  {row.model} {row.group}, {row.block_rows} rows, {row.ranks} ranks: {row.driver}")
    return all(holds for holds, _ in claims)


def print_markdown(rows: Sequence[Row]) -> None:
    """The rows with a target as the README has them."""
    by_key = {(row.model, row.group, row.block_rows, row.ranks): row for row in rows}
    optimal = sum(row.ours - row.lower_bound < 5e-7 for row in rows)
    print(
        f"\n{len(rows)} rows, {optimal} proven optimal; {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, "
        f"{platform.machine()} with {os.cpu_count()} cores\n"
    )
    print("| layer, rows per block, ranks | ours | lower bound | published plan | FSDP2 | Megatron-FSDP |")
    print("|---|---|---|---|---|---|")
    for model, group, block_rows, ranks in TARGETS:
        row = by_key.get((model, group, block_rows, ranks))
        if row is not None:
            others = " | ".join(f"{value:,.1f}" for value in (row.published, row.fsdp2, row.megatron))
            name = f"{model} {group}, {block_rows}, {ranks:,}"
            print(f"| {name} | {row.ours:.2f} | {row.lower_bound:.2f} | {others} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="only this model; may be repeated")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the rows with a target as a table for the README")
    arguments = parser.parse_args()
    models = read_models()
    unknown = [name for name in arguments.model or () if name not in models]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; give one of {', '.join(models)}")
    chosen = {name: shapes for name, shapes in models.items() if not arguments.model or name in arguments.model}
    rows = print_table(measure_all(chosen))
    holds = print_summary(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(f"python {platform.python_version()}; {len(rows)} rows in {arguments.json}")
    if arguments.markdown:
        print_markdown(rows)
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
