"""read_model: the parameters of a model, by name and shape, without its memory.

    a folder, or its config.json       built by transformers on the meta device (transformers must be installed)
    a folder, or its *.index.json      safetensors: the shapes are read from the heads of the files beside the index
    one .safetensors file              the same
    a .json file                       [["name", [rows, columns]], ...], or entries {"name": ..., "shape": [...]}
    module:callable                    your own code: the callable builds the model, under torch.device("meta")

A model that was built is a module, whose embeddings and head are known. In a list they are recognised by their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.|$)")
_VOCABULARY = re.compile(r"embed|^wte$|^wpe$|^lm_head$|^head$|^output$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelShapes:
    """A model whose parameters are on the meta device.

    Attributes:
        label: how tables call it.
        parameters: (name, parameter) in the order of registration.
        module: the module they belong to, or None where only names and shapes are known.
    """

    label: str
    parameters: tuple[tuple[str, nn.Parameter], ...]
    module: nn.Module | None = None

    def vocabulary(self) -> list[str]:
        """Matrices outside the numbered layers that are called like an embedding or an output head."""
        return [name for name, param in self.parameters if param.ndim == 2 and _is_vocabulary_name(name)]


def layer_of(name: str) -> str:
    """The numbered layer that a parameter belongs to, "" where it is outside of all: what is wrapped and sent together."""
    found = _LAYER.match(name)
    return found.group(0) if found else ""


def read_model(source: str, dtype: torch.dtype) -> ModelShapes:
    """The model that `source` names (see the module docstring), its floating parameters in `dtype`.

    Raises:
        ValueError: `source` is none of these, or lacks something; the message names the way out.
    """
    path = Path(source)
    if not path.exists():
        if ":" in source:
            return _from_code(source, dtype)
        raise ValueError(
            f"model {source!r} is no file or folder; give a folder with config.json, a safetensors index, a JSON list of "
            "names and shapes, or module:callable"
        )
    if path.is_dir():
        return _from_folder(path, dtype)
    if path.suffix == ".safetensors":
        return _from_shapes(path.stem, _safetensors_shapes(path), dtype)
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}); give a JSON list of names and shapes") from None
    if isinstance(content, dict) and "weight_map" in content:
        return _from_shapes(path.resolve().parent.name, _index_shapes(path, content["weight_map"]), dtype)
    if isinstance(content, dict) and ("model_type" in content or "architectures" in content):
        return _from_config(path, dtype)
    return _from_shapes(path.stem, _listed_shapes(path, content), dtype)


def _from_folder(folder: Path, dtype: torch.dtype) -> ModelShapes:
    config = folder / "config.json"
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if config.exists() and (_has_transformers() or not (indices or files)):
        return _from_config(config, dtype)
    if indices:
        return read_model(str(indices[0]), dtype)
    if files:
        return _from_shapes(folder.resolve().name, [entry for file in files for entry in _safetensors_shapes(file)], dtype)
    raise ValueError(f"folder {folder} has no config.json and no safetensors; give one that has, or a JSON list of shapes")


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _from_config(config: Path, dtype: torch.dtype) -> ModelShapes:
    if not _has_transformers():
        raise ValueError(
            f"{config} is built by transformers, which is not installed: pip install transformers. Or give the safetensors "
            "index of the model with its files, a JSON list of names and shapes, or module:callable"
        )
    transformers = importlib.import_module("transformers")
    settings = transformers.AutoConfig.from_pretrained(str(config), local_files_only=True)
    named = [getattr(transformers, name, None) for name in getattr(settings, "architectures", None) or ()]
    with torch.device("meta"):
        if named and named[0] is not None:
            model = named[0](settings)
        else:
            try:
                model = transformers.AutoModelForCausalLM.from_config(settings)
            except ValueError:  # no language model
                model = transformers.AutoModel.from_config(settings)
    return _from_module(config.resolve().parent.name, model, dtype)


def _from_code(source: str, dtype: torch.dtype) -> ModelShapes:
    module_name, _, attribute = source.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        build: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            build = getattr(build, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model {source!r} cannot be imported ({error}); give module:callable as in `from module import callable`, "
            "with the folder of the module as working directory or on PYTHONPATH"
        ) from error
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{source} returned {type(model).__name__}; it must return the model, a torch.nn.Module")
    return _from_module(attribute, model, dtype)


def _from_module(label: str, model: nn.Module, dtype: torch.dtype) -> ModelShapes:
    # Whatever was built with an explicit device goes there too; only its shape is of interest.
    model = model.to(device="meta", dtype=dtype)
    parameters = tuple(model.named_parameters())
    if not parameters:
        raise ValueError(f"{label} has no parameters; give a model that has")
    return ModelShapes(label, parameters, model)


def _from_shapes(label: str, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> ModelShapes:
    parameters = {
        name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=True) for name, shape in shapes
    }
    if not parameters:
        raise ValueError(f"{label} has no tensors; give a list of at least one name and shape")
    return ModelShapes(label, tuple(parameters.items()))


def _listed_shapes(path: Path, content: Any) -> list[tuple[str, tuple[int, ...]]]:
    entries = list(content.items()) if isinstance(content, dict) else content
    result = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            entry = (entry.get("name"), entry.get("shape"))
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        name, shape = entry if is_pair else (None, None)
        if not (isinstance(name, str) and isinstance(shape, list) and all(isinstance(s, int) and s >= 0 for s in shape)):
            raise ValueError(f'{path}: entry {number} is {str(entry)[:60]}; give ["name", [rows, columns]]')
        result.append((name, tuple(shape)))
    names = [name for name, _ in result]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path}: the name {twice!r} is given twice; give every tensor a name of its own")
    if not result:
        raise ValueError(f'{path} is no list of tensors; give [["name", [rows, columns]], ...]')
    return result


def _index_shapes(index: Path, weight_map: dict[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """In the order of the index; the index itself has no shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(weight_map.values())):
        path = index.parent / file
        if not path.exists():
            raise ValueError(
                f"{index} names {file}, which is not beside it, and the index alone has no shapes; give the folder with all "
                "files, its config.json, or a JSON list of names and shapes"
            )
        shapes |= dict(_safetensors_shapes(path))
    missing = [name for name in weight_map if name not in shapes]
    if missing:
        raise ValueError(f"{index} names {missing[0]!r}, which is not in {weight_map[missing[0]]}; download the model anew")
    return [(name, shapes[name]) for name in sorted(weight_map, key=_natural)]


def _safetensors_shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """A safetensors file starts with the length of its head, 8 bytes little endian, and the head, JSON."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(path.stat().st_size - 8, 100 << 20):
            raise ValueError(f"{path} has no safetensors head (a Git LFS pointer?); download the file itself")
        head = json.loads(file.read(length))
    entries = [(name, tuple(entry["shape"])) for name, entry in head.items() if name != "__metadata__"]
    return sorted(entries, key=lambda entry: _natural(entry[0]))


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _is_vocabulary_name(name: str) -> bool:
    parts = name.removesuffix(".weight").split(".")
    return not layer_of(name) and bool(_VOCABULARY.search(parts[-1]))
