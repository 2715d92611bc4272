# SPDX-License-Identifier: Apache-2.0
"""Save and load a run: weights, optimizer, schedule, random state, progress.

A checkpoint is complete or absent: it is written under another name, renamed, and then named by the
tracker file.
"""

from __future__ import annotations

import argparse
import copyreg
import enum
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.core import directory
from megatron.checkpoint.core.listing import listed
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain import (
    fsdp_dtensor_checkpoint,
    integrity,
    save_directory,
    torch_dist_checkpoint,
)
from megatron.pretrain.checkpoint_arguments import check_arguments
from megatron.pretrain.checkpoint_source import (
    CheckpointSource,
    Damage,
    Say,
    fallback_lines,
    find_source,
    pass_over,
)
from megatron.pretrain.errors import RunError
from megatron.pretrain.first_rank import on_first_rank
from megatron.pretrain.progress import Progress
from megatron.pretrain.random_state import gather_random_state, restore_random_state

FORMATS = {"fsdp_dtensor": fsdp_dtensor_checkpoint, "torch_dist": torch_dist_checkpoint}
"""Name of a checkpoint format -> the module whose ``save`` and ``load`` write and read it."""

SECONDS_UNTIL_VISIBLE = 10.0
"""Time in which a shared file system shows every rank what the first one sees."""

# ---- save


def save(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    progress: Progress,
    say: Say,
) -> None:
    """Write the state of the run into a new checkpoint under ``args.save`` and publish it.

    This is a collective.

    Raises:
        RunError: on every rank, if any rank could not write; nothing is left behind then.
    """
    root, iteration = args.save, progress.iteration
    if args.no_save_optim:
        optimizer = scheduler = None
    state = run_state(args, progress, scheduler, with_rng=not args.no_save_rng)
    _on_first_rank(lambda: directory.prepare(root, iteration), "cannot prepare the checkpoint")
    staging = directory.staging_directory(root, iteration)
    problems = _write(args, state, model, optimizer, staging) or integrity.sign(staging)
    if problems:
        _on_first_rank(lambda: directory.discard(root, iteration), "cannot clean up")
        raise RunError(
            f"the checkpoint of iteration {iteration} was not written:\n" + "\n".join(problems)
        )
    _on_first_rank(lambda: directory.publish(root, iteration), "cannot publish the checkpoint")
    if args.save_retain_interval:
        _on_first_rank(
            lambda: directory.retain(root, args.save_retain_interval, iteration), "cannot clean up"
        )
    say(
        f"saved checkpoint of iteration {iteration} to"
        f" {directory.iteration_directory(root, iteration)}"
    )


def _write(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    target: Path,
) -> list[str]:
    """Write into ``target`` and return the problems of all ranks, the same on every rank."""
    problem = None
    try:
        FORMATS[args.ckpt_format].save(args, state, model, optimizer, target)
    except CheckpointException as error:
        # This is raised on every rank, and is no Exception: each rank reports its own problem.
        problem = _cause(error, dist.get_rank())
    except Exception as error:
        # A full disk, a missing permission, a broken file system: the other ranks wait.
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return agree([problem] if problem else [])


def run_state(
    args: argparse.Namespace,
    progress: Progress,
    scheduler: OptimizerParamScheduler | None,
    with_rng: bool,
) -> dict[str, Any]:
    """Return the state of a run without weights and optimizer, in the structure of both formats.

    A collective if ``with_rng``.
    """
    for value in vars(args).values():
        if isinstance(value, enum.Enum):
            # Early releases of Python 3.11 pickle members by `getattr`, which careful readers
            # refuse to call.
            copyreg.pickle(type(value), _pickle_by_value)
    state: dict[str, Any] = {
        "args": progress.written_into(args),
        "checkpoint_version": fsdp_dtensor_checkpoint.CHECKPOINT_VERSION,
        "iteration": progress.iteration,
        "num_floating_point_operations_so_far": progress.num_floating_point_operations_so_far,
    }
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng_state"] = gather_random_state(
            differs_between_data_ranks=(
                args.data_parallel_random_init or args.expert_model_parallel_size > 1
            )
        )
    return state


def _pickle_by_value(member: enum.Enum) -> tuple[type, tuple[Any]]:
    return type(member), (member.value,)


def _on_first_rank(action: Callable[[], Any], problem: str) -> None:
    """Run ``action`` on the first rank, and raise its error on every rank."""
    trouble = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            trouble = f"{problem}: {error}"
    problems = agree([trouble] if trouble else [])
    if problems:
        raise RunError(problems[0])


# ---- load


def load(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    say: Say,
) -> Progress:
    """Load the checkpoint of ``--load`` or ``--pretrained-checkpoint``, and return its progress.

    A collective. Without a checkpoint, and if only weights are loaded, the counters are 0.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, or it is of another model.
    """
    source = _choose_source(args, say)
    if source is None:
        return Progress()
    path = source.path
    with_optimizer = optimizer is not None and not (args.no_load_optim or source.weights_only)
    with_rng = not (args.no_load_rng or source.weights_only)
    if not args.no_check_checkpoint_args:
        check_arguments(path, args, say)
    state = run_state(args, Progress(), scheduler if with_optimizer else None, with_rng)
    rates = _rates(scheduler) if with_optimizer else []
    loaded = _read(args, state, model, optimizer if with_optimizer else None, path)

    if optimizer is not None and not with_optimizer:
        optimizer.reload_model_params()  # its fp32 weights are those that were loaded
    progress = Progress() if source.weights_only else Progress.of_checkpoint(loaded)
    if with_optimizer:
        _load_schedule(scheduler, loaded["opt_param_scheduler"], rates)
    if with_rng:
        _load_random_state(loaded.get("rng_state"), path, say)
    saved_rows = getattr(loaded["args"], "padded_vocab_size", None)
    _compare_vocabulary(saved_rows, args.padded_vocab_size, path, say)
    on_first_rank(lambda: save_directory.settle(args, source))
    if source.weights_only:
        say(f"loaded the weights of {path}")
    else:
        say(f"loaded {path}, iteration {progress.iteration}")
    return progress


def _choose_source(args: argparse.Namespace, say: Say) -> CheckpointSource | None:
    """Return the checkpoint to load, the same on every rank, None to start from scratch.

    A collective. The newest may be damaged: then it is the newest of the sound ones before it.

    Raises:
        ValueError: on every rank, if there is none that may be loaded.
    """
    damage: Damage = {}
    while True:
        source = on_first_rank(lambda: find_source(args, say, damage))
        if source is None:
            return None
        _wait_until_visible(source.path)
        _check_format(source.path, args.ckpt_format)
        try:
            integrity.check(source.path, verify=not args.no_verify_integrity)
            break
        except ValueError as error:
            pass_over(args, source, str(error), damage)
    on_first_rank(lambda: save_directory.refuse_overwriting(args, source))
    for line in fallback_lines(args, source, damage):
        say(line)
    return source


def _wait_until_visible(path: Path) -> None:
    """Wait until this rank sees a directory that the first rank sees; a collective.

    Raises:
        ValueError: on every rank, naming the ranks that do not see it.
    """
    deadline = time.monotonic() + SECONDS_UNTIL_VISIBLE
    while not path.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    unseen = [] if path.is_dir() else [f"rank {dist.get_rank()} does not see {path}"]
    problems = agree(unseen)
    if problems:
        raise ValueError(listed("all ranks must read the same file system", problems))


def _check_format(source: Path, expected: str) -> None:
    if not (source / ".metadata").is_file():
        raise ValueError(f"{source} is no complete checkpoint: it has no .metadata")
    actual = "torch_dist" if (source / "metadata.json").is_file() else "fsdp_dtensor"
    if actual != expected:
        flag = "with" if actual == "fsdp_dtensor" else "without"
        raise ValueError(
            f"{source} is in the format {actual}, but this run reads {expected}: it was written"
            f" {flag} --use-megatron-fsdp"
        )


def _read(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    source: Path,
) -> dict[str, Any]:
    """Read ``source`` into the model and the optimizer, and return the rest of it.

    Raises:
        ValueError: names the problems of each rank.
    """
    try:
        return FORMATS[args.ckpt_format].load(args, state, model, optimizer, source)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    except CheckpointException as error:
        lines = [f"{source} cannot be loaded, its files are damaged or of another run:"]
        lines += [str(_cause(error, rank)) for rank in sorted(error.failures)]
        raise ValueError("\n  ".join(lines)) from error


def _cause(error: CheckpointException, rank: int) -> str | None:
    """Return the error of ``rank`` without its traceback, None if it had none."""
    if rank not in error.failures:
        return None
    cause = error.failures[rank][0]
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _load_random_state(states: list[dict[str, Any]] | None, source: Path, say: Say) -> None:
    """Set the generators of every rank, or of none if the file has no state for some rank."""
    if agree(["no random state"] if states is None else []):
        say(
            f"{source} has no random state for some of this run's ranks: their generators begin"
            " anew"
        )
    elif states is not None:
        restore_random_state(states)


def _compare_vocabulary(saved_rows: int | None, rows: int, source: Path, say: Say) -> None:
    """Print a line if the run that wrote ``source`` had another number of vocabulary rows.

    Args:
        saved_rows: of that run; None if its arguments do not say it.
        rows: of this run.
        source: the directory of the checkpoint.
        say: prints a line.
    """
    if saved_rows is not None and saved_rows != rows:
        say(
            f"{source} has {saved_rows} rows of vocabulary, this run {rows}: rows of padding take"
            " part in the loss, which is another one now; --padded-vocab-size"
            f" {saved_rows} keeps it"
        )


# ---- the schedule of learning rate and weight decay


def _rates(scheduler: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """Return the highest and lowest learning rate of every param group."""
    return [
        {name: group.get(name) for name in ("max_lr", "min_lr")}
        for group in scheduler.optimizer.param_groups
    ]


def _load_schedule(
    scheduler: OptimizerParamScheduler, saved: dict[str, Any], rates: list[dict[str, Any]]
) -> None:
    """Set the schedule to the step of the saved one.

    Args:
        scheduler: of this run. The param groups of its optimizer have the file's rates already.
        saved: the state of the file's schedule.
        rates: the highest and lowest rates of this run's groups before the load.

    Raises:
        ValueError: lists the settings that differ, unless a flag says which ones count.
    """
    if scheduler.override_opt_param_scheduler:
        for group, own in zip(scheduler.optimizer.param_groups, rates):
            group.update(own)
    elif not scheduler.use_checkpoint_opt_param_scheduler:
        different = _differences(saved, scheduler.state_dict())
        for number, (theirs, own) in enumerate(zip(_rates(scheduler), rates)):
            different += [f"param group {number}, {line}" for line in _differences(theirs, own)]
        different = agree(different)  # a rank does not know the rates of groups empty on it
        if different:
            raise ValueError(
                "the checkpoint has another schedule of learning rate and weight decay (steps count"
                " samples):\n  "
                + "\n  ".join(different)
                + "\n--use-checkpoint-opt-param-scheduler takes the file's,"
                " --override-opt-param-scheduler this run's"
            )
    scheduler.load_state_dict(saved)


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {value} in the file, {own[name]} in this run"
        for name, value in saved.items()
        if name != "num_steps" and name in own and own[name] != value
    ]
