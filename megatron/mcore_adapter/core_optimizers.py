# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers, and those of torch, over a sharded model."""

from __future__ import annotations

import functools
import weakref
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.fsdp.optimizer.optimizer_state import initial_state
from megatron.fsdp.sharded_module import ShardedModule, is_owned, owner_of

# ---- state before the first step


def make_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first step would create: moments zero, step 0.

    Parameters of which this rank owns nothing get state too. Checkpoints then have the same keys on
    every rank, and loading needs no step, which would change weights.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        if type(inner).__module__.split(".")[0] == "torch":
            _fill_state(inner)
            continue
        # Fused optimizers (Transformer Engine's and Apex's) create their own, with steps by group.
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            group.setdefault("step", 0)


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = initial_state(
                    optimizer, type(optimizer), group, parameter
                )


# ---- gradient statistics
#
# Megatron-Core finds norm and overflow of gradients over the ranks of one optimizer instance. That
# is wrong in two cases:
# - The outer data axis shards optimizer state: an instance has only a part of the gradient, its
#   norm would be too small, and clipping would leave gradients too large.
# - Nothing is sharded: Megatron-Core 0.18 reduces over model-parallel ranks alone, each of which
#   counts all of its gradients. Expert-parallel ranks would then clip shared weights differently.
#   Here replicas do not count, so the sum is over the instance, as in older releases.

GROUP = "_gradient_statistics_group"
"""Attribute of a wrapper whose optimizer reduces over another group than Megatron-Core's."""

_original_group = DistributedOptimizer.get_grad_stats_parallel_group


def count_over(wrapper: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let the optimizer of one model reduce over a group; None stands for all ranks."""
    setattr(wrapper, GROUP, group)
    DistributedOptimizer.get_grad_stats_parallel_group = _group


@functools.wraps(_original_group)
def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup | None:
    wrapper = optimizer.model_chunks[0]
    return getattr(wrapper, GROUP) if hasattr(wrapper, GROUP) else _original_group(optimizer)


# ---- steps of other optimizers
#
# DistributedOptimizer tells the model when its step has changed the main weights. An optimizer of
# torch does not, so its step is watched. Megatron-Core's other optimizers cannot work: they keep
# weights of their own, which no forward would ever see.


def follow_torch_optimizers(wrapper: nn.Module) -> None:
    """Reduce the gradients of a model before each step of a torch optimizer over its parameters.

    After the step its main weights become the weights of the next forward. This ends with the
    wrapper.
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


@functools.cache
def refuse_stale_weights() -> None:
    """Let Megatron-Core's other optimizers refuse parameters of sharded models; once a process."""
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


# ---- main weights after a load
#
# A sharded model loads its main weights itself, so none have to be copied after a load without the
# optimizer (--finetune). Programs ask the optimizer to copy them all the same, which does nothing
# up to Megatron-Core 0.17 and raises an error from 0.18 on.

COPY_METHOD = "_copy_model_params_to_main_params"
_KEEPS = "keeps_main_weights"
"""Attribute of the method that copies no weights of sharded models."""


def keep_main_weights() -> None:
    """Let DistributedOptimizer copy no weights of sharded models."""
    original = getattr(DistributedOptimizer, COPY_METHOD)
    if hasattr(original, _KEEPS):
        return

    @functools.wraps(original)
    def copy_of_others(optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if not any(map(is_owned, parameters)):
            original(optimizer, *args, **kwargs)

    setattr(copy_of_others, _KEEPS, True)
    setattr(DistributedOptimizer, COPY_METHOD, copy_of_others)
