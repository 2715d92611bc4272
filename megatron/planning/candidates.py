# SPDX-License-Identifier: Apache-2.0
"""Candidates of a search: sizes of meshes, ZeRO levels, recomputation and microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron.fsdp import ShardingStrategy
from megatron.planning.costs.model_sizes import ModelSizes, sizes_of_arguments

LONGEST_PIPELINE = 16
MICRO_BATCHES = (1, 2, 4)
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
    args: argparse.Namespace,
    num_gpus: int,
    gpus_per_node: int,
    choices: Choices,
) -> Iterator[Candidate]:
    """Yield the candidates whose sizes divide what they must.

    Args:
        args: the completed arguments of the model on one rank.
        num_gpus: of the run.
        gpus_per_node: the most tensor-parallel ranks.
        choices: what may be chosen.
    """
    sizes = sizes_of_arguments(args)
    ways_of_recomputation: tuple[bool, ...] = (False, True)
    if args.recompute_granularity == "full":
        ways_of_recomputation = (True,)
    for tensor, pipeline, context, expert in meshes(sizes, num_gpus, gpus_per_node, choices):
        if not _is_runnable(args, sizes, pipeline, expert):
            continue
        data_ranks = num_gpus // (tensor * pipeline * context)
        ends = None
        if args.num_layers % pipeline:
            ends = layers_of_ends(args.num_layers, pipeline)
        num_copies = data_ranks * context // gpus_per_node
        for micro_batch in choices.micro_batch or MICRO_BATCHES:
            if args.global_batch_size % (data_ranks * micro_batch):
                continue
            for recomputes in ways_of_recomputation:
                for level, outer in _strategies(choices, num_copies):
                    if num_gpus % (pipeline * expert * outer) or data_ranks * context % outer:
                        continue
                    yield Candidate(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        level=level,
                        outer=outer,
                        recomputes=recomputes,
                        micro_batch=micro_batch,
                        layers_of_ends=ends,
                    )


def meshes(
    sizes: ModelSizes,
    num_gpus: int,
    most_tensor: int,
    choices: Choices,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield tensor-parallel ranks, stages, context- and expert-parallel ranks that divide a model.

    Args:
        sizes: of the model.
        num_gpus: of the run.
        most_tensor: the most tensor-parallel ranks.
        choices: what may be chosen.
    """
    for tensor, pipeline, context, expert in _divisions(sizes, most_tensor, choices):
        if num_gpus % (tensor * pipeline * context) == 0 and num_gpus % (pipeline * expert) == 0:
            yield tensor, pipeline, context, expert


def _divisions(
    sizes: ModelSizes,
    most_tensor: int,
    choices: Choices,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what :func:`meshes` does, for any number of GPUs."""
    num_experts = 1
    if sizes.experts is not None:
        num_experts = sizes.experts.number
    longest = max(sizes.sequence // SHORTEST_PART, 1)
    for tensor, pipeline, context, expert in product(
        choices.tensor or powers(min(most_tensor, sizes.key_heads)),
        choices.pipeline or powers(min(LONGEST_PIPELINE, sizes.layers)),
        choices.context or powers(longest),
        choices.expert or powers(num_experts),
    ):
        if sizes.key_heads % tensor or sizes.ffn % tensor or num_experts % expert:
            continue
        if context > 1 and sizes.sequence % (2 * context):
            continue
        # Experts without ranks of their own are divided like other parameters.
        if num_experts > 1 and tensor > 1 and expert == 1:
            continue
        if layers_of_ends(sizes.layers, pipeline) == (0, 0):
            continue
        yield tensor, pipeline, context, expert


def no_mesh(
    args: argparse.Namespace,
    num_gpus: int,
    gpus_per_node: int,
    choices: Choices,
) -> str:
    """Return the message that there is no candidate, with what to change.

    Args:
        args: the completed arguments of the model on one rank.
        num_gpus: of the run.
        gpus_per_node: the most tensor-parallel ranks.
        choices: what may be chosen.
    """
    batch = args.global_batch_size
    ways: list[str] = []
    numbers = _numbers_of_gpus(args, gpus_per_node, choices)
    fewer = [number for number in numbers if number < num_gpus]
    more = [number for number in numbers if num_gpus < number <= 2 * num_gpus]
    if fewer:
        ways.append(f"--gpus {max(fewer)}")
    if more:
        ways.append(f"--gpus {min(more)}")
    lower = batch // num_gpus * num_gpus
    for of_batch in (lower, lower + num_gpus):
        changed = argparse.Namespace(**vars(args) | {"global_batch_size": of_batch})
        found = candidates(changed, num_gpus, gpus_per_node, choices)
        if of_batch and next(found, None) is not None:
            ways.append(f"--global-batch-size {of_batch}")
    if not ways:
        ways.append("fewer limits, or a batch that is a multiple of the data ranks")
    return (
        f"no mesh of {num_gpus} GPUs divides the model and a --global-batch-size of {batch}:"
        f" give {' or '.join(ways)}"
    )


def _numbers_of_gpus(
    args: argparse.Namespace,
    gpus_per_node: int,
    choices: Choices,
) -> set[int]:
    """Return the numbers of GPUs for which there are candidates.

    They are found from the divisors of the batch: trying every number takes seconds for thousands.

    Args:
        args: the completed arguments of the model on one rank.
        gpus_per_node: the most tensor-parallel ranks.
        choices: what may be chosen.
    """
    batch = args.global_batch_size
    numbers_of_data_ranks: set[int] = set()
    for micro_batch in choices.micro_batch or MICRO_BATCHES:
        for number in range(1, batch // micro_batch + 1):
            if batch % (number * micro_batch) == 0:
                numbers_of_data_ranks.add(number)
    sizes = sizes_of_arguments(args)
    found: set[int] = set()
    for tensor, pipeline, context, expert in _divisions(sizes, gpus_per_node, choices):
        if not _is_runnable(args, sizes, pipeline, expert):
            continue
        for data_ranks in numbers_of_data_ranks:
            num_gpus = tensor * pipeline * context * data_ranks
            if num_gpus % (pipeline * expert) == 0:
                found.add(num_gpus)
    return found


def _is_runnable(
    args: argparse.Namespace,
    sizes: ModelSizes,
    pipeline: int,
    expert: int,
) -> bool:
    """Return True if the model can be planned with so many stages and expert-parallel ranks.

    Args:
        args: the completed arguments of the model on one rank.
        sizes: of the model.
        pipeline: pipeline stages.
        expert: expert-parallel ranks.
    """
    of_experts = args.expert_data_parallel_sharding_strategy, args.expert_outer_dp_sharding_strategy
    if expert == 1 and any(of_experts):
        return False
    # A weight that two stages share needs values, which a simulation has not.
    return pipeline == 1 or not sizes.is_tied


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


def powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``."""
    return [2**number for number in range(most.bit_length()) if 2**number <= most]
