# SPDX-License-Identifier: Apache-2.0
"""Processor time of saves and loads of one process beside DCP of an FSDP2 model, in one run.

    TMPDIR=/dev/shm OMP_NUM_THREADS=1 python benchmarks/checkpoint_writer.py

It takes models and operations of checkpoint_speed.py, and counts the time that the process' threads
compute, in the program and in the kernel. Unlike seconds it says little about a disk, and other
work on the machine changes it less. Each round takes the operations in another order. Prints a
table in Markdown of medians, least figures and ratios to plain DCP.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.checkpoint_speed import MODEL, OwnCheckpoint, PlainCheckpoint, in_turn
from megatron.pretrain import ranks


def processor_seconds(action: Callable[[], object]) -> float:
    """Return the processor time of this process' threads for ``action``."""
    gc.collect()
    begin = time.process_time()
    action()
    return time.process_time() - begin


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, flags: tuple[str, ...]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    own = OwnCheckpoint([*MODEL, *flags])
    shapes = own.shapes
    plain = PlainCheckpoint(shapes)
    rows: dict[str, tuple[Callable[[Path], None], str]] = {
        "save, plain DCP": (plain.save, "plain"),
        "save, without digests": (own.save_without_digests, "bare"),
        "save, with digests": (own.save, "own"),
        "load, plain DCP": (plain.load, "plain"),
        "load, without digests": (own.load_unverified, "own"),
        "load, with digests": (own.load, "own"),
    }
    measured: dict[str, list[float]] = {title: [] for title in rows}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("plain", "bare"):
                Path(folder, name).mkdir()
            for title in in_turn(list(rows), number):
                action, name = rows[title]
                seconds = processor_seconds(
                    lambda action=action, name=name: action(Path(folder, name))
                )
                if number:  # the first round warms up
                    measured[title].append(seconds)
    print(
        f"{sum(shape.numel() for shape in shapes.values()) / 1e6:.1f} million parameters in"
        f" {len(shapes)} tensors, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| processor time | seconds | ratio | least | ratio |\n|---|---|---|---|---|")
    for title, row in measured.items():
        first = measured[f"{title.split(',')[0]}, plain DCP"]
        middle, least = statistics.median(row), min(row)
        print(
            f"| {title} | {middle:.2f} | {middle / statistics.median(first):.2f} | {least:.2f}"
            f" | {least / min(first):.2f} |"
        )
    ranks.stop()


if __name__ == "__main__":
    main()
