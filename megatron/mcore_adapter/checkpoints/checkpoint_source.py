# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run loads: the newest sound one of --load and --pretrained-checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.commands.formats import TORCH_DIST, open_checkpoint
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.dcp.safe_pickle import RefusedPickleError
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.hugging_face.model_directory import CONFIG, is_model_directory
from megatron.checkpoint.store import directory, stores
from megatron.checkpoint.store.directory import METADATA
from megatron.checkpoint.torch_dist.checkpoint import check_marker
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, read_common
from megatron.mcore_adapter.checkpoints.checkpoint_arguments import stored_arguments
from megatron.mcore_adapter.run.errors import RunError, is_of_machine
from megatron.mcore_adapter.run.first_rank import Log

Damage = dict[Path, str]
"""Path of a checkpoint or a tracker file that is skipped -> description of its damage."""
FILES_OF_ONE = {
    "*.distcp": METADATA,
    COMMON_FILE: METADATA,
    "model*.safetensors*": CONFIG,
    "pytorch_model*.bin*": CONFIG,
}
"""Pattern of files in the directory of one checkpoint or model -> file that must be there too."""
NON_PERSISTENT = "non_persistent"
"""Subdirectory of --save with the checkpoint that --non-persistent-save-interval overwrites."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint to load.

    Attributes:
        path: directory of the checkpoint or the Hugging Face model.
        iteration: iteration in its name, or ``directory.RELEASE``.
        weights_only: True to load the weights alone and start at iteration 0, without the file's
            optimizer state, schedule and progress.
        is_newest: True if it was chosen as the newest sound one, False if --ckpt-step names it.
    """

    path: Path
    iteration: int | str
    weights_only: bool
    is_newest: bool

    def in_words(self, iteration: int) -> str:
        """Describe the checkpoint by its path and by ``iteration``, which was read from it."""
        description = f"{self.path}, iteration {iteration}"
        if iteration != self.iteration:
            description += (
                ", which is not that of its name: it was renamed, or files of another checkpoint"
                " are in it"
            )
        return description


def find_source(
    args: argparse.Namespace,
    log: Log,
    damage: Damage,
) -> CheckpointSource | None:
    """Return the checkpoint to load, None to start from scratch, without reading tensors.

    Checkpoints at a URL are downloaded to this node first. ``args.load`` has precedence, at
    iteration ``ckpt_step`` or the newest one. From ``pretrained_checkpoint`` only weights are
    loaded. Both may be a Hugging Face model, which has only weights.

    Args:
        args: arguments of the run.
        log: prints a line.
        damage: damaged checkpoints to skip, from earlier calls and :func:`pass_over`; those that
            this call skips are added.

    Raises:
        ValueError: there is no such checkpoint, or it is not clear which one is meant.
        RunError: a checkpoint cannot be read on this machine.
    """
    load, pretrained = args.load, args.pretrained_checkpoint
    for root, weights_only in ((load, args.finetune), (pretrained, True)):
        if not root:
            continue
        is_given = root == load and args.ckpt_step is not None
        if is_given:
            iteration: int | str | None = args.ckpt_step
        elif root == load:
            root, iteration = _newer_of_both(args, load, log, damage)
        else:
            iteration = _newest_sound(root, args, damage)
        if iteration is None and is_model_directory(Path(root)):
            return CheckpointSource(
                path=Path(root),
                iteration=directory.RELEASE,
                weights_only=True,
                is_newest=False,
            )
        if iteration is None:
            continue
        path = directory.find(root, iteration)
        if path is None:
            raise ValueError(_absent(root, iteration))
        if is_given and (wrong := _damage_of(path, args)):
            raise ValueError(wrong)
        is_weights = weights_only or iteration == directory.RELEASE
        return CheckpointSource(path, iteration, is_weights, not is_given)
    if pretrained:
        raise ValueError(f"--pretrained-checkpoint {pretrained} has no {directory.TRACKER}")
    if load and (args.exit_on_missing_checkpoint or args.finetune):
        flag = "--exit-on-missing-checkpoint" if args.exit_on_missing_checkpoint else "--finetune"
        raise ValueError(f"{flag}: {load} has no {directory.TRACKER}")
    if load:
        log(
            f"{load} has no {directory.TRACKER}: starting from scratch, which"
            " --exit-on-missing-checkpoint makes an error"
        )
    return None


def pass_over(
    args: argparse.Namespace,
    source: CheckpointSource,
    problem: str,
    damage: Damage,
) -> None:
    """Mark a checkpoint as damaged, so that :func:`find_source` returns the one before it.

    Args:
        args: arguments of the run.
        source: the damaged checkpoint.
        problem: description of the damage.
        damage: mapping to which it is added.

    Raises:
        ValueError: with the problem, if --ckpt-step names this checkpoint, or with
            --no-load-fallback.
    """
    if args.no_load_fallback or not source.is_newest:
        raise ValueError(problem)
    damage[source.path] = problem


def fallback_lines(
    args: argparse.Namespace,
    source: CheckpointSource,
    damage: Damage,
) -> Iterator[str]:
    """Yield a line for each damaged file or checkpoint that was skipped.

    Args:
        args: arguments of the run.
        source: checkpoint that is loaded instead.
        damage: the files and checkpoints that :func:`find_source` has skipped.
    """
    for path, problem in damage.items():
        line = f"{' '.join(problem.split())}. {source.path.name} is loaded instead"
        if path.name != directory.TRACKER and continues(args, source):
            line += ", and the damaged one is replaced when this run saves that iteration"
        yield line


def continues_in(save: str | None, source: CheckpointSource | None) -> bool:
    """Return True if the run resumes from a checkpoint of its --save directory."""
    if not save or source is None or source.weights_only:
        return False
    root = source.path.parent
    return root.resolve() == Path(save).resolve()


def continues(args: argparse.Namespace, source: CheckpointSource | None) -> bool:
    """Return True if the run resumes from one of its own checkpoints, or its non-persistent one."""
    if continues_in(args.save, source):
        return True
    if not is_own(args):
        return False
    return continues_in(non_persistent_root(args, args.save), source)


def is_own(args: argparse.Namespace) -> bool:
    """Return True if --load and --save name the same directory, from which the run resumes."""
    if not args.save or not args.load or args.finetune:
        return False
    load = Path(args.load)
    save = Path(args.save)
    return load.resolve() == save.resolve()


# ---- the newest checkpoint


def non_persistent_root(args: argparse.Namespace, root: str) -> str:
    """Return the directory of the non-persistent checkpoint that belongs to those in ``root``."""
    return args.non_persistent_global_ckpt_dir or str(Path(root) / NON_PERSISTENT)


def _newer_of_both(
    args: argparse.Namespace,
    load: str,
    log: Log,
    damage: Damage,
) -> tuple[str, int | str | None]:
    """Return the directory and the iteration of the newest checkpoint, non-persistent or not.

    As in Megatron-LM, a newer non-persistent one has precedence over the one that the tracker file
    names.

    Args:
        args: arguments of the run.
        load: the directory that --load names.
        log: prints a line.
        damage: as that of :func:`find_source`.

    Raises:
        ValueError: as :func:`_newest_sound`, for one of both directories, if the other one has no
            sound checkpoint either, or with --no-load-fallback.
    """
    extra_root = non_persistent_root(args, load)
    if args.non_persistent_ckpt_type != "global":
        newest = _newest_sound(load, args, damage)
        extra_iterations = directory.iterations(extra_root)  # the newest first
        if extra_iterations and not damage:
            extra = extra_iterations[0]
            if not isinstance(newest, int) or newest < extra:
                log(
                    f"{extra_root} has a newer one, of iteration {extra}, which only"
                    " --non-persistent-ckpt-type global loads"
                )
        return load, newest
    sound: list[tuple[str, int | str]] = []
    problems: list[ValueError] = []
    newest_extra = max(directory.iterations(extra_root), default=1)
    for root in (load, extra_root):
        try:
            iteration = _newest_sound(root, args, damage)
        except ValueError as error:
            problems.append(error)
            continue
        if iteration is not None:
            sound.append((root, iteration))
            if _number(sound[0]) >= newest_extra:
                break  # the non-persistent one is older, and may be damaged
    if problems and (args.no_load_fallback or not sound):
        raise problems[0]
    return max(sound, key=_number, default=(load, None))


def _number(found: tuple[str, int | str]) -> int:
    """Return the iteration that was found, 0 for a release."""
    iteration = found[1]
    if isinstance(iteration, int):
        return iteration
    return 0


def _newest_sound(
    root: str,
    args: argparse.Namespace,
    damage: Damage,
) -> int | str | None:
    """Return the newest sound iteration of a directory, None if it has no checkpoint at all.

    Args:
        root: directory of checkpoints.
        args: arguments of the run.
        damage: as that of :func:`find_source`.

    Raises:
        ValueError: ``root`` is a file, or none of its checkpoints can be loaded, or, with
            --no-load-fallback, not the newest one. The run must not start from scratch then.
    """
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{root} is a file; a directory with checkpoints is expected")
    candidates, problem = _candidates(root)
    if not candidates:
        _refuse_parts(path)
    if problem is not None:
        if args.no_load_fallback or not candidates:
            raise ValueError(problem)
        damage[path / directory.TRACKER] = problem
    refused = []
    for iteration in candidates:
        found = directory.find(root, iteration) or directory.iteration_directory(root, iteration)
        wrong = damage.get(found) or _damage_of(found, args)
        if wrong is None:
            return iteration
        if args.no_load_fallback:
            raise ValueError(wrong)
        damage[found] = wrong
        refused.append(wrong)
    if len(refused) == 1:
        raise ValueError(refused[0])
    if refused:
        raise ValueError(listed(f"{root} has no checkpoint that can be loaded", refused))
    return None


def _refuse_parts(path: Path) -> None:
    """Refuse the directory of a single checkpoint, and that of an incomplete Hugging Face model."""
    if (path / METADATA).is_file():
        raise ValueError(
            f"{path} is itself the directory of one checkpoint: name the directory above it, and"
            " its iteration by --ckpt-step"
        )
    if is_model_directory(path):
        return
    for pattern, needed in FILES_OF_ONE.items():
        for part in sorted(path.glob(pattern)):
            raise ValueError(
                f"{path} has {part.name} but no {needed}: it is the directory of one checkpoint or"
                " model, which is not complete"
            )


def _candidates(root: str) -> tuple[list[int] | list[str], str | None]:
    """Return the iterations that may be loaded, and what is wrong with the tracker file, if any.

    Iterations are sorted, the newest first. If the tracker file is sound, the first one is the one
    that it names: people edit it to go back to an earlier checkpoint.
    """
    present = directory.iterations(root)
    has_release = directory.find(root, directory.RELEASE) is not None
    try:
        tracked = directory.read_tracker(root)
    except ValueError as error:
        problem = str(error)
    else:
        if tracked == directory.RELEASE and has_release:
            return [directory.RELEASE], None
        if tracked in present:
            return [iteration for iteration in present if iteration <= int(tracked)], None
        if tracked is None and not (present or has_release):
            return [], None
        problem = (
            f"{root} has checkpoints ({_checkpoints_in(root)}) but no {directory.TRACKER}, which"
            " names the newest complete one"
        )
        if tracked is not None:
            problem = _absent(root, tracked)
    if present or not has_release:
        return present, problem
    return [directory.RELEASE], problem


def _absent(root: str, iteration: int | str) -> str:
    missing = directory.iteration_directory(root, iteration)
    return f"there is no checkpoint {missing}; in {root} are: {_checkpoints_in(root)}"


def _checkpoints_in(root: str) -> str:
    """Return the names of the checkpoints of a directory."""
    folder = Path(root)
    paths = [*folder.glob("iter_*"), *folder.glob(directory.RELEASE)]
    names = sorted(path.name for path in paths)
    return ", ".join(names) or "none"


def _damage_of(path: Path, args: argparse.Namespace) -> str | None:
    """Describe the damage of a checkpoint that one process finds quickly, None if it is whole.

    It finds missing, truncated and foreign files, changed small files, and unreadable arguments.
    All ranks verify the tensors later.

    Raises:
        RunError: this machine cannot read it, which is no damage.
    """
    stores.fetch(path)
    try:
        StoredCheckpoint(path, verify=not args.no_verify_integrity)
        # Objects have checksums of their own; digests would read files of tensors as a whole.
        opened = open_checkpoint(path, verify=False)
        if opened.format == TORCH_DIST:
            check_marker(path)
            read_common(opened.dcp_files())
        if args.use_checkpoint_args or not args.no_check_checkpoint_args:
            stored_arguments(path)
    except RefusedPickleError:
        return None  # it may be a sound checkpoint of another program: the load reports it
    except ValueError as error:
        return str(error)
    except Exception as error:  # files can hold anything
        if is_of_machine(error):
            raise RunError(f"{path} cannot be read: {error}") from error
        return f"{path} cannot be loaded: {type(error).__name__}: {error}"
    return None
