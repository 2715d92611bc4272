# SPDX-License-Identifier: Apache-2.0
"""Servers that ranks are forked from, one for each release of Megatron-Core that tests use.

A start of Python with torch and Megatron-Core takes ten seconds of processor time, a fork of a
process that has imported them milliseconds. A server has one thread, and each runs for the whole
pytest run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from unittest.mock import patch

from tests.support import emerging_optimizers_wheel, megatron_release

PRELOAD = [
    "torch.distributed.tensor",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "pytest",
    "tests.support.rank_process",
    "tests.support.pretrain.training_runs",
]
"""Modules that a server imports. Eight ranks would need seconds each for those of training."""
ENGINE = "tests.support.transformer_engine.preload"
HUGGING_FACE = "transformers.models.llama.modeling_llama"
"""With torchao four seconds on each rank of the tests that use one of them."""
LAST = "tests.support.imports_done"


@dataclass(frozen=True)
class Packages:
    """Packages that the processes of a server have imported.

    Args:
        release: of Megatron-Core, such as "0.19.2"; None for the installed one.
        capability: of the emulated device of Transformer Engine; None without that package.
        emerging_optimizers: True with that package, which newer releases look for on import.
    """

    release: str | None = None
    capability: tuple[int, int] | None = None
    emerging_optimizers: bool = False

    @property
    def preload(self) -> list[str]:
        """Modules in order: Megatron-Core looks for Transformer Engine when it is imported."""
        engine = [] if self.capability is None else [ENGINE]
        others = [HUGGING_FACE] if self == Packages() else []
        return [*engine, *PRELOAD, *others, LAST]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process beside those of this one."""
        variables = {}
        if self.release is not None:
            variables |= megatron_release.environment(self.release)
        if self.emerging_optimizers:
            variables = emerging_optimizers_wheel.environment_with(variables)
        if self.capability is not None:
            variables["EMULATED_CAPABILITY"] = "{}.{}".format(*self.capability)
        return variables

    @property
    def sys_path(self) -> list[str]:
        """Folders in which a process looks for modules."""
        first, last = [], []
        if self.release is not None:
            first = self.environment["PYTHONPATH"].split(os.pathsep)
        if self.capability is not None:
            from tools.transformer_engine_on_cpu.wheel import unpack

            last = [str(unpack())]
        return [*first, *(each for each in sys.path if each not in first), *last]


FORKSERVER = multiprocessing.get_context("forkserver")
INSTALLED = Packages()
_servers: dict[Packages, forkserver.ForkServer] = {INSTALLED: forkserver._forkserver}
forkserver.set_forkserver_preload(INSTALLED.preload)


@contextlib.contextmanager
def forks_from(packages: Packages) -> Iterator[None]:
    """Let `multiprocessing` fork processes from the server of some packages; start it if needed."""
    if packages not in _servers:
        _servers[packages] = forkserver.ForkServer()
        _servers[packages].set_forkserver_preload(packages.preload)
    server = _servers[packages]
    with (
        patch.object(sys, "path", packages.sys_path),
        patch.dict(os.environ, packages.environment),
        patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        with silent():
            server.ensure_running()
        yield


def process_ids() -> set[int]:
    """Return the processes of all servers."""
    return {each._forkserver_pid for each in _servers.values() if each._forkserver_pid is not None}


def stop_servers() -> None:
    """Kill all servers: by themselves they free their modules first, for a second each."""
    for server in _servers.values():
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
            os.waitpid(server._forkserver_pid, 0)
            os.close(server._forkserver_alive_fd)
            server._forkserver_pid = server._forkserver_alive_fd = None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Start processes without a terminal: Megatron-Core warns of missing packages on import."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
