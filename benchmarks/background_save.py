# SPDX-License-Identifier: Apache-2.0
"""Time that a save holds training, blocking and in the background, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/background_save.py

Builds a GPT model as pretrain_gpt.py does, with FLAGS after ``--``, gives its optimizer state, and
saves it in turn in both ways, in each format. Prints a table in Markdown of the median seconds,
each with its ratio to the blocking save: the time that training is held (by the save itself and by
the wait for its copies before the optimizer's step) for the first save in the background, whose
memory is allocated in a thread from the end of the first step, and for the others; the time until
it is published; and that of a bare copy of as many bytes on every rank. The copies and the writers
share the processors with the next forward and backward: their times without and with a save are
there too.

The C library writes tensors past the processor's caches from a size on that it computes from them.
Virtual machines of few processors see the whole cache of their host, and never do. Then compare

    GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000 OMP_NUM_THREADS=1 torchrun ...
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.saved_run import FORMATS, VOCABULARY, SavedRun, quiet, seconds
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from megatron.mcore_adapter.run import environment
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain import ranks
from megatron.pretrain.model.model_statistics import number_of_parameters

Bytes = npt.NDArray[np.uint8]

MODEL = [
    *("--num-layers", "3", "--hidden-size", "1024", "--num-attention-heads", "16", "--bf16"),
    *("--async-save", "--use-persistent-ckpt-worker"),
]


_PIECE = 1 << 24
"""Bytes: about the size of the largest tensors of this model."""


def copy_pieces(source: Bytes, target: Bytes) -> None:
    """Copy bytes in pieces as large as tensors are."""
    for begin in range(0, len(source), _PIECE):
        np.copyto(target[begin : begin + _PIECE], source[begin : begin + _PIECE])


def forward_backward(run: SavedRun) -> None:
    """Compute the gradients of a step, and forget them."""
    tokens = torch.randint(VOCABULARY, (1, run.args.seq_length), device=run.device)
    positions = torch.arange(run.args.seq_length, device=run.device)[None]
    run.model[0](tokens, positions, None, labels=tokens).mean().backward()
    finalize_model_grads(run.model)
    run.model[0].zero_grad_buffer()
    run.optimizer.zero_grad()


def measure(form: str, flags: list[str], folder: str, rounds: int) -> None:
    """Print the rows of a format."""
    run = SavedRun([*MODEL, *flags, "--save", folder])
    background = BackgroundSaves(run.args, run.device, quiet, lambda progress: None)
    times: dict[str, list[float]] = {}
    background.step_is_over(run.parts, Progress())
    compute = partial(forward_backward, run)
    compute()
    background.finish_copying()  # forwards are known not to write to weights
    for number in range(1, rounds + 2):
        progress = Progress(iteration=number)
        blocking = partial(checkpointing.save, run.args, run.parts, progress, quiet)
        times.setdefault("blocking", []).append(seconds(blocking))
        times.setdefault("forward and backward", []).append(seconds(compute))
        begin = time.perf_counter()
        held = seconds(partial(background.save, run.parts, progress, folder))
        beside = seconds(compute)
        held += seconds(background.finish_copying)
        name = "background, training held" + (" (first)" if number == 1 else "")
        times.setdefault(name, []).append(held)
        background.wait()
        if number == 1:
            here, there = (np.ones(background.num_staged_bytes, np.uint8) for _ in range(2))
            continue
        times.setdefault("forward and backward after a background save", []).append(beside)
        times.setdefault("background, until published", []).append(time.perf_counter() - begin)
        times.setdefault("bare copy", []).append(seconds(partial(copy_pieces, here, there)))
    background.end()
    background.close()
    millions = number_of_parameters(run.model) / 1e6
    for name, measured in times.items():
        middle, ratio = statistics.median(measured), statistics.median(times["blocking"])
        row = f"| {form}, {millions:.0f} M parameters | {name} |"
        environment.log(f"{row} {middle:.3f} | {middle / ratio:.3f} |")


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, flags: tuple[str, ...]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    environment.log("| checkpoint | save | seconds | ratio |\n|---|---|---|---|")
    for form, own in FORMATS.items():
        # The same on all ranks of one torchrun.
        folder = Path(tempfile.gettempdir()) / f"background_save_{os.getppid()}"
        try:
            measure(form, [*own, *flags], str(folder), rounds)
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    ranks.stop()


if __name__ == "__main__":
    main()
