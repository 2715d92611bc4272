# SPDX-License-Identifier: Apache-2.0
"""The script that kills runs, in short."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.soak.kills import KINDS, SHARED, Series, Strike, struck, sweep, two_runs, warm_up
from benchmarks.soak.loops import MEGATRON_LM, Loop, loop_of
from tests.support import megatron_release
from tests.support.fork_servers import Packages
from tests.support.rank_pool import run_apart
from tests.support.warm_programs import ROOT


# test_loss_history.py kills the save alone, at every change, test_url_saves.py runs with a URL.
@pytest.mark.exhaustive
def test_a_run_that_is_struck_is_gone_on_with() -> None:
    words = ["benchmarks.soak.kills", "--kills", "2", "--seed", "1", "--form", "fsdp_dtensor"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for kind in (*KINDS, "two runs"):
        assert f"| fsdp_dtensor | {kind} | " in done.stdout
    assert "WRONG" not in done.stdout


def strike(loop: Loop, folder: str) -> tuple[Counter[str], list[str]]:
    """Job: strike runs of a loop that go on from its first checkpoint."""
    warm_up(loop)
    series = Series(loop, SHARED)
    attempt, problems = struck(series, Path(folder), Strike())
    assert not problems and not attempt.error, (problems, attempt)
    counts: Counter[str] = Counter()
    for found, wrong in (
        sweep(series, Path(folder), KINDS[0], 1),
        sweep(series, Path(folder), KINDS[2], 1),
        two_runs(series, Path(folder), 1),
    ):
        counts += found
        problems += wrong
    return counts, problems


@pytest.mark.exhaustive
def test_a_run_of_megatron_lms_loop_that_is_struck_is_gone_on_with(tmp_path: Path) -> None:
    loop = loop_of(MEGATRON_LM)
    megatron_release.require(str(loop.release))
    packages = Packages(loop.release)
    counts, problems = run_apart(strike, loop, str(tmp_path / "saved"), packages=packages)
    assert not problems
    assert counts == {
        "killed; the next start goes on": 1,
        "stopped with a message; the next start goes on": 1,
        "second refused, third goes on at once": 1,
    }
