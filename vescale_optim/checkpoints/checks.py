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

from vescale_optim.checkpoints.contents import METADATA, CheckpointContents, read_contents
from vescale_optim.optimizers.base import ShardedOptimizer


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint in `folder` that was finished last; None where there is none.

    Give every save a folder of its own: `dcp.save` into an existing one writes over its files before the new ones are
    complete.
    """
    finished = [entry.parent for entry in Path(folder).glob(f"*/{METADATA}")]
    return max(finished, key=lambda path: ((path / METADATA).stat().st_mtime_ns, path.name), default=None)


def check_checkpoint(
    path: str | Path,
    state: Mapping[str, Any],
    model: nn.Module | None = None,
    optimizer: ShardedOptimizer | None = None,
) -> CheckpointContents:
    """Raise where `dcp.load(state, checkpoint_id=path)` and loading the result would fail; communicates nothing.

    Args:
        path: folder of the checkpoint.
        state: the state dict to be loaded into.
        model, optimizer: whose state is in it, as `get_optimizer_state_dict(model, optimizer)` gives it; the rules of the
            optimizer are compared with those of the checkpoint.

    Raises:
        ValueError: an unfinished save, a missing or truncated file, an entry that is missing or of another shape or
            kind (codes for numbers), or, by parameter, another algorithm, rule version or layout than the optimizer's.
    """
    contents = read_contents(path)
    _check_files(contents)
    _check_entries(contents, flatten_state_dict(dict(state))[0])
    if model is not None and optimizer is not None:
        groups = contents.groups()
        for name, param in model.named_parameters():
            # torch's helpers leave out what torch.compile puts in front of names.
            saved = groups.get(name.replace("_orig_mod.", ""))
            if saved is not None:
                optimizer.check_saved_group(name, param, saved)
    return contents


def _check_files(contents: CheckpointContents) -> None:
    for name, end in sorted(contents.file_ends().items()):
        file = contents.path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ValueError(f"{file} {found}, the checkpoint's metadata says {end:,}; take an earlier checkpoint")


def _check_entries(contents: CheckpointContents, wanted: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in set(contents.names)]
    if missing:
        raise ValueError(
            f"checkpoint {contents.path} has no entry '{missing[0]}', and {len(missing) - 1} more are missing; it was saved "
            "from another model or optimizer"
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

