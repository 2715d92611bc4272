# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, or whose disk is full, at any change of a file; and two runs at once.

    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
    python -m benchmarks.soak.kills --kills 500 --seed 1

A run of one rank trains two steps, saves and ends, or is struck before it does: killed before a
change of a file (the creation, renaming or removal of one, or an fsync), killed at any moment, or
told from a change on that the disk is full. Each start must load the newest published checkpoint,
with a history of losses without a gap. The program prints a table in Markdown.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import torch.distributed as dist

from benchmarks.soak.flips import LINES
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.parts import progress_of
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints import save_directory
from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain.arguments import build_parser
from megatron.pretrain.report import report
from megatron.pretrain.report.report import Report
from tests.support.pretrain.training_runs import pretrain, write_counting_corpus
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
        history: losses that it then had.
        changes: number of changes of files, known if it came to its end.
        error: message of the error that ended it; empty if none did.
        was_killed: by the strike.
        seconds: from its beginning to its end.
    """

    loaded: int | None = None
    history: list[dict[str, float]] | None = None
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


def draw_nothing(path: Path, *curves: Any) -> None:
    """Write a file as `draw_loss_curves` does."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"")
    os.replace(temporary, path)


def become_run(line: str, folder: Path, strike: Strike, pipe: int, pause: float) -> NoReturn:
    """Run in this process, which was forked for it, and write into the pipe what happens."""

    def tell(**facts: Any) -> None:
        os.write(pipe, (json.dumps(facts) + "\n").encode())

    begin = Report.begin

    def begin_and_tell(self: Report, progress: Any) -> None:
        begin(self, progress)
        tell(loaded=progress.iteration, history=self._history.entries)
        time.sleep(pause)

    striker = Striker(folder, strike)
    report.draw_loss_curves = draw_nothing  # drawing takes longer than all the rest
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        save_directory.WAIT_SECONDS = 0.0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        Report.begin = begin_and_tell
        striker.install()
        pretrain(line)
        tell(changes=striker.changes)
    except (ValueError, OSError, RunError) as error:  # what pretrain_gpt.py reports as a message
        tell(error=f"{type(error).__name__}: {error}")
    except BaseException:
        tell(error=traceback.format_exc())
    os._exit(0)


# ---- in the process that starts runs


class StartedRun:
    """A run in a process of its own."""

    def __init__(self, line: str, folder: Path, strike: Strike = Strike(), pause: float = 0):
        self._begin = time.perf_counter()
        here, there = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(here)
            become_run(line, folder, strike, there, pause)
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


def warm_up() -> None:
    """Do once what every run would do anew after its fork."""
    write_counting_corpus()
    for name in PRELOAD:
        importlib.import_module(name)
    build_parser()
    gc.collect()
    gc.freeze()


def line_of(form: str, folder: Path) -> str:
    """Return the command line of a run that saves in a folder and goes on there."""
    location = f"local://{folder}" if form == AT_URL else str(folder)
    line = f"{FORMS[form]} {FLAGS} --save {location} --load {location}"
    return line.replace("--eval-iters 0", "")


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
    for name, step in (("train", 1), ("validation", STEPS)):
        found = [entry["iteration"] for entry in attempt.history or [] if name in entry]
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


def struck(form: str, folder: Path, strike: Strike) -> tuple[Attempt, list[str]]:
    """Run once and return what was wrong with it, or with what it has left."""
    before = published(folder)
    attempt = StartedRun(line_of(form, folder), folder, strike).wait()
    problems = [*problems_of_start(attempt, before)]
    problems += problems_of_end(attempt, strike, folder, before)
    return attempt, problems


@contextmanager
def copy_of(source: Path) -> Iterator[Path]:
    """Copy a folder with checkpoints for as long as the context lasts."""
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        yield Path(shutil.copytree(source, Path(name, "copy")))


def first_runs(form: str, folder: Path) -> tuple[Attempt, Path]:
    """Make a folder in which the next save replaces a checkpoint; return an attempt in a copy.

    The last checkpoint has been renamed and is not in the tracker file yet.
    """
    for _ in range(3):
        attempt, problems = struck(form, folder, Strike())
        assert not problems and not attempt.error, (problems, attempt)
    directory.write_tracker(folder, published(folder) - STEPS)
    with copy_of(folder) as copy:
        attempt, problems = struck(form, copy, Strike())
        assert not problems and not attempt.error, (problems, attempt)
    return attempt, folder


def sweep(form: str, source: Path, kind: str, number: int) -> tuple[Counter[str], list[str]]:
    """Strike runs in copies of a folder at every change, or at evenly chosen ones."""
    with copy_of(source) as copy:
        changes = struck(form, copy, Strike())[0].changes
    number = min(number, changes)
    places = [1 + (index * changes) // number for index in range(number)]
    counts: Counter[str] = Counter()
    problems = []
    with progress_of(f"{form}, {kind}", len(places), unit="runs") as advance:
        for place in places:
            with copy_of(source) as copy:
                attempt, found = struck(form, copy, Strike(kind, place))
                last, found_later = struck(form, copy, Strike())
                found += found_later + ([last.error] if last.error else [])
            counts[outcome(attempt, found)] += 1
            problems += [f"{form}, {kind} {place} of {changes}: {each}" for each in found]
            advance(1)
    return counts, problems


def chain(
    form: str, folder: Path, seconds: float, number: int, numbers: random.Random
) -> tuple[Counter[str], list[str]]:
    """Kill one run after the other in the same folder, each at any moment."""
    counts: Counter[str] = Counter()
    problems = []
    with progress_of(f"{form}, {KINDS[1]}", number, unit="runs") as advance:
        for _ in range(number):
            strike = Strike(KINDS[1], numbers.uniform(0.01, 1.1 * seconds))
            attempt, found = struck(form, folder, strike)
            counts[outcome(attempt, found)] += 1
            problems += [f"{form}, {strike}: {each}" for each in found]
            advance(1)
    attempt, found = struck(form, folder, Strike())
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


def two_runs(form: str, source: Path, number: int) -> tuple[Counter[str], list[str]]:
    """Start a second run while the first one is at work, and a third when that was killed."""
    counts: Counter[str] = Counter()
    problems = []
    for _ in range(number):
        with copy_of(source) as copy:
            line, before = line_of(form, copy), published(copy)
            first = StartedRun(line, copy, pause=60)
            first.wait_until_begun()
            second = StartedRun(line, copy).wait()
            first.kill()
            first.wait()
            third = StartedRun(line, copy).wait()
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
@click.option("--kills", default=100, show_default=True, help="Of runs, over both formats.")
@click.option("--seed", default=0, show_default=True)
@click.option("--form", type=click.Choice(list(FORMS)), multiple=True, default=list(FORMS))
def main(kills: int, seed: int, form: tuple[str, ...]) -> None:
    """Strike runs, start them again, and print how often what happened."""
    warm_up()
    share = max(1, kills // len(form) // 2)
    failed = False
    click.echo("| format | strike | outcome | number |\n|---|---|---|---|")
    for each in form:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            sample, source = first_runs(each, Path(name, "source"))
            strikes = {
                KINDS[0]: partial(sweep, each, source, KINDS[0], share),
                KINDS[2]: partial(sweep, each, source, KINDS[2], share // 2 or 1),
            }
            if each != AT_URL:  # where a file is overwritten in place, and nothing can be locked
                strikes["two runs"] = partial(two_runs, each, source, max(1, share // 20))
                numbers = random.Random(f"{seed}")
                strikes[KINDS[1]] = partial(chain, each, source, sample.seconds, share, numbers)
            for kind, strike in strikes.items():
                failed |= told(f"| {each} | {kind} |", *strike())
        took = time.perf_counter() - begin
        click.echo(f"{each}: {sample.changes} changes a run, seed {seed}, {took:.0f} s", err=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
