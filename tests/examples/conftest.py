# SPDX-License-Identifier: Apache-2.0
"""Data for the tests of examples, and a shell in which one machine plays a cluster."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pretrain.conftest import counting_corpus  # noqa: F401
from tests.support import stand_ins
from tests.support.warm_programs import ROOT


@dataclass(frozen=True)
class Shell:
    """A shell in a folder that looks like this repository; checkpoints and results stay there.

    Attributes:
        directory: the folder.
        environment: variables of the commands, with `stand_ins` in the path.
    """

    directory: Path
    environment: dict[str, str]

    def run(
        self, *command: str | Path, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; its output and errors are one text, `stdout`."""
        return subprocess.run(
            list(map(str, command)),
            cwd=self.directory,
            env={**self.environment, **environment},
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def repository_in(folder: Path) -> Path:
    """Link the files that commands name into the folder, and return it."""
    for name in ("pretrain_gpt.py", "tools", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def with_inspector(shell: Shell) -> Shell:
    """Return the shell with a `checkpoint-inspector` in its path, which a warm process runs."""
    folder = shell.directory / "commands"
    folder.mkdir()
    program = ROOT / "tools" / "checkpoint" / "checkpoint_inspector.py"
    (folder / "checkpoint-inspector").write_text(f'#!/bin/sh\nexec python "{program}" "$@"\n')
    (folder / "checkpoint-inspector").chmod(0o755)
    path = f"{folder}:{shell.environment['PATH']}"
    return Shell(shell.directory, {**shell.environment, "PATH": path})


@pytest.fixture
def shell(commands: dict[str, str], tmp_path: Path) -> Shell:
    return Shell(repository_in(tmp_path), commands)


@pytest.fixture
def recorder(tmp_path: Path) -> Shell:
    """Return a shell in which torchrun and python only write down their words, for `RECORD`."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    stand_ins.install(folder)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    path = f"{folder}:{os.environ['PATH']}"
    return Shell(repository_in(tmp_path), {**kept, "PATH": path, "OMP_NUM_THREADS": "1"})
