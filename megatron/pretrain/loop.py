# SPDX-License-Identifier: Apache-2.0
"""The training loop: once in a while evaluate, save, stop; one step; report."""

from __future__ import annotations

import argparse
import gc
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
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
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from megatron.pretrain import checkpointing
from megatron.pretrain.data import build_datasets, build_iterator
from megatron.pretrain.errors import RunError
from megatron.pretrain.flops import floating_point_operations
from megatron.pretrain.gpt_model import build_model
from megatron.pretrain.gpt_optimizer import build_optimizer
from megatron.pretrain.model_statistics import count_zeros, number_of_parameters, params_norm
from megatron.pretrain.ranks import data_parallel_rank, data_parallel_size
from megatron.pretrain.report import Report
from megatron.pretrain.tokenizer import build_tokenizer, padded_vocab_size

Batches = Generator[dict[str, torch.Tensor], None, None]


@dataclass
class Run:
    """Everything that one training run consists of."""

    args: argparse.Namespace
    device: torch.device
    model: list[MegatronModule]
    """The chunks of this pipeline stage: one, or one for each virtual stage."""
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    report: Report
    started: float
    terminated: bool = False  # this rank was sent SIGTERM
    stop_requested: bool = False  # some rank wants to stop


def pretrain(args: argparse.Namespace, device: torch.device) -> None:
    """Build everything, load, train, evaluate, save.

    Raises:
        ValueError, RunError, OSError: with a message for the user, the same on every rank where the
            cause is.
    """
    checkpointing.check_target(args)
    tokenizer = build_tokenizer(args)
    args.padded_vocab_size = padded_vocab_size(tokenizer, args)
    model = build_model(args, args.padded_vocab_size, device)
    optimizer, scheduler = (None, None) if args.skip_train else build_optimizer(args, model)
    run = Run(args, device, model, optimizer, scheduler, Report(args), started=time.monotonic())
    run.report.say(
        f"{number_of_parameters(model) / 1e6:.2f} M parameters on {args.world_size} ranks"
    )
    checkpointing.load(args, model, optimizer, scheduler, run.report.say)
    train_data, valid_data, test_data = build_datasets(args, tokenizer)
    init_num_microbatches_calculator(
        dist.get_rank(),
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    connect(run)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    if not args.skip_train and args.iteration < args.train_iters:
        with batches(args, train_data, args.consumed_train_samples) as data:
            train(run, data, valid_data)
    # A run that was told to stop has no time for this.
    finished = args.skip_train or args.iteration >= args.train_iters
    for name, dataset in (
        ("validation", valid_data if args.skip_train else None),
        ("test", test_data),
    ):
        if dataset is not None and finished:
            with batches(args, dataset, 0) as data:
                run.report.evaluation(evaluate(run, data), name)
    run.report.end()


@contextmanager
def batches(
    args: argparse.Namespace, data: Any, consumed: int
) -> Iterator[Batches | list[Batches]]:
    """This rank's microbatches, for every model chunk anew: virtual stages read the same ones at different times.

    Closed at the end: after an error its frames, and with them the loader's workers, would live on,
    and exit wait for them.
    """
    with ExitStack() as stack:
        chunks = [
            stack.enter_context(
                closing(
                    build_iterator(
                        data,
                        args,
                        consumed_samples=consumed,
                        data_parallel_rank=data_parallel_rank(),
                        data_parallel_size=data_parallel_size(),
                    )
                )
            )
            for _ in range(args.virtual_pipeline_model_parallel_size or 1)
        ]
        yield of_each(chunks)


def connect(run: Run) -> None:
    """Tell the schedule how to finish gradients, scale losses and delay synchronisation."""
    args = run.args
    config = get_model_config(run.model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = run.optimizer.scale_loss if run.optimizer else None
    if args.overlap_grad_reduce:
        config.no_sync_func = of_each([chunk.no_sync for chunk in run.model])
        if args.align_grad_reduce:
            config.grad_sync_func = of_each([chunk.start_grad_sync for chunk in run.model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = of_each([chunk.start_param_sync for chunk in run.model])
    if args.manual_gc:
        gc.disable()
        gc.collect()


def of_each(items: list[Any]) -> Any:
    """As the schedules want what belongs to model chunks: a list, or the only one."""
    return items[0] if len(items) == 1 else items


def train(run: Run, data: Batches | list[Batches], valid_data: Any) -> None:
    """Train from ``args.iteration`` to ``args.train_iters``, or until told to stop."""
    args, report = run.args, run.report
    watch_signal(run)
    for chunk in run.model:
        chunk.train()
    report.begin()
    saved_at = args.iteration
    with profiler(args) as profile:
        while args.iteration < args.train_iters:
            train_step(run, data)
            if profile is not None:
                profile.step()
            report.stop_clock()
            if (
                valid_data is not None
                and args.eval_interval
                and args.iteration % args.eval_interval == 0
            ):
                evaluate_in_training(run, valid_data)
            if args.save and args.iteration % args.save_interval == 0:
                save(run)
                saved_at = args.iteration
            if (
                args.manual_gc
                and args.manual_gc_interval
                and args.iteration % args.manual_gc_interval == 0
            ):
                gc.collect()
            if should_stop(run):
                break
            report.restart_clock()
    if args.save and saved_at != args.iteration:
        save(run)
    report.keep()


def train_step(run: Run, data: Batches | list[Batches]) -> None:
    """Forward and backward of every microbatch, one optimizer step, one report."""
    args = run.args
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)
    batch_size = get_current_global_batch_size()
    for chunk in run.model:
        chunk.force_all_reduce = False
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    losses = forward_backward(run, data, get_num_microbatches(), forward_only=False)
    zeros = (
        count_zeros(run.model) if args.log_num_zeros_in_grad and args.use_megatron_fsdp else None
    )
    updated, grad_norm, num_zeros = run.optimizer.step()
    if args.empty_unused_memory_level and torch.cuda.is_available():
        torch.cuda.empty_cache()
    rate = get_canonical_lr_for_logging(run.optimizer.param_groups)
    args.iteration += 1
    args.consumed_train_samples += batch_size
    args.num_floating_point_operations_so_far += floating_point_operations(args, batch_size)
    if updated:
        run.scheduler.step(increment=batch_size)
    run.report.step(
        {
            "lm loss": reduce_loss(run, losses),
            "learning-rate": rate,
            "batch-size": batch_size,
            "grad-norm": grad_norm,
            "num-zeros": (
                zeros if zeros is not None else num_zeros if args.log_num_zeros_in_grad else None
            ),
            "loss-scale": float(run.optimizer.get_loss_scale()) if args.fp16 else None,
            "params-norm": params_norm(run.model) if args.log_params_norm else None,
        },
        skipped=not updated,
    )


def forward_backward(
    run: Run, data: Batches | list[Batches], num_microbatches: int, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """What the schedule collects from the loss function, for every microbatch; nothing before the last pipeline stage."""
    return get_forward_backward_func()(
        forward_step_func=ForwardStep(run.args, run.device),
        data_iterator=data,
        model=run.model,
        num_microbatches=num_microbatches,
        seq_length=run.args.seq_length,
        micro_batch_size=run.args.micro_batch_size,
        forward_only=forward_only,
    )


class ForwardStep:
    """One microbatch through the model; the schedule gets the losses and a function that makes them one."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self._check = args.check_for_nan_in_loss_and_grad
        self._iteration = args.iteration
        self._device = device

    def __call__(self, data: Batches, model: MegatronModule) -> tuple[torch.Tensor, Any]:
        batch = {
            name: value.to(self._device, non_blocking=True) for name, value in next(data).items()
        }
        batch = get_batch_on_this_cp_rank(batch)
        mask = batch["loss_mask"]
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
            loss_mask=mask,
        )
        return output, lambda output: self.loss(output, mask)

    def loss(
        self, losses: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The sum of the losses ``[batch, length]`` where ``mask`` is 1, the number of those tokens, and both to report."""
        total = torch.sum(losses.float() * mask)
        tokens = mask.sum().to(torch.int)
        if self._check and not torch.isfinite(total):
            raise RunError(
                f"rank {dist.get_rank()}: the loss is {total.item()} in iteration"
                f" {self._iteration + 1}"
            )
        # A copy: the schedule scales the loss in place.
        return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}


def sum_of(run: Run, losses: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Sum of losses and number of tokens, ``[2]``; zeros before the last pipeline stage.

    Tensor-parallel ranks all have them: summed over all ranks, both are too large by the same
    factor.
    """
    return sum((entry["lm loss"] for entry in losses), torch.zeros(2, device=run.device))


def reduce_loss(run: Run, losses: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss per token over microbatches and ranks; the ranks' wishes to stop travel with it."""
    sums = torch.cat(
        [sum_of(run, losses), torch.tensor([float(wants_to_stop(run))], device=run.device)]
    )
    dist.all_reduce(sums)
    run.stop_requested = bool(sums[2] > 0)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(run: Run, data: Batches | list[Batches]) -> float:
    """The mean loss per token over ``eval_iters`` global batches; no gradients, no dropout."""
    for chunk in run.model:
        chunk.eval()
    args = run.args
    num_microbatches = args.global_batch_size // (
        args.micro_batch_size * args.data_parallel_size
    )  # also while batches grow
    sums = torch.zeros(2, device=run.device)
    for _ in range(args.eval_iters):
        sums += sum_of(run, forward_backward(run, data, num_microbatches, forward_only=True))
    dist.all_reduce(sums)
    for chunk in run.model:
        chunk.train()
    return (sums[0] / sums[1]).item()


def evaluate_in_training(run: Run, valid_data: Any) -> None:
    """Evaluate on the next part of the validation set; after its end, on the first again."""
    args = run.args
    part = args.eval_iters * args.global_batch_size
    consumed = args.consumed_valid_samples % (len(valid_data) // part * part)
    with batches(args, valid_data, consumed) as data:
        run.report.evaluation(evaluate(run, data))
    args.consumed_valid_samples += part


def save(run: Run) -> None:
    """A checkpoint, and the curves so far."""
    checkpointing.save(run.args, run.model, run.optimizer, run.scheduler, run.report.say)
    run.report.keep()


def watch_signal(run: Run) -> None:
    """SIGTERM, which batch systems send before they end a job, asks for a checkpoint and an end."""
    if not (run.args.save or run.args.exit_signal_handler):
        return

    def request(number: int, frame: Any) -> None:
        run.terminated = True

    signal.signal(signal.SIGTERM, request)


def wants_to_stop(run: Run) -> bool:
    """Whether this rank has a reason to stop that the others may not have."""
    minutes = run.args.exit_duration_in_mins
    return run.terminated or bool(minutes and time.monotonic() - run.started > minutes * 60)


def should_stop(run: Run) -> bool:
    """Whether to leave the loop; the same on every rank."""
    args = run.args
    if run.stop_requested:
        run.report.say(f"stopping at iteration {args.iteration}: signal or time limit")
        return True
    if args.exit_interval and args.iteration % args.exit_interval == 0:
        run.report.say(f"stopping at iteration {args.iteration}: --exit-interval")
        return True
    return False


def profiler(args: argparse.Namespace) -> Any:
    """Torch's profiler over the asked steps of the asked ranks, with a trace for TensorBoard."""
    if not (args.profile and dist.get_rank() in args.profile_ranks):
        return nullcontext()
    directory = args.tensorboard_dir or "profile"
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=args.profile_step_start,
            warmup=0,
            active=args.profile_step_end - args.profile_step_start,
            repeat=1,
        ),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(directory),
    )
