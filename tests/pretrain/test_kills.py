# SPDX-License-Identifier: Apache-2.0
"""The script that kills runs, in short."""

import os
import subprocess
import sys

import pytest

from benchmarks.soak.kills import AT_URL, KINDS
from tests.support.warm_programs import ROOT


@pytest.mark.exhaustive  # test_loss_history.py kills the save alone, at every change
def test_a_run_that_is_struck_is_gone_on_with() -> None:
    words = ["benchmarks.soak.kills", "--kills", "4", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--form", "fsdp_dtensor", "--form", AT_URL],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [("fsdp_dtensor", kind) for kind in (*KINDS, "two runs")]
    rows += [(AT_URL, KINDS[0]), (AT_URL, KINDS[2])]
    for form, kind in rows:
        assert f"| {form} | {kind} | " in done.stdout
    assert "WRONG" not in done.stdout
