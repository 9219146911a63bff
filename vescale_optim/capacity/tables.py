"""render: a capacity report as text of at most 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby

from vescale_optim.capacity.amounts import format_bytes, format_flops
from vescale_optim.capacity.rank_bytes import BUFFERS, BytesRow
from vescale_optim.capacity.report import BucketRow, CapacityReport, SweepPoint

WIDTH = 100
_MOST_BUCKETS = 16


def render(report: CapacityReport) -> str:
    """The whole report."""
    setting = report.setting
    devices = setting.num_ranks * setting.num_replicas
    replicas = f" x {setting.num_replicas} replicas = {devices:,} devices" if setting.num_replicas > 1 else ""
    dtypes = sorted({row.dtype for row in report.buckets})
    lines = [
        *_wrapped(f"{report.model}: {report.num_tensors:,} tensors, {report.numel:,} parameters in {', '.join(dtypes)}"),
        f"{report.optimizer} on {setting.num_ranks:,} ranks{replicas}",
        *_wrapped(f"storage: {report.storage}: {report.storage_reason}", "         "),
    ]
    for note in report.notes:
        lines += _wrapped(f"note: {note}", "      ")
    lines += ["", *_buckets(report)]
    lines += ["", *_bytes_table("memory of a rank", report.memory)]
    if report.memory[-1].largest > setting.device_bytes:
        excess = f"{format_bytes(report.memory[-1].largest)} exceed the {format_bytes(setting.device_bytes)} of a device"
        (buffers,) = [row.largest for row in report.memory if row.name == BUFFERS]
        if buffers > setting.device_bytes:
            way_out = (
                f"the {BUFFERS} alone need {format_bytes(buffers)}, on any number of ranks: wrap smaller modules than whole "
                "layers, or give a larger --device-gib"
            )
        else:
            way_out = "give more --ranks, or a larger --device-gib"
        lines += _wrapped(f"  {excess}; {way_out}", "  ")
    lines += ["", *_balance(report)]
    lines += ["", *_bytes_table("received by a rank in a step", report.traffic)]
    if report.peers:
        lines += ["", *_peers(report)]
    return "\n".join(lines)


def render_sweep(points: Sequence[SweepPoint]) -> str:
    """Padding in % and bytes of the fullest rank, one line per number of ranks."""
    names = [name for name in points[0].padding if all(name in point.padding for point in points)]
    short = {name: _short_name(name) for name in names}
    rows = [("ranks", *(short[name] for name in names), "params", "grads+state", "buffers", "FLOPs")]
    for point in points:
        memory = point.memory
        rows.append(
            (
                f"{point.num_ranks:,}",
                *(_percent(point.padding[name]) for name in names),
                format_bytes(memory["parameters"]),
                format_bytes(memory["gradients"] + memory["state"]),
                format_bytes(memory[BUFFERS]),
                f"{point.balance:.2f}",
            )
        )
    title = "over ranks: padding by planner; bytes of the fullest rank; FLOPs of the busiest by the mean"
    return "\n".join([*_wrapped(title, "  "), *_table(rows, left=0)])


def _short_name(name: str) -> str:
    return {
        "vescale_optim, as planned": "ours",
        "vescale_optim, layer by layer": "by layer",
        "published single-buffer plan": "published",
        "FSDP2, same blocks whole": "FSDP2",
        "Megatron-FSDP, same blocks whole": "Megatron",
        "FSDP2 as it is": "plain",
    }.get(name, name)


def _buckets(report: CapacityReport) -> list[str]:
    total = sum(row.count for row in report.buckets)
    lines = [f"{total:,} bucket{'s' * (total > 1)}, padding {_percent(report.padding_fraction)} in all"]
    rows = [("bucket", "tensors", "elements", "segments", "shards", "padding", "lower bound")]
    details: list[tuple[str, str]] = []
    shown = _grouped(report.buckets)
    for members in shown[:_MOST_BUCKETS]:
        first = members[0]
        label = first.label if len(members) == 1 else f"{first.label} to {members[-1].label}"
        rows.append(
            (
                label,
                _range([row.num_tensors for row in members], "{:,}"),
                _range([row.numel for row in members], "{:,}"),
                str(first.segments),
                "equal" if first.is_even else "unequal",
                _range([100 * row.padding / max(row.numel, 1) for row in members], "{:.2f}", "%"),
                _bound(members),
            )
        )
        worst = max(members, key=lambda row: row.padding)
        driver = re.sub(r"(?<![\w.])\d{4,}(?![\w.])", lambda found: f"{int(found[0]):,}", worst.driver)
        # What the table shows as 0.00 % needs no reason.
        is_padded = worst.padding >= 5e-5 * worst.numel
        details.append((label, f"{first.why}. Padding: {driver}" if driver and is_padded else first.why))
    lines += _table(rows, left=1)
    if len(shown) > _MOST_BUCKETS:
        lines.append(f"  and {sum(map(len, shown[_MOST_BUCKETS:])):,} more (all in the --json file)")
    lines.append("")
    for text, group in groupby(details, key=lambda entry: entry[1]):
        labels = [label for label, _ in group]
        name = labels[0] if len(labels) == 1 else f"{labels[0]} ... {labels[-1]}"
        lines += _wrapped(f"  {name}: {text}", "    ")
    return lines


def _bound(members: Sequence[BucketRow]) -> str:
    """How much of the padding any plan of equal shards must have."""
    if not all(row.is_even for row in members):
        return "-"
    return _range([100 * (row.lower_bound / max(row.numel, 1) - 1) for row in members], "{:.2f}", "%")


def _grouped(rows: Sequence[BucketRow]) -> list[list[BucketRow]]:
    """Neighbours that were planned for the same reason share a line where there are many buckets."""
    if len(rows) <= _MOST_BUCKETS:
        return [[row] for row in rows]
    return [list(group) for _, group in groupby(rows, key=lambda row: (row.dtype, row.segments, row.why))]


def _balance(report: CapacityReport) -> list[str]:
    if not report.mean_flops:
        return ["owners: an element-wise rule, every rank updates its shard"]
    devices = report.setting.num_ranks * report.setting.num_replicas
    text = (
        f"owners: busiest of {devices:,} devices {format_flops(report.busiest_flops)} a step, "
        f"mean {format_flops(report.mean_flops)}: {report.balance:.3f} times the mean"
    )
    alone = report.costliest_unit_flops / report.mean_flops
    if alone > 1:
        text += f"; the costliest unit, which cannot be divided, is {alone:.3f} alone"
    return _wrapped(text, "  ")


def _bytes_table(title: str, rows: Sequence[BytesRow]) -> list[str]:
    table = [(title, "fullest", "mean", "")]
    table += [(row.name, format_bytes(row.largest), format_bytes(row.mean), row.note) for row in rows]
    return _table(table, left=1, last_left=True)


def _peers(report: CapacityReport) -> list[str]:
    table = [("planners, same model and blocks", "padding", "shards of a rank", "")]
    table += [(row.name, _percent(row.padding), format_bytes(row.sharded_bytes), row.note) for row in report.peers]
    text = (
        "shards of a rank: parameters, gradients and state, all sharded over one replica. Planners other than `as planned` "
        "pack every numbered layer by itself, and what is outside layers together."
    )
    return [*_table(table, left=1, last_left=True), *_wrapped(f"  {text}", "  ")]


def _percent(fraction: float) -> str:
    percent = 100 * fraction
    return f"{percent:.2f}%" if percent < 100 else f"{percent:,.0f}%"


def _range(values: Sequence[float], form: str, suffix: str = "") -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return f"{low}{suffix}" if low == high else f"{low}-{high}{suffix}"


def _table(rows: Sequence[tuple[str, ...]], *, left: int, last_left: bool = False) -> list[str]:
    """`left` columns to the left, the others to the right; a rule below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number < left or (last_left and number == len(row) - 1) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    lines.insert(1, "  " + "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    # A number stays on the line of its unit: textwrap does not break at no-break spaces.
    joined = re.sub(r"(?<=\d) (?=[kMGT]?B\b|%)", "\u00a0", text)
    lines = textwrap.wrap(joined, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]
