# SPDX-License-Identifier: Apache-2.0
"""The public functions. See `megatron.fsdp.fully_shard`."""

from megatron.fsdp.engine.policy import ShardingStrategy
from megatron.fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer

__all__ = ["ShardingStrategy", "fully_shard", "fully_shard_model", "fully_shard_optimizer"]
