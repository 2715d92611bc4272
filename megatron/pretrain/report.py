# SPDX-License-Identifier: Apache-2.0
"""The report of a run: printed lines, a progress bar, TensorBoard, and the curves of its losses."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from tqdm import tqdm

from megatron.checkpoint.core.progress import terminal_bar
from megatron.pretrain.flops import training_flops
from megatron.pretrain.loss_curve import draw_loss_curves
from megatron.pretrain.progress import Progress
from megatron.pretrain.ranks import environment_rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HISTORY = "losses.jsonl"
PICTURE = "loss_curves.png"


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
        self._history: list[dict[str, float]] = []
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
        if self._args.save and progress.iteration:
            self._history = _read_history(Path(self._args.save) / HISTORY, progress.iteration)
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
            self._history.append({"iteration": progress.iteration, "train": shown["lm loss"]})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {shown['lm loss']:.3f}", refresh=False)
            self._bar.update(1)
        if self._writer and progress.is_multiple_of(self._args.tensorboard_log_interval):
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
        if name == "validation":
            self._history.append({"iteration": iteration, "validation": loss})
        if self._writer:
            samples = progress.consumed_train_samples
            self._writer.add_scalar(f"lm loss {name}", loss, iteration)
            self._writer.add_scalar(f"lm loss {name} vs samples", loss, samples)
            if self._args.log_validation_ppl_to_tensorboard:
                self._writer.add_scalar(f"lm loss {name} ppl", perplexity, iteration)

    def keep(self) -> None:
        """Write the history of losses and its plot beside the checkpoints."""
        if not (self._speaks and self._args.save):
            return
        directory = Path(self._args.save)
        directory.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(entry) + "\n" for entry in self._history)
        (directory / f"{HISTORY}.new").write_text(lines)
        (directory / f"{HISTORY}.new").replace(directory / HISTORY)
        draw_loss_curves(directory / PICTURE, self._curve("train"), self._curve("validation"))

    def _curve(self, name: str) -> list[tuple[int, float]]:
        return [(int(entry["iteration"]), entry[name]) for entry in self._history if name in entry]

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
            self._writer.close()


def _open_tensorboard(directory: str, queue_size: int) -> SummaryWriter:
    # Here, because TensorBoard is an optional dependency.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, max_queue=queue_size)


def _read_history(path: Path, last_iteration: int) -> list[dict[str, float]]:
    """Read the losses of the run that is resumed, up to ``last_iteration``."""
    if not path.is_file():
        return []
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry["iteration"] <= last_iteration]


def memory_in_use() -> int:
    """Return bytes: the most that was allocated on the GPU, else what this process uses."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss
