# SPDX-License-Identifier: Apache-2.0
"""The training loop of pretrain_gpt.py, from top to bottom: build, load, train, evaluate.

`pretrain` builds the parts of a run and loads its checkpoint, `train` is the loop, `train_step` one
iteration of it, `evaluate` one evaluation. The settings of a run never change: they are read-only
in `TrainingRun.args`. What changes is in `TrainingRun.progress`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.fsdp import trace
from megatron.pretrain import (
    checkpointing,
    fsdp_dtensor_checkpoint,
    local_save,
    save_directory,
)
from megatron.pretrain.arguments.frozen import FrozenArguments
from megatron.pretrain.background_save import BackgroundSaves
from megatron.pretrain.checkpoint_source import non_persistent_root
from megatron.pretrain.data import build_datasets, find_data
from megatron.pretrain.flops import training_flops
from megatron.pretrain.forward_step import ForwardStep, Microbatches
from megatron.pretrain.gpt_model import build_model
from megatron.pretrain.gpt_optimizer import build_optimizer
from megatron.pretrain.local_checkpoint import LOCAL
from megatron.pretrain.microbatches import build_iterator
from megatron.pretrain.model_statistics import count_zeros, number_of_parameters, params_norm
from megatron.pretrain.profiling import profile_directory, profiling
from megatron.pretrain.progress import Progress
from megatron.pretrain.ranks import data_parallel_rank, data_parallel_size, say
from megatron.pretrain.report import Report
from megatron.pretrain.stopping import StopRequest
from megatron.pretrain.tokenizer import build_tokenizer, padded_vocab_size


@dataclass
class TrainingRun:
    """The parts of one training run."""

    args: argparse.Namespace
    """The completed arguments, which no part of the run changes."""
    device: torch.device
    model: list[MegatronModule]
    """The model chunks of this pipeline stage: one, or one for each virtual stage."""
    optimizer: MegatronOptimizer | None
    """None for a run that only evaluates."""
    scheduler: OptimizerParamScheduler | None
    """The schedule of learning rate and weight decay; None for a run that only evaluates."""
    report: Report
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    background: BackgroundSaves | None = None
    """With --async-save."""


def pretrain(
    args: argparse.Namespace,
    device: torch.device,
    follow: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Build everything, load, train, evaluate and save; return the progress of the run.

    ``follow`` gets the progress, which training then changes.

    Raises:
        ValueError, RunError, OSError: with a message for the user, the same on every rank where the
            cause is.
    """
    with save_directory.reserved(args, say):
        return run_to_the_end(args, device, follow)


def run_to_the_end(
    args: argparse.Namespace, device: torch.device, follow: Callable[[Progress], None]
) -> Progress:
    """Do the work of :func:`pretrain` while no other run saves in the same directory."""
    if args.profile:
        trace.check_directory(profile_directory(args), args.profile_ranks)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    rows = padded_vocab_size(
        tokenizer,
        padded_size=args.padded_vocab_size,
        vocab_size=args.vocab_size,
        divisible_by=args.make_vocab_size_divisible_by,
        tensor_size=args.tensor_model_parallel_size,
    )
    args = FrozenArguments(args, padded_vocab_size=rows)
    source = find_data(args, tokenizer)
    model = build_model(args, args.padded_vocab_size, device)
    optimizer, scheduler = (None, None) if args.skip_train else build_optimizer(args, model)
    run = TrainingRun(args, device, model, optimizer, scheduler, Report(args))
    run.stop = StopRequest(args.exit_duration_in_mins)
    run.report.say(
        f"{number_of_parameters(model) / 1e6:.2f} M parameters on {args.world_size} ranks"
    )

    run.progress = checkpointing.load(args, model, optimizer, scheduler, run.report.say)
    train_data, valid_data, test_data = build_datasets(args, tokenizer, source)
    init_num_microbatches_calculator(
        dist.get_rank(),
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    connect(run)
    update_num_microbatches(run.progress.consumed_train_samples, consistency_check=False)
    follow(run.progress)

    if not args.skip_train and run.progress.iteration < args.train_iters:
        consumed = run.progress.consumed_train_samples
        with batches(run, train_data, consumed) as data, background_saves(run):
            train(run, data, valid_data)
    # A run that was told to stop has no time for the last evaluations.
    if args.skip_train or run.progress.iteration >= args.train_iters:
        if args.skip_train and valid_data is not None:
            evaluate_at_the_end(run, valid_data, "validation")
        if test_data is not None:
            evaluate_at_the_end(run, test_data, "test")
    run.report.end()
    return run.progress


def connect(run: TrainingRun) -> None:
    """Tell the schedule how to finish gradients, scale losses and delay synchronisation."""
    args = run.args
    config = get_model_config(run.model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = run.optimizer.scale_loss if run.optimizer else None
    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_list([chunk.no_sync for chunk in run.model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_list([chunk.start_grad_sync for chunk in run.model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_list([chunk.start_param_sync for chunk in run.model])
    if args.manual_gc:
        gc.disable()
        gc.collect()


def train(
    run: TrainingRun, data: Microbatches | list[Microbatches], valid_data: Any | None
) -> None:
    """Train from where the run is to ``args.train_iters``, or until it is told to stop.

    Raises:
        KeyboardInterrupt: on every rank, if one was sent SIGINT.
    """
    args, progress, report = run.args, run.progress, run.report
    if args.save or args.exit_signal_handler:
        run.stop.watch_sigterm()
    run.stop.watch_sigint()
    for chunk in run.model:
        chunk.train()
    report.begin(progress)
    saved_at = progress.iteration

    with profiling(args, report.say) as step_is_over:
        while progress.iteration < args.train_iters:
            train_step(run, data)
            step_is_over()

            # Once in a while: evaluate, save, collect garbage, stop. None of it is training time.
            report.stop_clock()
            if run.background is not None:
                run.background.conclude()
            if run.stop.interrupted:
                break
            if valid_data is not None and progress.is_multiple_of(args.eval_interval):
                evaluate_in_training(run, valid_data)
            if args.save and progress.is_multiple_of(args.save_interval):
                save(run, args.save)
                saved_at = progress.iteration
            elif progress.is_multiple_of(args.non_persistent_save_interval):
                save_non_persistent(run)
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


@contextmanager
def background_saves(run: TrainingRun) -> Iterator[None]:
    """Save in the background inside the context, with --async-save, and wait for it at the end."""
    if not run.args.async_save:
        yield
        return
    saves = BackgroundSaves(run.args, run.device, run.report.say, run.report.saved)
    with closing(saves) as run.background:
        try:
            yield
        except KeyboardInterrupt:  # of all ranks: what is being written is finished
            run.background.wait()
            raise
        run.background.wait()
        run.background.end()


def train_step(run: TrainingRun, data: Microbatches | list[Microbatches]) -> None:
    """Run forward and backward of every microbatch and one optimizer step, and report it."""
    args, progress, optimizer = run.args, run.progress, run.optimizer
    assert optimizer is not None and run.scheduler is not None  # a run that trains has both
    update_num_microbatches(progress.consumed_train_samples, consistency_check=True)
    batch_size = get_current_global_batch_size()
    for chunk in run.model:
        chunk.force_all_reduce = False
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    losses = forward_backward(run, data, get_num_microbatches(), forward_only=False)
    # Of fully sharded gradients Megatron-Core's optimizer would count copies too.
    counts_zeros_here = args.log_num_zeros_in_grad and args.use_megatron_fsdp
    num_zeros = count_zeros(run.model) if counts_zeros_here else None
    updated, grad_norm, optimizer_num_zeros = optimizer.step()
    if args.log_num_zeros_in_grad and num_zeros is None:
        num_zeros = optimizer_num_zeros
    if args.empty_unused_memory_level and torch.cuda.is_available():
        torch.cuda.empty_cache()

    learning_rate = get_canonical_lr_for_logging(optimizer.param_groups)
    progress.count_step(batch_size, training_flops(args, batch_size))
    if updated:
        run.scheduler.step(increment=batch_size)
    run.report.step(
        progress,
        {
            "lm loss": reduce_loss(run, losses),
            "learning-rate": learning_rate,
            "batch-size": batch_size,
            "grad-norm": grad_norm,
            "num-zeros": num_zeros,
            "loss-scale": float(optimizer.get_loss_scale()) if args.fp16 else None,
            "params-norm": params_norm(run.model) if args.log_params_norm else None,
        },
        skipped=not updated,
    )


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
    forward_step = ForwardStep(
        run.device, run.progress.iteration, run.args.check_for_nan_in_loss_and_grad
    )
    return get_forward_backward_func()(
        forward_step_func=forward_step,
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


@torch.no_grad()
def evaluate(run: TrainingRun, data: Microbatches | list[Microbatches]) -> float:
    """Return the mean loss per token over ``eval_iters`` global batches, without dropout."""
    for chunk in run.model:
        chunk.eval()
    args = run.args
    # Evaluations are over whole global batches, also while --rampup-batch-size makes them grow.
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    sums = torch.zeros(2, device=run.device)
    for _ in range(args.eval_iters):
        sums += sum_of(run, forward_backward(run, data, num_microbatches, forward_only=True))
    dist.all_reduce(sums)
    for chunk in run.model:
        chunk.train()
    return (sums[0] / sums[1]).item()


def evaluate_in_training(run: TrainingRun, valid_data: Any) -> None:
    """Evaluate on the next part of the validation set, and after its end from the start again."""
    num_samples = run.args.eval_iters * run.args.global_batch_size
    num_parts = len(valid_data) // num_samples
    consumed = run.progress.consumed_valid_samples % (num_parts * num_samples)
    with batches(run, valid_data, consumed) as data:
        run.report.evaluation(run.progress, evaluate(run, data))
    run.progress.consumed_valid_samples += num_samples


def evaluate_at_the_end(run: TrainingRun, dataset: Any, name: str) -> None:
    """Evaluate on the first part of a data set, which is reported as ``name``."""
    with batches(run, dataset, 0) as data:
        run.report.evaluation(run.progress, evaluate(run, data), name)


@contextmanager
def batches(
    run: TrainingRun, dataset: Any, consumed_samples: int
) -> Iterator[Microbatches | list[Microbatches]]:
    """Open this rank's microbatches of ``dataset``, from ``consumed_samples`` on.

    Every model chunk has an iterator of its own, as virtual stages read the same microbatches at
    different times. The iterators are closed at the end: after an error their frames would keep the
    workers of the data loader alive, and the exit of the program would wait for them.
    """
    args = run.args
    with ExitStack() as stack:
        iterators = []
        for _ in range(args.virtual_pipeline_model_parallel_size or 1):
            iterator = build_iterator(
                dataset,
                micro_batch_size=args.micro_batch_size,
                dataloader_type=args.dataloader_type,
                seed=args.seed,
                num_workers=args.num_workers,
                consumed_samples=consumed_samples,
                data_parallel_rank=data_parallel_rank(),
                data_parallel_size=data_parallel_size(),
            )
            iterators.append(stack.enter_context(closing(iterator)))
        yield one_or_list(iterators)


def one_or_list(items: list[Any]) -> Any:
    """Return the only item, or the list of several, as schedules expect model chunks."""
    return items[0] if len(items) == 1 else items


def save(run: TrainingRun, root: str, at_the_end: bool = False) -> None:
    """Save a checkpoint under ``root``, and the loss curves so far.

    Args:
        run: the run.
        root: the directory of checkpoints.
        at_the_end: no training follows, so no process is started to save in the background: after
            SIGTERM a launcher gives a few seconds.
    """
    parts = (run.model, run.optimizer, run.scheduler, run.progress)
    if run.background is not None:
        run.background.wait()
    run.report.stage(run.progress)
    if run.background is not None and not at_the_end:
        run.background.save(*parts, root)
    else:
        checkpointing.save(run.args, *parts, run.report.say, root)
        run.report.saved(run.progress)


def save_non_persistent(run: TrainingRun) -> None:
    """Save the checkpoint of which only the newest is kept.

    A local one is written while training waits, also with --async-save: it may be written while a
    persistent one is being written in the background.
    """
    args = run.args
    if args.non_persistent_ckpt_type != LOCAL:
        save(run, non_persistent_root(args, args.save))
        return
    parts = (run.model, run.optimizer, run.scheduler, run.progress)
    run.report.stage(run.progress)
    content = checkpointing.collect(args, *parts, fsdp_dtensor_checkpoint)
    under_way = None if run.background is None else run.background.under_way
    local_save.save(args, content, run.progress.iteration, run.report.say, under_way)
    run.report.keep_history()


def should_stop(run: TrainingRun) -> bool:
    """Return True if the run must leave the loop; the same on every rank."""
    iteration = run.progress.iteration
    if run.stop.interrupted:
        return True
    if run.stop.agreed:
        run.report.say(f"stopping at iteration {iteration}: signal or time limit")
        return True
    if run.progress.is_multiple_of(run.args.exit_interval):
        run.report.say(f"stopping at iteration {iteration}: --exit-interval")
        return True
    return False
