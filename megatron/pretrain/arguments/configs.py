# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's config objects, made from completed arguments.

A field has the value of its flag, unless a function below sets another.
"""

import argparse
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.activations import squared_relu
from megatron.core.config import set_experimental_flag
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import gelu, silu

from megatron.fsdp import Offload
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.config_flags import default_of, destination, known_flags
from megatron.pretrain.arguments.flags import ENGINE

Config = TypeVar("Config")


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Return the model's config, an MLATransformerConfig with --multi-latent-attention.

    Raises:
        ValueError, AssertionError: Megatron-Core refuses the combination.
    """
    # Megatron-Core has this switch outside its configs.
    set_experimental_flag(args.enable_experimental)
    cp_comm_type = args.cp_comm_type
    return from_destinations(
        MLATransformerConfig if args.multi_latent_attention else TransformerConfig,
        args,
        activation_func=activation(args),
        gated_linear_unit=args.swiglu,
        bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        persist_layer_norm=not args.no_persist_layer_norm,
        # gloo sends from the memory itself, which would be freed too early.
        deallocate_pipeline_outputs=args.distributed_backend == "nccl",
        batch_p2p_comm=not args.overlap_p2p_comm,
        pipeline_dtype=args.params_dtype,
        cp_comm_type=cp_comm_type[0] if len(cp_comm_type) == 1 else cp_comm_type,
    )


def activation(args: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the MLP's activation: GELU, unless a flag asks for another one."""
    if args.swiglu:
        return silu
    if args.squared_relu:
        return squared_relu
    # The tanh formula, which Megatron-Core's fused GELU computes too.
    return partial(gelu, approximate="tanh") if args.openai_gelu else gelu


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Return the optimizer's config.

    The decoupled rates take effect through `get_standard_config_overrides`.
    """
    # The wrapper offloads, not an optimizer with weights of its own.
    return from_destinations(OptimizerConfig, args, optimizer_cpu_offload=False)


def ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Return the data-parallel config.

    Flags that are marked as `ENGINE` may have no field in this release of Megatron-Core: they are
    attributes of the result.
    """
    config = from_destinations(DistributedDataParallelConfig, args)
    config.fp4_param_gather = args.fp4_param  # a field since Megatron-Core 0.17
    for dest, flag in known_flags().items():
        if ENGINE in flag.rules:
            setattr(config, dest, getattr(args, dest))
    config.megatron_fsdp_use_decoupled_grad = args.use_precision_aware_optimizer
    config.megatron_fsdp_granularity = "prefer_tensors" if args.optimizer in MUON else "prefer_rows"
    pins = args.pin_cpu_grads and args.pin_cpu_params
    offload = Offload(fraction=args.optimizer_offload_fraction, pins=pins)
    config.megatron_fsdp_offload_policy = offload if args.optimizer_cpu_offload else None
    return config


def from_destinations(
    config: Callable[..., Config],
    args: argparse.Namespace,
    **exceptions: Any,
) -> Config:
    """Make a config from `exceptions` and, for other fields, the destinations of their flags.

    Fields without either keep their defaults, which are not given: some releases warn of every
    value that is given for a deprecated field.
    """
    values = {}
    for declared in fields(config):  # type: ignore[arg-type]
        dest = destination(declared.name)
        if hasattr(args, dest) and getattr(args, dest) != default_of(declared):
            values[declared.name] = getattr(args, dest)
    return config(**(values | exceptions))
