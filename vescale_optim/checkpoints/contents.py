"""What a checkpoint folder of torch.distributed.checkpoint says about itself; no process group, no tensor is read.

    folder/.metadata        shapes, dtypes, and of every chunk its file and place; written last, so that a folder without it
                            is a save that never finished
    folder/__0_0.distcp     the chunks that rank 0 wrote, one after the other
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"


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
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self._metadata = metadata
        self._first_chunks = {index.fqn: info for index, info in reversed(metadata.storage_data.items())}
        entries = metadata.state_dict_metadata
        self.names = list(entries)
        self.tensors = {
            name: SavedTensor(
                name, tuple(entry.size), entry.properties.dtype, tuple(tuple(chunk.sizes) for chunk in entry.chunks)
            )
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def file_ends(self) -> dict[str, int]:
        """Bytes that each file must have at least."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        return ends

    def read_value(self, name: str) -> Any:
        """An entry that is in one chunk: a number, a list of groups, a tensor that every rank had alike.

        Raises:
            ValueError: it holds more than plain values and tensors, which reading would have to execute.
        """
        info = self._first_chunks[name]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            stream = io.BytesIO(file.read(info.length))
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"entry '{name}' of {self.path} is more than plain values: {error}") from None

    def groups(self) -> dict[str, dict[str, Any]]:
        """Param group of every parameter of every optimizer, by the parameter's name, without `params`.

        A list of groups is one entry, or, where a hyperparameter is a tensor, one entry for each value of each group; with
        `flatten_optimizer_state_dict=True` it is one for each hyperparameter of each parameter.
        """
        whole: list[dict[str, Any]] = []
        split: dict[tuple[str, str], dict[str, Any]] = {}
        for name in self.names:
            head, separator, rest = f".{name}".partition(".param_groups")
            if separator and not rest:
                whole += self.read_value(name)
            elif rest.startswith("."):
                owner, _, key = rest[1:].rpartition(".")
                split.setdefault((head, owner), {})[key] = self.read_value(name)
        found = {owner: group for (_, owner), group in split.items() if "params" not in group}
        for group in [*whole, *(group for group in split.values() if "params" in group)]:
            said = {key: value for key, value in group.items() if key != "params"}
            found.update(dict.fromkeys(group["params"], said))
        return found


def read_contents(path: str | Path) -> CheckpointContents:
    """What a checkpoint folder says about itself.

    Raises:
        ValueError: the folder has no readable metadata: it is no checkpoint, or its save did not finish.
    """
    path = Path(path)
    if not (path / METADATA).is_file():
        raise ValueError(f"{path} has no file {METADATA}: no checkpoint, or its save did not finish; take an earlier one")
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise ValueError(f"{path / METADATA} cannot be read ({error}); take an earlier checkpoint") from None
    return CheckpointContents(path, metadata)

