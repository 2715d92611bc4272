# SPDX-License-Identifier: Apache-2.0
"""torch.compile of units and models changes no number and does not compile at every step.

The compiler that generates code is left out here: `test_inductor.py` has it.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WAYS = ["block.compile", "torch.compile(block)", "block_in_unit", "model", "model.compile"]
AT_BOTH_LEVELS = [f"aot_eager {level} {way}" for level, way in product((2, 3), WAYS)]
"""Backend, level and way; "aot_eager" also traces the backward pass."""


@pytest.mark.exhaustive
def test_compiled_models_match_plain_ones_and_are_compiled_once() -> None:
    runs = [*AT_BOTH_LEVELS, "eager 2 block.compile", "eager 3 block.compile"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*launcher, "-m", "tests.support.fsdp.compiled_training", *runs],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.split("\n")[:-1] == [f"equal: {run}" for run in runs], result.stdout
