# SPDX-License-Identifier: Apache-2.0
"""Optimizers other than Megatron-Core's DistributedOptimizer, over a sharded model.

Megatron-Core's DistributedOptimizer tells the model when its step has changed the main weights. An
optimizer of torch does not, so its step is watched. Megatron-Core's other optimizers cannot work:
they keep weights of their own, which no forward would ever see.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.fsdp.sharded_module import ShardedModule, is_owned, owner_of

_refusing = False


def follow_torch_optimizers(wrapper: nn.Module) -> None:
    """Reduce the gradients of a model before each step of a torch optimizer over its parameters.

    After the step its main weights become the weights of the next forward. This ends with the
    wrapper.

    Args:
        wrapper: its ``module`` is the engine.
    """
    reference = weakref.ref(wrapper)

    def before(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        followed = _engine_of(reference(), optimizer)
        if followed is not None:
            # An all-gather under way would overwrite the new weights with the old ones.
            followed.synchronize_param_gather()
            followed.finish_grad_sync()

    def after(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        followed = _engine_of(reference(), optimizer)
        if followed is not None:
            followed.install_optimized_model_weights(only_trainable=True)

    for handle in (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ):
        weakref.finalize(wrapper, handle.remove)


def _engine_of(wrapper: Any, optimizer: torch.optim.Optimizer) -> ShardedModule | None:
    """Return the engine of a wrapper if the optimizer steps its parameters."""
    for group in optimizer.param_groups if wrapper is not None else ():
        for parameter in group["params"]:
            if is_owned(parameter) and owner_of(parameter) is wrapper.module:
                return owner_of(parameter)
    return None


def refuse_stale_weights() -> None:
    """Let Megatron-Core's other optimizers refuse parameters of sharded models; once a process."""
    global _refusing
    if _refusing:
        return
    _refusing = True
    for kind in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        kind.__init__ = _refusing_init(kind.__init__)


def _refusing_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(megatron_optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        # The original calls its first argument "optimizer", and programs may pass it by that name.
        inner = args[0] if args else kwargs.get("optimizer")
        stepped: list[nn.Parameter] = []
        for group in inner.param_groups if inner is not None else ():
            stepped += group["params"]
        if any(map(is_owned, stepped)):
            raise ValueError(
                f"{type(megatron_optimizer).__name__} would train on stale weights of a"
                " FullyShardedDataParallel model: set use_distributed_optimizer in OptimizerConfig"
                " (--use-distributed-optimizer), or step model.parameters() with an optimizer of"
                " torch"
            )
        original(megatron_optimizer, *args, **kwargs)

    return init
