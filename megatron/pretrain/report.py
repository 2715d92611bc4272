# SPDX-License-Identifier: Apache-2.0
"""What a run tells: lines and a progress bar, TensorBoard, and the curves of its losses."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from megatron.checkpoint.core.progress import terminal_bar
from megatron.pretrain.flops import floating_point_operations
from megatron.pretrain.loss_curve import draw_loss_curves
from megatron.pretrain.ranks import environment_rank

HISTORY = "losses.jsonl"
PICTURE = "loss_curves.png"


class Report:
    """Reports of the first rank; on others every method does nothing.

    Args:
        args: of the run. With ``save``, losses are kept there in ``losses.jsonl`` (one JSON object
            a line, with ``iteration`` and ``train`` or ``validation``) and drawn in
            ``loss_curves.png``.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._speaks = environment_rank() == 0
        self._history: list[dict[str, float]] = []
        self._writer = self._open_tensorboard() if self._speaks and args.tensorboard_dir else None
        self._bar: tqdm | None = None
        self._since = time.perf_counter()
        self._iterations_since = 0
        self._skipped = 0

    def _open_tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(
            self._args.tensorboard_dir, max_queue=self._args.tensorboard_queue_size
        )

    def begin(self) -> None:
        """Training begins, or goes on at ``args.iteration``, with what was reported before that."""
        if not self._speaks:
            return
        if self._args.save and self._args.iteration:
            self._history = self._read_history()
        self._bar = terminal_bar(
            total=self._args.train_iters,
            initial=self._args.iteration,
            unit="it",
            dynamic_ncols=True,
        )
        self._since = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self._speaks:
            tqdm.write(line) if self._bar is not None else print(line, flush=True)

    def step(self, values: dict[str, float | None], skipped: bool) -> None:
        """One training step is over: ``values`` has ``lm loss``, ``learning-rate``, ``grad-norm``, ``batch-size`` and more."""
        if not self._speaks:
            return
        iteration = self._args.iteration
        self._iterations_since += 1
        self._skipped += skipped
        shown = {name: value for name, value in values.items() if value is not None}
        if not skipped:
            self._history.append({"iteration": iteration, "train": shown["lm loss"]})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {shown['lm loss']:.3f}", refresh=False)
            self._bar.update(1)
        if self._writer and iteration % self._args.tensorboard_log_interval == 0:
            self._write(shown)
        if iteration % self._args.log_interval == 0:
            self._line(shown)

    def _line(self, shown: dict[str, float]) -> None:
        args = self._args
        seconds = (time.perf_counter() - self._since) / self._iterations_since
        batch_size = int(shown["batch-size"])
        tokens = batch_size * args.seq_length / seconds
        parts = [
            f"iteration {args.iteration:>{len(str(args.train_iters))}}/{args.train_iters}",
            f"consumed samples: {args.consumed_train_samples}",
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
            f"tokens/s: {tokens:.0f}",
            f"memory: {memory_in_use() / 2**20:.0f} MiB",
        ]
        if args.log_throughput:
            rate = floating_point_operations(args, batch_size) / seconds / args.world_size
            parts.append(f"TFLOP/s per device: {rate / 1e12:.3f}")
        if self._skipped:
            parts.append(f"skipped iterations: {self._skipped}")
        self.say(" | ".join(parts))
        self._since, self._iterations_since, self._skipped = time.perf_counter(), 0, 0

    def _write(self, shown: dict[str, float]) -> None:
        args = self._args
        for name, value in shown.items():
            self._writer.add_scalar(name, value, args.iteration)
        for name in ("lm loss", "learning-rate", "grad-norm"):
            if name in shown:
                self._writer.add_scalar(
                    f"{name} vs samples", shown[name], args.consumed_train_samples
                )
        if args.log_memory_to_tensorboard:
            self._writer.add_scalar("mem-allocated-bytes", memory_in_use(), args.iteration)

    def evaluation(self, loss: float, name: str = "validation") -> None:
        """An evaluation at ``args.iteration``; the mean loss per token of the split ``name``."""
        if not self._speaks:
            return
        iteration, perplexity = self._args.iteration, math.exp(min(20, loss))
        self.say(
            f"{name} at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL:"
            f" {perplexity:.6E}"
        )
        if name == "validation":
            self._history.append({"iteration": iteration, "validation": loss})
        if self._writer:
            self._writer.add_scalar(f"lm loss {name}", loss, iteration)
            self._writer.add_scalar(
                f"lm loss {name} vs samples", loss, self._args.consumed_train_samples
            )
            if self._args.log_validation_ppl_to_tensorboard:
                self._writer.add_scalar(f"lm loss {name} ppl", perplexity, iteration)

    def keep(self) -> None:
        """Write the history and the picture beside the checkpoints."""
        if not (self._speaks and self._args.save):
            return
        directory = Path(self._args.save)
        directory.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(entry) + "\n" for entry in self._history)
        (directory / f"{HISTORY}.new").write_text(lines)
        (directory / f"{HISTORY}.new").replace(directory / HISTORY)
        curves = {
            name: [
                (int(entry["iteration"]), entry[name]) for entry in self._history if name in entry
            ]
            for name in ("train", "validation")
        }
        draw_loss_curves(str(directory / PICTURE), curves["train"], curves["validation"])

    def _read_history(self) -> list[dict[str, float]]:
        path = Path(self._args.save) / HISTORY
        if not path.is_file():
            return []
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return [entry for entry in entries if entry["iteration"] <= self._args.iteration]

    def restart_clock(self) -> None:
        """What happened since the last line (an evaluation, a save) does not count as training time."""
        now = time.perf_counter()
        self._since += now - self._paused_at

    def stop_clock(self) -> None:
        self._paused_at = time.perf_counter()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._writer:
            self._writer.close()


def memory_in_use() -> int:
    """Bytes: the most that was allocated on the GPU, else what this process holds."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss
