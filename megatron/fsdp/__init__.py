# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism for PyTorch: the engine. Begin with :func:`fully_shard`."""

from megatron.fsdp.config import DistributedDataParallelConfig
from megatron.fsdp.dtensor.gradient import clip_grad_norm_
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.gradient_sync import GradientError
from megatron.fsdp.model import MegatronFSDP

__version__ = "0.7.0"

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "GradientError",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "__version__",
    "clip_grad_norm_",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
