# SPDX-License-Identifier: Apache-2.0
"""Rules of batch sizes and of the length of a run."""

from collections.abc import Sequence

from megatron.mcore_adapter.releases.batch_size_schedule import batch_size_at, ramp_steps
from megatron.pretrain.arguments.check import Check


def complete_batch_and_length(check: Check) -> None:
    """Complete the global batch size and the number of iterations."""
    args = check.args
    if args.micro_batch_size and args.micro_batch_size > 0:
        step = args.micro_batch_size * args.data_parallel_size
        args.global_batch_size = step if args.global_batch_size is None else args.global_batch_size
        check.require(
            args.global_batch_size % step == 0,
            f"--global-batch-size {args.global_batch_size} must be a multiple of {step}:"
            f" --micro-batch-size {args.micro_batch_size} times {args.data_parallel_size}"
            " data-parallel ranks",
        )
    check.at_most_one("train_iters", "train_samples")
    check.require(
        args.skip_train or args.train_iters or args.train_samples,
        "required but not given: --train-iters or --train-samples",
    )
    grows = args.rampup_batch_size is not None and check_growing_batch(check)
    if args.train_samples and args.global_batch_size and args.global_batch_size > 0:
        if grows:
            args.train_iters = growing_iterations(
                args.train_samples,
                args.rampup_batch_size,
                args.global_batch_size,
                args.micro_batch_size,
                args.data_parallel_size,
            )
        else:
            args.train_iters = args.train_samples // args.global_batch_size
        check.require(
            args.train_iters,
            f"--train-samples {args.train_samples} is less than one --global-batch-size"
            f" {args.global_batch_size}"
            + (f", also at its start of {args.rampup_batch_size[0]}" if grows else ""),
        )
    args.train_iters = args.train_iters or 0
    args.no_load_optim = args.no_load_optim or args.skip_train


def check_growing_batch(check: Check) -> bool:
    """Check --rampup-batch-size, and return whether all of its rules hold."""
    args = check.args
    start, increment, samples = args.rampup_batch_size
    count = len(check.problems)
    check.require(
        args.train_samples,
        "--rampup-batch-size counts samples: give --train-samples instead of --train-iters",
    )
    check.require(
        min(start, increment, samples) > 0,
        f"--rampup-batch-size {start} {increment} {samples}: each must be at least 1",
    )
    if args.micro_batch_size and args.micro_batch_size > 0 and count == len(check.problems):
        step = args.micro_batch_size * args.data_parallel_size
        grown = args.global_batch_size - start
        check.require(
            grown > 0 and grown % increment == 0,
            f"--rampup-batch-size {start} {increment} {samples}: increments of {increment} must"
            f" lead from {start} to --global-batch-size {args.global_batch_size}",
        )
        check.require(
            start % step == 0 and increment % step == 0,
            f"--rampup-batch-size {start} {increment} {samples}: start and increment must be"
            f" multiples of {step}: --micro-batch-size {args.micro_batch_size} times"
            f" {args.data_parallel_size} data-parallel ranks",
        )
    return count == len(check.problems)


def growing_iterations(
    train_samples: int,
    rampup_batch_size: Sequence[int],
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> int:
    """Return the iterations of whole batches in a run whose global batch size grows.

    Args:
        train_samples: of the run.
        rampup_batch_size: the first global batch size, its increment, and the number of samples
            after which it has its last value.
        global_batch_size: the last one, in samples.
        micro_batch_size: samples of one rank in one pass.
        data_parallel_size: number of data-parallel ranks.
    """
    steps = ramp_steps(rampup_batch_size, global_batch_size)
    last_step, _ = steps[-1]
    consumed = iterations = 0
    while consumed < last_step:
        size = batch_size_at(steps, consumed)
        if consumed + size > train_samples:
            return iterations
        consumed += size
        iterations += 1
    return iterations + (train_samples - consumed) // global_batch_size
