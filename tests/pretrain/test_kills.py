# SPDX-License-Identifier: Apache-2.0
"""The script that kills runs, in short."""

import os
import subprocess
import sys

import pytest

from benchmarks.soak.kills import KINDS
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
