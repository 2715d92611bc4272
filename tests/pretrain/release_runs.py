# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program on another release of Megatron-Core, in a process of their own.

    python -m tests.pretrain.release_runs JOB RESULT

reads a pickled number of ranks and command lines, and writes what `training_runs.train` returns.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import megatron.core

from tests import megatron_release
from tests.pretrain.training_runs import Record, train, write_counting_corpus
from tests.rank_pool import run_ranks

TIMEOUT = 600.0


def train_on(release: str, folder: Path, num_ranks: int, *command_lines: str) -> list[Record]:
    """Run command lines one after the other on ranks of a release; return the first rank's records.

    Skips the test where the release is absent.

    Args:
        release: such as "0.19.0".
        folder: for the files of the exchange.
        num_ranks: number of ranks.
        command_lines: of the training program.
    """
    megatron_release.require(release)
    job, result = folder / "job", folder / "result"
    job.write_bytes(pickle.dumps((num_ranks, command_lines)))
    run = subprocess.run(
        [sys.executable, "-m", "tests.pretrain.release_runs", str(job), str(result)],
        env={**os.environ, **megatron_release.environment(release)},
        cwd=megatron_release.ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stderr
    found, records = pickle.loads(result.read_bytes())
    assert Path(found).is_relative_to(megatron_release.UNPACKED / release)
    return records


def main(job: str, result: str) -> None:
    """Do the job of :func:`train_on` in the process of the release."""
    num_ranks, command_lines = pickle.loads(Path(job).read_bytes())
    write_counting_corpus()
    records = run_ranks(num_ranks, train, *command_lines, timeout=TIMEOUT)[0]
    Path(result).write_bytes(pickle.dumps((megatron.core.__file__, records)))


if __name__ == "__main__":
    main(*sys.argv[1:])
