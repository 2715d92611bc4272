# SPDX-License-Identifier: Apache-2.0
"""Runs and conversions on another release of Megatron-Core, in a process of their own.

    python -m tests.support.pretrain.release_runs TASKS RESULT

reads pickled tasks and writes what :func:`do_tasks` returns.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron.core
from click.testing import CliRunner

from megatron.checkpoint.commands.command_line import main as convert_checkpoint
from tests.support import megatron_release
from tests.support.pretrain.training_runs import Record, train, write_counting_corpus
from tests.support.rank_pool import RankFailure, run_ranks

INSTALLED = "installed"
"""Stands for the release of the virtual environment."""
TIMEOUT = 600.0


@dataclass(frozen=True)
class Train:
    """A run of the training program; its result is the first rank's record."""

    ranks: int
    command_line: str


@dataclass(frozen=True)
class Convert:
    """A conversion of the checkpoint in ``source``; its result is an empty record."""

    command: str
    """Of tools/checkpoint/checkpoint_inspector.py."""
    source: Path
    target: Path


Task = Train | Convert
Result = Record | str
"""A task's record, or the text of its failure."""


def train_on(release: str, folder: Path, num_ranks: int, *command_lines: str) -> list[Record]:
    """Run command lines one after the other on ranks of a release; return the first rank's records.

    Skips the test where the release is absent.

    Args:
        release: such as "0.19.2".
        folder: for the files of the exchange.
        num_ranks: number of ranks.
        command_lines: of the training program.
    """
    megatron_release.require(release)
    results = do_on(release, [Train(num_ranks, line) for line in command_lines], folder)
    failures = [result for result in results if isinstance(result, str)]
    assert not failures, failures[0]
    return [result for result in results if isinstance(result, Record)]


def do_on(release: str, tasks: Sequence[Task], folder: Path | None = None) -> list[Result]:
    """Do tasks one after the other on a release; a task that fails ends none of the others.

    Args:
        release: such as "0.19.2"; :data:`INSTALLED` for this process.
        tasks: the tasks.
        folder: for the files of the exchange; a temporary one without.

    Raises:
        RuntimeError: the process of the release ended before its tasks.
    """
    if release == INSTALLED:
        return do_tasks(tasks)
    with tempfile.TemporaryDirectory(dir=folder) as exchange:
        given, result = Path(exchange, "tasks"), Path(exchange, "result")
        given.write_bytes(pickle.dumps(tasks))
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.pretrain.release_runs", str(given), str(result)],
            env={**os.environ, **megatron_release.environment(release)},
            cwd=megatron_release.ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        if run.returncode != 0:
            raise RuntimeError(f"{release}: {run.stderr}")
        found, results = pickle.loads(result.read_bytes())
    assert Path(found).is_relative_to(megatron_release.UNPACKED / release)
    return results


def do_tasks(tasks: Sequence[Task]) -> list[Result]:
    """Do tasks in this process and its ranks."""
    write_counting_corpus()
    return [_done(task) for task in tasks]


def _done(task: Task) -> Result:
    if isinstance(task, Train):
        try:
            return run_ranks(task.ranks, train, task.command_line, timeout=TIMEOUT)[0][0]
        except RankFailure as failure:
            return str(failure)
    words = [task.command, str(task.source), str(task.target), "--quiet"]
    ended = CliRunner().invoke(convert_checkpoint, words)
    return Record() if ended.exit_code == 0 else f"{ended.output}{ended.exception!r}"


def main(tasks: str, result: str) -> None:
    """Do the tasks of :func:`do_on` in the process of the release."""
    results = do_tasks(pickle.loads(Path(tasks).read_bytes()))
    Path(result).write_bytes(pickle.dumps((megatron.core.__file__, results)))


if __name__ == "__main__":
    # The classes of the pickle are those of the module, not of this program.
    from tests.support.pretrain import release_runs

    release_runs.main(*sys.argv[1:])
