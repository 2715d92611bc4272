# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism for PyTorch, by the published keywords and classes.

from megatron_fsdp import fully_shard

model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])

The keywords become settings of :func:`megatron.fsdp.fully_shard`, which has the engine.
"""

# From the modules of this package: importing one binds its name here, and `fully_shard` has to end
# up as the function.
from megatron.fsdp import clip_grad_norm_
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.fully_shard import (
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.package_info import __version__
from megatron_fsdp.utils import FSDPDistributedIndex

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "__version__",
    "clip_grad_norm_",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
