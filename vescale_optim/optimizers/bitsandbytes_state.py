"""State dicts of 8-bit AdamW on their way in and out: bitsandbytes' form, other blocks, fp32 moments.

    bitsandbytes    "step": int, "state1", "state2": uint8, "absmax1", "absmax2": fp32 for each 256 elements,
                    "qmap1", "qmap2": the codebooks. Tensors lie in the entry, or nested under one key of it.
    torch AdamW     "exp_avg", "exp_avg_sq"
    ours            bitsandbytes' without the codebooks; our groups say which blocks

Tensors are those of the whole logical parameter. Nothing here changes an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_optim.optimizers.groups import hyperparameters_of, names_of
from vescale_optim.optimizers.quantize import (
    FlatLayout,
    QuantizationLayout,
    chunks,
    codebook,
    dequantize_,
    layout_of,
    quantization_layout,
    quantize_,
)
from vescale_optim.optimizers.rule import Group
from vescale_optim.optimizers.state import other_meaning

Layouts = Mapping[Tensor, QuantizationLayout | None]
"""How the moments of every managed parameter are quantised; None for fp32."""

STATE = ("state1", "state2", "absmax1", "absmax2")
NESTED = "__bnb_optimizer_quant_state__"
BITSANDBYTES_LAYOUT = FlatLayout(256)
# Before 0.44 bitsandbytes had blocks of 2048. The number of scales decides; for few elements several sizes fit.
KNOWN_BLOCK_NUMELS = (256, 2048, 64, 128, 512, 1024, 4096)
# What decides the form of the state belongs to the optimizer that holds it, not to the checkpoint.
FORM = ("bits", "min_8bit_size", "block_size", "block_shape")
BITSANDBYTES_GROUP = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
CHUNK_NUMEL = 1 << 20


def converted_state_dict(state_dict: Mapping[str, Any], groups: Sequence[Group], layouts: Layouts) -> dict[str, Any]:
    """`state_dict` with state in the form of `layouts`; where the parameters do not match in number, as it is.

    Raises:
        ValueError: state of no known form, or quantised in other blocks by one of our optimizers, by parameter name.
    """
    saved_groups = state_dict["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return dict(state_dict)
    entries, converted_groups = dict(state_dict["state"]), []
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        for key, name, param in zip(saved["params"], names_of(group, number), group["params"], strict=True):
            if key in entries and param in layouts:
                _check_blocks(entries[key], saved, group, name, param.shape, layouts[param])
                entries[key] = _converted(entries[key], saved, name, param.shape, layouts[param])
        kept = {name: value for name, value in saved.items() if name not in BITSANDBYTES_GROUP}
        if saved.get("algorithm") == "adamw":
            kept |= {"algorithm": group["algorithm"], "rule_version": group["rule_version"]}
        converted_groups.append({**kept, **{name: group[name] for name in FORM}})
    return {**state_dict, "state": entries, "param_groups": converted_groups}


def exported_state_dict(state_dict: Mapping[str, Any], groups: Sequence[Group], layouts: Layouts) -> dict[str, Any]:
    """Our `state_dict` as bitsandbytes has it, tensors whole: collective.

    A parameter that never had a gradient is left out, since bitsandbytes makes its state at the first one.

    Raises:
        ValueError: blocks that bitsandbytes does not have, by parameter name.
    """
    for number, group in enumerate(groups):
        for name, param in zip(names_of(group, number), group["params"], strict=True):
            if layouts.get(param) not in (None, BITSANDBYTES_LAYOUT):
                raise ValueError(
                    f"state of parameter '{name}' of shape {tuple(param.shape)} is quantised by {layouts[param]}, and "
                    f"bitsandbytes has runs of 256 elements only; use block_size=256 without block_shape"
                )
    state, exported_groups = {}, []
    maps = {f"qmap{number}": codebook(is_signed=number == 1, device=torch.device("cpu")).values.clone() for number in (1, 2)}
    for packed, group in zip(state_dict["param_groups"], groups, strict=True):
        for key in packed["params"]:
            entry = state_dict["state"].get(key, {"step": 0})
            if entry["step"] == 0:
                continue
            tensors = {name: _whole(entry[name]) for name in STATE if name in entry}
            if "absmax1" in tensors:
                tensors |= {name: value.to(tensors["state1"].device) for name, value in maps.items()}
            state[key] = {"step": int(entry["step"]), NESTED: tensors}
        said = hyperparameters_of(group)
        kept = {name: said[name] for name in ("lr", "betas", "eps", "weight_decay")}
        exported_groups.append({**kept, **BITSANDBYTES_GROUP, "params": list(packed["params"])})
    return {"state": state, "param_groups": exported_groups}


def _check_blocks(
    entry: Mapping[str, Any], saved: Group, group: Group, name: str, shape: torch.Size, wanted: QuantizationLayout | None
) -> None:
    """Refuse our own state in other blocks, which would be rounded anew, and codes that were read as moments."""
    if "block_size" not in saved or not isinstance(entry.get("state1"), Tensor):
        return
    was = layout_of(shape, saved)
    if (was is None) == (entry["state1"].dtype == torch.uint8):
        raise ValueError(
            f"parameter '{name}' of shape {tuple(shape)}: its state was saved with bits={saved['bits']} and min_8bit_size="
            f"{saved['min_8bit_size']}, and arrives as {entry['state1'].dtype}: dcp.load copied it into state of another "
            "form; construct the optimizer with the values of the checkpoint, or load a full state dict, which is converted"
        )
    if None not in (was, wanted) and was != wanted:
        changed = next(key for key in ("block_shape", "block_size") if saved[key] != group[key])
        raise other_meaning(name, shape, changed, saved[changed], group[changed])


def _converted(
    entry: Mapping[str, Any], saved: Group, name: str, shape: torch.Size, wanted: QuantizationLayout | None
) -> dict[str, Any]:
    """One parameter's entry in the wanted form."""
    entry = {**entry, **entry.get(NESTED, {})}
    entry.pop(NESTED, None)
    lookups = [entry.pop("qmap1", None), entry.pop("qmap2", None)]
    for ours, theirs in (("state1", "exp_avg"), ("state2", "exp_avg_sq")):
        if theirs in entry and ours not in entry:
            entry[ours] = entry.pop(theirs)
    moments = [entry.get("state1"), entry.get("state2")]
    if any(moment is None or tuple(moment.shape) != tuple(shape) for moment in moments):
        return entry  # nothing to convert, or of another shape: loading says which
    found = None
    if moments[0].dtype == torch.uint8:
        found = _saved_layout(entry, saved, name, shape)
    if found == wanted and lookups == [None, None]:
        return entry
    scales = [entry.pop(f"absmax{number}", None) for number in (1, 2)]
    for number in (1, 2):
        parts = moments[number - 1], scales[number - 1], lookups[number - 1]
        moment, absmax = _converted_moment(*parts, found, wanted, is_signed=number == 1)
        entry[f"state{number}"] = moment
        if absmax is not None:
            entry[f"absmax{number}"] = absmax
    return entry


def _saved_layout(entry: Mapping[str, Any], saved: Group, name: str, shape: torch.Size) -> QuantizationLayout:
    if "absmax1" not in entry or "absmax2" not in entry:
        raise ValueError(
            f"state of parameter '{name}' has 8-bit codes, but no absmax1 and absmax2 in its entry ({sorted(entry)}); "
            "only block-wise quantised state can be loaded"
        )
    count = entry["absmax1"].numel()
    if "block_size" in saved:
        candidates: list[QuantizationLayout] = [
            quantization_layout(shape, saved["block_size"], saved.get("block_shape"))
        ]
    else:
        candidates = [FlatLayout(numel) for numel in KNOWN_BLOCK_NUMELS]
    for layout in candidates:
        if layout.scales_per_unit() * layout.blocks(shape).num_units == count == entry["absmax2"].numel():
            return layout
    raise ValueError(
        f"state of parameter '{name}' of shape {tuple(shape)} has {count} and {entry['absmax2'].numel()} scales in the "
        f"checkpoint, which fits none of {candidates}"
    )


def _converted_moment(
    moment: Tensor,
    absmax: Tensor | None,
    lookup: Tensor | None,
    found: QuantizationLayout | None,
    wanted: QuantizationLayout | None,
    *,
    is_signed: bool,
) -> tuple[Tensor, Tensor | None]:
    """(state, absmax) of one moment; fp32 state has no absmax."""
    moment = _whole(moment)
    book = codebook(is_signed=is_signed, device=moment.device, lowest=1 - is_signed)
    if found is not None:
        absmax = _whole(absmax).to(moment.device)
        lookup = book.values if lookup is None else lookup.to(moment.device)
    if found is not None and wanted is not None and _is_coarser(found, wanted):
        # Code by code, so that nothing is rounded but what the codebooks do not share: the same codebook is the identity.
        recode, factor = _quantized(lookup.float(), FlatLayout(lookup.numel()), is_signed=is_signed)
        scales = absmax * factor
        if found != wanted:
            scales = scales.repeat_interleave(found.numel // wanted.numel)[: wanted.blocks(moment.shape).num_units]
        return recode.index_select(0, moment.reshape(-1).int()).view(moment.shape), scales
    values = moment.float() if found is None else _dequantized(moment, absmax, lookup, found)
    if wanted is None:
        return values, None
    return _quantized(values, wanted, is_signed=is_signed)


def _is_coarser(found: QuantizationLayout, wanted: QuantizationLayout) -> bool:
    """Whether every wanted block lies in one found block: the scales are then those of the blocks around."""
    both_flat = isinstance(found, FlatLayout) and isinstance(wanted, FlatLayout)
    return found == wanted or (both_flat and found.numel % wanted.numel == 0)


def _dequantized(codes: Tensor, absmax: Tensor, lookup: Tensor, layout: QuantizationLayout) -> Tensor:
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for elements, scales in chunks(layout, layout.blocks(codes.shape), 0, codes.numel(), CHUNK_NUMEL):
        part = codes.reshape(-1)[elements]
        index = torch.empty(part.numel(), dtype=torch.int32, device=codes.device)
        dequantize_(values.view(-1)[elements], part, absmax[scales], layout, lookup.float(), index)
    return values


def _quantized(values: Tensor, layout: QuantizationLayout, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    book = codebook(is_signed=is_signed, device=values.device, lowest=1 - is_signed)
    blocks = layout.blocks(values.shape)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    absmax = torch.empty(layout.scales_per_unit() * blocks.num_units, dtype=torch.float32, device=values.device)
    for elements, scales in chunks(layout, blocks, 0, values.numel(), CHUNK_NUMEL):
        part = values.reshape(-1)[elements].clone()
        scratch = torch.empty(2, part.numel(), dtype=torch.int32, device=values.device).unbind()
        quantize_(part, codes.view(-1)[elements], absmax[scales], layout, book, scratch)
    return codes, absmax


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
