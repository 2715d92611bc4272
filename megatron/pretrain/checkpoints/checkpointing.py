# SPDX-License-Identifier: Apache-2.0
"""Save and load a run: weights, optimizer, schedule, random state, progress.

A checkpoint is complete or absent: it is written under another name, renamed, and then named by the
tracker file.
"""

from __future__ import annotations

import argparse
import copyreg
import enum
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.commands.formats import FSDP_DTENSOR, HUGGING_FACE, TORCH_DIST
from megatron.checkpoint.store import directory
from megatron.checkpoint.store import stores
from megatron.checkpoint.dcp.stored_metadata import metadata_read_once
from megatron.checkpoint.store.url_staging import with_urls
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.checkpoints import fsdp_dtensor_checkpoint
from megatron.pretrain.checkpoints import fsdp_torch_dist
from megatron.pretrain.checkpoints import integrity
from megatron.pretrain.watch import rerun
from megatron.pretrain.checkpoints import save_directory
from megatron.pretrain.checkpoints import torch_dist_checkpoint
from megatron.pretrain.checkpoints import url_saves
from megatron.pretrain.checkpoints.checkpoint_arguments import check_arguments
from megatron.pretrain.checkpoints.checkpoint_source import (
    CheckpointSource,
    Damage,
    Say,
    fallback_lines,
    find_source,
    pass_over,
)
from megatron.pretrain.checkpoints.converted_source import format_of, open_converted
from megatron.pretrain.errors import RunError
from megatron.pretrain.first_rank import on_first_rank, wait_until_visible
from megatron.pretrain.progress import Progress
from megatron.pretrain.random_state import gather_random_state, restore_random_state
from megatron.pretrain.checkpoints.saved_schedule import load_schedule, rates_of

FORMATS = {"fsdp_dtensor": fsdp_dtensor_checkpoint, "torch_dist": torch_dist_checkpoint}
"""Name of a checkpoint format -> the module with its ``collect``, ``write`` and ``load``."""


# ---- save


def save(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    progress: Progress,
    say: Say,
    root: str | None = None,
) -> None:
    """Write the state of the run into a new checkpoint under ``root`` and publish it.

    This is a collective. ``root`` is ``args.save`` unless told.

    Raises:
        RunError: on every rank, if any rank could not write; nothing is left behind then.
    """
    root = root or args.save
    content = collect(args, model, optimizer, scheduler, progress)
    target = prepare(root, progress.iteration)
    conclude(args, root, progress, write(args, content, target), say)


def collect(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    progress: Progress,
) -> dict[str, Any]:
    """Return the content of a checkpoint; its tensors share storage with model and optimizer.

    This is a collective.

    Raises:
        RunError: on every rank, if any rank has failed.
    """
    if args.no_save_optim:
        optimizer = scheduler = None
    state = run_state(args, progress, scheduler, with_rng=not args.no_save_rng)
    content: dict[str, Any] = {}
    writer = _writer(args)
    problems = attempt(lambda: content.update(writer.collect(args, state, model, optimizer)))
    if problems:
        raise _not_written(progress.iteration, problems)
    return content


def prepare(root: str, iteration: int) -> Path:
    """Make the empty directory in which a checkpoint is written; a collective."""
    _on_first_rank(lambda: directory.prepare(root, iteration), "cannot prepare the checkpoint")
    staging = directory.staging_directory(root, iteration)
    if stores.is_staged(root):
        problems = attempt(lambda: staging.mkdir(parents=True, exist_ok=True))  # on other nodes
        if problems:
            raise _not_written(iteration, problems)
    return staging


def write(args: argparse.Namespace, content: dict[str, Any], target: Path) -> list[str]:
    """Write what :func:`collect` returned into ``target``, sign it and upload it; a collective.

    Only what is in the staged directory of a URL is uploaded.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    writer = _writer(args)
    problems = attempt(lambda: writer.write(args, content, target))
    if not problems and writer is torch_dist_checkpoint:  # the others sign what they write
        problems = integrity.sign(target)
    if not problems and stores.is_staged(target):
        problems = url_saves.upload(target)
    return problems


def conclude(
    args: argparse.Namespace, root: str, progress: Progress, problems: list[str], say: Say
) -> None:
    """Publish a checkpoint that is written, or discard it if there are problems; a collective.

    Args:
        args: of the run.
        root: directory of the checkpoint. Under another one than ``args.save`` only the newest
            checkpoint is kept.
        progress: at the iteration of the checkpoint.
        problems: the same on every rank.
        say: prints a line.

    Raises:
        RunError: on every rank, if there are problems.
    """
    iteration = progress.iteration
    is_at_url = stores.is_staged(root)
    place = url_saves if is_at_url else directory
    try:
        if problems:
            _on_first_rank(lambda: place.discard(root, iteration), "cannot clean up")
            raise _not_written(iteration, problems)
        _on_first_rank(lambda: place.publish(root, iteration), "cannot publish the checkpoint")
    finally:
        if is_at_url:
            url_saves.remove_staged(root, iteration)
    if root != args.save:
        _on_first_rank(lambda: directory.keep_only(root, iteration), "cannot clean up")
    elif args.save_retain_interval:
        interval = args.save_retain_interval
        _on_first_rank(lambda: place.retain(root, interval, iteration), "cannot clean up")
    say(
        f"saved checkpoint of iteration {iteration} to"
        f" {directory.iteration_directory(root, iteration)}"
    )


def _not_written(iteration: int, problems: list[str]) -> RunError:
    return RunError(
        f"the checkpoint of iteration {iteration} was not written:\n" + "\n".join(problems)
    )


def attempt(action: Callable[[], None]) -> list[str]:
    """Run ``action`` and return the problems of all ranks, the same on every rank."""
    problem = None
    try:
        action()
    except CheckpointException as error:
        # This is raised on every rank, and is no Exception: each rank reports its own problem.
        problem = _cause(error, dist.get_rank())
    except Exception as error:
        # A full disk, a missing permission, a broken file system: the other ranks wait.
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return agree([problem] if problem else [])


def _writer(args: argparse.Namespace) -> ModuleType:
    """Return the module that writes the checkpoints of this run."""
    if args.use_megatron_fsdp and args.ckpt_format == TORCH_DIST:
        return fsdp_torch_dist
    return FORMATS[args.ckpt_format]


def run_state(
    args: argparse.Namespace,
    progress: Progress,
    scheduler: OptimizerParamScheduler | None,
    with_rng: bool,
) -> dict[str, Any]:
    """Return the state of a run without weights and optimizer, in the structure of both formats.

    A collective if ``with_rng``.
    """
    pickle_enums_by_value(args)
    saved_args = _with_urls(progress.written_into(args))
    step_to_repeat = rerun.pending_state()
    if step_to_repeat:
        saved_args.rerun_state = step_to_repeat
    state: dict[str, Any] = {
        "args": saved_args,
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


def _with_urls(args: argparse.Namespace) -> argparse.Namespace:
    """Let arguments name URLs instead of the directories in which they are staged."""
    for dest in ("save", "load", "pretrained_checkpoint"):
        if getattr(args, dest):
            setattr(args, dest, with_urls(getattr(args, dest)))
    return args


def pickle_enums_by_value(args: argparse.Namespace) -> None:
    """Let this process pickle the enums among the arguments by their values.

    Early releases of Python 3.11 pickle members by `getattr`, which careful readers refuse to call.
    """
    for value in vars(args).values():
        if isinstance(value, enum.Enum):
            copyreg.pickle(type(value), _pickle_by_value)


def _pickle_by_value(member: enum.Enum) -> tuple[type, tuple[Any]]:
    return type(member), (member.value,)


def _on_first_rank(action: Callable[[], Any], problem: str) -> None:
    """Run ``action`` on the first rank, and raise its error as a RunError on every rank."""
    try:
        on_first_rank(action)
    except OSError as error:
        raise RunError(f"{problem}: {error}") from error


# ---- load


@metadata_read_once()
@fsdp_dtensor_checkpoint.collector_paused()
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
    progress = Progress()
    if source is not None:
        progress = _load_source(source, args, model, optimizer, scheduler, say)
    for line in on_first_rank(lambda: save_directory.settle(args, source)):
        say(line)
    return progress


def _load_source(
    source: CheckpointSource,
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    say: Say,
) -> Progress:
    """Load a checkpoint and return its progress; a collective."""
    path = source.path
    with_optimizer = optimizer is not None and not (args.no_load_optim or source.weights_only)
    with_rng = not (args.no_load_rng or source.weights_only)
    if not args.no_check_checkpoint_args:
        check_arguments(path, args, say)
    readable = _open(source, args, say)
    state = run_state(args, Progress(), scheduler if with_optimizer else None, with_rng)
    rates = rates_of(scheduler) if with_optimizer else []
    loaded = _read(args, state, model, optimizer if with_optimizer else None, readable)

    if optimizer is not None and not with_optimizer:
        optimizer.reload_model_params()  # its fp32 weights are those that were loaded
    progress = Progress() if source.weights_only else Progress.of_checkpoint(loaded)
    if with_optimizer:
        load_schedule(scheduler, loaded["opt_param_scheduler"], rates)
    if with_rng:
        _load_random_state(loaded.get("rng_state"), path, say)
        step_to_repeat = getattr(loaded["args"], "rerun_state", "")
        if step_to_repeat:
            rerun.resume(step_to_repeat, say)
    saved_rows = getattr(loaded["args"], "padded_vocab_size", None)
    _compare_vocabulary(saved_rows, args.padded_vocab_size, path, say)
    if stores.is_staged(path):
        url_saves.drop(path)
    if source.weights_only:
        say(f"loaded the weights of {path}")
    else:
        say(f"loaded {source.in_words(progress.iteration)}")
    return progress


def _open(
    source: CheckpointSource, args: argparse.Namespace, say: Say
) -> fsdp_dtensor_checkpoint.Source:
    """Return the directory or the reader from which a checkpoint is loaded; a collective."""
    if args.use_megatron_fsdp and format_of(source.path) != FSDP_DTENSOR:
        return open_converted(source.path, args, say)
    return source.path


def _choose_source(args: argparse.Namespace, say: Say) -> CheckpointSource | None:
    """Return the checkpoint to load, the same on every rank, None to start from scratch.

    A collective. The newest may be damaged: then it is the newest of the sound ones before it.

    Raises:
        ValueError: on every rank, if there is none that may be loaded.
    """
    damage: Damage = {}
    while True:
        source = url_saves.found_for_all(partial(find_source, args, say, damage))
        if source is None:
            return None
        wait_until_visible(source.path)
        form = on_first_rank(partial(_check_format, source.path, args))
        try:
            if form != HUGGING_FACE:  # which has neither a manifest nor checksums
                integrity.check(source.path, verify=not args.no_verify_integrity)
            break
        except ValueError as error:
            pass_over(args, source, str(error), damage)
    on_first_rank(lambda: save_directory.refuse_overwriting(args, source))
    for line in fallback_lines(args, source, damage):
        say(line)
    for path in damage:
        stores.drop(path)
    return source


def _check_format(source: Path, args: argparse.Namespace) -> str:
    """Return the format of a checkpoint. Runs with FSDP read all of them.

    Raises:
        ValueError: if it is not complete, or this run does not read it.
    """
    form = format_of(source)
    if form != TORCH_DIST and not args.use_megatron_fsdp:
        raise ValueError(
            f"{source} is in the format {form}, but this run reads torch_dist: convert it by"
            " tools/checkpoint/checkpoint_inspector.py, or give --use-megatron-fsdp"
        )
    return form


def _read(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    source: fsdp_dtensor_checkpoint.Source,
) -> dict[str, Any]:
    """Read ``source`` into the model and the optimizer, and return the rest of it.

    Raises:
        ValueError: names the problems of each rank.
    """
    try:
        module = fsdp_dtensor_checkpoint if args.use_megatron_fsdp else torch_dist_checkpoint
        return module.load(args, state, model, optimizer, source)
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
