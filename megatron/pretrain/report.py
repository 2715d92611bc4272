# SPDX-License-Identifier: Apache-2.0
"""The report of a run: printed lines, a progress bar, TensorBoard, and the curves of its losses."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from tqdm import tqdm

from megatron.checkpoint.core.progress import terminal_bar
from megatron.checkpoint.core.url_staging import with_urls
from megatron.pretrain.flops import training_flops
from megatron.pretrain.loss_curve import draw_loss_curves
from megatron.pretrain.loss_history import HISTORY, LossHistory
from megatron.pretrain.progress import Progress
from megatron.pretrain.ranks import environment_rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PICTURE = "loss_curves.png"
PROGRESS = "progress.txt"
TENSORBOARD = "TensorBoard's file"


class Report:
    """The report of the first rank; other ranks report nothing.

    Args:
        args: of the run. With ``save``, losses are kept there in ``losses.jsonl`` (one JSON object
            a line, with ``iteration`` and ``train`` or ``validation``) and drawn in
            ``loss_curves.png``.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._speaks = environment_rank() == 0
        self._history = LossHistory(Path(args.save or ""))
        self._unwritable: set[str] = set()
        self._writer: SummaryWriter | None = None
        if self._speaks and args.tensorboard_dir:
            self._writer = _open_tensorboard(args.tensorboard_dir, args.tensorboard_queue_size)
        self._bar: tqdm | None = None
        self._line_started = time.perf_counter()
        self._clock_stopped = self._line_started
        self._iterations_since_line = 0
        self._skipped_since_line = 0

    def begin(self, progress: Progress) -> None:
        """Begin to report training, or continue at ``progress`` with the history of the run."""
        if not self._speaks:
            return
        save, load = self._args.save, self._args.load
        if progress.iteration and save and load and Path(save).resolve() == Path(load).resolve():
            with self._decorating(HISTORY):
                note = self._history.resume(progress.iteration)
                if note is not None:
                    self.say(note)
        self._bar = terminal_bar(
            total=self._args.train_iters,
            initial=progress.iteration,
            unit="it",
            dynamic_ncols=True,
        )
        self._line_started = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._speaks:
            return
        line = with_urls(line)
        if self._bar is not None:
            tqdm.write(line)
        else:
            print(line, flush=True)

    def step(self, progress: Progress, values: dict[str, float | None], skipped: bool) -> None:
        """Report one training step.

        Args:
            progress: with that step counted.
            values: ``lm loss`` (nats per token), ``learning-rate``, ``batch-size`` (sequences),
                ``grad-norm``, ``num-zeros``, ``loss-scale`` and ``params-norm``; None for those
                that are not known.
            skipped: the loss scaler skipped the optimizer step.
        """
        if not self._speaks:
            return
        self._iterations_since_line += 1
        self._skipped_since_line += skipped
        shown = {name: value for name, value in values.items() if value is not None}
        if not skipped:
            self._history.entries.append(
                {"iteration": progress.iteration, "train": shown["lm loss"]}
            )
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {shown['lm loss']:.3f}", refresh=False)
            self._bar.update(1)
        if self._writer and progress.is_multiple_of(self._args.tensorboard_log_interval):
            with self._decorating(TENSORBOARD):
                self._add_scalars(self._writer, progress, shown)
        if progress.is_multiple_of(self._args.log_interval):
            self.say(self._line(progress, shown))
            self._line_started = time.perf_counter()
            self._iterations_since_line = self._skipped_since_line = 0

    def _line(self, progress: Progress, shown: dict[str, float]) -> str:
        args = self._args
        seconds = (time.perf_counter() - self._line_started) / self._iterations_since_line
        batch_size = int(shown["batch-size"])
        width = len(str(args.train_iters))
        parts = [
            f"iteration {progress.iteration:>{width}}/{args.train_iters}",
            f"consumed samples: {progress.consumed_train_samples}",
            f"lm loss: {shown['lm loss']:.6E}",
            f"learning rate: {shown['learning-rate']:.4E}",
        ]
        if args.rampup_batch_size:
            parts.append(f"global batch size: {batch_size}")
        for name, label, form in (
            ("grad-norm", "grad norm", ".4f"),
            ("num-zeros", "num zeros", ".0f"),
            ("params-norm", "params norm", ".4f"),
            ("loss-scale", "loss scale", ".1f"),
        ):
            if name in shown:
                parts.append(f"{label}: {shown[name]:{form}}")
        parts += [
            f"step: {seconds * 1000:.1f} ms",
            f"tokens/s: {batch_size * args.seq_length / seconds:.0f}",
            f"memory: {memory_in_use() / 2**20:.0f} MiB",
        ]
        if args.log_throughput:
            flops_per_second = training_flops(args, batch_size) / seconds / args.world_size
            parts.append(f"TFLOP/s per device: {flops_per_second / 1e12:.3f}")
        if self._skipped_since_line:
            parts.append(f"skipped iterations: {self._skipped_since_line}")
        return " | ".join(parts)

    def _add_scalars(
        self, writer: SummaryWriter, progress: Progress, shown: dict[str, float]
    ) -> None:
        iteration, samples = progress.iteration, progress.consumed_train_samples
        for name, value in shown.items():
            writer.add_scalar(name, value, iteration)
        for name in ("lm loss", "learning-rate", "grad-norm"):
            if name in shown:
                writer.add_scalar(f"{name} vs samples", shown[name], samples)
        if self._args.log_memory_to_tensorboard:
            writer.add_scalar("mem-allocated-bytes", memory_in_use(), iteration)

    def evaluation(self, progress: Progress, loss: float, name: str = "validation") -> None:
        """Report an evaluation: the mean loss of the split ``name``, in nats per token."""
        if not self._speaks:
            return
        iteration, perplexity = progress.iteration, math.exp(min(20, loss))
        self.say(
            f"{name} at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL:"
            f" {perplexity:.6E}"
        )
        if name.startswith("validation"):  # validation-0 and so on for several sets
            self._history.entries.append({"iteration": iteration, name: loss})
        if self._writer:
            samples = progress.consumed_train_samples
            with self._decorating(TENSORBOARD):
                self._writer.add_scalar(f"lm loss {name}", loss, iteration)
                self._writer.add_scalar(f"lm loss {name} vs samples", loss, samples)
                if self._args.log_validation_ppl_to_tensorboard:
                    self._writer.add_scalar(f"lm loss {name} ppl", perplexity, iteration)

    def stage(self, progress: Progress) -> None:
        """Write the history that belongs to the checkpoint which is saved next."""
        if self._speaks and self._args.save:
            with self._decorating(HISTORY):
                self._history.stage(progress.iteration)

    def saved(self, progress: Progress) -> None:
        """Report that a checkpoint has been published: keep the history that belongs to it."""
        self.keep()
        if self._speaks and self._args.log_progress:
            with self._decorating(PROGRESS), open(Path(self._args.save) / PROGRESS, "a") as file:
                file.write(
                    f"iteration {progress.iteration}\tsamples {progress.consumed_train_samples}\t"
                    f"operations {progress.num_floating_point_operations_so_far:.4e}\n"
                )

    def keep(self) -> None:
        """Write the history of losses and its plot beside the checkpoints."""
        if not (self._speaks and self._args.save):
            return
        self.keep_history()
        with self._decorating(PICTURE):
            curves = self._history.curve("train"), self._history.curve("validation")
            draw_loss_curves(Path(self._args.save) / PICTURE, *curves)

    def keep_history(self) -> None:
        """Write the history of losses, without its plot: drawing takes longer than a local save."""
        if self._speaks and self._args.save:
            with self._decorating(HISTORY):
                self._history.keep()

    @contextmanager
    def _decorating(self, name: str) -> Iterator[None]:
        """Go on with training where this file cannot be written, and say so once."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritable:
                self._unwritable.add(name)
                self.say(f"{name} cannot be written, training goes on without: {error}")

    def stop_clock(self) -> None:
        """Leave the time until :meth:`restart_clock` out of the time that steps take."""
        self._clock_stopped = time.perf_counter()

    def restart_clock(self) -> None:
        """Count time as training time again."""
        self._line_started += time.perf_counter() - self._clock_stopped

    def end(self) -> None:
        """Close the progress bar and TensorBoard's file."""
        if self._bar is not None:
            self._bar.close()
        if self._writer:
            with self._decorating(TENSORBOARD):
                self._writer.close()


def _open_tensorboard(directory: str, queue_size: int) -> SummaryWriter:
    # Here, because TensorBoard is an optional dependency.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, max_queue=queue_size)


def memory_in_use() -> int:
    """Return bytes: the most that was allocated on the GPU, else what this process uses."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss
