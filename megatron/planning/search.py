# SPDX-License-Identifier: Apache-2.0
"""The search for settings with which a model fits the memory of a machine and trains fastest."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.planning.candidates import Candidate, Choices, candidates, no_mesh
from megatron.planning.costs.message_seconds import stage_message_seconds
from megatron.planning.gpt_simulation import StagePrediction, simulate_stage
from megatron.planning.machine import Cluster
from megatron.planning.quick_estimate import QuickEstimate, QuickEstimates, unlike_stages
from megatron.pretrain.arguments import CommandLineError, parse_arguments
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizers import build_tokenizer, embedding_rows
from megatron.pretrain.megatron_lm_loop import MEGATRON_LM, chosen_loop, loop_arguments
from megatron.pretrain.model.flops import training_flops

CHOSEN = {
    "--tensor-model-parallel-size": "--tensor",
    "--pipeline-model-parallel-size": "--pipeline",
    "--context-parallel-size": "--context",
    "--expert-model-parallel-size": "--expert",
    "--data-parallel-sharding-strategy": "--level",
    "--micro-batch-size": "--micro-batch",
}
"""Flags that the search chooses, and the option of the planner that limits them."""

NOT_SIMULATED = {
    "--num-layers-per-virtual-pipeline-stage": "interleaved stages (but by --beside-ddp)",
    "--pipeline-model-parallel-layout": "layouts of stages",
    "--megatron-fsdp-enable-fine-grained-param-gather": "units inside of layers",
    "--hybrid-layer-pattern": "a HybridModel",
}
"""Flags that are refused, and what they ask for."""

GIB = 2**30
MORE_TRIES = 4
"""Candidates that are simulated at most, for each that is wanted: some turn out not to fit."""


@dataclass(frozen=True)
class Prediction:
    """A simulated candidate.

    Attributes:
        candidate: the settings.
        flags: of ``pretrain_gpt.py``.
        args: the completed arguments.
        machine: on which the model is trained.
        stages: pipeline stages that may differ: the first, one from the middle, and the last.
    """

    candidate: Candidate
    flags: list[str]
    args: argparse.Namespace
    machine: Cluster
    stages: list[StagePrediction]

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes of a rank."""
        return max(stage.peak_bytes for stage in self.stages)

    @cached_property
    def host_bytes(self) -> int:
        """The most bytes of a rank on its host."""
        return max(stage.update.host.num_bytes for stage in self.stages)

    @cached_property
    def microbatch_seconds(self) -> float:
        """Seconds of a microbatch in the slowest stage, with the messages to its neighbours."""
        seconds = max(stage.microbatch_seconds for stage in self.stages)
        return seconds + self.message_seconds

    @cached_property
    def message_seconds(self) -> float:
        """Seconds of the messages between stages for one microbatch."""
        args = self.args
        if args.pipeline_model_parallel_size == 1:
            return 0.0
        tokens = args.micro_batch_size * args.seq_length
        tokens //= args.context_parallel_size
        if args.sequence_parallel:
            tokens //= args.tensor_model_parallel_size
        of_element = 4
        if args.bf16 or args.fp16:
            of_element = 2
        num_bytes = tokens * args.hidden_size * of_element
        distance = args.world_size // args.pipeline_model_parallel_size
        return stage_message_seconds(self.machine, num_bytes, distance)

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        slowest = max(self.stages, key=lambda stage: stage.seconds)
        messages = slowest.num_microbatches * self.message_seconds
        return slowest.seconds + messages + self.bubble_seconds

    @cached_property
    def bubble_seconds(self) -> float:
        """Seconds in which a stage waits for the others, at the begin and the end of a step."""
        return (self.args.pipeline_model_parallel_size - 1) * self.microbatch_seconds

    @cached_property
    def exposed_seconds(self) -> float:
        """Seconds in which compute waits for the communication of shards, and for their copies."""
        return max(stage.exposed_seconds for stage in self.stages)

    @cached_property
    def utilization(self) -> float:
        """Model FLOPs utilization: the part of the machine's FLOP/s that the model's need."""
        args = self.args
        flops = training_flops(args, args.global_batch_size)
        per_second = flops / self.seconds
        of_gpu = per_second / args.world_size
        return of_gpu / self.machine.flops


def model_arguments(
    words: Sequence[str],
    problems: list[str],
    expert_imbalance: float = 1.0,
) -> argparse.Namespace | None:
    """Return the completed arguments of a model on one rank, as :func:`arguments_on` does.

    Args:
        words: flags of ``pretrain_gpt.py``, without those that a search chooses.
        problems: gets everything that is wrong with them; then None is returned.
        expert_imbalance: tokens of the busiest expert rank, in those of the mean.
    """
    given = {word.split("=")[0] for word in words}
    for flag, option in CHOSEN.items():
        if flag in given:
            problems.append(f"{flag} is chosen by the search: limit it by {option}")
    for flag, subject in NOT_SIMULATED.items():
        if flag in given:
            problems.append(f"{flag}: {subject} cannot be planned; leave it out")
    words = [*words, "--micro-batch-size", "1"]
    try:
        args = arguments_on(words, 1, expert_imbalance)
    except CommandLineError as error:
        problems += error.problems
        return None
    return None if problems else args


def arguments_on(
    words: Sequence[str],
    num_gpus: int,
    expert_imbalance: float = 1.0,
) -> argparse.Namespace:
    """Return completed and checked arguments, with ``padded_vocab_size`` and the imbalance.

    Args:
        words: flags of ``pretrain_gpt.py``.
        num_gpus: of the run.
        expert_imbalance: tokens of the busiest expert rank, in those of the mean.

    Raises:
        CommandLineError: lists everything that is wrong with them.
    """
    words = [*words, "--use-megatron-fsdp"]
    if chosen_loop(words) == MEGATRON_LM:
        args = loop_arguments(words, num_gpus)
    else:
        # Nothing of it is imported to plan, and flags of FP8 need it to be there.
        has_engine = importlib.util.find_spec("transformer_engine") is not None
        for word in words:
            if word.startswith(("--fp8", "--fp4")):
                has_engine = True
        args, _ = parse_arguments(
            words,
            world_size=num_gpus,
            cuda=torch.cuda.is_available(),
            transformer_engine=has_engine,
            emerging_optimizers=True,
        )
    try:
        rows = embedding_rows(args, build_tokenizer(TokenizerChoice.of(args)))
    except (ValueError, OSError) as error:
        raise CommandLineError([str(error)]) from None
    added = {"padded_vocab_size": rows, "expert_imbalance": expert_imbalance}
    return argparse.Namespace(**vars(args) | added)


def estimates_of(
    args: argparse.Namespace,
    num_gpus: int,
    machine: Cluster,
    choices: Choices,
) -> list[QuickEstimate]:
    """Return the quick estimates of all candidates.

    Args:
        args: the completed arguments of the model on one rank.
        num_gpus: of the run.
        machine: on which the model is trained.
        choices: what may be chosen.
    """
    estimates = QuickEstimates(args, num_gpus, machine)
    found: list[QuickEstimate] = []
    for candidate in candidates(args, num_gpus, machine.gpus_per_node, choices):
        found.append(estimates.of(candidate))
    return found


def search(
    words: Sequence[str],
    args: argparse.Namespace,
    num_gpus: int,
    machine: Cluster,
    memory_limit: float,
    choices: Choices,
    num_wanted: int,
    log: Callable[[str], object],
) -> list[Prediction]:
    """Return the fastest settings that fit, the fastest first.

    Args:
        words: flags of ``pretrain_gpt.py`` for the model.
        args: the completed arguments of the model on one rank.
        num_gpus: of the run.
        machine: on which the model is trained.
        memory_limit: bytes of a GPU.
        choices: what may be chosen.
        num_wanted: number of settings.
        log: is called with each line about the search.

    Raises:
        ValueError: if the sizes of the model, the batch and the mesh go together in no way.
    """
    every = estimates_of(args, num_gpus, machine, choices)
    if not every:
        raise ValueError(no_mesh(args, num_gpus, machine.gpus_per_node, choices))
    host_share = machine.host_share(num_gpus)
    fitting: list[QuickEstimate] = []
    for estimate in every:
        if estimate.num_bytes <= memory_limit and estimate.host_bytes <= host_share:
            fitting.append(estimate)
    log(f"{len(every):,} settings, of which {len(fitting):,} are estimated to fit")
    if not fitting:
        least = min(estimate.num_bytes for estimate in every)
        log(f"the smallest one is estimated to need {least / GIB:.3g} GiB of each GPU")
    fitting.sort(key=lambda estimate: estimate.seconds)
    return _simulated(
        words=words,
        estimates=fitting,
        model=args,
        num_gpus=num_gpus,
        machine=machine,
        memory_limit=memory_limit,
        num_wanted=num_wanted,
    )


def _simulated(
    words: Sequence[str],
    estimates: Iterable[QuickEstimate],
    model: argparse.Namespace,
    num_gpus: int,
    machine: Cluster,
    memory_limit: float,
    num_wanted: int,
) -> list[Prediction]:
    """Simulate candidates until enough of them fit."""
    fitting: list[Prediction] = []
    num_tries = 0
    too_small = 1.0  # the largest factor by which an estimate was
    host_share = machine.host_share(num_gpus)
    for estimate in estimates:
        if len(fitting) == num_wanted or num_tries == MORE_TRIES * num_wanted:
            break
        if too_small * estimate.num_bytes > memory_limit:
            continue
        has_experts = bool(model.num_experts)
        flags = [*words, *estimate.candidate.flags(has_experts)]
        try:
            args = arguments_on(flags, num_gpus, model.expert_imbalance)
        except CommandLineError:  # the program would refuse them
            continue
        num_tries += 1
        prediction = predict(estimate.candidate, flags, args, machine)
        factor = prediction.peak_bytes / estimate.num_bytes
        too_small = max(too_small, factor)
        fits_host = prediction.host_bytes <= host_share
        if prediction.peak_bytes <= memory_limit and fits_host:
            fitting.append(prediction)
    return sorted(fitting, key=lambda prediction: prediction.seconds)


def predict(
    candidate: Candidate,
    flags: list[str],
    args: argparse.Namespace,
    machine: Cluster,
) -> Prediction:
    """Simulate the first pipeline stage of a candidate, one from the middle, and the last one.

    Args:
        candidate: the settings.
        flags: of ``pretrain_gpt.py``.
        args: the completed arguments.
        machine: on which the model is trained.
    """
    stages: list[StagePrediction] = []
    for stage in unlike_stages(args.pipeline_model_parallel_size):
        stages.append(simulate_stage(args, machine, stage))
    return Prediction(
        candidate=candidate,
        flags=flags,
        args=args,
        machine=machine,
        stages=stages,
    )
