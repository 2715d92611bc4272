# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism for PyTorch, with typed settings: :func:`fully_shard`.

The published interface, with its keywords, is the package ``megatron_fsdp``.
"""

from megatron.fsdp.config.memory import Memory
from megatron.fsdp.config.meta_initialisation import MetaInitialisation
from megatron.fsdp.config.offload import Offload
from megatron.fsdp.config.settings import Gradients, Settings, Strategy
from megatron.fsdp.dtensor.sharded_gradient import clip_grad_norm_
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, Overlap, ShardingStrategy
from megatron.fsdp.fully_shard import fully_shard
from megatron.fsdp.module.gradient_sync import GradientError
from megatron.fsdp.module.sharded_module import ShardedModule
from megatron.fsdp.optimizer.sharded_optimizer import shard_optimizer

__version__ = "0.7.0"

__all__ = [
    "GradientError",
    "Gradients",
    "Memory",
    "Mesh",
    "MetaInitialisation",
    "MixedPrecisionPolicy",
    "Offload",
    "Overlap",
    "Settings",
    "ShardedModule",
    "ShardingStrategy",
    "Strategy",
    "__version__",
    "clip_grad_norm_",
    "fully_shard",
    "shard_optimizer",
]
