# SPDX-License-Identifier: Apache-2.0
"""Inductor's code changes no loss, layers share it, and it has no more breaks than with FSDP2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fsdp.inductor_training import WAYS

ROOT = Path(__file__).parents[2]

GRAPHS_OF_A_STACK = 3
"""The embedding, a block, whose code all blocks share, and the head."""


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor calls a C++ compiler")
def test_inductor_trains_as_eager_code_does_with_no_more_breaks_than_fsdp2(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc_per_node", "2", "-m", "tests.support.fsdp.inductor_training", *WAYS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["way"] for report in reports] == list(WAYS)
    for report in reports:
        graphs = report["graphs"]
        _, breaks_of_fsdp2 = graphs.pop("fsdp2")
        assert set(graphs) == {"0", "1", "2", "3"}
        for level, (compiled, breaks) in graphs.items():
            at_most = 1 if report["way"].startswith("blocks") else GRAPHS_OF_A_STACK
            assert 0 < compiled <= at_most, (report["way"], level, compiled)
            assert breaks <= breaks_of_fsdp2, (report["way"], level, breaks)
