# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, or whose disk is full, at any change of a file; and two runs at once.

    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
    python -m benchmarks.soak.kills --kills 500 --seed 1 [--loop megatron-lm --release 0.19.2]

A run of one rank trains two steps, saves and ends, or is struck before it does: killed before a
change of a file (the creation, renaming or removal of one, or an fsync), killed at any moment, or
told from a change on that the disk is full. Each start must load the newest published checkpoint, a
history of losses (of this program's loop) has no gap, and steps that are repeated the same losses.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from benchmarks.soak.flips import LINES
from benchmarks.soak.loops import LOOPS, OWN, RELEASES, History, Loop, loop_of
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.parts import progress_of
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints import save_directory
from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain.arguments import build_parser
from tests.support.pretrain.training_runs import write_counting_corpus
from tests.support.warm_programs import PRELOAD

STEPS = 2
"""Steps of one attempt, which saves after the last."""
LENGTH = 4000
FLAGS = (
    f"--train-iters {LENGTH} --lr-decay-iters {LENGTH} --save-interval {STEPS}"
    f" --exit-interval {STEPS} --eval-interval {STEPS} --eval-iters 1 --log-progress"
    f" --save-retain-interval {2 * STEPS}"
)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
"""Audit events of changes, beside `open` for writing. An fsync has none and is patched."""
NEEDS_SPACE = ("open", "os.mkdir", "fsync")
AT_URL = "fsdp_dtensor at a URL"
"""Saved at ``local://``, a store for all that is known here. It has no locks, and no renames."""
FORMS = {**LINES, AT_URL: LINES["fsdp_dtensor"]}
SHARED = "fsdp_dtensor"  # the format of both loops
KINDS = ("killed before a change", "killed at any moment", "disk full from a change on")


@dataclass(frozen=True)
class Strike:
    """An accident of a run.

    Attributes:
        kind: one of `KINDS`; empty for a run that nothing happens to.
        at: number of the change, from 1, or seconds.
    """

    kind: str = ""
    at: float = 0


@dataclass
class Attempt:
    """The facts that are known of a run that has ended, however it did.

    Attributes:
        loaded: iteration that it began at, None if it did not come so far.
        history: losses that it then had kept, None for a loop that keeps none.
        losses: iteration and loss of its steps.
        changes: number of changes of files, known if it came to its end.
        error: message of the error that ended it; empty if none did.
        was_killed: by the strike.
        seconds: from its beginning to its end.
    """

    loaded: int | None = None
    history: History | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    changes: int = 0
    error: str = ""
    was_killed: bool = False
    seconds: float = 0.0


# ---- in the process of the run


class Striker:
    """The hook on all changes of files under a folder, which strikes at one of them."""

    def __init__(self, folder: Path, strike: Strike):
        self._folder = str(folder)
        self._strike = strike
        self._run = 0
        self.changes = 0

    def install(self) -> None:
        """Begin; ends with the process."""
        self._run = os.getpid()
        sys.addaudithook(self._see)
        fsync = os.fsync

        def counted(descriptor: Any) -> None:
            self._count("fsync")
            fsync(descriptor)

        os.fsync = counted
        if self._strike.kind == KINDS[1]:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._strike.at)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        # `shutil.rmtree` gives names inside of a directory that it has opened.
        is_relative = isinstance(path, str) and not os.path.isabs(path)
        if is_relative or (isinstance(path, (str, Path)) and str(path).startswith(self._folder)):
            self._count(event)

    def _count(self, event: str) -> None:
        self.changes += 1
        kind, at = self._strike.kind, self._strike.at
        if kind == KINDS[0] and self.changes == at:
            os.kill(self._run, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)  # of the run, or forked by it to write
        if kind == KINDS[2] and self.changes >= at and event in NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def become_run(
    loop: Loop, line: str, folder: Path, strike: Strike, pipe: int, pause: float
) -> NoReturn:
    """Run in this process, which was forked for it, and write into the pipe what happens."""

    def tell(**facts: Any) -> None:
        os.write(pipe, (json.dumps(facts) + "\n").encode())

    def tell_loaded(iteration: int, history: History | None) -> None:
        tell(loaded=iteration, history=history)
        time.sleep(pause)

    losses: list[tuple[int, float | None]] = []

    def tell_loss(iteration: int, loss: float | None, norm: float | None) -> None:
        losses.append((iteration, loss))
        tell(losses=losses)

    striker = Striker(folder, strike)
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        save_directory.WAIT_SECONDS = 0.0
        loop.on_load(tell_loaded)
        loop.on_step(tell_loss)
        striker.install()
        loop.run(line)
        tell(changes=striker.changes)
    except (ValueError, OSError, RunError) as error:  # what pretrain_gpt.py reports as a message
        tell(error=f"{type(error).__name__}: {error}")
    except BaseException:
        tell(error=traceback.format_exc())
    os._exit(0)


# ---- in the process that starts runs


@dataclass
class Series:
    """Runs of one loop in one format, in which a step that is repeated has the same loss.

    Args:
        loop: the loop.
        form: a name of :data:`FORMS`.
        losses: by iteration, of all runs so far.
    """

    loop: Loop
    form: str
    losses: dict[int, float] = field(default_factory=dict)

    def start(self, folder: Path, strike: Strike = Strike(), pause: float = 0) -> StartedRun:
        """Start a run that saves in a folder and goes on there."""
        location = f"local://{folder}" if self.form == AT_URL else str(folder)
        line = f"{FORMS[self.form]} {FLAGS} --save {location} --load {location}"
        line = line.replace("--eval-iters 0", "")
        return StartedRun(self.loop, line, folder, strike, pause)

    def problems_of_losses(self, attempt: Attempt) -> Iterator[str]:
        """Compare the losses of a run with those of earlier runs at the same steps."""
        for number, (iteration, loss) in enumerate(attempt.losses, 1):
            if attempt.loaded is None or iteration != attempt.loaded + number:
                yield f"step {iteration} after the start from {attempt.loaded}"
            elif loss != self.losses.setdefault(iteration, loss):
                yield f"a loss of {loss} at step {iteration}, not {self.losses[iteration]}"


class StartedRun:
    """A run in a process of its own."""

    def __init__(self, loop: Loop, line: str, folder: Path, strike: Strike, pause: float):
        self._begin = time.perf_counter()
        here, there = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(here)
            become_run(loop, line, folder, strike, there, pause)
        os.close(there)
        self._stream = os.fdopen(here)
        self._attempt = Attempt()

    def wait_until_begun(self) -> None:
        """Wait until it has loaded its checkpoint."""
        self._take(self._stream.readline())

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.process, signal.SIGKILL)

    def wait(self) -> Attempt:
        """Wait for its end and return what is known of it."""
        for text in self._stream:
            self._take(text)
        _, status = os.waitpid(self.process, 0)
        self._stream.close()
        self._attempt.was_killed = os.WIFSIGNALED(status)
        self._attempt.seconds = time.perf_counter() - self._begin
        return self._attempt

    def _take(self, text: str) -> None:
        with suppress(ValueError):  # the last words of a killed process
            for name, value in json.loads(text).items():
                setattr(self._attempt, name, value)


def warm_up(loop: Loop) -> None:
    """Do once what every run would do anew after its fork."""
    loop.enter()
    write_counting_corpus()
    for name in PRELOAD:
        importlib.import_module(name)
    build_parser()
    loop.import_modules()
    gc.collect()
    gc.freeze()


def published(folder: Path) -> int:
    """Return the iteration that a start must load, 0 if there is none."""
    tracked = directory.read_tracker(folder) if folder.is_dir() else None
    return int(tracked or 0)


def problems_of_start(attempt: Attempt, expected: int) -> Iterator[str]:
    """Compare what a run has loaded with what was there."""
    if attempt.loaded is None:
        return
    if attempt.loaded != expected:
        yield f"loaded {attempt.loaded} instead of {expected}"
    if attempt.history is None:
        return
    for name, step in (("train", 1), ("validation", STEPS)):
        found = [entry["iteration"] for entry in attempt.history if name in entry]
        if found != list(range(step, attempt.loaded + 1, step)):
            yield f"{name} losses of {found[-5:]} at the start from {attempt.loaded}"


def problems_of_end(attempt: Attempt, strike: Strike, folder: Path, before: int) -> Iterator[str]:
    """Look at a folder in which a run has ended."""
    after = published(folder)
    if after not in (before, before + STEPS):
        yield f"the tracker file went from {before} to {after}"
    if after and find_problems(open_checkpoint(folder)):
        yield f"the checkpoint of {after} is damaged"
    if "Traceback" in attempt.error or (attempt.error and strike.kind != KINDS[2]):
        yield attempt.error


def struck(series: Series, folder: Path, strike: Strike) -> tuple[Attempt, list[str]]:
    """Run once and return what was wrong with it, or with what it has left."""
    before = published(folder)
    attempt = series.start(folder, strike).wait()
    problems = [*problems_of_start(attempt, before), *series.problems_of_losses(attempt)]
    problems += problems_of_end(attempt, strike, folder, before)
    return attempt, problems


@contextmanager
def copy_of(source: Path) -> Iterator[Path]:
    """Copy a folder with checkpoints for as long as the context lasts."""
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        yield Path(shutil.copytree(source, Path(name, "copy")))


def first_runs(series: Series, folder: Path) -> tuple[Attempt, Path]:
    """Make a folder in which the next save replaces a checkpoint; return an attempt in a copy.

    The last checkpoint has been renamed and is not in the tracker file yet.
    """
    for _ in range(3):
        attempt, problems = struck(series, folder, Strike())
        assert not problems and not attempt.error, (problems, attempt)
    directory.write_tracker(folder, published(folder) - STEPS)
    with copy_of(folder) as copy:
        attempt, problems = struck(series, copy, Strike())
        assert not problems and not attempt.error, (problems, attempt)
    return attempt, folder


def sweep(series: Series, source: Path, kind: str, number: int) -> tuple[Counter[str], list[str]]:
    """Strike runs in copies of a folder at every change, or at evenly chosen ones."""
    with copy_of(source) as copy:
        changes = struck(series, copy, Strike())[0].changes
    number = min(number, changes)
    places = [1 + (index * changes) // number for index in range(number)]
    counts: Counter[str] = Counter()
    problems = []
    with progress_of(f"{series.form}, {kind}", len(places), unit="runs") as advance:
        for place in places:
            with copy_of(source) as copy:
                attempt, found = struck(series, copy, Strike(kind, place))
                last, found_later = struck(series, copy, Strike())
                found += found_later + ([last.error] if last.error else [])
            counts[outcome(attempt, found)] += 1
            problems += [f"{series.form}, {kind} {place} of {changes}: {each}" for each in found]
            advance(1)
    return counts, problems


def chain(
    series: Series, folder: Path, seconds: float, number: int, numbers: random.Random
) -> tuple[Counter[str], list[str]]:
    """Kill one run after the other in the same folder, each at any moment."""
    counts: Counter[str] = Counter()
    problems = []
    with progress_of(f"{series.form}, {KINDS[1]}", number, unit="runs") as advance:
        for _ in range(number):
            strike = Strike(KINDS[1], numbers.uniform(0.01, 1.1 * seconds))
            attempt, found = struck(series, folder, strike)
            counts[outcome(attempt, found)] += 1
            problems += [f"{series.form}, {strike}: {each}" for each in found]
            advance(1)
    attempt, found = struck(series, folder, Strike())
    return counts, problems + found + ([attempt.error] if attempt.error else [])


def outcome(attempt: Attempt, problems: list[str]) -> str:
    """Return the outcome of a run in a few words."""
    if problems:
        return "WRONG"
    if attempt.was_killed:
        return "killed; the next start goes on"
    if attempt.error:
        return "stopped with a message; the next start goes on"
    return "came to its end"


def two_runs(series: Series, source: Path, number: int) -> tuple[Counter[str], list[str]]:
    """Start a second run while the first one is at work, and a third when that was killed."""
    counts: Counter[str] = Counter()
    problems = []
    for _ in range(number):
        with copy_of(source) as copy:
            before = published(copy)
            first = series.start(copy, pause=60)
            first.wait_until_begun()
            second = series.start(copy).wait()
            first.kill()
            first.wait()
            third = series.start(copy).wait()
            found = [*problems_of_start(third, before)]
            if f"is in use by process {first.process} on" not in second.error:
                found.append(f"the second run was not refused: {second}")
            if third.error or published(copy) != before + STEPS:
                found.append(f"the third run did not go on: {third}")
        counts["WRONG" if found else "second refused, third goes on at once"] += 1
        problems += found
    return counts, problems


def told(start: str, counts: Counter[str], problems: list[str]) -> bool:
    """Print the rows of one kind, at once: all take long. Return True if there are problems."""
    for words, number in sorted(counts.items()):
        click.echo(f"{start} {words} | {number} |")
    for problem in problems:
        click.echo(problem, err=True)
    return bool(problems)


@click.command()
@click.option("--kills", default=100, show_default=True, help="Of runs, over all formats.")
@click.option("--seed", default=0, show_default=True)
@click.option("--form", type=click.Choice(list(FORMS)), multiple=True, help="Default: all.")
@click.option("--loop", "name", type=click.Choice(list(LOOPS)), default=OWN, show_default=True)
@click.option("--release", type=click.Choice(RELEASES), help="Of Megatron-Core.")
def main(kills: int, seed: int, form: tuple[str, ...], name: str, release: str | None) -> None:
    """Strike runs, start them again, and print how often what happened."""
    loop = loop_of(name, release)
    warm_up(loop)
    forms = form or (list(FORMS) if name == OWN else [SHARED])
    share = max(1, kills // len(forms) // 2)
    failed = False
    click.echo("| format | strike | outcome | number |\n|---|---|---|---|")
    for each in forms:
        begin = time.perf_counter()
        series = Series(loop, each)
        with tempfile.TemporaryDirectory() as name:
            # The folder exists: the loop of 0.17.1 writes its progress there before a save.
            sample, source = first_runs(series, Path(tempfile.mkdtemp(dir=name)))
            strikes = {
                KINDS[0]: partial(sweep, series, source, KINDS[0], share),
                KINDS[2]: partial(sweep, series, source, KINDS[2], share // 2 or 1),
            }
            if each != AT_URL:  # where a file is overwritten in place, and nothing can be locked
                strikes["two runs"] = partial(two_runs, series, source, max(1, share // 20))
                numbers = random.Random(f"{seed}")
                strikes[KINDS[1]] = partial(chain, series, source, sample.seconds, share, numbers)
            for kind, strike in strikes.items():
                failed |= told(f"| {each} | {kind} |", *strike())
        took = time.perf_counter() - begin
        click.echo(f"{each}: {sample.changes} changes a run, seed {seed}, {took:.0f} s", err=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
