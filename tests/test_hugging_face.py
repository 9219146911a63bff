"""One promise: models of Hugging Face train under FSDP2, with accelerate and with the Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from vescale_optim import ShardedMuon, clip_grad_norm_

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 20
SIZES = dict(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    tie_word_embeddings=False,
)
LAYERS = {"llama": "LlamaDecoderLayer", "mixtral": "MixtralDecoderLayer"}
LEARNING_RATES = dict(lr=0.02, adamw_lr=1e-2)


def tiny_model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def batch(rank: int) -> dict[str, torch.Tensor]:
    """Two sequences that a model can learn by heart."""
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": tokens, "labels": tokens}


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state in classes and in the environment."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def allow_fsdp_on_cpu() -> None:
    """accelerate (1.15) leaves FSDP out on CPU without a word; told that ranks are devices, it goes the way of GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def with_accelerate(rank: int, world_size: int, mesh: Any, kind: str) -> tuple[list[float], set[str]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with fresh_accelerate():
        allow_fsdp_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[LAYERS[kind]],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = tiny_model(kind)
        optimizer = ShardedMuon(model.named_parameters(), mesh, **LEARNING_RATES)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(STEPS):
            loss = model(**batch(rank)).loss
            accelerator.backward(loss)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {type(param).__name__ for param in model.parameters() if isinstance(param, DTensor)}


def with_trainer(rank: int, world_size: int, mesh: Any, kind: str, directory: str) -> tuple[list[float], set[str]]:
    from transformers import Trainer, TrainingArguments

    with fresh_accelerate():
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            fsdp="full_shard",
            fsdp_config={
                "fsdp_version": 2,
                "transformer_layer_cls_to_wrap": [LAYERS[kind]],
                "cpu_ram_efficient_loading": False,
            },
            max_steps=STEPS,
            per_device_train_batch_size=2,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        assert arguments.device.type == "cpu"  # sets accelerate up
        allow_fsdp_on_cpu()
        batches = [batch(other) for other in range(world_size)]
        rows = [{name: value[row] for name, value in both.items()} for both in batches for row in range(2)]
        trainer = Trainer(
            model=tiny_model(kind),
            args=arguments,
            train_dataset=rows,
            optimizer_cls_and_kwargs=(ShardedMuon, dict(mesh=mesh, **LEARNING_RATES)),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {type(param).__name__ for param in trainer.model.parameters() if isinstance(param, DTensor)}


def assert_trained(losses: list[float], sharded: set[str]) -> None:
    assert sharded == {"DTensor"}
    assert len(losses) == STEPS
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("kind", LAYERS)
def test_accelerate_shards_the_model_and_the_optimizer_follows(kind: str) -> None:
    for result in run_ranks(2, with_accelerate, kind):
        assert_trained(*result)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_trainer_takes_the_optimizer_as_a_class(kind: str, tmp_path: Any) -> None:
    for result in run_ranks(2, with_trainer, kind, str(tmp_path)):
        assert_trained(*result)
