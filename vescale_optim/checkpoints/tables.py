"""render: what a checkpoint holds, as text: one line for each parameter, with the state of its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vescale_optim.capacity.amounts import format_bytes
from vescale_optim.checkpoints.contents import CheckpointContents, Groups, SavedTensor

# Hyperparameters that say which mathematics the state belongs to come first; the rest follows as it was saved.
RULE = ("algorithm", "rule_version")
NOT_SHOWN = ("param_names",)


def render(contents: CheckpointContents, most: int | None = None) -> str:
    """Totals, the rules, and a table of tensors.

    Args:
        most: lines of the table of tensors; None for all.
    """
    tensors = [tensor for _, tensor in sorted(contents.tensors.items())]
    size, files = format_bytes(contents.num_bytes), contents.file_ends()
    lines = [
        f"{contents.path}: {len(tensors):,} tensors, {size} in {len(files)} files, "
        f"{len(contents.names) - len(tensors):,} other entries",
        "",
        *_rules(contents),
        "",
        *_tensors(contents, tensors[:most]),
    ]
    if most is not None and len(tensors) > most:
        lines.append(f"  and {len(tensors) - most:,} more; --all shows them")
    others = [name for name in contents.names if name not in contents.tensors and "param_groups" not in name]
    if others:
        shown = ", ".join(others[:8])
        lines += ["", f"other entries: {shown}" + (f" and {len(others) - 8:,} more" if len(others) > 8 else "")]
    return "\n".join(lines)


def as_json(contents: CheckpointContents) -> dict[str, Any]:
    """All of it as plain values; sizes in bytes, `chunks` the shapes of the boxes that ranks wrote."""
    found = contents.groups()
    return {
        "path": str(contents.path),
        "files": contents.file_ends(),
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "bytes": tensor.num_bytes,
                "chunks": tensor.chunks,
            }
            for name, tensor in contents.tensors.items()
        },
        "groups": {
            place: {
                name: {key: _plain(value) for key, value in group.items() if key not in NOT_SHOWN}
                for name, group in groups.items()
            }
            for place, groups in found.items()
        },
        "steps": steps(contents, found),
    }


def steps(contents: CheckpointContents, found: Mapping[str, Groups]) -> dict[str, dict[str, int]]:
    """Steps that each parameter has made, by the place of its optimizer and by its name, as its groups are found."""
    made: dict[str, dict[str, int]] = {}
    for place, groups in found.items():
        entries = {name: f"{place}.state.{name}.step".removeprefix(".") for name in groups}
        made[place] = {
            name: int(contents.read_value(entry))
            for name, entry in entries.items()
            if entry in contents.tensors and contents.tensors[entry].shape == ()
        }
    return made


def _rules(contents: CheckpointContents) -> list[str]:
    """The rules of each optimizer, under its place where there are several."""
    found = contents.groups()
    if not found:
        return ["no optimizer state with param groups"]
    made = steps(contents, found)
    lines = []
    for place, groups in found.items():
        rules = _rules_of(groups, made[place])
        lines += rules if len(found) == 1 else [f"{place}:", *(f"  {line}" for line in rules)]
    return lines


def _rules_of(groups: Groups, made: Mapping[str, int]) -> list[str]:
    """Two lines for each distinct group: its rule, how many parameters and steps, and its hyperparameters."""
    by_group: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for name, group in groups.items():
        text = repr(sorted((key, str(_plain(value))) for key, value in group.items() if key not in NOT_SHOWN))
        by_group.setdefault(text, (group, []))[1].append(name)
    lines = []
    for group, names in by_group.values():
        rule = group.get("algorithm", "unknown rule")
        version = f" version {group['rule_version']}" if "rule_version" in group else ""
        counts = Counter(made[name] for name in names if name in made)
        step = [f"{count:,} at step {number:,}" for number, count in sorted(counts.items())]
        lines.append(f"{rule}{version}: {len(names):,} parameters" + (f", {', '.join(step)}" if step else ""))
        said = {key: _plain(value) for key, value in group.items() if key not in (*RULE, *NOT_SHOWN)}
        lines.append("  " + ", ".join(f"{key}={value}" for key, value in said.items()))
    return lines


def _tensors(contents: CheckpointContents, tensors: Sequence[SavedTensor]) -> list[str]:
    rows = [("tensor", "dtype", "shape", "bytes", "chunks")]
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "number"
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((tensor.name, dtype, shape, format_bytes(tensor.num_bytes), _chunks(tensor)))
    name, dtype, shape, size, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    text = [f"  {r[0]:<{name}}  {r[1]:<{dtype}}  {r[2]:<{shape}}  {r[3]:>{size}}  {r[4]}" for r in rows]
    return [text[0].rstrip(), "  " + "-" * (max(map(len, text)) - 2), *(line.rstrip() for line in text[1:])]


def _chunks(tensor: SavedTensor) -> str:
    """How many boxes, and their shapes: "2 of 4 x 7" or "3: 1 x 5, 4 x 7, 1 x 2"."""
    shapes = Counter(" x ".join(map(str, chunk)) or "number" for chunk in tensor.chunks)
    if len(tensor.chunks) == 1:
        return "whole"
    parts = [f"{count} of {shape}" if count > 1 else shape for shape, count in shapes.items()]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more kinds" if len(parts) > 4 else "")


def _plain(value: object) -> object:
    """Tensors and numpy's numbers as python's."""
    return value.tolist() if hasattr(value, "tolist") else value
