# SPDX-License-Identifier: Apache-2.0
"""Runs and conversions on any release of Megatron-Core, on ranks forked from a server of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron.core
from click.testing import CliRunner

from megatron.checkpoint.commands.command_line import main as convert_checkpoint
from tests.support import megatron_release
from tests.support.fork_servers import Packages
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


def train_on(release: str, num_ranks: int, *command_lines: str) -> list[Record]:
    """Run command lines one after the other on ranks of a release; return the first rank's records.

    Skips the test where the release is absent.

    Args:
        release: such as "0.19.2"; :data:`INSTALLED` for that of the virtual environment.
        num_ranks: number of ranks.
        command_lines: of the training program.
    """
    packages = packages_of(release)
    write_counting_corpus()
    found, records = run_ranks(
        num_ranks, _train, *command_lines, packages=packages, timeout=TIMEOUT
    )[0]
    if packages.release is not None:
        assert Path(found).is_relative_to(megatron_release.UNPACKED / release)
    return records


def do_on(release: str, tasks: Sequence[Task]) -> list[Result]:
    """Do tasks one after the other on a release; a task that fails ends none of the others."""
    packages = packages_of(release)
    results: list[Result] = []
    for task in tasks:
        if isinstance(task, Convert):
            words = (task.command, str(task.source), str(task.target), "--quiet")
            results += run_ranks(1, _convert, *words, packages=packages, timeout=TIMEOUT)
            continue
        try:
            results += train_on(release, task.ranks, task.command_line)
        except RankFailure as failure:
            results.append(str(failure))
    return results


def packages_of(release: str) -> Packages:
    """Return what ranks of a release import; skips the test where the release is absent."""
    if release == INSTALLED:
        return Packages()
    megatron_release.require(release)
    return Packages(release)


def _train(*command_lines: str) -> tuple[str, list[Record]]:
    """Job: run the command lines, and say which Megatron-Core has done so."""
    return megatron.core.__file__, train(*command_lines)


def _convert(*words: str) -> Result:
    """Job: run a command of the checkpoint tool."""
    ended = CliRunner().invoke(convert_checkpoint, words)
    return Record() if ended.exit_code == 0 else f"{ended.output}{ended.exception!r}"
