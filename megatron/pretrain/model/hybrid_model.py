# SPDX-License-Identifier: Apache-2.0
"""The HybridModel of --hybrid-layer-pattern, whose layers are attention or an MLP, not both.

Releases of Megatron-Core before 0.18 have no such model, and cannot import this module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.mcore_adapter.local_layers import LocalNorm
from megatron.pretrain.model.layer_specs import with_local_classes

NO_ATTENTION = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": IdentityFuncOp,
}
NO_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}


def hybrid_model(config: TransformerConfig, pattern: str, **settings: Any) -> LanguageModule:
    """Build the layers that a pattern names; ``settings`` are HybridModel's other arguments."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **settings)
    model = HybridModel(config, local_stack(config), hybrid_layer_pattern=pattern, **settings)
    if model.post_process:  # a specification cannot replace the last norm
        model.decoder.final_norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)
        model.decoder.post_layer_norm = True
    return model


def local_stack(config: TransformerConfig) -> ModuleSpec:
    """Return the layers without Transformer Engine, and without a last norm."""
    dense, sparse = (
        get_gpt_layer_local_spec(number, normalization=config.normalization).submodules
        for number in (None, config.num_moe_experts)
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=replace(dense, **NO_MLP)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=replace(dense, **NO_ATTENTION)),
        moe_layer=ModuleSpec(TransformerLayer, submodules=replace(sparse, **NO_ATTENTION)),
    )
    submodules = with_local_classes(layers, config)
    return ModuleSpec(HybridStack, params={"post_layer_norm": False}, submodules=submodules)
