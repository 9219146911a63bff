"""muon_param_groups: which parameters of a module are hidden matrices, and which belong to AdamW.

Muon is for matrices that map activations to activations. Embeddings and the output head map from and to tokens, and do
better with AdamW (Jordan et al. 2024); a wrong routing trains without any error, so the role is looked up, not guessed
from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vescale_optim.caller_warnings import warn_caller


def muon_param_groups(model: nn.Module, head: str | nn.Module | None = None) -> list[dict[str, Any]]:
    """Two param groups of a module: hidden matrices for Muon, everything else with `algorithm="adamw"`.

    AdamW gets parameters of fewer than two dimensions, biases (those of experts are stacked, [experts, out], and still no
    matrices), embeddings (by module type), the output head, and what is tied to either.

    Args:
        model: the model, not wrapped; `get_output_embeddings()` (transformers) names its head.
        head: the output head where the model does not say: a module of the model or its qualified name.

    Returns:
        Groups with named parameters, for `ShardedMuon(muon_param_groups(model), mesh)`; an empty group is left out.

    Raises:
        ValueError: `head` names no module of the model.
    """
    vocabulary = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    vocabulary += _heads(model, head)
    ids = {id(param) for module in vocabulary for param in module.parameters(recurse=False)}
    matrices, others = [], []
    for name, param in model.named_parameters():
        is_vector = param.ndim < 2 or name.rpartition(".")[2].endswith("bias")
        (others if id(param) in ids or is_vector else matrices).append((name, param))
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return [group for group in groups if group["params"]]


def _heads(model: nn.Module, head: str | nn.Module | None) -> list[nn.Module]:
    if head is None:
        if hasattr(model, "get_output_embeddings"):
            named = model.get_output_embeddings()
            return [named] if named is not None else []
        _warn_about_head(model)
        return []
    modules = dict(model.named_modules())
    found = modules.get(head) if isinstance(head, str) else head
    if found is None or all(found is not module for module in modules.values()):
        raise ValueError(f"head {head!r} is no module of {type(model).__name__}; give a name of model.named_modules()")
    return [found]


def _warn_about_head(model: nn.Module) -> None:
    """One warning where the last linear layer has as many outputs as an embedding has rows, and is not tied to it."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        return
    name, last = linears[-1]
    is_tied = any(last.weight is embedding.weight for embedding in embeddings)
    if not is_tied and any(last.out_features == embedding.num_embeddings for embedding in embeddings):
        warn_caller(
            f"module '{name}' looks like the output head of {type(model).__name__}, and its weight will be "
            f"orthogonalised; give head='{name}' to update it with AdamW"
        )


def warn_about_vocabulary(groups: Sequence[dict[str, Any]]) -> None:
    """One warning where a bare matrix looks like a vocabulary table: many rows, each much shorter."""
    for number, group in enumerate(groups):
        if group["algorithm"] == "adamw":
            continue
        for index, param in enumerate(group["params"]):
            if param.ndim == 2 and param.size(0) >= 8192 and param.size(0) >= 8 * param.size(1):
                name = group["param_names"][index] if "param_names" in group else f"groups[{number}][{index}]"
                warn_caller(
                    f"parameter '{name}' of shape {tuple(param.shape)} looks like an embedding or output head and will "
                    "be orthogonalised; give the optimizer the module, or a group with algorithm='adamw'"
                )
                return
