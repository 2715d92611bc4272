# SPDX-License-Identifier: Apache-2.0
"""Save and load a run: weights, optimizer, schedule, random state, progress.

A checkpoint is complete or absent: it is written under another name, renamed, and then named by the
tracker file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.commands.formats import FSDP_DTENSOR, HUGGING_FACE, TORCH_DIST
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.dcp.stored_metadata import metadata_read_once
from megatron.checkpoint.store import directory, stores
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints import save_directory, url_saves
from megatron.mcore_adapter.checkpoints.checkpoint_arguments import check_arguments
from megatron.mcore_adapter.checkpoints.checkpoint_format import (
    CheckpointFormat,
    attempt,
    cause_of,
    collector_paused,
)
from megatron.mcore_adapter.checkpoints.checkpoint_source import (
    CheckpointSource,
    Damage,
    fallback_lines,
    find_source,
    pass_over,
)
from megatron.mcore_adapter.checkpoints.converted_source import format_of
from megatron.mcore_adapter.checkpoints.entered_together import entered_together
from megatron.mcore_adapter.checkpoints.fsdp_dtensor_format import FsdpDtensorFormat
from megatron.mcore_adapter.checkpoints.fsdp_torch_dist import FsdpTorchDistFormat
from megatron.mcore_adapter.checkpoints.saved_state import (
    StateDict,
    load_random_state,
    load_schedule,
    rates_of,
    run_state,
)
from megatron.mcore_adapter.checkpoints.torch_dist_format import TorchDistFormat
from megatron.mcore_adapter.core_optimizers import make_optimizer_state
from megatron.mcore_adapter.precision_aware import unscaled_moments
from megatron.mcore_adapter.run.errors import RunError, is_of_machine
from megatron.mcore_adapter.run.first_rank import Log, on_first_rank, wait_until_visible
from megatron.mcore_adapter.run.run_state import Progress, TrainedParts

FORMATS: dict[tuple[bool, str], CheckpointFormat] = {
    (True, FSDP_DTENSOR): FsdpDtensorFormat(),
    (True, TORCH_DIST): FsdpTorchDistFormat(),
    (False, TORCH_DIST): TorchDistFormat(),
}
"""(True with FSDP, name of a format) -> its implementation, which keeps the plans of saves."""


def format_for(args: argparse.Namespace) -> CheckpointFormat:
    """Return the format in which a run saves and loads."""
    return FORMATS[args.use_megatron_fsdp, args.ckpt_format]


# ---- save


def save(
    args: argparse.Namespace,
    parts: TrainedParts,
    progress: Progress,
    log: Log,
    root: str | None = None,
) -> None:
    """Write the state of the run into a new checkpoint and publish it; a collective.

    Args:
        args: arguments of the run.
        parts: model, optimizer and schedule.
        progress: progress of the run, whose iteration names the checkpoint.
        log: prints a line on the first rank.
        root: directory of checkpoints; None for ``args.save``.

    Raises:
        RunError: on every rank, if any rank could not write. The checkpoint is removed then.
    """
    root = root or args.save
    content = collect(args, parts, progress)
    target = prepare(root, progress.iteration)
    problems = write(args, content, target)
    conclude(args=args, root=root, progress=progress, problems=problems, log=log)


def collect(
    args: argparse.Namespace,
    parts: TrainedParts,
    progress: Progress,
) -> StateDict:
    """Return the content of a checkpoint; its tensors share storage with model and optimizer.

    This is a collective.

    Args:
        args: arguments of the run. With ``no_save_optim`` optimizer and schedule are left out.
        parts: model, optimizer and schedule.
        progress: progress of the run.

    Raises:
        RunError: on every rank, if any rank has failed.
    """
    if args.no_save_optim:
        parts = TrainedParts(parts.model)
    state = run_state(args, progress, parts.scheduler, with_rng=not args.no_save_rng)
    content: StateDict = {}
    with ExitStack() as stack:
        unscaled = unscaled_moments(parts.optimizer)
        problems = attempt(lambda: stack.enter_context(unscaled))
        if not problems:
            problems = attempt(lambda: content.update(format_for(args).collect(args, state, parts)))
    if problems:
        raise _not_written(progress.iteration, problems)
    return content


def prepare(root: str, iteration: int) -> Path:
    """Make the empty directory in which a checkpoint is written; a collective.

    Raises:
        RunError: on every rank, if it cannot be made on any node.
    """
    _on_first_rank(lambda: directory.prepare(root, iteration), "cannot prepare the checkpoint")
    staging = directory.staging_directory(root, iteration)
    if stores.is_staged(root):
        problems = attempt(lambda: staging.mkdir(parents=True, exist_ok=True))  # on other nodes
        if problems:
            raise _not_written(iteration, problems)
    return staging


def write(
    args: argparse.Namespace,
    content: StateDict,
    target: Path,
) -> list[str]:
    """Write content into a directory, sign it, and upload it if it belongs to a URL; a collective.

    Args:
        args: arguments of the run.
        content: result of :func:`collect`, or a copy of it.
        target: directory that :func:`prepare` has returned.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    problems = format_for(args).write(args, content, target)
    if not problems and stores.is_staged(target):
        problems = url_saves.upload(target)
    return problems


def conclude(
    args: argparse.Namespace,
    root: str,
    progress: Progress,
    problems: list[str],
    log: Log,
) -> None:
    """Publish a checkpoint that is written, or discard it if there are problems; a collective.

    Args:
        args: arguments of the run.
        root: directory of checkpoints. Under another one than ``args.save`` only the newest
            checkpoint is kept.
        progress: progress of the run at the iteration of the checkpoint.
        problems: problems of all ranks, the same on every rank.
        log: prints a line on the first rank.

    Raises:
        RunError: on every rank, if there are problems.
    """
    iteration = progress.iteration
    interval = args.save_retain_interval
    is_at_url = stores.is_staged(root)
    location = url_saves if is_at_url else directory
    try:
        if problems:
            _on_first_rank(lambda: location.discard(root, iteration), "cannot clean up")
            raise _not_written(iteration, problems)
        _on_first_rank(lambda: location.publish(root, iteration), "cannot publish the checkpoint")
    finally:
        if is_at_url:  # every rank has staged files
            directory.discard(root, iteration)
    if root != args.save:
        _on_first_rank(lambda: directory.retain(root, None, iteration), "cannot clean up")
    elif interval:
        _on_first_rank(lambda: location.retain(root, interval, iteration), "cannot clean up")
    log(
        f"saved checkpoint of iteration {iteration} to"
        f" {directory.iteration_directory(root, iteration)}"
    )


def _not_written(iteration: int, problems: list[str]) -> RunError:
    return RunError(
        f"the checkpoint of iteration {iteration} was not written:\n" + "\n".join(problems)
    )


def _on_first_rank(action: Callable[[], Any], problem: str) -> None:
    """Run ``action`` on the first rank, and raise its error as a RunError on every rank."""
    try:
        on_first_rank(action)
    except OSError as error:
        raise RunError(f"{problem}: {error}") from error


# ---- load


@metadata_read_once()
@collector_paused()
def load(
    args: argparse.Namespace,
    parts: TrainedParts,
    log: Log,
) -> Progress:
    """Load the checkpoint of ``--load`` or ``--pretrained-checkpoint``, and return its progress.

    A collective. All counters of the progress are 0 if there is no checkpoint, or if only weights
    are loaded.

    Args:
        args: arguments of the run.
        parts: model, optimizer and schedule, into which it is loaded.
        log: prints a line on the first rank.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, or none that is sound, or it is
            of another model or in a format that this run does not read.
        RunError: on the ranks that could read it, if another one could not.
    """
    source = choose_source(args, log)
    progress = Progress()
    if source is not None:
        on_first_rank(lambda: save_directory.refuse_overwriting(args, source))
        with entered_together():
            progress = load_source(source, args, parts, log)
    for line in on_first_rank(lambda: save_directory.settle(args, source)):
        log(line)
    return progress


def load_source(
    source: CheckpointSource,
    args: argparse.Namespace,
    parts: TrainedParts,
    log: Log,
) -> Progress:
    """Load a checkpoint that :func:`choose_source` has found, and return its progress.

    A collective.

    Args:
        source: the checkpoint.
        args: arguments of the run.
        parts: model, optimizer and schedule, into which it is loaded.
        log: prints a line on the first rank.

    Raises:
        ValueError: on every rank, if it is of another model or in a format that this run does not
            read.
        RunError: on the ranks that could read it, if another one could not.
    """
    path = source.path
    optimizer = parts.optimizer
    with_optimizer = optimizer is not None and not (args.no_load_optim or source.weights_only)
    with_rng = not (args.no_load_rng or source.weights_only)
    if not args.no_check_checkpoint_args:
        check_arguments(path, args, log)
    wanted = TrainedParts(parts.model)
    if with_optimizer:
        wanted = parts
    state = run_state(args, Progress(), wanted.scheduler, with_rng)
    own_rates: list[dict[str, Any]] = []
    if with_optimizer:
        own_rates = rates_of(parts.scheduler)  # the load replaces them
    loaded = _read(args=args, state=state, parts=wanted, source=path, log=log)

    if with_optimizer:
        load_schedule(parts.scheduler, loaded["opt_param_scheduler"], own_rates)
    elif optimizer is not None:
        optimizer.reload_model_params()  # copies the loaded weights to its fp32 weights
    if with_rng:
        load_random_state(loaded.get("rng_state"), path, log)
    _report_other_vocabulary(loaded["args"], args, path, log)
    if stores.is_staged(path):
        agree([])  # every rank has read the copy
        stores.drop(path)
    if source.weights_only:
        log(f"loaded the weights of {path}")
        return Progress()
    progress = Progress.of_checkpoint(loaded)
    log(f"loaded {source.in_words(progress.iteration)}")
    return progress


def _report_other_vocabulary(
    saved: argparse.Namespace,
    args: argparse.Namespace,
    path: Path,
    log: Log,
) -> None:
    saved_rows = getattr(saved, "padded_vocab_size", None)
    if saved_rows not in (None, args.padded_vocab_size):
        log(
            f"{path} has {saved_rows} rows of vocabulary, this run {args.padded_vocab_size}: rows"
            " of padding take part in the loss, which is another one now; --padded-vocab-size"
            f" {saved_rows} keeps it"
        )


def choose_source(args: argparse.Namespace, log: Log) -> CheckpointSource | None:
    """Return the checkpoint to load, the same on every rank; None to start from scratch.

    A collective. If the newest checkpoint is damaged, it is the newest sound one before it.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, or none that is sound.
        RunError: on every rank, if a rank could not read it.
    """
    damage: Damage = {}
    while True:
        source = url_saves.found_for_all(lambda: find_source(args, log, damage))
        if source is None:
            return None
        path = source.path
        wait_until_visible(path)
        form = on_first_rank(partial(_check_format, path, args))
        try:
            if form != HUGGING_FACE:  # which has neither a manifest nor checksums
                check_files(path, verify=not args.no_verify_integrity)
            break
        except ValueError as error:
            pass_over(args, source, str(error), damage)
    for line in fallback_lines(args, source, damage):
        log(line)
    for path in damage:
        stores.drop(path)
    return source


def _check_format(source: Path, args: argparse.Namespace) -> str:
    """Return the format of a checkpoint.

    Raises:
        ValueError: this run does not read the format. Runs with FSDP read all of them.
    """
    form = format_of(source)
    if form != TORCH_DIST and not args.use_megatron_fsdp:
        raise ValueError(
            f"{source} is in the format {form}, but this run reads torch_dist: convert it by"
            " tools/checkpoint/checkpoint_inspector.py, or give --use-megatron-fsdp"
        )
    return form


def check_files(source: Path, verify: bool) -> None:
    """Check the files of a checkpoint before anything of it is loaded; a collective.

    Sizes are always compared. With ``verify`` so are digests, or checksums where there is no
    manifest. Every rank reads its share of the files.

    Raises:
        ValueError: on every rank, naming the damaged files and the tensors in them.
        RunError: on every rank, if a rank could not read them.
    """
    refused, damaged, unread = [], [], []
    share = url_saves.reading_share(source)
    try:
        damaged = StoredCheckpoint(source, verify).damaged_files(*share)
    except ValueError as error:
        refused = [str(error)]
    except Exception as error:  # files can hold anything, and the other ranks wait
        if is_of_machine(error):
            unread = [f"{source} cannot be read on rank {dist.get_rank()}: {error}"]
        else:
            refused = [f"{source} cannot be loaded: {type(error).__name__}: {error}"]
    unread = agree(unread)
    refused = agree(refused)
    damaged = agree(damaged)
    if unread:
        raise RunError("\n".join(unread))
    if refused:
        raise ValueError(refused[0])
    if damaged:
        raise ValueError(listed(f"{source} is damaged, nothing of it was loaded", damaged))


def _read(
    args: argparse.Namespace,
    state: StateDict,
    parts: TrainedParts,
    source: Path,
    log: Log,
) -> StateDict:
    """Read ``source`` into the model and the optimizer, and return the rest of it.

    Args:
        args: arguments of the run.
        state: everything but weights and optimizer, as a run without a checkpoint has it.
        parts: model, and the optimizer if its state is loaded.
        source: directory of the checkpoint.
        log: prints a line on the first rank.

    Raises:
        ValueError: it does not fit this run, lacks an entry, or is damaged.
    """
    if parts.optimizer is not None:
        make_optimizer_state(parts.optimizer)  # moments that have scales are read without them
    try:
        with unscaled_moments(parts.optimizer, is_load=True):
            loaded = format_for(args).load(
                args=args, state=state, parts=parts, source=source, log=log
            )
        for key in state.keys() & {"args", "iteration", "opt_param_scheduler"}:
            loaded[key]  # raises KeyError if the file lacks it
        return loaded
    except KeyError as error:
        raise ValueError(f"{source} cannot be loaded: it lacks {error}") from error
    except FileNotFoundError as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    except CheckpointException as error:
        lines = [f"{source} cannot be loaded, its files are damaged or of another run:"]
        lines += [str(cause_of(error, rank)) for rank in sorted(error.failures)]
        raise ValueError("\n  ".join(lines)) from error
