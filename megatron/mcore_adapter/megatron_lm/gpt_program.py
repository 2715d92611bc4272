# SPDX-License-Identifier: Apache-2.0
"""A GPT program for Megatron-LM's training loop, which wheels of Megatron-Core have without one.

It builds the models that Megatron-LM's own ``pretrain_gpt.py`` builds; ``--hybrid-layer-pattern``
(0.19) brings a HybridModel. Every rank makes the samples by itself. The modules of the loop are
imported here, so the drop-in must be installed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training import argument_utils, arguments, get_args, pretrain
from torch import Tensor

from megatron.mcore_adapter.releases.process_groups import batch_on_this_rank

BuildDatasets = Callable[[Any, Sequence[int]], Sequence[Any]]
"""Arguments of the loop, and numbers of samples -> data for training, validation and test."""
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Sum of losses, number of tokens, and both for the report."""

ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
MODEL_CONFIG = "core_transformer_config_from_args"
ENGINE = "transformer_engine"


def run(build_datasets: BuildDatasets) -> None:
    """Run the loop with the command line of the process, on samples that are built here.

    Args:
        build_datasets: their items are dicts of tensors of the length of a sequence: ``tokens``,
            ``labels``, ``loss_mask``, ``position_ids``, and ``attention_mask`` where layers need
            one.
    """

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
        return build_datasets(get_args(), num_samples)

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it
    settings: dict[str, Any] = {}
    if hasattr(argument_utils, "pretrain_cfg_container_from_args"):
        args = arguments.parse_and_validate_args()
        config = None
        if args.hybrid_layer_pattern is not None:
            config = argument_utils.hybrid_config_from_args(args)
            if args.transformer_impl != ENGINE:
                config.hybrid_stack_spec = hybrid_stack(args.num_experts, args.normalization)
        elif hasattr(argument_utils, "gpt_config_from_args"):
            config = argument_utils.gpt_config_from_args(args)
        settings["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(args, config)
    pretrain(
        train_valid_test_dataset_provider=provide,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **settings,
    )


def build_model(
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a chunk of the model for loops before 0.19, which have no builder of their own.

    Args:
        pre_process: with the embedding, in the first pipeline stage.
        post_process: with the output layer, in the last one.
        vp_stage: number of the virtual pipeline stage; None without virtual stages.
        config: ignored: the model's config is made of the loop's arguments.
        pg_collection: process groups; None: those of ``parallel_state``.
    """
    args = get_args()
    module = argument_utils if hasattr(argument_utils, MODEL_CONFIG) else arguments
    config = getattr(module, MODEL_CONFIG)(args)
    with_engine = args.transformer_impl == ENGINE
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_engine,
        normalization=args.normalization,
        vp_stage=vp_stage,
    )
    several_tokens = None
    if args.mtp_num_layers:
        several_tokens = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=with_engine, vp_stage=vp_stage
        )
    return GPTModel(
        config,
        layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=several_tokens,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def hybrid_stack(num_experts: int | None, normalization: str) -> ModuleSpec:
    """Return the layers of a HybridModel but for Mamba's, by local classes."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    dense = get_gpt_layer_local_spec(None, normalization=normalization).submodules
    sparse = get_gpt_layer_local_spec(num_experts, normalization=normalization).submodules
    nothing = TransformerLayerSubmodules()
    no_attention = {name: getattr(nothing, name) for name in ATTENTION}
    no_mlp = {name: getattr(nothing, name) for name in MLP}
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=replace(dense, **no_mlp)),
            mlp_layer=ModuleSpec(MLPLayer, submodules=replace(dense, **no_attention)),
            moe_layer=ModuleSpec(TransformerLayer, submodules=replace(sparse, **no_attention)),
        ),
    )


def forward_step(
    data: Iterator[dict[str, Tensor]],
    model: GPTModel,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[[Tensor], Loss]]:
    """Run the model on the next microbatch, or return its plan for the combined 1F1B schedule.

    Args:
        data: yields tensors ``[batch, sequence]`` by the names of :data:`BATCH_KEYS`.
        model: this chunk of it, inside its wrappers.
        return_schedule_plan: return the plan, with which the schedule runs the model itself.

    Returns:
        The output of the model, or its plan, and the function that makes the loss of an output.
    """
    device = torch.cuda.current_device()
    sample = next(data)
    batch = {}
    for name in BATCH_KEYS:  # blended data has the number of the data set too
        if name in sample:
            batch[name] = sample[name].to(device, non_blocking=True)
    batch = batch_on_this_rank(batch)
    mask = batch["loss_mask"]

    def loss(losses: Tensor) -> Loss:
        total = torch.sum(losses.float() * mask)
        tokens = mask.sum().to(torch.int)
        both = torch.stack([total.detach().clone(), tokens.float()])
        return total, tokens, {"lm loss": both}

    call = model.build_schedule_plan if return_schedule_plan else model
    output = call(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=mask,
    )
    return output, loss
