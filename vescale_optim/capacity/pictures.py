"""Pictures of a plan: one bucket with ranks as rows, and padding and memory over the number of ranks. Needs matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vescale_optim.capacity.report import CapacityReport, SweepPoint, format_bytes
from vescale_optim.capacity.storages import PlannedBucket

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
    _label_axes(axes, ranks, row_of, widest, plan.num_ranks)
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
    _legend(axes, {kind: colour for kind, colour in colours.items() if kind in seen}, pyplot)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _shown_ranks(num_ranks: int) -> list[int]:
    """All ranks, or the first and the last ones where there are many."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    last = _MOST_RANKS // 3
    return [*range(_MOST_RANKS - last), *range(num_ranks - last, num_ranks)]


def _label_axes(axes: Any, ranks: Sequence[int], row_of: dict[int, int], widest: int, num_ranks: int) -> None:
    axes.set_yticks([row_of[rank] for rank in ranks], [f"rank {rank:,}" for rank in ranks], fontsize=8)
    rows = max(row_of.values())
    if len(ranks) < num_ranks:
        gap = next(row for row in range(rows) if row not in row_of.values())
        hidden = f"{num_ranks - len(ranks):,} more ranks"
        axes.text(widest / 2, gap, hidden, ha="center", va="center", fontsize=8, color="#444444")
    axes.set_ylim(rows + 0.6, -0.6)
    axes.set_xlim(0, widest)
    axes.set_xlabel("elements of the rank's shard, segment after segment (black lines)")
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
    name = declared.name.removeprefix(declared.layer).removeprefix(".") if bucket.label != "0" else declared.name
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


def _legend(axes: Any, colours: dict[str, str], pyplot: Any) -> None:
    patch = pyplot.matplotlib.patches.Patch
    own = [(kind, colour) for kind, colour in colours.items() if colour != _COLOURS[-1]]
    handles = [patch(facecolor=colour, label=kind) for kind, colour in own]
    if len(colours) > len(own):
        handles.append(patch(facecolor=_COLOURS[-1], label=f"{len(colours) - len(own)} smaller kinds"))
    handles.append(patch(facecolor="white", edgecolor="#555555", hatch="/////", label="padding"))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def draw_sweep(report: CapacityReport, points: Sequence[SweepPoint], path: Path) -> None:
    """Padding by planner, and bytes of the fullest rank, over the number of ranks."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    ranks = [point.num_ranks for point in points]
    styles = ("o-", "s--", "^-", "v-", "D-", "x:")
    for number, name in enumerate(points[0].padding):
        if not all(name in point.padding for point in points):
            continue
        values = [max(100 * point.padding[name], 0.0) for point in points]
        width = 2.4 if number == 0 else 1.3
        left.plot(ranks, values, styles[number % len(styles)], color=_COLOURS[number], label=name, linewidth=width, ms=5)
    largest = max(value for point in points for value in point.padding.values())
    if largest > 0.5:
        # From 1 % on in decades, below in proportion, so that 0 has a place.
        left.set_yscale("symlog", linthresh=1)
        left.set_ylim(-0.1, 200 * largest)
    else:
        left.set_ylim(bottom=0)
    left.set_ylabel("padding, % of the elements")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    left.set_title("padding, the same blocks whole", fontsize=10, loc="left")
    kinds = [name for name in points[0].memory if name != "total"]
    bottoms = [0.0] * len(points)
    for number, name in enumerate(kinds):
        values = [point.memory[name] / 1e9 for point in points]
        right.bar(range(len(points)), values, 0.7, bottoms, color=_COLOURS[number], label=name)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for position, total in enumerate(bottoms):
        right.text(position, total, format_bytes(total * 1e9), ha="center", va="bottom", fontsize=7)
    device = report.setting.device_bytes / 1e9
    # Small models would be flattened by a line far above them.
    if max(bottoms) > 0.3 * device:
        right.axhline(device, color="black", linewidth=1, linestyle="--")
        right.text(-0.45, device, "one device", va="bottom", fontsize=7)
    right.set_ylim(0, 1.4 * max(*bottoms, right.get_ylim()[1] / 1.4))
    right.set_ylabel("GB on the fullest rank")
    right.set_title(f"memory, {report.storage} parameters, without activations", fontsize=10, loc="left")
    left.set_xscale("log", base=2)
    left.set_xticks(ranks, [f"{rank:,}" for rank in ranks])
    left.minorticks_off()
    right.set_xticks(range(len(points)), [f"{rank:,}" for rank in ranks])
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    left.grid(axis="y", linewidth=0.4, alpha=0.6)
    figure.suptitle(f"{report.model}, {report.numel:,} parameters, {report.optimizer}", fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
