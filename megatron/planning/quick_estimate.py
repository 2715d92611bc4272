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
from megatron.planning.costs.message_seconds import collective_seconds, overlapped_seconds
from megatron.planning.costs.update_bytes import ALL_BY_TORCH
from megatron.planning.layer_costs import GptCosts
from megatron.planning.machine import Cluster
from megatron.planning.skeleton import Cost
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.dry_run import memory_plan, pretending
from megatron.pretrain.memory_estimate import MemoryEstimate, estimate_memory
from megatron.pretrain.model.flops import layers_with_experts
from megatron.pretrain.model.gpt_model import build_chunk

DENSE = "dense layer"
EXPERTS = "layer with experts"
EMBEDDING = "embedding"
OUTPUT = "output"


@dataclass(frozen=True)
class PartCost:
    """A part of the model in a pipeline stage.

    Args:
        memory: of a rank.
        cost: of a microbatch.
    """

    memory: MemoryEstimate
    cost: Cost


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
    args: argparse.Namespace,
    candidate: Candidate,
    num_gpus: int,
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
    expert_tensor = candidate.tensor
    if args.num_experts:
        expert_tensor = 1
    changed = {
        "world_size": num_gpus,
        "tensor_model_parallel_size": candidate.tensor,
        "pipeline_model_parallel_size": candidate.pipeline,
        "context_parallel_size": candidate.context,
        "expert_model_parallel_size": candidate.expert,
        "expert_tensor_parallel_size": expert_tensor,
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

    def __init__(
        self,
        args: argparse.Namespace,
        num_gpus: int,
        machine: Cluster,
    ):
        self._args = args
        self._num_gpus = num_gpus
        self._machine = machine
        self._has_experts = layers_with_experts(args)
        self._built: dict[tuple[int, int], dict[str, nn.Module]] = {}
        self._memory: dict[tuple[object, ...], dict[str, MemoryEstimate]] = {}

    def of(self, candidate: Candidate) -> QuickEstimate:
        """Return the estimate of a candidate."""
        args = arguments_of(self._args, candidate, self._num_gpus)
        costs = self._costs_of(args)
        memory = self._memory_of(candidate, args)
        samples = args.micro_batch_size * args.data_parallel_size
        num_microbatches = args.global_batch_size // samples
        seconds = 0.0
        num_bytes = 0.0
        host_bytes = 0
        state_bytes = 0
        for stage in unlike_stages(candidate.pipeline):
            parts: list[PartCost] = []
            for name in self._parts_of(candidate, stage):
                parts.append(PartCost(memory[name], costs[name]))
            under_way = min(candidate.pipeline - stage, num_microbatches)
            of_stage = _bytes_of(parts, under_way, candidate)
            if of_stage > num_bytes:
                num_bytes = of_stage
                state_bytes = sum(part.memory.optimizer_state for part in parts)
            away = sum(part.memory.host for part in parts)
            host_bytes = max(host_bytes, away)
            of_one = self._microbatch_seconds(parts, candidate)
            of_step = of_one * (num_microbatches + candidate.pipeline - 1)
            if away:
                of_step += self._host_seconds(away, num_microbatches, candidate)
            seconds = max(seconds, of_step)
        return QuickEstimate(
            candidate=candidate,
            num_bytes=num_bytes,
            seconds=seconds,
            host_bytes=host_bytes,
            state_bytes=state_bytes,
        )

    def _costs_of(self, args: argparse.Namespace) -> dict[str, Cost]:
        """Return the cost of each part of the model."""
        costs = GptCosts(args, self._machine)
        found = {
            DENSE: costs.of_layer(False),
            EMBEDDING: Cost(),
            OUTPUT: costs.of_output(),
        }
        if args.num_experts:
            found[EXPERTS] = costs.of_layer(True)
        return found

    def _host_seconds(
        self,
        host_bytes: int,
        num_microbatches: int,
        candidate: Candidate,
    ) -> float:
        """Return the seconds of a step's copies to and from the host, and of the update there."""
        of_each = host_bytes / 4  # as many of weights, gradients and two moments
        num_copies = 1
        if candidate.level == 3:
            num_copies = 2 * num_microbatches
        if candidate.level >= 2:
            num_copies += num_microbatches
        else:
            num_copies += 1
        copies = self._machine.copy_seconds(of_each * num_copies)
        num_elements = of_each / 4
        return copies + self._machine.host_seconds(num_elements * ALL_BY_TORCH)

    def _parts_of(self, candidate: Candidate, stage: int) -> list[str]:
        """Return the parts of the model in a pipeline stage."""
        per_stage = len(self._has_experts) // candidate.pipeline
        first, last = candidate.layers_of_ends or (per_stage, per_stage)
        is_last = stage == candidate.pipeline - 1
        layers = self._has_experts[:first]
        if is_last:
            layers = self._has_experts[-last:]
        parts: list[str] = []
        for has_experts in layers:
            parts.append(EXPERTS if has_experts else DENSE)
        if stage == 0:
            parts.append(EMBEDDING)
        if is_last:
            parts.append(OUTPUT)
        return parts

    def _microbatch_seconds(self, parts: list[PartCost], candidate: Candidate) -> float:
        """Return the seconds of a microbatch in a pipeline stage."""
        num_sharding = candidate.num_data_ranks(self._num_gpus) * candidate.context
        # Experts are sharded over fewer ranks than this, which is as fast between nodes.
        ranks = range(0, num_sharding * candidate.tensor, candidate.tensor)
        seconds = 0.0
        for part in parts:
            gather = collective_seconds(self._machine, "all_gather", part.memory.gathered, ranks)
            reduce = 0.0
            if candidate.level >= 2:
                local = part.memory.local_gradients
                reduce = collective_seconds(self._machine, "reduce_scatter", local, ranks)
            seconds += overlapped_seconds(part.cost.forward, gather)
            seconds += overlapped_seconds(part.cost.backward, max(gather, reduce))
        return seconds

    def _memory_of(
        self, candidate: Candidate, args: argparse.Namespace
    ) -> dict[str, MemoryEstimate]:
        """Return the memory of each part, with the shards of a candidate."""
        key = (
            candidate.tensor,
            candidate.pipeline,
            candidate.expert,
            args.data_parallel_size * candidate.context,
            candidate.level,
            candidate.outer,
        )
        if key not in self._memory:
            found: dict[str, MemoryEstimate] = {}
            for part, module in self._modules(candidate).items():
                found[part] = _estimate_unit(module, args)
            self._memory[key] = found
        return self._memory[key]

    def _modules(self, candidate: Candidate) -> dict[str, nn.Module]:
        """Return the parts of the model as one rank has them, on the meta device."""
        key = (candidate.tensor, candidate.expert)
        if key not in self._built:
            self._built[key] = self._build(candidate)
        return self._built[key]

    def _build(self, candidate: Candidate) -> dict[str, nn.Module]:
        """Build one layer of each kind, and the ends of the model."""
        alone = replace(
            candidate,
            pipeline=1,
            context=1,
            outer=1,
            recomputes=False,
            layers_of_ends=None,
        )
        kinds = sorted(set(self._has_experts))
        args = arguments_of(self._args, alone, candidate.tensor * candidate.expert)
        args.num_layers = len(kinds)
        args.moe_layer_freq = [int(has_experts) for has_experts in kinds]
        args = argparse.Namespace(**vars(args) | PLAIN)
        args.transformer_impl = "local"
        args.moe_grouped_gemm = False
        args.init_model_with_meta_device = True
        with pretending(args, 0):
            config = transformer_config(args)
            rows = args.padded_vocab_size
            gpt = unwrap(build_chunk(args, config, rows, torch.device("meta"), None))
        modules = {EMBEDDING: gpt.embedding, OUTPUT: nn.ModuleList([gpt.output_layer])}
        if next(gpt.output_layer.parameters(), None) is None:  # tied to the embedding
            modules[OUTPUT] = gpt.decoder.final_layernorm
        for has_experts, layer in zip(kinds, layers_of(gpt).values()):
            modules[EXPERTS if has_experts else DENSE] = layer
        return modules


def unlike_stages(num_stages: int) -> list[int]:
    """Return the first pipeline stage, one from the middle, and the last one."""
    return sorted({0, min(1, num_stages - 1), num_stages - 1})


def _estimate_unit(module: nn.Module, args: argparse.Namespace) -> MemoryEstimate:
    """Return the memory of a module that is one unit."""
    plan = replace(memory_plan(args, module), unit_modules=[module])
    return estimate_memory(nn.ModuleList([module]), plan)


def _bytes_of(
    parts: list[PartCost],
    under_way: int,
    candidate: Candidate,
) -> float:
    """Return the bytes of a pipeline stage whose first microbatches are under way."""
    lasting = 0
    kept = 0
    recomputed = 0
    local: list[int] = []
    gathered: list[int] = []
    for part in parts:
        lasting += part.memory.weights
        lasting += part.memory.gradients
        lasting += part.memory.optimizer_state
        kept += part.cost.kept_bytes
        recomputed = max(recomputed, part.cost.recomputed_bytes)
        local.append(part.memory.local_gradients)
        gathered.append(part.memory.gathered)
    local.sort()
    gathered.sort()
    waiting = sum(local)
    if candidate.level >= 2:
        waiting = sum(local[-2:])
    waiting += local[-1] // 2  # what autograd leaves of the largest layer, in half precision
    passing = waiting + sum(gathered[-2:])
    return lasting + passing + under_way * kept + recomputed
