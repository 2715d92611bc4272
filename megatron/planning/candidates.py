# SPDX-License-Identifier: Apache-2.0
"""Candidates of a search: sizes of meshes, ZeRO levels, recomputation and microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron.fsdp import ShardingStrategy

LONGEST_PIPELINE = 16
SHORTEST_PART = 4096
"""Tokens of a sequence that a context rank has at least."""


@dataclass(frozen=True)
class Candidate:
    """The settings of a run that a search chooses.

    Args:
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        context: context-parallel ranks.
        expert: expert-parallel ranks; 1 for a model without experts.
        level: the ZeRO level.
        outer: copies of the shards: data ranks of the outer axis of hybrid sharding.
        recomputes: layers keep only their input for backward.
        micro_batch: sequences of a microbatch.
        layers_of_ends: layers of the first and of the last stage, where stages differ.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    level: int
    outer: int
    recomputes: bool
    micro_batch: int
    layers_of_ends: tuple[int, int] | None = None

    def flags(self, has_experts: bool) -> list[str]:
        """Return the flags of ``pretrain_gpt.py``."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
            "--context-parallel-size": self.context,
            "--expert-model-parallel-size": self.expert,
            "--num-distributed-optimizer-instances": self.outer,
        }
        words = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        if self.tensor > 1:
            words.append("--sequence-parallel")
            words += ["--expert-tensor-parallel-size 1"] if has_experts else []
        if self.layers_of_ends is not None:
            first, last = self.layers_of_ends
            words.append(f"--decoder-first-pipeline-num-layers {first}")
            words.append(f"--decoder-last-pipeline-num-layers {last}")
        name = ShardingStrategy(self.level).name.lower()
        words.append(f"--data-parallel-sharding-strategy {name}")
        words.append("--overlap-grad-reduce --overlap-param-gather")
        if self.recomputes:
            words.append(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            )
        words.append(f"--micro-batch-size {self.micro_batch}")
        return " ".join(words).split()

    def num_data_ranks(self, num_gpus: int) -> int:
        """Return the number of ranks that read different samples."""
        return num_gpus // (self.tensor * self.pipeline * self.context)


@dataclass(frozen=True)
class Choices:
    """Sizes from which a search may choose; empty: everything that is usual.

    Args:
        tensor: numbers of tensor-parallel ranks.
        pipeline: numbers of pipeline stages.
        context: numbers of context-parallel ranks.
        expert: numbers of expert-parallel ranks.
        level: ZeRO levels.
        micro_batch: sequences of a microbatch.
    """

    tensor: Sequence[int] = ()
    pipeline: Sequence[int] = ()
    context: Sequence[int] = ()
    expert: Sequence[int] = ()
    level: Sequence[int] = ()
    micro_batch: Sequence[int] = ()


def candidates(
    args: argparse.Namespace, num_gpus: int, gpus_per_node: int, choices: Choices
) -> Iterator[Candidate]:
    """Yield the candidates whose sizes divide what they must.

    Args:
        args: the completed arguments of the model on one rank.
        num_gpus: of the run.
        gpus_per_node: the most tensor-parallel ranks.
        choices: what may be chosen.
    """
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    longest = max(args.seq_length // SHORTEST_PART, 1)
    of_experts = args.expert_data_parallel_sharding_strategy, args.expert_outer_dp_sharding_strategy
    has_own_strategy = any(of_experts)
    meshes = product(
        choices.tensor or _powers(min(gpus_per_node, heads)),
        choices.pipeline or _powers(min(LONGEST_PIPELINE, args.num_layers)),
        choices.context or _powers(longest),
        choices.expert or _powers(args.num_experts or 1),
    )
    for tensor, pipeline, context, expert in meshes:
        ends = layers_of_ends(args.num_layers, pipeline)
        data_ranks = num_gpus // (tensor * pipeline * context)
        is_whole = (
            num_gpus % (tensor * pipeline * context) == 0
            and num_gpus % (pipeline * expert) == 0
            and heads % tensor == 0
            and (args.num_experts or 1) % expert == 0
            and args.ffn_hidden_size % tensor == 0
            # Experts without ranks of their own are divided like other parameters.
            and (expert > 1 or tensor == 1 or not args.num_experts)
            and (expert > 1 or not has_own_strategy)
            # A weight that two stages share needs values, which a simulation has not.
            and (pipeline == 1 or args.untie_embeddings_and_output_weights)
        )
        if not is_whole or ends == (0, 0) or args.global_batch_size % data_ranks:
            continue
        for micro_batch, recomputes in product(choices.micro_batch or (1, 2, 4), (False, True)):
            if args.global_batch_size % (data_ranks * micro_batch):
                continue
            num_copies = data_ranks * context // gpus_per_node
            for level, outer in _strategies(choices, num_copies):
                if num_gpus % (pipeline * expert * outer) or data_ranks * context % outer:
                    continue
                yield Candidate(
                    *(tensor, pipeline, context, expert, level, outer, recomputes, micro_batch),
                    None if args.num_layers % pipeline == 0 else ends,
                )


def layers_of_ends(num_layers: int, num_stages: int) -> tuple[int, int]:
    """Return the layers of the first and the last stage, if all others have as many as fit best.

    (0, 0) if there is no such division. Example: 61 layers in 8 stages are 7, six times 8, and 6.
    """
    if num_stages == 1:
        return num_layers, num_layers
    middle = -(-num_layers // num_stages)
    left = num_layers - middle * (num_stages - 2)
    return (-(-left // 2), left // 2) if left >= 2 else (0, 0)


def _strategies(choices: Choices, num_copies: int) -> Iterator[tuple[int, int]]:
    """Yield ZeRO levels and numbers of copies of the shards: one, and at level 3 ``num_copies``."""
    for level in choices.level or range(4):
        yield level, 1
        if level == 3 and num_copies > 1:
            yield level, num_copies


def _powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``."""
    return [2**number for number in range(most.bit_length()) if 2**number <= most]
