# SPDX-License-Identifier: Apache-2.0
"""torch.compile of units and models changes no number and does not compile at every step.

The compiler that generates code is left out: it would take most of the time of all tests.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


WAYS = ["block.compile", "torch.compile(block)", "block_in_unit", "model", "model.compile"]
RUNS = [*(f"aot_eager {way}" for way in WAYS), "eager block.compile"]


def test_compiled_models_match_plain_ones_and_are_compiled_once() -> None:
    """Levels 2 and 3 are run; "aot_eager" also traces the backward pass."""
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
        [*launcher, "-m", "tests.fsdp.compiled_training", *RUNS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.split("\n")[:-1] == [f"equal: {run}" for run in RUNS], result.stdout
