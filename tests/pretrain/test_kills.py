# SPDX-License-Identifier: Apache-2.0
"""The script that kills runs, in short."""

import os
import subprocess
import sys

import pytest

from tests.support.pretrain.kills import AT_URL, KINDS
from tests.support.warm_programs import ROOT


@pytest.mark.exhaustive  # test_loss_history.py kills the save alone, at every change
@pytest.mark.parametrize(
    ("form", "kinds"),
    [("fsdp_dtensor", (*KINDS, "two runs")), (AT_URL, (KINDS[0], KINDS[2]))],
    ids=["in a directory", "at a URL"],
)
def test_a_run_that_is_struck_is_gone_on_with(form: str, kinds: tuple[str, ...]) -> None:
    words = ["tests.support.pretrain.kills", "--kills", "6", "--seed", "1", "--form", form]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for kind in kinds:
        assert f"| {form} | {kind} | " in done.stdout
    assert "WRONG" not in done.stdout
