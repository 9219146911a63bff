"""Optimizers for sharded training in PyTorch: blocks first, then the sharding."""

from vescale_optim.checkpoints import check_checkpoint, latest_checkpoint
from vescale_optim.clipping import clip_grad_norm_
from vescale_optim.optimizers.adamw import ShardedAdamW, adamw_beside
from vescale_optim.optimizers.adamw8bit import ShardedAdamW8bit
from vescale_optim.optimizers.base import ShardedOptimizer
from vescale_optim.optimizers.muon import ShardedMuon
from vescale_optim.optimizers.routing import muon_param_groups
from vescale_optim.optimizers.rule import Rule, Shards, StateSpec, Units
from vescale_optim.optimizers.shampoo import ShardedShampoo
from vescale_optim.optimizers.soap import ShardedSOAP
from vescale_optim.optimizers.torch_state import join_state_dicts
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.fully_shard import FullyShardedModule, fully_shard
from vescale_optim.sharding.planner import BufferPlan, TensorBlocks, plan_buffer
from vescale_optim.sharding.ragged import RaggedShard, RaggedTensor

__all__ = [
    "Blocks",
    "BufferPlan",
    "FullyShardedModule",
    "RaggedShard",
    "RaggedTensor",
    "Rule",
    "ShardedAdamW",
    "ShardedAdamW8bit",
    "ShardedMuon",
    "ShardedOptimizer",
    "ShardedSOAP",
    "ShardedShampoo",
    "Shards",
    "StateSpec",
    "TensorBlocks",
    "Units",
    "adamw_beside",
    "check_checkpoint",
    "clip_grad_norm_",
    "fully_shard",
    "join_state_dicts",
    "latest_checkpoint",
    "muon_param_groups",
    "plan_buffer",
]
