# SPDX-License-Identifier: Apache-2.0
"""What the tests of examples share: data, and a shell in which one machine plays a cluster."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples import stand_ins
from tests.examples.warm_programs import ROOT, free_port, warm_programs
from tests.pretrain.conftest import counting_corpus  # noqa: F401


@dataclass(frozen=True)
class Shell:
    """Runs commands in a folder that looks like this repository, whose checkpoints and results stay there.

    Attributes:
        directory: the folder.
        environment: of the commands: `stand_ins` in the path.
    """

    directory: Path
    environment: dict[str, str]

    def run(
        self, *command: str | Path, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; its output and errors are one text, `stdout`."""
        return subprocess.run(
            list(map(str, command)), cwd=self.directory, env={**self.environment, **environment}, timeout=timeout, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which shells find the stand-ins, and these the warm programs."""
    folder = tmp_path_factory.mktemp("commands")
    stand_ins.install(folder)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    with warm_programs(folder / "socket"):
        yield {
            **kept, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "WARM_PROGRAMS": str(folder / "socket"), "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip


def repository_in(folder: Path) -> Path:
    """The folder, with links to what commands name."""
    for name in ("pretrain_gpt.py", "tools", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def shell(commands: dict[str, str], tmp_path: Path) -> Shell:
    return Shell(repository_in(tmp_path), commands)
