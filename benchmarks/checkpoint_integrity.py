# SPDX-License-Identifier: Apache-2.0
"""Time that digests and checksums add to loads and saves of checkpoints, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/checkpoint_integrity.py

Builds a GPT model as pretrain_gpt.py does, with FLAGS after ``--``, saves it in each format, and
loads it in turn with --no-verify-integrity, with the manifest, and as checkpoints of other programs
without one. Files are read from memory, where the save has left them, and from the disk. Prints a
table in Markdown of the median seconds, each with its ratio to the load that verifies nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import click
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.saved_run import FORMATS, SavedRun, quiet, seconds
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.checkpoints.checkpoint_format import sign
from megatron.mcore_adapter.run import environment
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain import ranks
from megatron.pretrain.arguments.check import FrozenArguments

MODEL = ["--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "16", "--bf16"]


def forget(source: Path) -> None:
    """Drop the files from the memory of the machine, so that they are read from the disk."""
    for path in source.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class CheckpointOfModel(SavedRun):
    """A run and the folder in which it saves, in one format."""

    def __init__(self, flags: list[str], folder: str):
        super().__init__([*MODEL, *flags, "--save", folder, "--load", folder])
        self.source = directory.iteration_directory(folder, 1)

    def save(self) -> None:
        """Save with the manifest."""
        checkpointing.save(self.args, self.parts, Progress(iteration=1), quiet)

    def load(self, verify: bool) -> None:
        """Load what was saved."""
        args = FrozenArguments(self.args, no_verify_integrity=not verify)
        self.scheduler.num_steps = 0
        checkpointing.load(args, self.parts, quiet)


def measure(form: str, checkpoint: CheckpointOfModel, rounds: int) -> None:
    """Print the rows of a format."""
    times: dict[str, list[float]] = {}
    manifest = checkpoint.source / MANIFEST
    for _ in range(rounds):
        times.setdefault("save", []).append(seconds(checkpoint.save))
        times.setdefault("the manifest of it", []).append(seconds(lambda: sign(checkpoint.source)))
        aside = manifest.with_name("aside")
        for place in ("memory", "disk"):
            for title, verify, has_manifest in (
                ("nothing verified", False, True),
                ("manifest", True, True),
                ("checksums, no manifest", True, False),
            ):
                if dist.get_rank() == 0:
                    if not has_manifest:
                        manifest.rename(aside)
                    if place == "disk":
                        forget(checkpoint.source)
                dist.barrier()
                name = f"load from {place}, {title}"
                times.setdefault(name, []).append(seconds(partial(checkpoint.load, verify)))
                if not has_manifest and dist.get_rank() == 0:
                    aside.rename(manifest)
    size = sum(path.stat().st_size for path in checkpoint.source.iterdir())
    first = ""
    for name, measured in times.items():
        if name == "save" or name.endswith("nothing verified"):
            first = name
        middle, ratio = statistics.median(measured), statistics.median(times[first])
        environment.log(
            f"| {form}, {size / 1e9:.2f} GB | {name} | {middle:.2f} | {middle / ratio:.2f} |"
        )


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, flags: tuple[str, ...]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    environment.log("| checkpoint | | seconds | ratio |\n|---|---|---|---|")
    for form, own in FORMATS.items():
        # The same on all ranks of one torchrun.
        folder = Path(tempfile.gettempdir()) / f"checkpoint_integrity_{os.getppid()}"
        checkpoint = CheckpointOfModel([*own, *flags], str(folder))
        try:
            measure(form, checkpoint, rounds)
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
        del checkpoint
        dist.barrier()
    ranks.stop()


if __name__ == "__main__":
    main()
