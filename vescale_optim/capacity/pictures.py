"""Pictures of a plan: one bucket with ranks as rows, and padding and memory over the number of ranks. Needs matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vescale_optim.capacity.amounts import format_bytes
from vescale_optim.capacity.report import CapacityReport, SweepPoint
from vescale_optim.capacity.storages import PlannedBucket
from vescale_optim.sharding.planner import BufferPlan

# Colour-blind safe, in the order of their use (Okabe and Ito, and three tints); padding has none.
_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C6BB1", "#A6761D", "#7FC97F", "#999999",
)  # fmt: skip
_MOST_RANKS = 24
_MOST_KINDS = len(_COLOURS) - 1


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'vescale-optim[bench]', or leave --plot out") from None
    return pyplot


def bucket_to_draw(report: CapacityReport) -> int:
    """The bucket that pads most for its size, the largest one where none pads."""
    plans = [bucket.plan for bucket in report.plan.buckets]
    return max(range(len(plans)), key=lambda i: (round(plans[i].padding_fraction, 4), plans[i].numel, -i))


def draw_bucket(report: CapacityReport, index: int, path: Path) -> None:
    """Ranks as rows, tensors as bars in the colour of their kind, padding hatched."""
    pyplot = _pyplot()
    bucket = report.plan.buckets[index]
    plan = bucket.plan
    ranks = _shown_ranks(plan.num_ranks)
    colours = _colours(bucket)
    height = 0.24 * len(ranks) + 2.3 + 0.17 * math.ceil(len(set(colours.values())) / 2)
    figure, axes = pyplot.subplots(figsize=(11, height), layout="constrained")
    # Where ranks are left out, a row is left free.
    row_of = {rank: row + (rank != ranks[0] + row) for row, rank in enumerate(ranks)}
    widest = max(plan.shard_numel(rank) for rank in ranks)
    hairline = widest / 900
    seen: set[str] = set()
    for segment in plan.segments:
        members = [(tensor, plan.ranks_of(tensor)) for tensor in segment.tensors]
        for rank in ranks:
            row, start = row_of[rank], segment.local_start[rank]
            # Padding below, tensors above: what stays visible belongs to no tensor.
            axes.barh(
                row, segment.shard_numels[rank], left=start, height=0.8, facecolor="white", edgecolor="#555555",
                hatch="/////", linewidth=0.4,
            )  # fmt: skip
            for tensor, owners in members:
                extent = plan.extent(tensor, rank) if rank in owners else None
                if extent is None or not extent.numel:
                    continue
                kind = _kind(bucket, tensor)
                seen.add(kind)
                axes.barh(
                    row, extent.numel, left=extent.local, height=0.8, facecolor=colours[kind],
                    edgecolor="white", linewidth=0.5 if extent.numel > 3 * hairline else 0,
                )  # fmt: skip
    if plan.is_even:
        for segment in plan.segments[1:]:
            axes.axvline(segment.local_start[0], color="black", linewidth=1.2)
    _label_axes(axes, ranks, row_of, widest, plan)
    shards = "equal" if plan.is_even else "unequal"
    alike = f" ({bucket.count} alike)" if bucket.count > 1 else ""
    segments = f"{len(plan.segments)} segment{'s' * (len(plan.segments) > 1)} of {shards} shards"
    bound = f", lower bound {plan.lower_bound / (plan.numel - plan.padding) - 1:.2%}" if plan.is_even else ""
    axes.set_title(
        f"{report.model}, {report.optimizer}, {plan.num_ranks:,} ranks: bucket {bucket.label}{alike}\n"
        f"{len(bucket.tensors):,} tensors, {plan.numel - plan.padding:,} elements, {segments}, "
        f"padding {plan.padding_fraction:.2%}{bound}",
        fontsize=10, loc="left",
    )  # fmt: skip
    _legend(axes, {kind: colour for kind, colour in colours.items() if kind in seen}, plan.padding > 0, pyplot)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _shown_ranks(num_ranks: int) -> list[int]:
    """All ranks, or the first and the last ones where there are many."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    last = _MOST_RANKS // 3
    return [*range(_MOST_RANKS - last), *range(num_ranks - last, num_ranks)]


def _label_axes(axes: Any, ranks: Sequence[int], row_of: dict[int, int], widest: int, plan: BufferPlan) -> None:
    axes.set_yticks([row_of[rank] for rank in ranks], [f"rank {rank:,}" for rank in ranks], fontsize=8)
    rows = max(row_of.values())
    if len(ranks) < plan.num_ranks:
        gap = next(row for row in range(rows) if row not in row_of.values())
        hidden = f"{plan.num_ranks - len(ranks):,} more ranks"
        free = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.text(widest / 2, gap, hidden, ha="center", va="center", fontsize=8, color="#444444", bbox=free)
    axes.set_ylim(rows + 0.6, -0.6)
    axes.set_xlim(0, widest)
    several = ", segment after segment (black lines)" if len(plan.segments) > 1 and plan.is_even else ""
    axes.set_xlabel(f"elements of the rank's shard{several}", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: _count(value))
    axes.spines[["top", "right"]].set_visible(False)


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _kind(bucket: PlannedBucket, tensor: int) -> str:
    """Name without the layer and with experts as one, and shape."""
    declared = bucket.tensors[tensor]
    name = declared.name.removeprefix(declared.layer).removeprefix(".")
    name = re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)
    return f"{name}  {'×'.join(map(str, declared.shape))}"


def _colours(bucket: PlannedBucket) -> dict[str, str]:
    """A colour for each kind of tensor, the kinds of most elements first; the smallest ones share the last."""
    sizes: dict[str, int] = {}
    for index, tensor in enumerate(bucket.tensors):
        kind = _kind(bucket, index)
        sizes[kind] = sizes.get(kind, 0) + tensor.units.numel
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    return {kind: _COLOURS[min(number, _MOST_KINDS)] for number, kind in enumerate(ordered)}


def _legend(axes: Any, colours: dict[str, str], is_padded: bool, pyplot: Any) -> None:
    patch = pyplot.matplotlib.patches.Patch
    own = [(kind, colour) for kind, colour in colours.items() if colour != _COLOURS[-1]]
    handles = [patch(facecolor=colour, label=kind) for kind, colour in own]
    if len(colours) > len(own):
        handles.append(patch(facecolor=_COLOURS[-1], label=f"{len(colours) - len(own)} smaller kinds"))
    if is_padded:
        handles.append(patch(facecolor="white", edgecolor="#555555", hatch="/////", label="padding"))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def draw_sweep(report: CapacityReport, points: Sequence[SweepPoint], path: Path) -> None:
    """Padding by planner, and bytes of the fullest rank, over the number of ranks."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    _draw_padding(left, points)
    _draw_memory(right, points, report.setting.device_bytes)
    left.set_title("padding of planners that keep the same blocks whole", fontsize=10, loc="left")
    right.set_title(f"memory of the fullest rank, {report.storage} parameters, no activations", fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_xlabel("ranks", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        # Below the axes: inside, there is no place that stays free for every model.
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    blocks = f"blocks of {report.setting.block_rows} rows" if report.setting.block_rows else "the optimizer's blocks"
    title = f"{report.model}, {report.numel:,} parameters, {report.optimizer}, {blocks}"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_padding(axes: Any, points: Sequence[SweepPoint]) -> None:
    ranks = [point.num_ranks for point in points]
    names = [name for name in points[0].padding if all(name in point.padding for point in points)]
    largest = 0.0
    for number, name in enumerate(names):
        values = [max(100 * point.padding[name], 0.0) for point in points]
        largest = max(largest, *values)
        cuts = " (cuts blocks)" if name.endswith("as it is") else ""
        # Lines may coincide: the later ones are thinner and have smaller, hollow marks, so that all are seen.
        width, size = (2.6, 5.0) if number == 0 else (2.6 - 0.35 * number, 11 - 1.6 * number)
        axes.plot(
            ranks, values, "os^vDx"[number % 6], linestyle=":" if cuts else "-", color=_COLOURS[number],
            label=f"{name}{cuts}", linewidth=width, markersize=size, markerfacecolor=_COLOURS[0] if number == 0 else "none",
            zorder=3 if number == 0 else 2, clip_on=False,
        )  # fmt: skip
    if largest > 50:
        # From 1 % on in decades, below in proportion, so that 0 has a place.
        axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("padding, % of the elements", fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)


def _draw_memory(axes: Any, points: Sequence[SweepPoint], device_bytes: float) -> None:
    kinds = [name for name in points[0].memory if name != "total"]
    bottoms = [0.0] * len(points)
    for number, name in enumerate(kinds):
        values = [point.memory[name] / 1e9 for point in points]
        axes.bar(range(len(points)), values, 0.7, bottoms, color=_COLOURS[number], label=name)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for position, total in enumerate(bottoms):
        axes.text(position, total, format_bytes(total * 1e9), ha="center", va="bottom", fontsize=7)
    # Small models would be flattened by a line far above them.
    if max(bottoms) > 0.3 * device_bytes / 1e9:
        label = f"a device, {format_bytes(device_bytes)}"
        axes.axhline(device_bytes / 1e9, color="black", linewidth=1, linestyle="--", label=label)
    axes.set_ylabel("GB", fontsize=9)
    axes.set_xticks(range(len(points)), [f"{point.num_ranks:,}" for point in points])
