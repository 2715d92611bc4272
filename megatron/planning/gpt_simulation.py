# SPDX-License-Identifier: Apache-2.0
"""The simulated training step of a command line of ``pretrain_gpt.py``, for one pipeline stage."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.trace.recorder import TraceEntry
from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.mcore_adapter.coded_weights import (
    PLAIN,
    code_bytes,
    coded_weights,
    gathered_part,
)
from megatron.mcore_adapter.run.wrapped_model import unwrap
from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.costs.message_seconds import collective_seconds
from megatron.planning.host_copies import follow_copies
from megatron.planning.layer_costs import GptCosts
from megatron.planning.machine import Cluster
from megatron.planning.optimizer_update import PlannedUpdate, plan_update
from megatron.planning.simulation import Copy, Simulator, StepResult, attach, simulating
from megatron.planning.skeleton import make_skeleton
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.dry_run import pretending
from megatron.pretrain.model.gpt_model import build_chunk, wrap


@dataclass(frozen=True)
class StagePrediction:
    """The predicted step of the first rank of a pipeline stage.

    Attributes:
        stage: number of the pipeline stage.
        step: simulated, of the first ``num_simulated`` microbatches and the last.
        num_microbatches: of the step.
        num_simulated: microbatches that were simulated; those left out repeat one of them.
        microbatch_seconds: of one that is neither the first nor the last.
        update: of the optimizer.
        copies: between the device and the host, of all microbatches.
    """

    stage: int
    step: StepResult
    num_microbatches: int
    num_simulated: int
    microbatch_seconds: float
    update: PlannedUpdate
    copies: list[Copy]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of weights, gradients, optimizer state, flat buffers and activations."""
        return self.step.peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step, without those in which the stage waits for others."""
        repeated = (self.num_microbatches - self.num_simulated) * self.microbatch_seconds
        return self.step.seconds + repeated

    @property
    def copied_bytes(self) -> int:
        """Bytes copied between the device and the host."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def copy_seconds(self) -> float:
        """Seconds of copies, in which compute continues where it needs no result."""
        return sum(copy.seconds for copy in self.copies)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which compute waits for the communication of shards, and for their copies."""
        computed = self.step.compute_seconds - self.update.seconds
        computed *= self.num_microbatches / self.num_simulated
        exposed = self.seconds - computed - self.update.seconds
        # Microbatches that were left out overlap with fewer collectives than those simulated.
        return max(0.0, exposed)


def simulate_stage(
    args: argparse.Namespace,
    machine: Cluster,
    stage: int = 0,
    max_microbatches: int | None = 3,
    costs: GptCosts | None = None,
) -> StagePrediction:
    """Simulate two steps of a pipeline stage's first rank, and return the second.

    Args:
        args: the completed arguments, with ``padded_vocab_size``.
        machine: on which the model is trained.
        stage: the pipeline stage.
        max_microbatches: simulate so many besides those that a pipeline begins first; None: all.
        costs: of the modules; None: those of ``pretrain_gpt.py`` with these arguments.
    """
    costs = costs or GptCosts(args, machine)
    num_stages = args.pipeline_model_parallel_size
    samples = args.micro_batch_size * args.data_parallel_size
    num_microbatches = args.global_batch_size // samples
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    num_simulated = num_microbatches
    if max_microbatches is not None:
        num_simulated = min(num_microbatches, num_ahead + max_microbatches)

    def seconds_of(entry: TraceEntry) -> float:
        return collective_seconds(machine, entry.name, entry.num_bytes, entry.ranks)

    with (
        pretending(args, stage),
        simulating(seconds_of, contention=FITTED.contention) as simulator,
    ):
        model = sharded_skeleton(args, machine, simulator, costs)
        update = plan_update(args, machine, model.module, costs)
        simulator.change_memory(update.state_bytes)
        step = StepResult()
        first_order = one_after_another(1, 0)
        order = one_after_another(num_simulated, num_ahead)
        for of_step in (first_order, order):
            simulator.begin_simulated_step()
            run_step(
                model=model,
                simulator=simulator,
                args=args,
                order=list(of_step),
                is_first_stage=stage == 0,
                update=update,
            )
            step = simulator.end_simulated_step()
    return StagePrediction(
        stage=stage,
        step=step,
        num_microbatches=num_microbatches,
        num_simulated=num_simulated,
        microbatch_seconds=_seconds_of_one(step),
        update=update,
        copies=_all_copies(step, num_microbatches - num_simulated),
    )


def _seconds_of_one(step: StepResult) -> float:
    """Return the seconds of a microbatch, of one in the middle if there are several."""
    ends = step.backward_ends
    if len(ends) == 1:
        return ends[0]
    return ends[1] - ends[0]


def _all_copies(step: StepResult, num_left_out: int) -> list[Copy]:
    """Return the copies of a step, with those of microbatches that were not simulated."""
    if not num_left_out:
        return step.copies
    begin, end, *_ = step.backward_ends
    second = [copy for copy in step.copies if begin < copy.launched <= end]
    return step.copies + num_left_out * second


def sharded_skeleton(
    args: argparse.Namespace,
    machine: Cluster,
    simulator: Simulator,
    costs: GptCosts,
) -> FullyShardedDataParallel:
    """Build the model of a stage on the meta device, shard it, and make it a skeleton.

    Args:
        args: the completed arguments.
        machine: on which the model is trained.
        simulator: the clock and the memory.
        costs: of the modules.
    """
    on_meta = argparse.Namespace(**vars(args) | PLAIN)
    # Parameters of Transformer Engine's layers have the same sizes, but are made on a GPU only.
    on_meta.transformer_impl = "local"
    on_meta.moe_grouped_gemm = False
    config = transformer_config(on_meta)
    on_meta.init_model_with_meta_device = True
    chunk = build_chunk(on_meta, config, args.padded_vocab_size, torch.device("meta"), None)
    coded = coded_weights(args, chunk)
    config.init_model_with_meta_device = False  # the engine has no values to make
    model = wrap(on_meta, config, chunk, device="meta")
    assert isinstance(model, FullyShardedDataParallel)
    engine = model.module
    of_code = code_bytes(args)
    parts: dict[ParamGroup, float] = {}
    for group in engine.groups:
        parts[group] = costs.gathered_part * gathered_part(group, coded, of_code)
    attach(simulator, engine, parts)
    follow_copies(simulator, engine, machine)
    units = [unit.module for unit in engine._units if unit.module is not None]
    make_skeleton(
        root=engine.module,
        units=units,
        simulator=simulator,
        cost_of=costs.of,
        passed=passed_weights(chunk),
    )
    if unwrap(chunk).post_process:
        engine.module.forward = _with_loss(engine.module.forward)
    return model


def _with_loss(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward that ends with an operation: the loss, after the last unit."""
    return lambda *inputs: forward(*inputs).clone()


def passed_weights(chunk: nn.Module) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Return the module whose weight the output layer gets as an argument, if it has none."""
    gpt = unwrap(chunk)
    if not gpt.share_embeddings_and_output_weights:
        return {}
    if not (gpt.pre_process and gpt.post_process):
        return {}
    return {gpt.output_layer: (gpt.embedding.word_embeddings, "weight")}


def one_after_another(num_microbatches: int, num_ahead: int) -> Iterator[bool]:
    """Yield True for a forward and False for a backward, as a pipeline stage runs them.

    Args:
        num_microbatches: of a step.
        num_ahead: forwards that come before the first backward, besides its own.
    """
    for number in range(num_microbatches):
        yield True
        if number >= num_ahead:
            yield False
    for _ in range(min(num_ahead, num_microbatches)):
        yield False


def run_step(
    model: FullyShardedDataParallel,
    simulator: Simulator,
    args: argparse.Namespace,
    order: list[bool],
    is_first_stage: bool,
    update: PlannedUpdate,
) -> None:
    """Run the forwards and backwards of a step, and what follows them.

    Args:
        model: a skeleton.
        simulator: the clock and the memory.
        args: the completed arguments.
        order: see :func:`one_after_another`.
        is_first_stage: its input is tokens, which need no gradient.
        update: of the optimizer.
    """
    model.zero_grad_buffer()
    outputs: deque[torch.Tensor] = deque()
    num_left = order.count(False)
    for is_forward in order:
        if is_forward:
            activation = torch.empty(1, device="meta", requires_grad=not is_first_stage)
            outputs.append(model(activation))
            continue
        num_left -= 1
        context: AbstractContextManager[None] = nullcontext()
        if num_left and args.overlap_grad_reduce:
            # Megatron-Core's schedules mark microbatches only where reductions overlap.
            context = model.no_sync()
        with context:
            outputs.popleft().backward()
        simulator.step.backward_ends.append(simulator.elapsed)
    model.finish_grad_sync()
    simulator.change_memory(update.passing_bytes)
    simulator.spend(update.seconds, "step", "")
    simulator.change_memory(-update.passing_bytes)
    # As Megatron-Core's distributed optimizer ends a step.
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    model.start_param_sync()
