# SPDX-License-Identifier: Apache-2.0
"""The model of a command line, chunk by chunk, and its data-parallel wrapper."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.pretrain.arguments.configs import ddp_config, transformer_config
from megatron.pretrain.model.layer_specs import layer_spec, mtp_block_spec


def build_model(
    args: argparse.Namespace,
    padded_vocab_size: int,
    device: torch.device,
) -> list[MegatronModule]:
    """Build the model chunks of this pipeline stage, wrapped for data parallelism.

    Args:
        args: the completed arguments.
        padded_vocab_size: rows of the embedding.
        device: device of the layers.

    Returns:
        One chunk, or one for each virtual stage.
    """
    config = transformer_config(args)
    virtual_stages: Sequence[int | None] = [None]
    if args.virtual_pipeline_model_parallel_size is not None:
        virtual_stages = range(args.virtual_pipeline_model_parallel_size)
    chunks = []
    for virtual_stage in virtual_stages:
        chunks.append(build_chunk(args, config, padded_vocab_size, device, virtual_stage))
    model = []
    for number, chunk in enumerate(chunks):
        model.append(wrap(args, config, chunk, disable_bucketing=number > 0))
    if args.data_parallel_random_init:
        for chunk in model:
            chunk.broadcast_params()
    return model


def build_chunk(
    args: argparse.Namespace,
    config: TransformerConfig,
    padded_vocab_size: int,
    device: torch.device,
    vp_stage: int | None,
) -> MegatronModule:
    """Build the layers of one (virtual) pipeline stage, in the dtype of the run.

    With --init-model-with-meta-device they are on the meta device and have no values yet.

    Args:
        args: the completed arguments.
        config: settings of the model.
        padded_vocab_size: rows of the embedding.
        device: device of the layers, unless they are on the meta device.
        vp_stage: number of the virtual stage; None without virtual stages.
    """
    settings = {
        "vocab_size": padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "vp_stage": vp_stage,
    }
    with on_meta(config) if args.init_model_with_meta_device else nullcontext():
        spec = layer_spec(config, vp_stage)
        settings["mtp_block_spec"] = mtp_block_spec(config, spec, vp_stage)
        model = GPTModel(config, spec, **settings)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if not args.init_model_with_meta_device:
        model.to(device)
    if config.bf16 or config.fp16:
        return Float16Module(config, model)
    return model


@contextmanager
def on_meta(config: TransformerConfig) -> Iterator[None]:
    """Build layers without storage inside the context.

    Only with ``use_cpu_initialization`` do the constructors of layers leave the device to torch.
    """
    use_cpu_initialization = config.use_cpu_initialization
    config.use_cpu_initialization = True
    try:
        with torch.device("meta"):
            yield
    finally:
        config.use_cpu_initialization = use_cpu_initialization


def wrap(
    args: argparse.Namespace,
    config: TransformerConfig,
    model: MegatronModule,
    disable_bucketing: bool = False,
    device: str | None = None,
) -> MegatronModule:
    """Wrap a chunk: fully sharded with --use-megatron-fsdp, else Megatron-Core's data parallelism.

    Args:
        args: completed arguments.
        config: settings of the model.
        model: chunk to wrap.
        disable_bucketing: setting of Megatron-Core's data parallelism: gradients of later chunks
            are complete too early to gain from buckets.
        device: device of a fully sharded model; None: the accelerator if there is one, or the CPU.
    """
    settings = ddp_config(args)
    if not args.use_megatron_fsdp:
        return DistributedDataParallel(config, settings, model, disable_bucketing=disable_bucketing)
    return FullyShardedDataParallel(config=config, ddp_config=settings, module=model, device=device)
