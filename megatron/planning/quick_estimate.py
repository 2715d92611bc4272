# SPDX-License-Identifier: Apache-2.0
"""Quick estimates of candidates, by which a search chooses those that it simulates.

Layers of a model are alike, so one layer of each kind is built on the meta device and estimated by
the function of ``megatron/pretrain/memory_estimate.py``, with the shards of the candidate. Of time,
only the largest of computing, gathering and reducing a layer counts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron.fsdp import ShardingStrategy
from megatron.mcore_adapter.coded_weights import PLAIN, layers_of
from megatron.mcore_adapter.run.wrapped_model import unwrap
from megatron.planning.candidates import Candidate
from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.costs.update_bytes import ALL_BY_TORCH
from megatron.planning.layer_costs import GptCosts
from megatron.planning.machine import Cluster
from megatron.planning.skeleton import Cost
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.dry_run import memory_plan, pretending
from megatron.pretrain.memory_estimate import MemoryEstimate, estimate_memory
from megatron.pretrain.model.flops import layers_with_experts
from megatron.pretrain.model.gpt_model import build_chunk

DENSE, EXPERTS, EMBEDDING, OUTPUT = "dense layer", "layer with experts", "embedding", "output"


@dataclass(frozen=True)
class QuickEstimate:
    """The estimated memory and time of a candidate.

    Attributes:
        candidate: the settings.
        num_bytes: of a GPU, in the stage that needs most.
        seconds: of a step.
        host_bytes: of a rank on its host, in the stage that needs most.
        state_bytes: of optimizer state on a GPU, in the stage that needs most memory.
    """

    candidate: Candidate
    num_bytes: float
    seconds: float
    host_bytes: int = 0
    state_bytes: int = 0


def arguments_of(
    args: argparse.Namespace, candidate: Candidate, num_gpus: int
) -> argparse.Namespace:
    """Return the arguments of a candidate, without the rules' check.

    Args:
        args: the completed arguments of the model on one rank.
        candidate: the settings.
        num_gpus: of the run.
    """
    granularity = args.recompute_granularity
    if candidate.recomputes:
        granularity = "full"
    changed = {
        "world_size": num_gpus,
        "tensor_model_parallel_size": candidate.tensor,
        "pipeline_model_parallel_size": candidate.pipeline,
        "context_parallel_size": candidate.context,
        "expert_model_parallel_size": candidate.expert,
        "expert_tensor_parallel_size": 1 if args.num_experts else candidate.tensor,
        "sequence_parallel": candidate.tensor > 1,
        "data_parallel_size": candidate.num_data_ranks(num_gpus),
        "num_distributed_optimizer_instances": candidate.outer,
        "data_parallel_sharding_strategy": ShardingStrategy(candidate.level).name.lower(),
        "recompute_granularity": granularity,
        "micro_batch_size": candidate.micro_batch,
        # Megatron-LM's loop derives them from the sizes above.
        "tensor_parallel_num_weight_shards": None,
        "expert_tensor_parallel_num_weight_shards": None,
    }
    return argparse.Namespace(**vars(args) | changed)


class QuickEstimates:
    """Estimates of the candidates of one model on one machine.

    Args:
        args: the completed arguments of the model on one rank, with ``padded_vocab_size``.
        num_gpus: of the run.
        machine: on which the model is trained.
    """

    def __init__(self, args: argparse.Namespace, num_gpus: int, machine: Cluster):
        self._args = args
        self._num_gpus = num_gpus
        self._machine = machine
        self._has_experts = layers_with_experts(args)
        self._built: dict[tuple[int, int], dict[str, nn.Module]] = {}
        self._memory: dict[tuple[object, ...], dict[str, MemoryEstimate]] = {}

    def of(self, candidate: Candidate) -> QuickEstimate:
        """Return the estimate of a candidate."""
        args = arguments_of(self._args, candidate, self._num_gpus)
        costs = GptCosts(args, self._machine)
        cost_of = {
            DENSE: costs.of_layer(False),
            EXPERTS: costs.of_layer(True) if args.num_experts else Cost(),
            EMBEDDING: Cost(),
            OUTPUT: costs.of_output(),
        }
        memory_of = self._memory_of(candidate, args)
        num_microbatches = args.global_batch_size // (
            args.micro_batch_size * args.data_parallel_size
        )
        memory: list[tuple[float, int]] = []
        seconds, host_bytes = 0.0, 0
        for stage in unlike_stages(candidate.pipeline):
            parts = self._parts_of(candidate, stage)
            under_way = min(candidate.pipeline - stage, num_microbatches)
            num_bytes = _bytes_of(parts, memory_of, cost_of, under_way, candidate)
            memory.append((num_bytes, sum(memory_of[part].optimizer_state for part in parts)))
            away = sum(memory_of[part].host for part in parts)
            host_bytes = max(host_bytes, away)
            of_one = self._microbatch_seconds(parts, memory_of, cost_of, candidate)
            of_step = of_one * (num_microbatches + candidate.pipeline - 1)
            of_step += self._host_seconds(away, num_microbatches, candidate) if away else 0.0
            seconds = max(seconds, of_step)
        return QuickEstimate(candidate, max(memory)[0], seconds, host_bytes, max(memory)[1])

    def _host_seconds(self, host_bytes: int, num_microbatches: int, candidate: Candidate) -> float:
        """Return the seconds of a step's copies to and from the host, and of the update there."""
        of_each = host_bytes / 4  # as many of weights, gradients and two moments
        gathers = 2 * num_microbatches if candidate.level == 3 else 1
        reductions = num_microbatches if candidate.level >= 2 else 1
        copies = self._machine.copy_seconds(of_each * (gathers + reductions))
        return copies + self._machine.host_seconds(of_each / 4 * ALL_BY_TORCH)

    def _parts_of(self, candidate: Candidate, stage: int) -> list[str]:
        """Return the parts of the model in a pipeline stage."""
        first, last = (
            candidate.layers_of_ends or (len(self._has_experts) // candidate.pipeline,) * 2
        )
        is_last = stage == candidate.pipeline - 1
        layers = self._has_experts[-last:] if is_last else self._has_experts[:first]
        parts = [EXPERTS if has_experts else DENSE for has_experts in layers]
        parts += [EMBEDDING] if stage == 0 else []
        return parts + ([OUTPUT] if is_last else [])

    def _microbatch_seconds(
        self,
        parts: list[str],
        memory_of: dict[str, MemoryEstimate],
        cost_of: dict[str, Cost],
        candidate: Candidate,
    ) -> float:
        """Return the seconds of a microbatch in a pipeline stage."""
        num_sharding = candidate.num_data_ranks(self._num_gpus) * candidate.context
        stride = candidate.tensor
        ranks = range(0, num_sharding * stride, stride)
        seconds = 0.0
        for part in parts:
            # Experts are sharded over fewer ranks than this, which is as fast between nodes.
            gathered = memory_of[part].gathered
            gather = self._machine.collective_seconds("all_gather", gathered, ranks) / FITTED.link
            reduced = memory_of[part].local_gradients if candidate.level >= 2 else 0
            reduce = self._machine.collective_seconds("reduce_scatter", reduced, ranks)
            reduce /= FITTED.link
            seconds += _overlapped(cost_of[part].forward, gather)
            seconds += _overlapped(cost_of[part].backward, max(gather, reduce))
        return seconds

    def _memory_of(
        self, candidate: Candidate, args: argparse.Namespace
    ) -> dict[str, MemoryEstimate]:
        """Return the memory of each part, with the shards of a candidate."""
        data_ranks = args.data_parallel_size * candidate.context
        sizes = (candidate.tensor, candidate.pipeline, candidate.expert, data_ranks)
        key = (*sizes, candidate.level, candidate.outer)
        if key not in self._memory:
            self._memory[key] = {
                part: _estimate_unit(module, args)
                for part, module in self._modules(candidate).items()
            }
        return self._memory[key]

    def _modules(self, candidate: Candidate) -> dict[str, nn.Module]:
        """Return the parts of the model as one rank has them, on the meta device."""
        key = (candidate.tensor, candidate.expert)
        if key not in self._built:
            kinds = sorted(set(self._has_experts))
            alone = replace(
                candidate, pipeline=1, context=1, outer=1, recomputes=False, layers_of_ends=None
            )
            args = arguments_of(self._args, alone, candidate.tensor * candidate.expert)
            args.num_layers = len(kinds)
            args.moe_layer_freq = [int(has_experts) for has_experts in kinds]
            args = argparse.Namespace(**vars(args) | PLAIN)
            args.transformer_impl, args.moe_grouped_gemm = "local", False
            args.init_model_with_meta_device = True
            with pretending(args, 0):
                config, rows = transformer_config(args), args.padded_vocab_size
                gpt = unwrap(build_chunk(args, config, rows, torch.device("meta"), None))
            modules = {EMBEDDING: gpt.embedding, OUTPUT: nn.ModuleList([gpt.output_layer])}
            if not any(True for _ in gpt.output_layer.parameters()):  # tied to the embedding
                modules[OUTPUT] = gpt.decoder.final_layernorm
            for has_experts, layer in zip(kinds, layers_of(gpt).values()):
                modules[EXPERTS if has_experts else DENSE] = layer
            self._built[key] = modules
        return self._built[key]


def _overlapped(compute: float, message: float) -> float:
    """Return the seconds of compute beside a collective that slows it."""
    return max(compute + FITTED.contention * min(compute, message), message)


def unlike_stages(num_stages: int) -> list[int]:
    """Return the first pipeline stage, one from the middle, and the last one."""
    return sorted({0, min(1, num_stages - 1), num_stages - 1})


def _estimate_unit(module: nn.Module, args: argparse.Namespace) -> MemoryEstimate:
    """Return the memory of a module that is one unit."""
    plan = replace(memory_plan(args, module), unit_modules=[module])
    return estimate_memory(nn.ModuleList([module]), plan)


def _bytes_of(
    parts: list[str],
    memory_of: dict[str, MemoryEstimate],
    cost_of: dict[str, Cost],
    under_way: int,
    candidate: Candidate,
) -> float:
    """Return the bytes of a pipeline stage whose first microbatches are under way."""
    memory = [memory_of[part] for part in parts]
    lasting = sum(each.weights + each.gradients + each.optimizer_state for each in memory)
    local = sorted(each.local_gradients for each in memory)
    waiting = sum(local[-2:]) if candidate.level >= 2 else sum(local)
    gathered = sum(sorted(each.gathered for each in memory)[-2:])
    waiting += local[-1] // 2  # what autograd leaves of the largest layer, in half precision
    kept = under_way * sum(cost_of[part].kept_bytes for part in parts)
    return (
        lasting + waiting + gathered + kept + max(cost_of[part].recomputed_bytes for part in parts)
    )
