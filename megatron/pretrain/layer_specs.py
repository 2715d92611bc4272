# SPDX-License-Identifier: Apache-2.0
"""What the layers of a command line's model are made of: dense or with experts, plain or latent attention, extra predictions.

Megatron-Core's own functions decide. Without Transformer Engine the classes that stop short are
then exchanged for ours.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.mcore_adapter.local_layers import LocalAttention, LocalLatentAttention, LocalNorm


def layer_spec(
    args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder's layers on this pipeline stage, for GPTModel's second argument.

    Args:
        args: with ``transformer_impl``: "transformer_engine", or "local" for layers in plain
            PyTorch.
        config: what the layers are: number and kind of experts, latent attention, norms. Its
            pipeline sizes and this rank's place say which of them are here.
        vp_stage: the virtual stage, where there are any.
    """
    with_engine = _with_engine(args)
    spec = get_gpt_decoder_block_spec(
        config,
        with_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return spec if with_engine else _exchanged(spec, _local_classes(config))


def mtp_block_spec(
    args: argparse.Namespace,
    config: TransformerConfig,
    spec: TransformerBlockSubmodules,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers that predict further tokens, for GPTModel's ``mtp_block_spec``; None on stages without any.

    Args:
        args, config, vp_stage: as for :func:`layer_spec`.
        spec: what that returned. Predicting layers are made like the model's last.
    """
    if not config.mtp_num_layers:
        return None
    with_engine = _with_engine(args)
    if not spec.layer_specs:  # a stage with predicting layers only
        last = get_gpt_decoder_layer_specs(
            config, with_engine, config.normalization, config.qk_l2_norm
        )[-1]
        spec = replace(spec, layer_specs=[last])
    block = get_gpt_mtp_block_spec(config, spec, with_engine, vp_stage=vp_stage)
    return block if with_engine else _exchanged(block, _local_classes(config))


def _with_engine(args: argparse.Namespace) -> bool:
    return args.transformer_impl == "transformer_engine"


def _local_classes(config: TransformerConfig) -> dict[type, type]:
    """Class of Megatron-Core's local layers -> ours."""
    # With Apex it takes the fused norm in some places, for RMSNorm too, which that does not know:
    # one norm on all machines.
    classes: dict[type, type] = {
        WrappedTorchNorm: LocalNorm,
        FusedLayerNorm: LocalNorm,
        MLASelfAttention: LocalLatentAttention,
    }
    if config.context_parallel_size > 1 or config.multi_latent_attention:
        classes[DotProductAttention] = LocalAttention
    return classes


def _exchanged(part: Any, classes: dict[type, type]) -> Any:
    """The same spec with other classes, all the way down."""
    if isinstance(part, type):
        return classes.get(part, part)
    if isinstance(part, list):
        return [_exchanged(each, classes) for each in part]
    if is_dataclass(part):
        values = {
            field.name: _exchanged(getattr(part, field.name), classes) for field in fields(part)
        }
        return replace(part, **values)  # type: ignore[type-var]
    return part
