# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM's loop in the format fsdp_dtensor, by the code that both loops share.

They are complete or absent, signed, and verified when they are loaded; a load takes any format, and
falls back to the newest sound checkpoint. The loop's lines, its counters and its calls of other
packages around a save and a load remain. Runs without ``--use-megatron-fsdp``, and checkpoints that
the shared code does not have (on the disks of nodes, releases), are handled by the loop itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.checkpoint.commands.formats import FSDP_DTENSOR
from megatron.checkpoint.dcp.stored_metadata import metadata_read_once
from megatron.checkpoint.fsdp_dtensor.keys import CHECKPOINT_VERSION
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints import checkpointing, save_directory
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from megatron.mcore_adapter.checkpoints.checkpoint_arguments import stored_arguments
from megatron.mcore_adapter.checkpoints.checkpoint_format import collector_paused
from megatron.mcore_adapter.checkpoints.checkpoint_source import (
    Damage,
    find_source,
    non_persistent_root,
)
from megatron.mcore_adapter.checkpoints.entered_together import entered_together
from megatron.mcore_adapter.megatron_lm.loaded_names import Arguments, Function, with_original
from megatron.mcore_adapter.releases import tested
from megatron.mcore_adapter.run.environment import log
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.first_rank import on_first_rank
from megatron.mcore_adapter.run.run_state import Progress, TrainedParts
from megatron.mcore_adapter.watch import position


class LoopCheckpoints:
    """Replacements of the loop's functions on checkpoints, with the state between their calls.

    Args:
        modules: ``checkpointing``, ``training`` and ``initialize`` of ``megatron.training``.
        own_arguments: values of :data:`~...loop_flags.OWN_FLAGS`, which the loop does not know.
    """

    def __init__(
        self,
        modules: tuple[ModuleType, ModuleType, ModuleType],
        own_arguments: Mapping[str, object],
    ):
        self._loop, self._training, self._initialize = modules
        self._defaults = {"softmax_scale": None, **own_arguments}
        self._parts: TrainedParts | None = None
        self._saves: BackgroundSaves | None = None
        self._roots: set[Path] = set()  # locked
        self._locks = ExitStack()
        self._hook: RemovableHandle | None = None

    def replacements(self) -> Iterator[tuple[object, object]]:
        """Yield pairs of a function of the loop and its replacement."""
        for owner, name, replacement in (
            (self._loop, "save_checkpoint", self.save),
            (self._loop, "load_checkpoint", self.load),
            (self._loop, "_load_base_checkpoint", self.load_base),
            (self._training, "maybe_finalize_async_save", self.finalize),
            (self._initialize, "init_persistent_async_worker", self.start_worker),
            (self._training, "setup_model_and_optimizer", self.set_up),
        ):
            original = getattr(owner, name, None)
            if original is not None:  # loops before 0.17 may lack some
                yield original, with_original(original, replacement)

    def close(self) -> None:
        """End saves in the background, and give the directories of checkpoints back."""
        if self._saves is not None:
            self._saves.close()
            self._saves = None
        if self._hook is not None:
            self._hook.remove()
        self._unlock()

    # ---- the loop's functions; each gets the original, and its arguments by name

    def set_up(self, original: Function, given: Arguments) -> Any:
        """Build model, optimizer and schedule, and keep them for saves in the background.

        The directory of checkpoints is locked before: a second run in it would continue from the
        same checkpoint.
        """
        args = self._args()
        if is_shared(args) and args.save and not args.skip_train:
            self._lock(args.save)
        model, optimizer, scheduler = original(**given)
        self._parts = TrainedParts(model, optimizer, scheduler)
        return model, optimizer, scheduler

    def save(self, original: Function, given: Arguments) -> None:
        """Save a checkpoint, as ``save_checkpoint`` does; a collective.

        Raises:
            RunError: on every rank, if any rank could not write; nothing is left behind then.
        """
        args = self._args()
        is_non_persistent = given.get("non_persistent_ckpt", False)
        is_local = is_non_persistent and args.non_persistent_ckpt_type == "local"
        if not is_shared(args) or is_local or given.get("release", False):
            original(**given)
            return
        iteration = given["iteration"]
        parts = TrainedParts(
            model=given["model"],
            optimizer=given["optimizer"],
            scheduler=given["opt_param_scheduler"],
        )
        progress = Progress(
            iteration=iteration,
            consumed_train_samples=args.consumed_train_samples,
            skipped_train_samples=args.skipped_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
            num_floating_point_operations_so_far=given["num_floating_point_operations_so_far"],
        )
        root = args.save
        if is_non_persistent:
            root = non_persistent_root(args, args.save)
        self._loop.ft_integration.on_checkpointing_start()
        metrics = self._loop.on_save_checkpoint_start(args.async_save)
        self._loop.maybe_save_dataloader_state(
            given.get("train_data_iterator"), iteration, getattr(args, "dataloader_save", None)
        )
        self._lock(root)
        with position.during(position.SAVING):
            if args.async_save:
                self._background().save(parts, progress, root)
            else:
                checkpointing.save(args, parts, progress, log, root)
                self._report_published(root, progress)
        if self._loop.is_last_rank():
            self._loop.on_save_checkpoint_success(metrics, args.async_save)
        self._loop.ft_integration.on_checkpointing_end(is_async_finalization=False)

    def load(self, original: Function, given: Arguments) -> Any:
        """Load a checkpoint, as ``load_checkpoint`` does; a collective.

        Returns:
            The iteration, and the floating-point operations so far.

        Raises:
            RunError: on every rank, if there is no such checkpoint, or none that is sound, or it is
                of another model; and if a rank could not read it.
        """
        args = self._args()
        if not is_shared(args) or args.non_persistent_ckpt_type == "local":
            return original(**given)
        try:
            return self._load(args, given)
        except (ValueError, OSError) as error:
            raise RunError(str(error)) from error

    def _load(self, args: argparse.Namespace, given: Arguments) -> tuple[int, float]:
        parts = TrainedParts(
            model=given["ddp_model"],
            optimizer=given["optimizer"],
            scheduler=given["opt_param_scheduler"],
        )
        with metadata_read_once(), collector_paused():
            source = checkpointing.choose_source(args, log)
            if source is None:
                return 0, 0
            with entered_together():
                progress = checkpointing.load_source(source, args, parts, log)
        if args.save:
            on_first_rank(lambda: save_directory.follow(args.save, source))
        loop_args = self._loop.get_args()  # `args` is a copy
        target = getattr(loop_args, "override_ckpt_iteration", None)  # since 0.19
        if target is not None:
            progress = at_iteration(progress, target, source.path, loop_args.global_batch_size)
        if source.weights_only:
            loop_args.finetune = True
        else:
            loop_args.consumed_train_samples = progress.consumed_train_samples
            loop_args.skipped_train_samples = progress.skipped_train_samples
            loop_args.consumed_valid_samples = progress.consumed_valid_samples
            update_num_microbatches(consumed_samples=progress.consumed_train_samples, verbose=True)
        self._loop.set_checkpoint_version(CHECKPOINT_VERSION)
        if hasattr(self._loop, "set_loaded_iteration"):
            self._loop.set_loaded_iteration(progress.iteration)
        log(
            f"  successfully loaded checkpoint from {source.path.parent} at iteration"
            f" {progress.iteration}"
        )
        if self._loop.is_last_rank():
            self._loop.wandb_utils.on_load_checkpoint_success(
                str(source.path), str(source.path.parent)
            )
        if progress.iteration:
            self._loop.ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
        return progress.iteration, progress.num_floating_point_operations_so_far

    def load_base(self, original: Function, given: Arguments) -> Any:
        """Return the arguments in the checkpoint that would be loaded, for ``rank0``.

        Ranks call it before there is a process group, to complete their command lines.
        """
        args = self._args(given["args"])
        if not is_shared(args) or not given.get("rank0", False):
            return original(**given)
        absent = None, "", False, None
        if not given["load_dir"]:
            return absent
        if given["load_dir"] == args.pretrained_checkpoint:
            args.load = None
        else:
            args.pretrained_checkpoint = None
        damage: Damage = {}
        try:
            source = find_source(args, log, damage)
        except (ValueError, OSError) as error:
            tested.end_program(f"error: {error}", 1)
        if source is None:
            return absent
        stored = stored_arguments(source.path)
        content: dict[str, Any] = {
            "iteration": source.iteration,
            "checkpoint_version": CHECKPOINT_VERSION,
        }
        if stored is not None:
            content["args"] = stored
        form = self._loop.CheckpointType.FSDP_DTENSOR
        is_release = source.iteration == directory.RELEASE
        return content, str(source.path), is_release, form

    def start_worker(self, original: Function, given: Arguments) -> None:
        """Start the loop's process for its own saves alone: those of this project have others."""
        if not is_shared(self._args()):
            original(**given)

    def finalize(self, original: Function, given: Arguments) -> None:
        """Publish a checkpoint of ``--async-save`` that all ranks have written; a collective.

        The loop calls it before every iteration, and at the end of training.
        """
        args = self._args()
        if not is_shared(args):
            original(**given)
            return
        if not args.async_save:
            if given.get("terminate", False):
                self._unlock()
            return
        saves = self._background()
        with position.during(position.SAVING):
            if given.get("blocking", False):
                saves.wait()
            else:
                saves.vote()
                assert self._parts is not None, "the loop has set the model up"
                if args.curr_iteration > args.iteration:  # the optimizer has its state
                    saves.step_is_over(self._parts, Progress(args.curr_iteration))
            if given.get("terminate", False):
                saves.end()
                self._unlock()

    # ---- parts of them

    def _args(self, args: argparse.Namespace | None = None) -> argparse.Namespace:
        """Return a copy of the loop's arguments with those that it does not know."""
        if args is None:
            args = self._loop.get_args()
        values = {**self._defaults, **vars(args)}
        return argparse.Namespace(**values)

    def _lock(self, root: str) -> None:
        """Lock a directory of checkpoints for this run, and remove the files of killed saves."""
        path = Path(root).absolute()
        if path not in self._roots:
            self._roots.add(path)
            lock = save_directory.locked_and_tidy(path, log)
            on_first_rank(lambda: self._locks.enter_context(lock))

    def _unlock(self) -> None:
        self._locks.close()
        self._roots.clear()

    def _background(self) -> BackgroundSaves:
        """Return the saves in the background, which begin with the first call; a collective."""
        if self._saves is None:
            assert self._parts is not None, "the loop has set the model up"
            first_parameter = next(self._parts.model[0].parameters())
            device = first_parameter.device
            args = self._args()
            saves = BackgroundSaves(
                args, device, log, lambda progress: self._report_published(args.save, progress)
            )
            self._hook = register_optimizer_step_pre_hook(lambda *_: saves.finish_copying())
            self._saves = saves
        return self._saves

    def _report_published(self, root: str, progress: Progress) -> None:
        """Report that a checkpoint is complete, as the loop does."""
        iteration = progress.iteration
        log(f"  successfully saved checkpoint from iteration {iteration:7d} to {root}")
        path = directory.iteration_directory(root, iteration)
        if self._loop.is_last_rank():
            self._loop.wandb_utils.on_save_checkpoint_success(
                str(path), str(Path(root, directory.TRACKER)), root, iteration
            )


def at_iteration(
    progress: Progress,
    iteration: int,
    source: Path,
    batch_size: int,
) -> Progress:
    """Return the progress of a run as if it had come to another iteration, with equal batches.

    Args:
        progress: progress in the checkpoint.
        iteration: the other one.
        source: the directory of the checkpoint, whose arguments have its batch size.
        batch_size: sequences in a global batch of this run.

    Raises:
        RunError: if the batches of the checkpoint had another size.
    """
    saved = getattr(stored_arguments(source), "global_batch_size", batch_size)
    if saved != batch_size:
        raise RunError(
            f"--override-ckpt-iteration {iteration}: {source} has a global batch size of {saved},"
            f" this run {batch_size}, so the place in the data is not known: give"
            f" --global-batch-size {saved}"
        )
    return replace(
        progress,
        iteration=iteration,
        consumed_train_samples=iteration * batch_size,
        skipped_train_samples=0,
    )


def is_shared(args: argparse.Namespace) -> bool:
    """Return True for a run whose checkpoints are those of both loops."""
    return bool(args.use_megatron_fsdp) and args.ckpt_format == FSDP_DTENSOR
