# SPDX-License-Identifier: Apache-2.0
"""The report of a run: printed lines, a progress bar, TensorBoard, W&B, curves of its losses."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from megatron.checkpoint.core.parts import terminal_bar
from megatron.checkpoint.hugging_face.model_directory import CONFIG
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.url_staging import with_urls
from megatron.mcore_adapter.run.environment import environment_rank
from megatron.mcore_adapter.run.report_files import HISTORY, PICTURE, PROGRESS
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain.report.loss_history import LossHistory, draw_loss_curves
from megatron.pretrain.report.quantities import clock, rows, significant, size
from megatron.pretrain.report.run_files import Decorations, write_config
from megatron.pretrain.report.scalars import ScalarWriters
from megatron.pretrain.report.speed import Speed, SpeedClock
from megatron.pretrain.report.timing import PhaseTimes

MAX_ALLOCATIONS = 100_000
"""Allocations and releases that --record-memory-history keeps, the last ones."""
LABELS = {
    "grad-norm": "grad norm",
    "params-norm": "params norm",
    "num-zeros": "num zeros",
    "loss-scale": "loss scale",
}
"""Name of a number of a step -> its label on the log."""
UNKNOWN_PEAK = "no MFU for {}, whose peak is not known: use --device-peak-tflops"


class Report:
    """The report of the first rank; other ranks report nothing but their times.

    With ``args.save`` all arguments are written to ``config.json``, losses to ``losses.jsonl`` and
    ``loss_curves.png``.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._speaks = environment_rank() == 0
        self._history = LossHistory(Path(args.save or ""))
        self._bar: tqdm | None = None
        self._decorations = Decorations(self.log)
        self._scalars = ScalarWriters(args, self._decorations, writes=self._speaks)
        self.times = PhaseTimes(args, self.log)  # of the phases of training, on this rank
        self._clock = SpeedClock(args)
        self._first_iteration = 1
        self._iterations_since_line = 0
        self._skipped_since_line = 0

    def begin(self, progress: Progress) -> None:
        """Begin to report training, or continue at ``progress`` with the history of the run."""
        if self._args.record_memory_history:
            # torch has no public name for its recorder, which it documents under these two.
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        self._first_iteration = progress.iteration + 1
        knows_peak = self._clock.start(progress)
        if not self._speaks:
            return
        if not knows_peak:
            self.log(UNKNOWN_PEAK.format(torch.cuda.get_device_name()))
        save = self._args.save
        load = self._args.load
        if save:
            with self._decorations.guard(CONFIG):
                write_config(Path(save), self._args, progress.iteration)
        if progress.iteration and save and load and Path(save).resolve() == Path(load).resolve():
            with self._decorations.guard(HISTORY):
                note = self._history.resume(progress.iteration)
                if note is not None:
                    self.log(note)
        self._bar = terminal_bar(
            total=self._args.train_iters,
            initial=progress.iteration,
            unit="it",
            dynamic_ncols=True,
        )

    def log(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._speaks:
            return
        with durable.standard_output():
            if self._bar is not None:
                tqdm.write(with_urls(line))
            else:
                print(with_urls(line), flush=True)

    def is_due(self, progress: Progress, is_last: bool = False) -> bool:
        """Return True if a step that has been counted is reported, the same on every rank."""
        args = self._args
        writes = bool(args.tensorboard_dir or args.wandb_project)
        return writes or self._has_line(progress, is_last)

    def _has_line(self, progress: Progress, is_last: bool) -> bool:
        """Return True for the first and the last step of this run, and every ``log_interval``."""
        is_first = progress.iteration == self._first_iteration
        is_last = is_last or progress.iteration >= self._args.train_iters
        return is_first or is_last or progress.is_multiple_of(self._args.log_interval)

    def step(
        self,
        progress: Progress,
        values: dict[str, float | None],
        skipped: bool,
        is_last: bool = False,
    ) -> None:
        """Report one training step that has been counted; a collective if phases are timed.

        Args:
            progress: progress of the run.
            values: ``lm loss`` (nats per token), ``learning-rate``, ``batch-size`` (sequences),
                ``grad-norm``, ``num-zeros``, ``loss-scale`` and ``params-norm``, None for those
                that are not known, and other losses by their names.
            skipped: True if the loss scaler skipped the optimizer step.
            is_last: True if no step follows in this run.
        """
        self._iterations_since_line += 1
        self._skipped_since_line += skipped
        shown = {name: value for name, value in values.items() if value is not None}
        if self._speaks:
            self._add_step(progress, shown, skipped)
        if self._has_line(progress, is_last):
            self._end_interval(progress, shown)

    def _add_step(
        self,
        progress: Progress,
        shown: dict[str, float],
        skipped: bool,
    ) -> None:
        if not skipped:
            self._history.entries.append(
                {"iteration": progress.iteration, "train": shown["lm loss"]}
            )
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {significant(shown['lm loss'], 4)}", refresh=False)
            self._bar.update(1)
        if self._scalars:
            self._scalars.add(scalars_of_step(self._args, shown), progress, tuple(shown))

    def _end_interval(self, progress: Progress, shown: dict[str, float]) -> None:
        """Print the line of the log for the steps since the last one, and write its numbers."""
        speed = self._clock.end_interval(progress)
        memory = memory_in_use()
        if self._speaks and self._args.record_memory_history:
            with self._decorations.guard(self._args.memory_snapshot_path, Exception):
                torch.cuda.memory._dump_snapshot(self._args.memory_snapshot_path)
        if self._speaks:
            self.log(rows(self._parts(progress, shown, speed, memory)))
        numbers = speed.scalars() | {"memory-bytes": memory}
        times = self.times.report(self._iterations_since_line)
        self._scalars.add(numbers | times, progress)
        self._iterations_since_line = 0
        self._skipped_since_line = 0

    def times_of(self, name: str, progress: Progress) -> None:
        """Report the time of a checkpoint; a collective if phases are timed."""
        self._scalars.add(self.times.report(1, name), progress)

    def _parts(
        self,
        progress: Progress,
        shown: dict[str, float],
        speed: Speed,
        memory: int,
    ) -> list[str]:
        """Return the parts of a line: where the run is, how it learns, how fast it is."""
        args = self._args
        width = len(str(args.train_iters))
        parts = [
            f"iteration {progress.iteration:>{width}}/{args.train_iters}",
            f"consumed samples: {progress.consumed_train_samples}",
            f"lm loss: {shown['lm loss']:.6E}",
            f"lr: {shown['learning-rate']:.4E}",
        ]
        for name, label in LABELS.items():
            if name in shown:
                parts.append(f"{label}: {significant(shown[name], 4)}")
        for name, value in shown.items():
            if name.endswith("loss") and name != "lm loss":
                parts.append(f"{name}: {value:.6E}")
        if self._skipped_since_line:
            parts.append(f"skipped iterations: {self._skipped_since_line}")
        return [*parts, *speed.parts(), size(memory), f"ETA {clock(speed.remaining)}"]

    def evaluation(
        self,
        progress: Progress,
        loss: float,
        name: str = "validation",
    ) -> None:
        """Report an evaluation.

        Args:
            progress: progress of the run.
            loss: mean in nats per token.
            name: name of the split: "validation" or "test".
        """
        if not self._speaks:
            return
        iteration = progress.iteration
        perplexity = math.exp(min(20, loss))
        self.log(
            f"{name} at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL:"
            f" {perplexity:.6E}"
        )
        if name == "validation":
            self._history.entries.append({"iteration": iteration, name: loss})
        loss_name = f"lm loss {name}"
        numbers = {loss_name: loss}
        if self._args.log_validation_ppl_to_tensorboard:
            numbers[f"{loss_name} ppl"] = perplexity
        self._scalars.add(numbers, progress, by_samples=(loss_name,))

    def keep_history(self) -> None:
        """Write the history of losses: before a checkpoint is published, so that it has its own."""
        if self._speaks and self._args.save:
            with self._decorations.guard(HISTORY):
                self._history.write()

    def keep(self) -> None:
        """Write the history of losses and its plot into the directory of checkpoints."""
        self.keep_history()
        if self._speaks and self._args.save:
            with self._decorations.guard(PICTURE):
                train = self._history.curve("train")
                valid = self._history.curve("validation")
                draw_loss_curves(Path(self._args.save, PICTURE), train, valid)

    def saved(self, progress: Progress) -> None:
        """Report that a checkpoint has been published."""
        self.keep()
        if self._speaks and self._args.log_progress:
            path = Path(self._args.save) / PROGRESS
            with self._decorations.guard(PROGRESS), durable.file_at(path).open("a") as file:
                file.write(
                    f"iteration {progress.iteration}\tsamples {progress.consumed_train_samples}\t"
                    f"operations {progress.num_floating_point_operations_so_far:.4e}\n"
                )

    def stop_clock(self) -> None:
        """Leave the time until :meth:`restart_clock` out of the time that steps take."""
        self.times.stop_interval()
        self._clock.stop()

    def restart_clock(self) -> None:
        """Count time as training time again."""
        self.times.resume_interval()
        self._clock.restart()

    def end(self) -> None:
        """Close the progress bar and TensorBoard's file."""
        if self._bar is not None:
            self._bar.close()
        self._scalars.close()
        if self._args.record_memory_history:
            torch.cuda.memory._record_memory_history(enabled=None)


def scalars_of_step(args: argparse.Namespace, shown: dict[str, float]) -> dict[str, float]:
    """Return the numbers of a step for TensorBoard, as the flags ask for them."""
    numbers = dict(shown)
    if not args.log_loss_scale_to_tensorboard:
        numbers.pop("loss-scale", None)
    if args.log_memory_to_tensorboard:
        numbers |= memory_numbers()
    return numbers


def memory_numbers() -> dict[str, float]:
    """Return the bytes in use, by the names that Megatron-LM gives them."""
    if not torch.cuda.is_available():
        return {"mem-allocated-bytes": memory_in_use()}
    statistics = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": statistics["reserved_bytes.all.current"],
        "mem-allocated-bytes": statistics["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": statistics["allocated_bytes.all.peak"],
        "mem-allocated-count": statistics["allocation.all.current"],
    }


def memory_in_use() -> int:
    """Return bytes: the most that was allocated on the GPU, else what this process uses."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss
