# SPDX-License-Identifier: Apache-2.0
"""Specifications of the model's layers: dense or with experts, plain or latent attention.

Megatron-Core's own functions make them. Without Transformer Engine those classes that lack a
feature are then replaced by ours.
"""

from __future__ import annotations

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
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the decoder's layers on this pipeline stage, for GPTModel's second argument.

    Args:
        config: determines the layers: ``transformer_impl`` ("transformer_engine", or "local" for
            layers in plain PyTorch), number of experts, latent attention, norms. Its pipeline sizes
            and this rank's stage determine which layers this stage has.
        vp_stage: virtual stage; None without virtual stages.
    """
    with_engine = _with_engine(config)
    spec = get_gpt_decoder_block_spec(
        config,
        with_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if with_engine:
        return spec
    return with_local_classes(spec, config)


def mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the layers that predict further tokens, for GPTModel's ``mtp_block_spec``.

    Args:
        config: settings of the model, as for :func:`layer_spec`.
        spec: result of :func:`layer_spec`. The layers are made like the last of it.
        vp_stage: virtual stage; None without virtual stages.

    Returns:
        None on stages without such layers.
    """
    if not config.mtp_num_layers:
        return None
    with_engine = _with_engine(config)
    if not spec.layer_specs:  # a stage with predicting layers only
        last = get_gpt_decoder_layer_specs(
            config, with_engine, config.normalization, config.qk_l2_norm
        )[-1]
        spec = replace(spec, layer_specs=[last])
    block = get_gpt_mtp_block_spec(config, spec, with_engine, vp_stage=vp_stage)
    if with_engine:
        return block
    return with_local_classes(block, config)


def _with_engine(config: TransformerConfig) -> bool:
    return config.transformer_impl == "transformer_engine"


def with_local_classes(spec: Any, config: TransformerConfig) -> Any:
    """Return a copy of a specification with our classes instead of Megatron-Core's local ones."""
    # With Apex, Megatron-Core takes the fused norm in some places, for RMSNorm too, which that norm
    # does not know. One norm serves all machines.
    classes: dict[type, type] = {
        WrappedTorchNorm: LocalNorm,
        FusedLayerNorm: LocalNorm,
        MLASelfAttention: LocalLatentAttention,
    }
    if config.context_parallel_size > 1 or config.multi_latent_attention:
        classes[DotProductAttention] = LocalAttention
    return _with_classes(spec, classes)


def _with_classes(spec: Any, classes: dict[type, type]) -> Any:
    """Return a copy of a specification with other classes, all the way down."""
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, list):
        return [_with_classes(part, classes) for part in spec]
    if is_dataclass(spec):
        values = {}
        for field in fields(spec):
            values[field.name] = _with_classes(getattr(spec, field.name), classes)
        return replace(spec, **values)  # type: ignore[type-var]  # a type was returned above
    return spec
