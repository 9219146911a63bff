"""What a checkpoint folder of torch.distributed.checkpoint says about itself; no process group, no tensor is read.

    folder/.metadata        shapes, dtypes, and of every chunk its file and place; written last, so that a folder without it
                            is a save that never finished
    folder/__0_0.distcp     the chunks that rank 0 wrote, one after the other
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"
# Of one optimizer: the group of each parameter, by the parameter's name.
Groups = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SavedTensor:
    """One logical tensor: `chunks` are the sizes of the boxes that ranks wrote of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointContents:
    """A checkpoint folder.

    Attributes:
        tensors: by name, as `state_dict` paths joined by dots.
        names: of all entries, tensors and others.
        num_bytes: of all tensors.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self._first_chunks = {index.fqn: info for index, info in reversed(metadata.storage_data.items())}
        # All that is needed of the metadata is computed here, so that damage shows where `read_contents` names the file.
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        self._file_ends = dict(sorted(ends.items()))
        entries = metadata.state_dict_metadata
        self.names = list(entries)
        self.tensors = {
            name: SavedTensor(
                name, tuple(entry.size), entry.properties.dtype, tuple(tuple(chunk.sizes) for chunk in entry.chunks)
            )
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())

    def file_ends(self) -> dict[str, int]:
        """Bytes that each file must have at least."""
        return dict(self._file_ends)

    def read_value(self, name: str) -> Any:
        """An entry that is in one chunk: a number, a list of groups, a tensor that every rank had alike.

        Raises:
            ValueError: it holds more than plain values, numpy's numbers and tensors, which reading would have to execute;
                or it is damaged.
        """
        try:
            info = self._first_chunks[name]
            with open(self.path / info.relative_path, "rb") as file:
                file.seek(info.offset)
                stream = io.BytesIO(file.read(info.length))
            with torch.serialization.safe_globals(_numpy_numbers()):
                return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"entry '{name}' of {self.path} is more than plain values: {error}") from None
        except Exception as error:  # As for the metadata, damage may show as any error.
            raise ValueError(
                f"entry '{name}' of {self.path} cannot be read ({error!r}); take an earlier checkpoint"
            ) from None

    def groups(self) -> dict[str, Groups]:
        """Param groups of every optimizer, by its place in the checkpoint: `groups_of`."""
        return groups_of(self.names, self.read_value)


def groups_of(names: Iterable[str], read: Callable[[str], Any]) -> dict[str, Groups]:
    """Param group of every parameter of every optimizer, without `params`.

    A list of groups is one entry, or, where a hyperparameter is a tensor, one entry for each value of each group; with
    `flatten_optimizer_state_dict=True` it is one for each hyperparameter of each parameter.

    Args:
        names: of all entries of a flattened state dict.
        read: gives the value of an entry.

    Returns:
        By the optimizer's place, such as "optimizer" or "generator.optimizer", and then by the parameter's name: two models
        may use the same names.
    """
    lists: list[tuple[str, dict[str, Any]]] = []
    split: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        head, separator, rest = f".{name}".partition(".param_groups")
        place = head.removeprefix(".")
        if separator and not rest:
            lists += [(place, group) for group in read(name)]
        elif rest.startswith("."):
            owner, _, key = rest[1:].rpartition(".")
            split.setdefault((place, owner), {})[key] = read(name)
    found: dict[str, Groups] = {}
    for (place, owner), group in split.items():
        if "params" in group:
            lists.append((place, group))
        else:
            found.setdefault(place, {})[owner] = group
    for place, group in lists:
        said = {key: value for key, value in group.items() if key != "params"}
        found.setdefault(place, {}).update(dict.fromkeys(group["params"], said))
    return found


def read_contents(path: str | Path | None) -> CheckpointContents:
    """What a checkpoint folder says about itself.

    Raises:
        ValueError: the folder has no readable metadata: it is no checkpoint, or its save did not finish.
    """
    if path is None:
        raise ValueError("there is no checkpoint: the path is None (latest_checkpoint found no finished save); start anew")
    path = Path(path)
    if not (path / METADATA).is_file():
        inside = sorted(entry.parent.name for entry in path.glob(f"*/{METADATA}"))
        if inside:
            raise ValueError(f"{path} holds checkpoints and is none itself; give one of them: {', '.join(inside[-3:])}")
        raise ValueError(f"{path} has no file {METADATA}: no checkpoint, or its save did not finish; take an earlier one")
    try:
        return CheckpointContents(path, FileSystemReader(path).read_metadata())
    except Exception as error:  # One flipped bit makes other classes, attributes or sizes of a pickle: any error may follow.
        raise ValueError(f"{path / METADATA} cannot be read ({error!r}); take an earlier checkpoint") from None


@cache
def _numpy_numbers() -> list[Any]:
    """What unpickling a number of numpy calls, for `safe_globals`; schedulers that compute with numpy leave such a lr."""
    try:
        import numpy
    except ImportError:
        return []
    scalar = numpy.float64(0).__reduce__()[0]
    # numpy 2 renamed the module, and a checkpoint may be of either.
    scalars = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    codes = "?" + numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"]
    return [*scalars, numpy.dtype, *{type(numpy.dtype(code)) for code in codes}]
