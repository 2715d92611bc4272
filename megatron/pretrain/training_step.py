# SPDX-License-Identifier: Apache-2.0
"""One training step: forward and backward of all microbatches, one optimizer step, its report.

The steps of a run work on its parts, a :class:`TrainingRun`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron.pretrain.captured_iterations import schedule_of
from megatron.pretrain.checkpoints.background_save import BackgroundSaves
from megatron.pretrain.model import router_losses
from megatron.pretrain.model.flops import training_flops
from megatron.pretrain.model.forward_step import ForwardStep, Microbatches
from megatron.pretrain.model.model_statistics import count_zeros, params_norm
from megatron.pretrain.report.report import Report
from megatron.pretrain.report.timing import OPTIMIZER
from megatron.pretrain.run_state import Progress, TrainedParts
from megatron.pretrain.watch.stopping import StopRequest


@dataclass(kw_only=True)
class TrainingRun(TrainedParts):
    """One training run with all of its parts."""

    args: argparse.Namespace
    """The completed arguments, which no part of the run changes."""
    device: torch.device
    report: Report
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    background: BackgroundSaves | None = None
    """With --async-save."""

    @property
    def stops_here(self) -> bool:
        """True if the run ends after its last step; the same on every rank."""
        return (
            self.progress.iteration >= self.args.train_iters
            or self.stop.interrupted
            or self.stop.agreed
            or self.progress.is_multiple_of(self.args.exit_interval)
        )


def train_step(run: TrainingRun, data: Microbatches | list[Microbatches]) -> None:
    """Run forward and backward of every microbatch and one optimizer step, and report it."""
    args, progress, optimizer = run.args, run.progress, run.optimizer
    assert optimizer is not None and run.scheduler is not None  # a run that trains has both
    update_num_microbatches(progress.consumed_train_samples, consistency_check=True)
    batch_size = get_current_global_batch_size()
    router_losses.forget()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = forward_backward(run, data, get_num_microbatches(), forward_only=False)
    if args.empty_unused_memory_level and torch.cuda.is_available():
        torch.cuda.empty_cache()
    # Of fully sharded gradients Megatron-Core's optimizer would count copies too.
    counts_zeros_here = args.log_num_zeros_in_grad and args.use_megatron_fsdp
    num_zeros = count_zeros(run.model) if counts_zeros_here else None
    if run.background is not None:
        run.background.finish_copying()
    with run.report.times.measured(OPTIMIZER):
        updated, grad_norm, optimizer_num_zeros = optimizer.step()
    if args.log_num_zeros_in_grad and num_zeros is None:
        num_zeros = optimizer_num_zeros
    if args.empty_unused_memory_level > 1 and torch.cuda.is_available():
        torch.cuda.empty_cache()

    learning_rate = get_canonical_lr_for_logging(optimizer.param_groups)
    progress.count_step(batch_size, training_flops(args, batch_size))
    if updated:
        run.scheduler.step(increment=batch_size)
    values = {
        "lm loss": reduce_loss(run, losses),
        "learning-rate": learning_rate,
        "batch-size": batch_size,
        "grad-norm": None if grad_norm is None else float(grad_norm),  # a tensor in some releases
        "num-zeros": num_zeros,
        "loss-scale": float(optimizer.get_loss_scale()) if args.fp16 else None,
        "params-norm": params_norm(run.model) if args.log_params_norm else None,
    }
    is_last = run.stops_here
    if run.report.is_due(progress, is_last):
        values |= router_losses.take(args, get_num_microbatches())
    run.report.step(progress, values, skipped=not updated, is_last=is_last)


def forward_backward(
    run: TrainingRun,
    data: Microbatches | list[Microbatches],
    num_microbatches: int,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    """Run the pipeline schedule over the microbatches.

    Returns:
        The dict that :meth:`ForwardStep.loss` returns, for every microbatch; an empty list before
        the last pipeline stage.
    """
    times = run.report.times
    with times.paused() if forward_only else nullcontext():
        return schedule_of(run.args)(
            forward_step_func=ForwardStep(run.args, run.device, run.progress.iteration, times),
            data_iterator=data,
            model=run.model,
            num_microbatches=num_microbatches,
            seq_length=run.args.seq_length,
            micro_batch_size=run.args.micro_batch_size,
            forward_only=forward_only,
        )


def reduce_loss(run: TrainingRun, losses: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss per token over microbatches and ranks.

    The ranks' requests to stop, and what they know of a save in the background, travel in the same
    all-reduce.
    """
    votes = [run.stop.vote]
    if run.background is not None:
        votes += run.background.votes()
    sums = torch.cat([sum_of(run, losses), torch.tensor(votes, device=run.device)])
    dist.all_reduce(sums)
    run.stop.count(sums[2].item())
    if run.background is not None:
        run.background.count(sums[3:].tolist())
    return (sums[0] / sums[1]).item()


def sum_of(run: TrainingRun, losses: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the sum of losses and the number of tokens, ``[2]``.

    Both are zero before the last pipeline stage. All tensor-parallel ranks have the same losses, so
    sums over all ranks make both too large by the same factor.
    """
    return sum((entry["lm loss"] for entry in losses), torch.zeros(2, device=run.device))
