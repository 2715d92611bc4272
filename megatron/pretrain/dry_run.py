# SPDX-License-Identifier: Apache-2.0
"""A dry run: a command line is checked as the run would, and what follows from it is printed.

No rank is contacted, and no GPU is needed: the model is built on the meta device for one rank of
each pipeline stage, with process groups that pretend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.fsdp import Strategy
from megatron.fsdp.quantized.stored_forms import GRANULARITIES
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.coded_weights import PLAIN, code_bytes, coded_weights, layers_of
from megatron.mcore_adapter.core_optimizers import is_matrix
from megatron.mcore_adapter.data_parallel import default_unit_modules
from megatron.mcore_adapter.releases.precision_fields import precision_policy
from megatron.mcore_adapter.run.model_parallel import initialize_model_parallel
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain import ranks
from megatron.pretrain.arguments.configs import ddp_config, transformer_config
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizers import build_tokenizer, embedding_rows
from megatron.pretrain.memory_estimate import (
    AxisSizes,
    MemoryEstimate,
    MemoryPlan,
    estimate_memory,
    experts_in,
)
from megatron.pretrain.model.gpt_model import build_chunk

MIB = 2**20
OF_REAL_GROUPS = {
    "enable_gloo_process_groups": False,
    "high_priority_stream_groups": [],
    "nccl_communicator_config_path": None,
    "use_sharp": False,
    "sharp_enabled_group": None,
}
"""Arguments that pretended process groups do not take, with values that change nothing."""
ACTIVATION_BYTES = 34
"""Bytes of activations for each token, unit of hidden size and layer, in bf16, with attention that
keeps no scores. Source: Korthikanti et al., arXiv:2205.05198."""


@dataclass(frozen=True)
class StageEstimate:
    """Parameters and memory of a rank of one pipeline stage."""

    stage: int
    num_parameters: int
    memory: MemoryEstimate
    activations: int


def print_dry_run(args: argparse.Namespace, log: Callable[[str], object] = print) -> None:
    """Print what follows from completed arguments: ranks, batches, parameters and memory."""
    tokenizer = build_tokenizer(TokenizerChoice.of(args))
    rows = embedding_rows(args, tokenizer)
    stages = []
    for stage in range(args.pipeline_model_parallel_size):
        stages.append(estimate_stage(args, rows, stage))
    for line in (*mesh_lines(args), *batch_lines(args), *model_lines(args, stages)):
        log(line)


def mesh_lines(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines about ranks."""
    line = (
        f"ranks: {args.world_size} = {args.tensor_model_parallel_size} tensor x"
        f" {args.pipeline_model_parallel_size} pipeline x {args.context_parallel_size} context x"
        f" {args.data_parallel_size} data"
    )
    if args.num_distributed_optimizer_instances > 1:
        line += f" ({args.num_distributed_optimizer_instances} outer)"
    yield line
    if args.num_experts:
        yield (
            f"ranks of experts: {args.expert_tensor_parallel_size} tensor x"
            f" {args.expert_model_parallel_size} expert x"
            f" {args.pipeline_model_parallel_size} pipeline x {expert_data_ranks(args)} data"
        )


def batch_lines(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines about batches and the length of the run."""
    tokens = args.global_batch_size * args.seq_length
    per_rank = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    yield f"a step: {tokens:,} tokens, {args.global_batch_size} sequences"
    yield f"microbatches of a rank and step: {per_rank} of {args.micro_batch_size} sequences"
    yield f"steps: {args.train_iters:,}"


def model_lines(args: argparse.Namespace, stages: list[StageEstimate]) -> Iterator[str]:
    """Yield the lines about parameters and memory."""
    for estimate in stages:
        memory = estimate.memory
        rank = "a rank"
        if len(stages) > 1:
            rank = f"a rank of stage {estimate.stage}"
        number = estimate.num_parameters
        yield f"parameters of {rank}, before data ranks divide them: {number:,}"
        parts = {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer state": memory.optimizer_state,
            "gathered weights": memory.gathered,
            "local gradients": memory.local_gradients,
            "activations": estimate.activations,
        }
        named = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items())
        total = sum(parts.values())
        yield f"memory of {rank}: {total / MIB:,.1f} MiB = {named}"
        if memory.host:
            yield f"memory of {rank} on its host: {memory.host / MIB:,.1f} MiB"
    if code_bytes(args):
        yield (
            f"matrices of linear layers are stored and gathered in {code_bytes(args):g} bytes an"
            " element, scales included, in addition to fp32 main weights"
        )
    kept = "no recomputation of layers"
    if args.recompute_granularity == "full":
        kept = "the input of each layer alone is kept"
    yield (
        f"activations assume {ACTIVATION_BYTES} bytes a token, hidden unit and layer ({kept}),"
        " without logits, experts beyond a dense MLP, and what libraries reserve"
    )


def estimate_stage(
    args: argparse.Namespace,
    rows: int,
    stage: int,
) -> StageEstimate:
    """Return parameters and memory of the first rank of a pipeline stage.

    Args:
        args: the completed arguments.
        rows: rows of the embedding.
        stage: number of the pipeline stage.
    """
    with pretending(args, stage):
        on_meta = argparse.Namespace(**vars(args) | PLAIN | {"init_model_with_meta_device": True})
        config = transformer_config(on_meta)
        virtual_stages: Sequence[int | None] = [None]
        if args.virtual_pipeline_model_parallel_size:
            virtual_stages = range(args.virtual_pipeline_model_parallel_size)
        memory = MemoryEstimate()
        num_parameters = 0
        num_layers = 0
        for virtual_stage in virtual_stages:
            chunk = build_chunk(on_meta, config, rows, torch.device("meta"), virtual_stage)
            memory += estimate_memory(chunk, memory_plan(args, chunk))
            num_parameters += sum(parameter.numel() for parameter in chunk.parameters())
            num_layers += len(layers_of(chunk))
    return StageEstimate(stage, num_parameters, memory, activation_bytes(args, num_layers, stage))


def memory_plan(args: argparse.Namespace, chunk: torch.nn.Module) -> MemoryPlan:
    """Return the settings with which a chunk is sharded.

    Megatron-Core's own wrapper is level 0, or 1 with a distributed optimizer; its padding differs.
    """
    settings = ddp_config(args)
    level = args.data_parallel_sharding_strategy
    if not args.use_megatron_fsdp:
        level = "optim" if args.use_distributed_optimizer else "no_shard"
    outer = args.num_distributed_optimizer_instances
    expert = None
    if args.expert_model_parallel_size > 1 and experts_in(chunk):
        expert = AxisSizes(expert_data_ranks(args) // outer, outer)
    state_bytes = None
    if args.use_precision_aware_optimizer:
        state_bytes = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    matrices = []
    if args.optimizer in MUON:
        matrices = [parameter for parameter in chunk.parameters() if is_matrix(parameter)]
    return MemoryPlan(
        unit_modules=default_unit_modules(chunk),
        strategy=Strategy(
            level=level,
            outer=args.outer_dp_sharding_strategy,
            expert_level=args.expert_data_parallel_sharding_strategy,
            expert_outer=args.expert_outer_dp_sharding_strategy,
            embedding_level=args.embedding_data_parallel_sharding_strategy,
        ),
        precision=precision_policy(settings),
        dense=AxisSizes(args.data_parallel_size * args.context_parallel_size // outer, outer),
        expert=expert,
        offloaded=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        granularity=GRANULARITIES[settings.megatron_fsdp_granularity],
        states=1 if args.optimizer == "sgd" else 2,
        state_bytes=state_bytes,
        decoupled=args.use_precision_aware_optimizer,
        matrices=frozenset(matrices),
        fine_grained=args.megatron_fsdp_enable_fine_grained_param_gather,
        coded=frozenset(coded_weights(args, chunk).values()),
        code_bytes=code_bytes(args) or 1.0,
    )


def expert_data_ranks(args: argparse.Namespace) -> int:
    """Return the number of ranks that have the same experts."""
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size
    return int(args.world_size // (experts * args.pipeline_model_parallel_size))


def activation_bytes(
    args: argparse.Namespace,
    num_layers: int,
    stage: int,
) -> int:
    """Return the bytes of activations of the microbatches that a stage has under way.

    Args:
        args: the completed arguments.
        num_layers: number of layers of the stage.
        stage: its number; the first one begins the most microbatches before their backward.
    """
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    element = 2 if args.bf16 or args.fp16 else 4
    per_layer = ACTIVATION_BYTES * element // 2
    if args.recompute_granularity == "full":
        per_layer = element
    stages = args.pipeline_model_parallel_size
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    under_way = min(stages - stage, microbatches)
    return int(tokens * args.hidden_size * per_layer * num_layers * under_way)


@contextmanager
def pretending(args: argparse.Namespace, stage: int) -> Iterator[None]:
    """Pretend to be the first rank of a pipeline stage in the process groups of the run."""
    cpu.install()
    per_stage = args.world_size // args.pipeline_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        per_stage = args.tensor_model_parallel_size * args.context_parallel_size
    pretended = argparse.Namespace(**vars(args) | OF_REAL_GROUPS)
    with pretended_ranks(args.world_size, stage * per_stage):
        try:
            initialize_model_parallel(pretended)
            ranks.seed(args.seed, False, False)
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def pretended_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Pretend to be one of many ranks: collectives return at once, and communicate nothing."""
    # torch has no public process group that pretends. Only plans and dry runs need this one.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
        # In torch 2.10 this module registers what process groups do with tensors on meta.
        from torch.distributed._tools import fake_collectives  # noqa: F401
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
