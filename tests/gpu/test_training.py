# SPDX-License-Identifier: Apache-2.0
"""The trainings of `tests/gpu/training.py` on all GPUs: torchrun starts anew after one that fails.

Skipped where there is no GPU, but for rehearsals of tests/gpu/check.py, on two CPU ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.training import TRAININGS, suits
from tests.support.warm_programs import ROOT

IS_REHEARSED = "REHEARSE_GPU_CHECK" in os.environ
NUM_RANKS = int(os.environ.get("GPU_CHECK_RANKS") or torch.cuda.device_count() or 2)
REHEARSED = (
    "level3",
    "level1 bf16",
    "hybrid level2",
    "experts",
    "meta level3",
    "checkpoint level3",
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not IS_REHEARSED, reason="needs GPUs"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all trainings; return the output of those that failed, by name."""
    progress = tmp_path_factory.mktemp("trainings") / "passed"
    pending = [name for name in TRAININGS if suits(name, NUM_RANKS)]
    if IS_REHEARSED:
        pending = [name for name in pending if name in REHEARSED]
    failures: dict[str, str] = {}
    while pending:
        progress.write_text("")
        done = subprocess.run(command(progress, pending), cwd=ROOT, capture_output=True, text=True)
        pending = pending[len(progress.read_text().splitlines()) :]
        if done.returncode and not pending:
            raise AssertionError(f"all trainings passed, then: {done.stderr[-3000:]}")
        if pending:
            failures[pending.pop(0)] = (done.stdout + done.stderr)[-6000:]
    return failures


def command(progress: Path, names: list[str]) -> list[str]:
    """Return what runs trainings on all ranks."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    program = ("-m", "tests.gpu.training", "--progress", str(progress))
    return [*launcher, "--nproc_per_node", str(NUM_RANKS), *program, *names]


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_an_unsharded_model(failures: dict[str, str], name: str) -> None:
    if not suits(name, NUM_RANKS) or (IS_REHEARSED and name not in REHEARSED):
        pytest.skip(f"not on {NUM_RANKS} ranks, or not rehearsed")
    assert name not in failures, failures[name]
