# SPDX-License-Identifier: Apache-2.0
"""A small GPT of Megatron-Core with layers of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch

from tools import transformer_engine_on_cpu


def make_gpt(recipe: str | None, **settings: Any) -> tuple[Any, Any]:
    """Return the config of a GPT, with further `settings`, and the GPT in bf16, or FP8 weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True} if recipe else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fp8,
        **settings,
    )
    if not config.use_cpu_initialization:
        model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=32)
    return config, Float16Module(config, model)


def make_sharded_gpt(recipe: str | None, strategy: str) -> Any:
    """Return a GPT in the adapter's wrapper, with main weights for a distributed optimizer."""
    transformer_engine_on_cpu.use()
    from megatron.mcore_adapter import cpu

    cpu.install()
    from megatron.core.distributed import DistributedDataParallelConfig

    from megatron.mcore_adapter import FullyShardedDataParallel

    config, module = make_gpt(recipe)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        fp8_param_gather=recipe is not None,
        data_parallel_sharding_strategy=strategy,
    )
    return FullyShardedDataParallel(config, ddp_config, module)
