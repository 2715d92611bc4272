# SPDX-License-Identifier: Apache-2.0
"""The GPT model of a command line, and its data-parallel wrapper."""

from __future__ import annotations

import argparse

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.training.arguments.configs import ddp_config, transformer_config


def build_model(args: argparse.Namespace, padded_vocab_size: int, device: torch.device) -> MegatronModule:
    """The model of ``args`` on ``device``, in the dtype of the run, wrapped for data parallelism."""
    config = transformer_config(args)
    model: MegatronModule = GPTModel(
        config,
        layer_spec(args, config),
        vocab_size=padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(device)
    if config.bf16 or config.fp16:
        model = Float16Module(config, model)
    return wrap(args, config, model)


def layer_spec(args: argparse.Namespace, config: TransformerConfig) -> ModuleSpec:
    """What the transformer layers are made of: Transformer Engine's modules, or Megatron-Core's own."""
    with_engine = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        return get_gpt_decoder_block_spec(config, with_engine, normalization=args.normalization)
    if with_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm, qk_l2_norm=args.qk_l2_norm)
    return get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm)


def wrap(args: argparse.Namespace, config: TransformerConfig, model: MegatronModule) -> MegatronModule:
    """Fully sharded with --use-megatron-fsdp, else Megatron-Core's own data parallelism."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    settings = ddp_config(args, num_parameters=num_parameters)
    if not args.use_megatron_fsdp:
        wrapped = DistributedDataParallel(config, settings, model)
    else:
        # This release's config has no fields for the dtypes; the wrapper looks for these attributes.
        for name in ("main_params", "main_grads", "grad_comm"):
            setattr(settings, f"megatron_fsdp_{name}_dtype", getattr(args, f"megatron_fsdp_{name}_dtype"))
        wrapped = FullyShardedDataParallel(config=config, ddp_config=settings, module=model)
    if args.data_parallel_random_init:
        wrapped.broadcast_params()
    return wrapped


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside all wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model


def floating_point_operations(args: argparse.Namespace, batch_size: int) -> float:
    """Operations of matrix products in one training step over ``batch_size`` sequences (forward, and twice that
    for backward), after Korthikanti et al., arXiv:2205.05198, appendix A, with grouped queries and gated MLPs.

    Every layer counts as one with experts if any is; routers and shared experts are left out."""
    hidden, length = args.hidden_size, args.seq_length
    query = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    projections = hidden * (2 * query + 2 * groups * args.kv_channels)
    scores = 2 * query * length / 2  # causal: half of the products are masked
    active = args.moe_router_topk if args.num_experts else 1
    width = args.moe_ffn_hidden_size if args.num_experts else args.ffn_hidden_size
    mlp = active * (3 if args.swiglu else 2) * hidden * width
    per_token = args.num_layers * (projections + scores + mlp) + hidden * args.padded_vocab_size
    return 3.0 * 2.0 * per_token * batch_size * length
