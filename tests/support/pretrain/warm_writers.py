# SPDX-License-Identifier: Apache-2.0
"""Writers of checkpoints that a rank forks from a process which has imported what they need.

A writer that is started, as runs do it, imports for eight seconds: one of the tests in
`test_background_save.py` does.
"""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron.mcore_adapter.checkpoints import checkpoint_writer
from megatron.mcore_adapter.run.logging_setup import set_up_logging

_context = multiprocessing.get_context("forkserver")


@contextmanager
def warm_writers() -> Iterator[None]:
    """Let writers be forked."""
    _context.set_forkserver_preload([checkpoint_writer.__name__])
    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedWriter})
    with patch.object(checkpoint_writer, "subprocess", stand_in):
        yield


class ForkedWriter:
    """The part of `subprocess.Popen` that `checkpoint_writer` uses, for its own command alone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdin: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ):
        assert "import serve" in command[-1] and start_new_session
        places = [DupFd(descriptor) for descriptor in pass_fds]
        self._process = _context.Process(target=serve, args=(env, *places))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a writer", timeout or 0.0)
        return self._process.exitcode


def serve(environment: dict[str, str], *places: Any) -> None:
    """Be a writer, as its command says."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ |= environment
    set_up_logging()
    checkpoint_writer.serve(*(place.detach() for place in places))
