# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers, and those of torch, over a sharded model."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter
from types import SimpleNamespace
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
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.optimizer.matrix.owner_update import OwnerUpdate
from megatron.fsdp.optimizer.optimizer_state import initial_state
from megatron.fsdp.sharded_module import ShardedModule, is_owned, owner_of
from megatron.mcore_adapter.fused_gradients import set_attributes

# ---- state before the first step


def make_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first step would create: moments zero, step 0.

    Parameters of which this rank owns nothing get state too. Checkpoints then have the same keys on
    every rank, and loading needs no step, which would change weights.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        inner = inner.adam if isinstance(inner, MuonAndAdam) else inner
        if inner is None:
            continue
        if type(inner).__module__.split(".")[0] == "torch":
            _fill_state(inner)
            continue
        # Fused optimizers (Transformer Engine's and Apex's) create their own, with steps by group.
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            if "betas" in group:  # Muon counts none
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
    config: OptimizerConfig, model: list[MegatronModule], **settings: Any
) -> DistributedOptimizer:
    """Build Muon and Adam over sharded models, as one optimizer inside of Megatron-Core's.

    Args:
        config: of Muon and of Adam.
        model: chunks of this pipeline stage.
        settings: other arguments of ``get_megatron_optimizer``.
    """
    of_adam = copy(config)
    of_adam.optimizer = "adam"
    distributed = get_megatron_optimizer(of_adam, model, **settings)
    adam = distributed.optimizer
    groups = []
    for group in adam.param_groups:
        own = {key: value for key, value in group.items() if key not in adam.defaults}
        groups.append({**own, "params": list(filter(is_matrix, group["params"]))})
        group["params"] = list(filterfalse(is_matrix, group["params"]))
    kind, settings_of_muon = _muon_of_owners(), {}
    for name in inspect.signature(kind).parameters:
        for field in (name, f"muon_{name.removesuffix('_beta')}"):  # momentum_beta in 0.17
            if hasattr(config, field):
                settings_of_muon[name] = getattr(config, field)
    blockwise = "tp_mode" if "tp_mode" in inspect.signature(kind).parameters else "mode"
    split = _mark_matrices(model, config.muon_tp_mode == "blockwise")
    settings_of_muon |= {
        blockwise: "blockwise",  # to the class, every matrix or slice is a whole one
        "is_qkv_fn": attrgetter("is_qkv"),
        "qkv_split_shapes": split,
    }
    distributed.optimizer = MuonAndAdam(kind(groups, **settings_of_muon), adam)
    return distributed


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that Megatron-Core gives to Muon."""
    return parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


def _mark_matrices(model: list[MegatronModule], by_slices: bool) -> list[int]:
    """Mark fused query, key and value, and the slices; return the rows of each of their groups."""
    config = get_model_config(model[0])
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    num_queries = 2 if getattr(config, "attention_output_gate", False) else 1
    split = [query] * num_queries + [config.kv_channels] * 2
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if not is_matrix(parameter):
                continue
            sharded = sharded_param_of(parameter)
            rows, dim = sharded.slice.shape[0], sharded.slice.dim or 0
            number = sharded.slice.shape[dim] // sharded.flat_range.shape[dim] if by_slices else 1
            is_qkv = "linear_qkv.weight" in name and rows // number % sum(split) == 0
            set_attributes(sharded.compute, is_qkv=is_qkv, slices=(number, dim))
    return split


class MuonAndAdam:
    """Two optimizers in the place of the one inside of DistributedOptimizer."""

    def __init__(self, muon: torch.optim.Optimizer, adam: torch.optim.Optimizer):
        self.muon, self.adam = muon, adam
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
    """Return a class of Megatron-Core's Muon that orthogonalizes slices as they are marked."""
    try:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    except ImportError:  # before 0.18
        use_new_names()
        from megatron.core.optimizer.muon import TensorParallelMuon

    class Muon(TensorParallelMuon):
        def orthogonalize(self, p: Any, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            number, dim = p.slices
            slices = [each.contiguous() for each in grad.chunk(number, dim)]
            orthogonalize = partial(TensorParallelMuon.orthogonalize, self, p, **kwargs)
            return torch.cat([*map(orthogonalize, slices)], dim)

    return Muon


@functools.cache
def use_new_names() -> None:
    """Let Megatron-Core 0.16 call emerging_optimizers from 0.2 on; once a process."""
    from megatron.core.optimizer import muon

    base: Any = getattr(muon, "OrthogonalizedOptimizer", object)  # not there in newer releases
    if hasattr(muon, "HAVE_EO_V02") or "nesterov" not in inspect.signature(base).parameters:
        return
    orthogonalize = muon.newton_schulz_tp

    class Renamed(base):
        def __init__(self, *args: Any, use_nesterov: bool, **kwargs: Any):
            super().__init__(*args, nesterov=use_nesterov, **kwargs)

    def newton_schulz_tp(*args: Any, mode: str, **kwargs: Any) -> torch.Tensor:
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
    return getattr(wrapper, GROUP) if hasattr(wrapper, GROUP) else _original_group(optimizer)


# ---- steps of other optimizers
#
# DistributedOptimizer tells the model when its step has changed the main weights. An optimizer of
# torch does not, so its step is watched. Megatron-Core's other optimizers cannot work: they keep
# weights of their own, which no forward would ever see.


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
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {owner_of(parameter) for parameter in parameters if is_owned(parameter)}


@functools.cache
def refuse_stale_weights() -> None:
    """Let Megatron-Core's optimizers refuse sharded models they cannot train; once a process."""
    for kind in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        kind.__init__ = _refusing_init(kind.__init__)
    DistributedOptimizer.__init__ = _preparing_init(DistributedOptimizer.__init__)


def _refusing_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(megatron_optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
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


# ---- the precision-aware optimizer
#
# It is Transformer Engine's FusedAdam over the main weights of a sharded model, so it keeps none of
# its own. Gradients are on `decoupled_grad`, in the dtype in which they accumulate. A moment in
# fp16 or fp8 (uint8) has one scale, here for the rank's shard, as in Megatron-Core's own optimizer.


class _FusedAdamOnShards(torch.optim.Optimizer):
    """The methods that the class of a FusedAdam over sharded parameters begins with."""

    name_to_dtype_map: dict[str, torch.dtype]

    def initialize_state(self, param: nn.Parameter, store_param_remainders: bool = False) -> None:
        """Create the moments of a parameter; Megatron-Core passes no second argument."""
        super().initialize_state(param, False)  # type: ignore[misc]

    def _initialize_state(self, param: nn.Parameter, state_name: str, **settings: Any) -> None:
        super()._initialize_state(param, state_name, **settings)  # type: ignore[misc]
        slots = self.state[param]  # it has made a DTensor of equal shards
        moment: Any = local_tensor(slots[state_name])
        if hasattr(moment, "_quantizer"):  # without the transposed copy that GEMMs of Hopper need
            moment._quantizer.set_usage(columnwise=False)
            moment.update_usage(columnwise_usage=False)
        slots[state_name] = sharded_param_of(param).over(moment)

    def _apply_scale(
        self, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Scale a moment of a shard, which may be empty, or zero as whole tensors rarely are."""
        if unscaled.numel():
            super()._apply_scale(name, unscaled, scaled, scale)  # type: ignore[misc]
            # It has multiplied zeros by the inverse of their scale, which is infinite.
            codes = getattr(scaled, "_data", scaled)
            codes.masked_fill_(scale[0].reciprocal().isinf(), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; FusedAdam's has DTensors of equal shards."""
        return torch.optim.Optimizer.state_dict(self)


@contextmanager
def unscaled_moments(optimizer: MegatronOptimizer | None, is_load: bool = False) -> Iterator[None]:
    """Let the state have copies in fp32 of moments that have a scale, for a checkpoint.

    In the end, ``is_load`` takes values that were read into the copies.
    """
    scaled = []
    try:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner: Any = getattr(part, "optimizer", None)
            dtypes = inner.name_to_dtype_map if isinstance(inner, _FusedAdamOnShards) else {}
            names = [each for each in dtypes if dtypes[each] in (torch.float16, torch.uint8)]
            for parameter, slots in inner.state.items() if names else ():
                for name in slots.keys() & names:
                    unscaled = inner.get_unscaled_state(parameter, name)  # memory may run out
                    scaled.append((inner, parameter, slots, name, slots[name]))
                    slots[name] = sharded_param_of(parameter).over(unscaled)
        yield
    finally:
        for inner, parameter, slots, name, moment in scaled:
            unscaled, slots[name] = local_tensor(slots[name]), moment
            if is_load:
                inner.set_scaled_state(parameter, name, unscaled)


def gradient_of(parameter: torch.Tensor) -> Any:
    """Return the gradient that the optimizer of a parameter reads, or None."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def _preparing_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(optimizer: DistributedOptimizer, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        inner, config, own = optimizer.optimizer, optimizer.config, optimizer.get_parameters()
        if inner is None or not own or not all(map(is_owned, own)):
            return
        aware, field = config.use_precision_aware_optimizer, "megatron_fsdp_use_decoupled_grad"
        if aware != getattr(optimizer.ddp_config, field, False):
            raise ValueError(
                f"use_precision_aware_optimizer={aware} of OptimizerConfig needs {field}={aware} in"
                " ddp_config: the optimizer would read gradients where none are"
            )
        if not aware:
            return
        main, field = config.main_params_dtype, "megatron_fsdp_main_params_dtype"
        if main not in (torch.float32, getattr(optimizer.ddp_config, field, None)):
            raise ValueError(
                f"main_params_dtype={main} of OptimizerConfig needs {field}={main} in ddp_config:"
                " main weights are those of the sharded model"
            )
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True  # main weights are neither
        inner.__class__ = type("FusedAdamOnShards", (_FusedAdamOnShards, type(inner)), {})
        inner.master_weights = inner.store_param_remainders = False
        inner.use_decoupled_grad = True
        # Megatron-Core before 0.19 takes norms and zeros of sharded models from `grad`.
        optimizer.get_parameters = lambda: [
            SimpleNamespace(**{**vars(each), "grad": gradient_of(each)}) for each in own
        ]

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
    def copy_of_others(optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        if not _models_of(optimizer):
            original(optimizer, *args, **kwargs)

    DistributedOptimizer._copy_model_params_to_main_params = copy_of_others
