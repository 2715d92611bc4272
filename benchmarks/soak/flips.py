# SPDX-License-Identifier: Apache-2.0
"""Single flipped bits in the files of checkpoints: none is loaded, and `verify` finds each.

    OMP_NUM_THREADS=1 python -m benchmarks.soak.flips --flips 500 --seed 1

A run on two ranks writes a checkpoint in each format. A flip is a file, chosen at random, and a bit
in it. The checkpoint is then verified and loaded into the run, whose whole state is compared with
what it was before, or should be. The program prints a table in Markdown.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.parts import progress_of
from megatron.mcore_adapter.run.run_state import TrainedParts
from tests.support.checkpoint.changed_checkpoints import without_manifest
from tests.support.pretrain.saved_runs import FSDP, GATED, SIX
from tests.support.pretrain.training_runs import (
    build,
    load_checkpoint,
    train,
    write_counting_corpus,
)
from tests.support.rank_pool import run_ranks

LINES = {
    "fsdp_dtensor": f"{SIX} {GATED} {FSDP} --bf16",
    "torch_dist": f"{SIX} {GATED} --bf16 --use-distributed-optimizer",
}
ITERATION = "iter_0000001"
FLIPS_PER_JOB = 50


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    file: str
    at: int
    bit: int


@dataclass(frozen=True)
class FlipOutcome:
    """The outcome of a flip on one rank, or on all together."""

    flip: Flip
    sound: bool
    """True if `verify` finds nothing."""
    message: str
    """The error of the load; empty if there was none."""
    differs: bool
    """True if a load brought another state than that of the unchanged files, or a refused load
    changed anything."""

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if not self.message:
            return "silent" if self.differs else "harmless"
        if self.differs:
            return "half-loaded"
        if self.flip.file not in self.message:
            return "refused without the name of the file"
        return "called sound, but refused" if self.sound else "refused"


def save(form: str, folder: Path) -> Path:
    """Write a checkpoint of a short run and return its directory."""
    run_ranks(2, train, f"{LINES[form]} --exit-interval 1 --save {folder} --save-interval 1")
    return folder / ITERATION


def draw_flips(source: Path, random_numbers: Random, count: int) -> list[Flip]:
    """Draw flips over all files, each file as often as the others."""
    files = sorted(path for path in source.iterdir() if path.stat().st_size)
    flips = []
    for _ in range(count):
        path = random_numbers.choice(files)
        at = random_numbers.randrange(path.stat().st_size)
        flips.append(Flip(path.name, at, random_numbers.randrange(8)))
    return flips


def load_flipped(line: str, folder: str, flips: Sequence[Flip]) -> list[FlipOutcome]:
    """Job: load a checkpoint with each of the flips into one run."""
    run = build(f"{line} --load {folder}")
    return load_each(lambda: load_checkpoint(run), run, (folder, flips))


def load_each(
    load: Callable[[], object], run: TrainedParts, place: tuple[str, Sequence[Flip]]
) -> list[FlipOutcome]:
    """Load a checkpoint with each of the flips, in a run of either loop; a collective.

    Args:
        load: loads the checkpoint into the run.
        run: model, optimizer and schedule.
        place: folder of the checkpoint, and the flips.
    """
    folder, flips = place
    load()
    expected = fingerprint(run)
    outcomes = []
    for flip in flips:
        path = Path(folder, ITERATION, flip.file)
        sound = False
        if dist.get_rank() == 0:
            toggle(path, flip)
            sound = is_sound(path.parent)
        dist.barrier()
        message = ""
        run.scheduler.num_steps = 0  # a load adds to it
        before = fingerprint(run)
        try:
            load()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        differs = fingerprint(run) != (before if message else expected)
        outcomes.append(FlipOutcome(flip, sound, message, differs))
        dist.barrier()
        if dist.get_rank() == 0:
            toggle(path, flip)
        dist.barrier()
        run.scheduler.num_steps = 0
        if differs:  # the next flip begins with the right state again
            load()
    return outcomes


def toggle(path: Path, flip: Flip) -> None:
    with open(path, "r+b") as file:
        file.seek(flip.at)
        value = file.read(1)[0] ^ (1 << flip.bit)
        file.seek(flip.at)
        file.write(bytes([value]))


def is_sound(source: Path) -> bool:
    try:
        return not find_problems(open_checkpoint(source))
    except Exception:  # the command reports any error
        return False


def fingerprint(run: TrainedParts) -> str:
    """Return a digest of all that a load sets on this rank."""
    digest = hashlib.sha256()
    for part in state_parts(run):
        add(digest, part)
    return digest.hexdigest()


def state_parts(run: TrainedParts) -> Iterator[Any]:
    for chunk in run.model:
        yield dict(chunk.named_parameters())
        yield dict(chunk.named_buffers())
    optimizer = run.optimizer
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.optimizer.param_groups:
            yield group
            for parameter in group["params"]:
                yield dict(each.optimizer.state[parameter])
    yield run.scheduler.state_dict()
    if hasattr(run, "progress"):  # Megatron-LM's loop sets it when the load is over
        yield vars(run.progress)
    yield [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    yield tensor_parallel.get_cuda_rng_tracker().get_states()


def add(digest: Any, value: Any) -> None:
    """Add a value to a digest, tensors with all their bits."""
    if isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            digest.update(str(key).encode())
            add(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            add(digest, item)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    else:
        digest.update(repr(value).encode())


def outcomes_of(form: str, folder: Path, flips: Sequence[Flip]) -> list[FlipOutcome]:
    """Load with each of the flips on two ranks; return the outcomes of both together.

    Ranks whose errors differ are a failure.
    """
    return of_both(run_ranks(2, load_flipped, LINES[form], str(folder), flips, timeout=600))


def of_both(outcomes: Sequence[Sequence[FlipOutcome]]) -> list[FlipOutcome]:
    """Return the outcomes of two ranks together."""
    first, second = outcomes
    together = []
    for mine, other in zip(first, second):
        assert mine.message == other.message, (mine, other)
        together.append(
            FlipOutcome(mine.flip, mine.sound, mine.message, mine.differs or other.differs)
        )
    return together


@click.command()
@click.option("--flips", default=100, show_default=True, help="In each format.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--without-manifest", "old", is_flag=True, help="As checkpoints of other programs are."
)
def main(flips: int, seed: int, old: bool) -> None:
    """Flip bits, verify and load, and print how often what happened."""
    write_counting_corpus()
    failed = False
    click.echo("| format | files | flips | outcome | number |\n|---|---|---|---|---|")
    for form in LINES:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = save(form, folder)
            if old:
                without_manifest(source)
            drawn = draw_flips(source, Random(f"{seed}/{form}"), flips)
            counts: Counter[str] = Counter()
            with progress_of(form, flips, unit="flips") as advance:
                for first in range(0, flips, FLIPS_PER_JOB):
                    found = outcomes_of(form, folder, drawn[first : first + FLIPS_PER_JOB])
                    counts.update(outcome.verdict for outcome in found)
                    for outcome in found:
                        if outcome.verdict not in ("refused", "harmless"):
                            tqdm.write(f"{outcome.verdict}: {outcome}")
                    advance(len(found))
            files = len(list(source.iterdir()))
            shutil.rmtree(source)
        for verdict, number in sorted(counts.items()):
            click.echo(f"| {form} | {files} | {flips} | {verdict} | {number} |")
            failed |= verdict not in ("refused", "harmless")
        click.echo(f"{form}: seed {seed}, {time.perf_counter() - begin:.0f} s", err=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
