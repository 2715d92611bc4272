# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers, and those of torch, over a sharded model."""

from __future__ import annotations

import functools
import inspect
import weakref
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import (
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.module.sharded_module import ShardedModule, is_owned, owner_of
from megatron.fsdp.optimizer.matrix.owner_update import OwnerUpdate
from megatron.fsdp.optimizer.optimizer_state import initial_state
from megatron.mcore_adapter.fused_gradients import set_attributes
from megatron.mcore_adapter.precision_aware import check_precision, prepare_precision_aware

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
        if isinstance(inner, MuonAndAdam):
            inner = inner.adam
        if type(inner).__module__.split(".")[0] == "torch":
            _fill_state(inner)
            continue
        # Fused optimizers (Transformer Engine's and Apex's) create their own, with steps by group.
        if part.init_state_fn is not None:  # SGD has none
            part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            if "betas" in group:  # Muon does not count steps
                group.setdefault("step", 0)


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = initial_state(
                    optimizer, type(optimizer), group, parameter
                )


# ---- Muon
#
# Megatron-Core's Muon updates the matrices of layers, and its Adam all else. Each matrix has an
# owner (see [Note: owners of matrices]), which has all slices of tensor parallelism. In the mode
# blockwise it orthogonalizes one slice after the other, in both other modes all of the matrix.


def build_muon(
    config: OptimizerConfig,
    model: list[MegatronModule],
    **settings: Any,
) -> DistributedOptimizer:
    """Build Muon and Adam over sharded models, as one optimizer inside of Megatron-Core's.

    Args:
        config: settings of both; Muon's fields begin with ``muon_``.
        model: chunks of this pipeline stage.
        settings: other arguments of ``get_megatron_optimizer``.
    """
    adam_config = copy(config)
    adam_config.optimizer = "adam"
    distributed = get_megatron_optimizer(adam_config, model, **settings)
    adam = distributed.optimizer
    groups = _take_matrices(adam)
    muon_class = _muon_of_owners()
    parameters = inspect.signature(muon_class).parameters
    arguments: dict[str, Any] = {}
    for name in parameters:
        for field in (name, f"muon_{name.removesuffix('_beta')}"):  # momentum_beta in 0.17
            if hasattr(config, field):
                arguments[name] = getattr(config, field)
    # The class gets whole matrices, or slices that it is to treat like whole ones.
    mode = "tp_mode" if "tp_mode" in parameters else "mode"
    arguments[mode] = "blockwise"
    arguments["is_qkv_fn"] = lambda parameter: parameter.is_qkv
    arguments["qkv_split_shapes"] = _mark_matrices(model, config.muon_tp_mode == "blockwise")
    distributed.optimizer = MuonAndAdam(muon_class(groups, **arguments), adam)
    return distributed


def _take_matrices(adam: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Move matrices out of the param groups of Adam into groups for Muon, and return these."""
    groups = []
    for group in adam.param_groups:
        muon_group: dict[str, Any] = {"params": []}
        for key, value in group.items():
            if key != "params" and key not in adam.defaults:
                muon_group[key] = value
        others = []
        for parameter in group["params"]:
            if is_matrix(parameter):
                muon_group["params"].append(parameter)
            else:
                others.append(parameter)
        group["params"] = others
        groups.append(muon_group)
    return groups


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that Megatron-Core gives to Muon."""
    return parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


def _mark_matrices(model: list[MegatronModule], by_slices: bool) -> list[int]:
    """Set ``is_qkv`` and ``slices`` on the matrices that Muon updates.

    Args:
        model: chunks of this pipeline stage.
        by_slices: orthogonalize each slice of tensor parallelism by itself.

    Returns:
        The rows of query (with its gate, if there is one), key and value in a query group.
    """
    config = get_model_config(model[0])
    heads_of_group = config.num_attention_heads // config.num_query_groups
    query_rows = heads_of_group * config.kv_channels
    split = [query_rows, config.kv_channels, config.kv_channels]
    if getattr(config, "attention_output_gate", False):
        split.insert(0, query_rows)
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if not is_matrix(parameter):
                continue
            sharded = sharded_param_of(parameter)
            shape = sharded.slice.shape  # of the whole matrix
            dim = sharded.slice.dim or 0
            num_slices = 1
            if by_slices:
                num_slices = shape[dim] // sharded.flat_range.shape[dim]
            num_rows = shape[0] // num_slices
            is_qkv = "linear_qkv.weight" in name and num_rows % sum(split) == 0
            slices = (num_slices, dim)
            set_attributes(sharded.compute, is_qkv=is_qkv, slices=slices)
    return split


class MuonAndAdam:
    """Two optimizers in the place of the one inside of DistributedOptimizer."""

    def __init__(self, muon: torch.optim.Optimizer, adam: torch.optim.Optimizer):
        self.muon = muon
        self.adam = adam
        self._owners = OwnerUpdate(type(muon))
        self._owners.prepare(muon)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of both."""
        return self.muon.param_groups + self.adam.param_groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of both, sharded like the parameters until the next step; a collective."""
        self._owners.shard_state(self.muon)
        return {**self.muon.state, **self.adam.state}

    def step(self) -> None:
        """Update all parameters."""
        self._owners.step(self.muon)
        self.adam.step()


def _muon_of_owners() -> Any:
    """Return a subclass of Megatron-Core's Muon that orthogonalizes by the attribute ``slices``."""
    try:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    except ImportError:  # before 0.18
        use_new_names()
        from megatron.core.optimizer.muon import TensorParallelMuon

    class Muon(TensorParallelMuon):
        def orthogonalize(
            self,
            p: Any,
            grad: torch.Tensor,
            **kwargs: Any,
        ) -> torch.Tensor:
            num_slices, dim = p.slices
            slices = []
            for part in grad.chunk(num_slices, dim):
                part = part.contiguous()
                slices.append(super().orthogonalize(p, part, **kwargs))
            return torch.cat(slices, dim)

    return Muon


@functools.cache
def use_new_names() -> None:
    """Let Megatron-Core 0.16 call emerging_optimizers from 0.2 on; once a process."""
    from megatron.core.optimizer import muon

    base: Any = getattr(muon, "OrthogonalizedOptimizer", object)  # not there in newer releases
    if hasattr(muon, "HAVE_EO_V02"):
        return
    parameters = inspect.signature(base).parameters
    if "nesterov" not in parameters:
        return
    orthogonalize = muon.newton_schulz_tp

    class Renamed(base):
        def __init__(
            self,
            *args: Any,
            use_nesterov: bool,
            **kwargs: Any,
        ):
            super().__init__(*args, nesterov=use_nesterov, **kwargs)

    def newton_schulz_tp(
        *args: Any,
        mode: str,
        **kwargs: Any,
    ) -> torch.Tensor:
        return orthogonalize(*args, tp_mode=mode, **kwargs)

    muon.TensorParallelMuon.__bases__ = (Renamed,)
    muon.newton_schulz_tp = newton_schulz_tp


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
    if not hasattr(wrapper, GROUP):
        return _original_group(optimizer)
    return getattr(wrapper, GROUP)


# ---- steps of other optimizers
#
# DistributedOptimizer notifies the model when its step has changed the main weights. An optimizer
# of torch does not, so hooks follow its step. Megatron-Core's other optimizers cannot work: they
# keep weights of their own, which no forward would ever see.


def follow_torch_optimizers(engine: ShardedModule) -> None:
    """Reduce the gradients of a model before each step of a torch optimizer over its parameters.

    After the step its main weights become the weights of the next forward. This ends with the
    model.
    """
    reference = weakref.ref(engine)

    def before(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        followed = reference()
        if followed in _models_of(optimizer):
            # An all-gather under way would overwrite the new weights with the old ones.
            followed.synchronize_param_gather()
            followed.finish_grad_sync()

    def after(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        followed = reference()
        if followed in _models_of(optimizer):
            followed.install_optimized_model_weights(only_trainable=True)

    weakref.finalize(engine, register_optimizer_step_pre_hook(before).remove)
    weakref.finalize(engine, register_optimizer_step_post_hook(after).remove)


def _models_of(optimizer: Any) -> set[ShardedModule]:
    """Return the sharded models whose parameters an optimizer steps."""
    models = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_owned(parameter):
                models.add(owner_of(parameter))
    return models


@functools.cache
def refuse_stale_weights() -> None:
    """Let Megatron-Core's optimizers refuse sharded models they cannot train; once a process."""
    for optimizer_class in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        optimizer_class.__init__ = _refusing_init(optimizer_class.__init__)
    DistributedOptimizer.__init__ = _preparing_init(DistributedOptimizer.__init__)


def _refusing_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(
        megatron_optimizer: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # The original calls its first argument "optimizer", and programs may pass it by that name.
        inner = args[0] if args else kwargs.get("optimizer")
        if inner is not None and _models_of(inner):
            raise ValueError(
                f"{type(megatron_optimizer).__name__} would train on stale weights of a"
                " FullyShardedDataParallel model: set use_distributed_optimizer in OptimizerConfig"
                " (--use-distributed-optimizer), or step model.parameters() with an optimizer of"
                " torch"
            )
        original(megatron_optimizer, *args, **kwargs)

    return init


def _preparing_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(
        optimizer: DistributedOptimizer,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(optimizer, *args, **kwargs)
        parameters = optimizer.get_parameters()
        if optimizer.optimizer is None or not parameters:
            return
        if not all(is_owned(parameter) for parameter in parameters):
            return
        check_precision(optimizer.config, optimizer.ddp_config)
        if optimizer.config.use_precision_aware_optimizer:
            prepare_precision_aware(optimizer, parameters)

    return init


# ---- main weights after a load
#
# A sharded model loads its main weights itself, so none have to be copied after a load without the
# optimizer (--finetune). Programs ask the optimizer to copy them all the same, which does nothing
# up to Megatron-Core 0.17 and raises an error from 0.18 on.


@functools.cache
def keep_main_weights() -> None:
    """Let DistributedOptimizer copy no weights of sharded models; once a process."""
    original = DistributedOptimizer._copy_model_params_to_main_params

    @functools.wraps(original)
    def copy_of_others(
        optimizer: DistributedOptimizer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not _models_of(optimizer):
            original(optimizer, *args, **kwargs)

    DistributedOptimizer._copy_model_params_to_main_params = copy_of_others
