# SPDX-License-Identifier: Apache-2.0
"""Time of saves and loads beside torch.distributed.checkpoint (DCP) of an FSDP2 model, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/checkpoint_speed.py

Builds a GPT model with --use-megatron-fsdp as pretrain_gpt.py does, with FLAGS after ``--``, and an
FSDP2 model of the same parameters with AdamW, whose state is complete. Each round saves and loads
both, in another order than the round before, into new directories under TMPDIR. Files are read from
memory, where the save has left them. Prints a table in Markdown of the median seconds, each with
its ratio to plain DCP, and the peak of a rank's memory beyond what it had before, as the kernel
counts it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.saved_run import SavedRun, quiet
from megatron.checkpoint.integrity.block_digest import BlockDigest, crc32
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints import checkpointing, fsdp_dtensor_format
from megatron.mcore_adapter.checkpoints.saved_state import run_state
from megatron.mcore_adapter.run import environment
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain import ranks
from megatron.pretrain.arguments.check import FrozenArguments

MODEL = [
    *("--num-layers", "14", "--hidden-size", "512", "--num-attention-heads", "8"),
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
]


@dataclass
class Measured:
    """Seconds and peaks of memory of one operation.

    Attributes:
        seconds: of each round, until all ranks had done it.
        peaks: bytes beyond what this rank had before, in each round.
    """

    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def add(self, action: Callable[[], object]) -> None:
        """Measure ``action``."""
        gc.collect()
        dist.barrier()
        with PeakMemory() as memory:
            begin = time.perf_counter()
            action()
            dist.barrier()
            self.seconds.append(time.perf_counter() - begin)
        self.peaks.append(memory.peak)


class PeakMemory:
    """The peak of this process' memory within a context, from samples of a thread.

    Attributes:
        peak: bytes beyond what the process had when the context began.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before is none
        self._begin, self.peak = resident_bytes(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, resident_bytes() - self._begin)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes() -> int:
    """Return the size of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class PlainCheckpoint:
    """An FSDP2 model with the parameters of another model, saved by DCP alone.

    Args:
        shapes: name -> shape of each parameter.
    """

    def __init__(self, shapes: dict[str, torch.Size]):
        self.model = nn.Module()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            owner = self.model
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(torch.randn(shape) * 0.02))
        for layer in self.model.get_submodule("decoder.layers").children():
            torch_fully_shard(layer)
        torch_fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Save as torch's tutorial does."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load what was saved."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class OwnCheckpoint(SavedRun):
    """A run of this project and its checkpoints."""

    def save(self, folder: Path) -> None:
        """Save with the digests of all files."""
        args = FrozenArguments(self.args, save=str(folder))
        checkpointing.save(args, self.parts, Progress(iteration=1), quiet)

    def save_without_digests(self, folder: Path) -> None:
        """Save as plain DCP does: no digests, and no directory is renamed."""
        state = run_state(self.args, Progress(1), self.scheduler, with_rng=True)
        form = fsdp_dtensor_format.FsdpDtensorFormat()
        content = form.collect(self.args, state, self.parts)
        with mock.patch.object(BlockDigest, "update", lambda digest, data: crc32(data)):
            assert not form.write(self.args, content, folder)

    def load(self, folder: Path, verify: bool = True) -> None:
        """Load what :meth:`save` has saved."""
        args = FrozenArguments(self.args, load=str(folder), no_verify_integrity=not verify)
        self.scheduler.num_steps = 0
        checkpointing.load(args, self.parts, quiet)

    def load_unverified(self, folder: Path) -> None:
        """Load and compare nothing but sizes."""
        self.load(folder, verify=False)


def on_first_rank(action: Callable[[], object]) -> None:
    """Run ``action`` on the first rank while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def measure(own: OwnCheckpoint, plain: PlainCheckpoint, rounds: int, root: Path) -> dict[str, Any]:
    """Return what was measured, by the title of the row."""
    rows = {
        "save, plain DCP": (plain.save, "plain"),
        "save, without digests": (own.save_without_digests, "bare"),
        "save, with digests": (own.save, "own"),
        "load, plain DCP": (plain.load, "plain"),
        "load, without digests": (own.load_unverified, "own"),
        "load, with digests": (own.load, "own"),
    }
    measured = {title: Measured() for title in rows}
    for number in range(rounds + 1):
        on_first_rank(lambda: [(root / name).mkdir(parents=True) for name in ("plain", "bare")])
        for title in in_turn(list(rows), number):
            action, name = rows[title]
            if number:
                measured[title].add(lambda action=action, name=name: action(root / name))
            else:
                action(root / name)  # the first round warms up
        if number == rounds:
            report_sizes(root)
        on_first_rank(lambda: shutil.rmtree(root))
    return measured


def in_turn(titles: list[str], number: int) -> list[str]:
    """Return the saves and then the loads, each beginning with another one in every round."""
    first, last = titles[:3], titles[3:]
    turn = number % 3
    return [*first[turn:], *first[:turn], *last[turn:], *last[:turn]]


def report_sizes(root: Path) -> None:
    """Print the bytes and the files of both checkpoints."""
    for title, folder in (
        ("plain DCP", root / "plain"),
        ("this project", directory.iteration_directory(str(root / "own"), 1)),
    ):
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        metadata = dcp.FileSystemReader(folder).read_metadata()
        environment.log(
            f"{title}: {sum(sizes.values()) / 1e9:.3f} GB, {len(metadata.state_dict_metadata)}"
            f" entries, .metadata {sizes['.metadata'] / 1e6:.2f} MB, files"
            f" {', '.join(f'{size / 1e6:.1f}' for name, size in sizes.items() if '_' in name)} MB"
        )


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, flags: tuple[str, ...]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    own = OwnCheckpoint([*MODEL, *flags])
    shapes = own.shapes
    plain = PlainCheckpoint(shapes)
    count = sum(shape.numel() for shape in shapes.values())
    environment.log(
        f"{date.today()}, {dist.get_world_size()} ranks, {count / 1e6:.1f} million parameters in"
        f" {len(shapes)} tensors, torch {torch.__version__}, {platform.processor() or 'CPU'},"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    # The same on all ranks of one torchrun.
    root = Path(tempfile.gettempdir()) / f"checkpoint_speed_{os.getppid()}"
    measured = measure(own, plain, rounds, root)
    environment.log("\n| | seconds | ratio | least | peak MB |\n|---|---|---|---|---|")
    for title, row in measured.items():
        first = measured[f"{title.split(',')[0]}, plain DCP"]
        middle = statistics.median(row.seconds)
        ratio = middle / statistics.median(first.seconds)
        peak = statistics.median(row.peaks) / 1e6
        environment.log(
            f"| {title} | {middle:.2f} | {ratio:.2f} | {min(row.seconds):.2f} | {peak:.0f} |"
        )
    ranks.stop()


if __name__ == "__main__":
    main()
