# SPDX-License-Identifier: Apache-2.0
"""tools/launch.py starts ranks as torchrun does, and tells of a failure in one line."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.pretrain.training_runs import SMALL
from tests.support.warm_programs import ROOT

SCRIPT = ROOT / "tools" / "launch.py"


@pytest.fixture(scope="module")
def launch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def failure(rank: int, code: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=40 + rank, exitcode=code, error_file="none")


@pytest.mark.parametrize(
    ("codes", "line"),
    [
        ({1: 3}, "train.py: rank 1 (process 41) ended with exit code 3"),
        ({0: -9, 2: 1}, "train.py: rank 0 (process 40) ended by SIGKILL, and 1 more"),
    ],
)
def test_a_failure_is_one_line(launch: ModuleType, codes: dict[int, int], line: str) -> None:
    failures = {rank: failure(rank, code) for rank, code in codes.items()}
    for number, rank in enumerate(sorted(codes)):
        failures[rank].timestamp = number
    assert launch.one_line(ChildFailedError("train.py", failures)) == line


@pytest.mark.exhaustive  # torchrun's own launcher starts from nothing
def test_a_defect_is_one_line_on_the_terminal_and_a_traceback_in_a_file(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    line = f"{SMALL} --use-megatron-fsdp --num-workers 0"
    program = ROOT / "benchmarks" / "soak" / "faulty_run.py"
    words = [
        "--standalone",
        "--nproc_per_node",
        "2",
        "--log-dir",
        str(tmp_path),
        "--redirects",
        "3",
        "--no-python",
        "python",
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, str(program), *line.split()],
        cwd=tmp_path,
        env={**commands, "FAULT": "defect 1 2"},
        timeout=180,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and not done.stdout
    (ended,) = done.stderr.strip().splitlines()
    assert re.fullmatch(r"\S*python: rank \d \(process \d+\) ended .*", ended)
    (first,) = tmp_path.glob("*/attempt_0/0/stdout.log")
    (second,) = tmp_path.glob("*/attempt_0/1/stderr.log")
    assert "iteration  1/20" in first.read_text()
    assert "raise TypeError" in second.read_text()
