# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop of newer releases trains with the drop-in as with its DDP.

The table of `real_loop.py` has further rows.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import megatron_release
from tests.mcore_adapter.real_loop import MODEL, ROOT, compare, is_equal

NEWEST = megatron_release.RELEASES[-1]


def test_one_flag_trains_with_the_newest_release_like_its_ddp() -> None:
    megatron_release.require(NEWEST)
    results = compare(["default"], NEWEST)
    assert is_equal(results["default"]), results


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "release, rows",
    [
        ("0.17.1", ["zero0", "ep", "resume-tp-pp"]),
        ("0.18.2", ["zero0", "hybrid-optim", "resume"]),
        ("0.19.0", ["zero0", "double-buffer", "evaluation", "resume-ep"]),
    ],
)
def test_every_release_trains_and_resumes_like_its_ddp(release: str, rows: list[str]) -> None:
    megatron_release.require(release)
    results = compare(rows, release)
    assert all(map(is_equal, results.values())), results


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron.mcore_adapter` on one rank."""
    return subprocess.run(
        [sys.executable, "-m", "megatron.mcore_adapter", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
    )


def test_contradictions_end_the_program_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    done = start(str(program), *MODEL.split(), "--use-megatron-fsdp", "--ckpt-format", "torch_dist")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "megatron.mcore_adapter: --ckpt-format torch_dist with --use-megatron-fsdp"
    )


def test_what_is_not_installed_is_said_in_one_line(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    (core / "datasets").mkdir(parents=True)
    (core / "transformer" / "moe").mkdir(parents=True)
    (core / "transformer" / "moe" / "paged_stash.py").touch()
    (core / "datasets" / "Makefile").touch()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\n")
    (tmp_path / "pretrain_gpt.py").touch()
    done = start(str(tmp_path / "pretrain_gpt.py"), PATH=str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    installed = Path(sysconfig.get_path("purelib"))  # a build of torch for GPUs brings triton
    for name in ("triton", "pybind11"):
        assert (f"pip install {name}" in line) != (installed / name).is_dir()
    assert "make, g++, python3" in line


@pytest.mark.parametrize("words", [[], ["--help"], ["absent.py"]], ids=["none", "help", "absent"])
def test_a_command_without_a_program_says_how_to_use_it(words: list[str]) -> None:
    done = start(*words)
    assert done.returncode == 2
    assert "-m megatron.mcore_adapter PROGRAM.py" in done.stderr
