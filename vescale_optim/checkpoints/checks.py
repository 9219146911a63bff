"""Before a checkpoint is loaded: is it whole, and does it fit?

`dcp.load` reads into the tensors of the state dict one by one, so that a fault found half-way leaves half of them changed,
and the rules of an optimizer are compared only afterwards, in `load_state_dict`. Checking first costs a look at the
metadata, the sizes of the files and the param groups:

    path = latest_checkpoint("run")             the newest folder whose save finished
    check_checkpoint(path, state, model, opt)   raises before anything changes
    dcp.load(state, checkpoint_id=path)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.checkpoint.stateful import Stateful

from vescale_optim.checkpoints.contents import METADATA, CheckpointContents, groups_of, read_contents
from vescale_optim.optimizers.base import ShardedOptimizer


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint in `folder` that was finished last; None where there is none.

    Give every save a folder of its own: `dcp.save` into an existing one writes over its files before the new ones are
    complete.
    """
    # A machine that goes down may leave the name of a file without its bytes.
    finished = [entry.parent for entry in Path(folder).glob(f"*/{METADATA}") if entry.stat().st_size > 0]
    return max(finished, key=lambda path: ((path / METADATA).stat().st_mtime_ns, path.name), default=None)


def check_checkpoint(
    path: str | Path | None,
    state: Mapping[str, Any],
    model: nn.Module | None = None,
    optimizer: ShardedOptimizer | None = None,
) -> CheckpointContents:
    """Raise where `dcp.load(state, checkpoint_id=path)` and loading the result would fail; changes nothing.

    Communicates nothing, unless `state_dict` of an object in `state` does.

    Args:
        path: folder of the checkpoint, as `latest_checkpoint` gives it.
        state: the state dict to be loaded into; objects with `state_dict` and `load_state_dict` may be in it, as for DCP.
        model, optimizer: whose state is in it, as `get_optimizer_state_dict(model, optimizer)` gives it; the rules of the
            optimizer are compared with those at the same place in the checkpoint.

    Raises:
        ValueError: an unfinished save, a missing or truncated file, an entry that is missing or of another shape or
            kind (codes for numbers), or, by parameter, another algorithm, rule version or layout than the optimizer's.
    """
    contents = read_contents(path)
    _check_files(contents)
    # DCP asks only the objects at the top; it pickles those further down.
    asked = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
    wanted = flatten_state_dict(asked)[0]
    _check_entries(contents, wanted)
    if model is not None and optimizer is not None:
        _check_rules(contents, wanted, model, optimizer)
    return contents


def _check_files(contents: CheckpointContents) -> None:
    for name, end in contents.file_ends().items():
        file = contents.path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ValueError(f"{file} {found}, the checkpoint's metadata says {end:,}; take an earlier checkpoint")


def _check_entries(contents: CheckpointContents, wanted: Mapping[str, Any]) -> None:
    saved_names = set(contents.names)
    missing = [name for name in wanted if name not in saved_names]
    if missing:
        raise ValueError(
            f"checkpoint {contents.path} has no entry '{missing[0]}' ({len(missing)} missing of {len(wanted)}); it was "
            "saved from another model or optimizer"
        )
    for name, value in wanted.items():
        saved = contents.tensors.get(name)
        if not isinstance(value, Tensor) or saved is None:
            continue
        found, expected = (saved.shape, saved.dtype), (tuple(value.shape), value.dtype)
        # Floating dtypes are converted; codes would be taken for numbers.
        if saved.shape != tuple(value.shape) or saved.dtype.is_floating_point != value.dtype.is_floating_point:
            raise ValueError(
                f"entry '{name}' is {found[1]} of shape {found[0]} in checkpoint {contents.path} and {expected[1]} of shape "
                f"{expected[0]} here; load it into the same model, blocks and dtypes"
            )


def _check_rules(
    contents: CheckpointContents, wanted: Mapping[str, Any], model: nn.Module, optimizer: ShardedOptimizer
) -> None:
    places = groups_of(wanted, wanted.__getitem__)
    for place, saved in contents.groups().items():
        here = places.get(place, {})
        for name, param in model.named_parameters():
            # Wrappers (DDP, FSDP, torch.compile, checkpoints of activations) change names; torch's helpers save without.
            for saved_name in _get_fqns(model, name):
                if saved_name in saved and _is_group_of(optimizer, name, param, here.get(saved_name, {})):
                    optimizer.check_saved_group(name, param, saved[saved_name])


def _is_group_of(optimizer: ShardedOptimizer, name: str, param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a group of the state to be loaded into may be the optimizer's; another model may use the same names."""
    if "algorithm" not in group:
        return False
    try:
        optimizer.check_saved_group(name, param, group)
    except ValueError:
        return False
    return True
