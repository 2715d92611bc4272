# SPDX-License-Identifier: Apache-2.0
"""The training loop of pretrain_gpt.py, from top to bottom: build, load, train, evaluate.

`pretrain` builds the parts of a run and loads its checkpoint, `train` is the loop, `evaluate` one
evaluation. One iteration is `train_step`: forward and backward of all microbatches, one step of the
optimizer, its report. The settings of a run never change: they are read-only in `TrainingRun.args`.
What changes is in `TrainingRun.progress`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config

from megatron.fsdp import trace
from megatron.mcore_adapter.captured_iterations import captures_iterations
from megatron.mcore_adapter.checkpoints import checkpointing, save_directory
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from megatron.mcore_adapter.checkpoints.checkpoint_source import non_persistent_root
from megatron.mcore_adapter.run.environment import log
from megatron.mcore_adapter.run.run_state import Progress, TrainedParts
from megatron.mcore_adapter.watch import position
from megatron.pretrain.arguments.check import FrozenArguments
from megatron.pretrain.captured_iterations import schedule_of
from megatron.pretrain.data.gpt_datasets import BuildDatasets, build_datasets, find_data
from megatron.pretrain.data.samplers import batches, one_or_list
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizers import build_tokenizer, embedding_rows
from megatron.pretrain.model import router_losses
from megatron.pretrain.model.flops import training_flops
from megatron.pretrain.model.forward_step import ForwardStep, Microbatches
from megatron.pretrain.model.gpt_model import build_model
from megatron.pretrain.model.gpt_optimizer import build_optimizer
from megatron.pretrain.model.model_statistics import count_zeros, number_of_parameters, params_norm
from megatron.pretrain.report.profiling import profile_directory, profiling
from megatron.pretrain.report.quantities import count
from megatron.pretrain.report.report import Report
from megatron.pretrain.report.timing import LOAD, OPTIMIZER, SAVE
from megatron.pretrain.stopping import StopRequest


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
    """Saves in the background, with --async-save."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each data-parallel rank in a global batch."""
        samples_of_all_ranks = self.args.micro_batch_size * self.args.data_parallel_size
        return int(self.args.global_batch_size // samples_of_all_ranks)

    @property
    def stops_here(self) -> bool:
        """True if the run ends after its last step; the same on every rank."""
        return (
            self.progress.iteration >= self.args.train_iters
            or self.stop.interrupted
            or self.stop.agreed
            or self.progress.is_multiple_of(self.args.exit_interval)
        )


def pretrain(
    args: argparse.Namespace,
    device: torch.device,
    follow: Callable[[Callable[[], int]], None] = lambda iteration: None,
    build: BuildDatasets = build_datasets,
) -> Progress:
    """Build everything, load, train, evaluate and save; return the progress of the run.

    Args:
        args: the completed arguments.
        device: device of this rank.
        follow: is called once with a function that returns the number of finished iterations.
        build: makes the datasets of the files that the arguments name; another function makes
            other samples of them.

    Raises:
        ValueError, RunError, OSError: with a message for the user, the same on every rank where the
            cause is.
    """
    with save_directory.reserved(args, log):
        if args.profile:
            trace.check_directory(profile_directory(args), args.profile_ranks)
        tokenizer = build_tokenizer(TokenizerChoice.of(args))
        rows = embedding_rows(args, tokenizer)
        args = FrozenArguments(args, padded_vocab_size=rows)
        with position.during(position.READING):
            source = find_data(args, tokenizer)
        model = build_model(args, args.padded_vocab_size, device)
        optimizer = None
        scheduler = None
        if not args.skip_train:
            optimizer, scheduler = build_optimizer(args, model)
        run = TrainingRun(
            model, optimizer, scheduler, args=args, device=device, report=Report(args)
        )
        run.stop = StopRequest(args.exit_duration_in_mins)
        run.report.log(
            f"{count(number_of_parameters(model))} parameters on {args.world_size} ranks"
        )
        if source is not None:
            for line in source.lines:
                run.report.log(line)

        load_and_train(run, lambda: build(args, tokenizer, source), follow)
        run.report.end()
        return run.progress


def load_and_train(
    run: TrainingRun,
    datasets: Callable[[], tuple[Any, Any, Any]],
    follow: Callable[[Callable[[], int]], None],
) -> None:
    """Load the checkpoint of a run and continue it: train, and evaluate at the end.

    Args:
        run: with a model of random weights.
        datasets: builds those for training, validation and test, None for one that is not needed.
        follow: as in :func:`pretrain`.
    """
    args = run.args
    report = run.report
    with report.times.measured(LOAD):
        run.progress = checkpointing.load(args, run, report.log)
    report.times_of(LOAD, run.progress)
    with position.during(position.READING):
        train_data, valid_data, test_data = datasets()
    connect(run)
    follow(lambda: run.progress.iteration)

    if not args.skip_train and run.progress.iteration < args.train_iters:
        consumed = run.progress.consumed_train_samples
        with batches(args, train_data, consumed) as data, background_saves(run):
            train(run, data, valid_data)
    # A run that was asked to stop has no time for the last evaluations.
    if args.skip_train or run.progress.iteration >= args.train_iters:
        if args.skip_train and valid_data is not None:
            evaluate_at_the_end(run, valid_data, "validation")
        if test_data is not None:
            evaluate_at_the_end(run, test_data, "test")


def connect(run: TrainingRun) -> None:
    """Set the functions by which the schedule finishes gradients, scales and synchronizes."""
    args = run.args
    config = get_model_config(run.model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    if run.optimizer is not None:
        config.grad_scale_func = run.optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_list([chunk.no_sync for chunk in run.model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_list([chunk.start_grad_sync for chunk in run.model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_list([chunk.start_param_sync for chunk in run.model])
    run.report.times.connect(run.model, run.optimizer)
    if captures_iterations(args):  # Megatron-Core works on another stream while it builds layers
        torch.cuda.synchronize()
    if args.manual_gc:
        gc.disable()
        gc.collect()


def register_memory_slots(run: TrainingRun) -> None:
    """Register the memory slots that the first step has shown to be needed, if nobody has yet."""
    if run.args.fsdp_manual_registration:
        for chunk in run.model:
            chunk.param_and_grad_buffer.manual_buffer_registration()


def train(
    run: TrainingRun,
    data: Microbatches | list[Microbatches],
    valid_data: Any | None,
) -> None:
    """Train from where the run is to ``args.train_iters``, or until it is asked to stop.

    Args:
        run: with a loaded checkpoint, if there is one.
        data: the next samples for training; a list with one for each virtual pipeline stage.
        valid_data: the validation set; None if nothing is evaluated.

    Raises:
        KeyboardInterrupt: on every rank, if one was sent SIGINT.
    """
    args = run.args
    progress = run.progress
    report = run.report
    if args.save or args.exit_signal_handler:
        run.stop.watch_sigterm()
    run.stop.watch_sigint()
    for chunk in run.model:
        chunk.train()
    report.begin(progress)
    saved_at = progress.iteration
    report.times.resume_interval()
    with profiling(args, report.log) as step_is_over:
        while progress.iteration < args.train_iters:
            train_step(run, data)
            step_is_over()
            register_memory_slots(run)

            # Once in a while: evaluate, save, collect garbage, stop. None of it is training time.
            report.stop_clock()
            if run.background is not None:
                with position.during(position.SAVING):
                    run.background.step_is_over(run, progress)
            if run.stop.interrupted:
                break
            if valid_data is not None and progress.is_multiple_of(args.eval_interval):
                evaluate_in_training(run, valid_data)
            if args.save and progress.is_multiple_of(args.save_interval):
                save(run, args.save)
                saved_at = progress.iteration
            elif progress.is_multiple_of(args.non_persistent_save_interval):
                save(run, non_persistent_root(args, args.save))
            if args.manual_gc and progress.is_multiple_of(args.manual_gc_interval):
                gc.collect()
            if should_stop(run):
                break
            report.restart_clock()

    if args.save and saved_at != progress.iteration and not run.stop.interrupted:
        save(run, args.save, at_the_end=True)
    if run.background is None and not run.stop.interrupted:  # no checkpoint is being written
        report.keep()
    run.stop.forget_signals()
    if run.stop.interrupted:
        report.end()
        raise KeyboardInterrupt


def train_step(run: TrainingRun, data: Microbatches | list[Microbatches]) -> None:
    """Run forward and backward of every microbatch and one optimizer step, and report it."""
    args = run.args
    progress = run.progress
    optimizer = run.optimizer
    assert optimizer is not None and run.scheduler is not None  # a run that trains has both
    batch_size = args.global_batch_size
    get_rerun_state_machine().current_iteration = progress.iteration  # in messages of DDP
    router_losses.forget()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = forward_backward(run, data, forward_only=False)
    if args.empty_unused_memory_level and torch.cuda.is_available():
        torch.cuda.empty_cache()
    num_zeros = None
    if args.log_num_zeros_in_grad and args.use_megatron_fsdp:
        # Of fully sharded gradients Megatron-Core's optimizer would count copies too.
        num_zeros = count_zeros(run.model)
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
    loss = reduce_loss(run, losses)
    if grad_norm is not None:
        grad_norm = float(grad_norm)  # a tensor in some releases
    values = {
        "lm loss": loss,
        "learning-rate": learning_rate,
        "batch-size": batch_size,
        "grad-norm": grad_norm,
        "num-zeros": num_zeros,
        "loss-scale": float(optimizer.get_loss_scale()) if args.fp16 else None,
        "params-norm": params_norm(run.model) if args.log_params_norm else None,
    }
    is_last = run.stops_here
    if run.report.is_due(progress, is_last):
        values |= router_losses.take(args, run.num_microbatches)
    run.report.step(progress, values, skipped=not updated, is_last=is_last)


def forward_backward(
    run: TrainingRun,
    data: Microbatches | list[Microbatches],
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    """Run the pipeline schedule over the microbatches of a global batch.

    Args:
        run: the run.
        data: the next samples; a list with one for each virtual pipeline stage.
        forward_only: evaluate, and measure no time.

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
            num_microbatches=run.num_microbatches,
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
    total = torch.zeros(2, device=run.device)
    for entry in losses:
        total = total + entry["lm loss"]
    return total


@contextmanager
def background_saves(run: TrainingRun) -> Iterator[None]:
    """Save in the background inside the context, with --async-save, and wait for it at the end."""
    if not run.args.async_save:
        yield
        return
    saves = BackgroundSaves(run.args, run.device, run.report.log, run.report.saved)
    with closing(saves) as run.background:
        try:
            yield
        except KeyboardInterrupt:  # of all ranks: what is being written is finished
            with position.during(position.SAVING):
                run.background.wait()
            raise
        with position.during(position.SAVING):
            run.background.wait()
            run.background.end()


@torch.no_grad()
def evaluate(run: TrainingRun, data: Microbatches | list[Microbatches]) -> float:
    """Return the mean loss per token of ``eval_iters`` global batches, without dropout."""
    for chunk in run.model:
        chunk.eval()
    # In double precision, which counts more than the 2^24 tokens of single precision.
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    for _ in range(run.args.eval_iters):
        sums += sum_of(run, forward_backward(run, data, forward_only=True))
    dist.all_reduce(sums)
    for chunk in run.model:
        chunk.train()
    return (sums[0] / sums[1]).item()


def evaluate_in_training(run: TrainingRun, valid_data: Any) -> None:
    """Evaluate on the next part of the validation set; after its end, on the first part again."""
    num_samples = run.args.eval_iters * run.args.global_batch_size
    num_parts = len(valid_data) // num_samples
    # Evaluations of an earlier run of other sizes may have ended within a part.
    consumed = run.progress.consumed_valid_samples // num_samples % num_parts * num_samples
    with batches(run.args, valid_data, consumed) as data:
        run.report.evaluation(run.progress, evaluate(run, data))
    run.progress.consumed_valid_samples += num_samples


def evaluate_at_the_end(
    run: TrainingRun,
    dataset: Any,
    name: str,
) -> None:
    """Evaluate on the first part of a data set.

    Args:
        run: the run.
        dataset: the data set.
        name: "validation" or "test", for the report.
    """
    with batches(run.args, dataset, 0) as data:
        run.report.evaluation(run.progress, evaluate(run, data), name)


def save(
    run: TrainingRun,
    root: str,
    at_the_end: bool = False,
) -> None:
    """Save a checkpoint and the loss curves so far.

    Args:
        run: the run.
        root: directory of checkpoints.
        at_the_end: start no process to save in the background: after SIGTERM a launcher gives a
            few seconds.
    """
    with position.during(position.SAVING):
        if run.background is not None:
            run.background.wait()
    run.report.keep_history()
    with run.report.times.measured(SAVE), position.during(position.SAVING):
        if run.background is not None and not at_the_end:
            run.background.save(run, run.progress, root)
        else:
            checkpointing.save(run.args, run, run.progress, run.report.log, root)
            run.report.saved(run.progress)
    run.report.times_of(SAVE, run.progress)


def should_stop(run: TrainingRun) -> bool:
    """Return True if the run must leave the loop; the same on every rank."""
    iteration = run.progress.iteration
    if run.stop.agreed:
        run.report.log(f"stopping at iteration {iteration}: signal or time limit")
        return True
    if run.progress.is_multiple_of(run.args.exit_interval):
        run.report.log(f"stopping at iteration {iteration}: --exit-interval")
        return True
    return False
