# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a run of tests, the processes that it has started end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import end_of_run
from tests.support.warm_programs import ROOT
from tests.test_rank_pool import is_gone

RUN = """
import os, signal, subprocess, sys, time
from tests.support import end_of_run

# A shell may have started the tests in the background, where interrupts are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ[end_of_run.VARIABLE] = sys.argv[1]
end_of_run.watch(sys.argv[1])
subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; sleep 600; sleep 600"], start_new_session=True)
time.sleep(600)
"""


def is_removed(folder: Path) -> bool:
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_run_end_with_it(ending: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    folder.mkdir()
    command = [sys.executable, "-c", RUN, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.send_signal(ending)
        assert run.stdout.read() == ""  # the shell and both of its children held it open
    assert is_gone(pid) and is_removed(folder)


def test_processes_of_other_runs_go_on() -> None:
    environment = {**os.environ, end_of_run.VARIABLE: "/a/run/of/another"}
    with subprocess.Popen(["sleep", "600"], env=environment) as other:
        end_of_run.kill_processes_of("/a/run")
        assert other.poll() is None
        end_of_run.kill_processes_of("/a/run/of/another")
        assert other.wait() == -signal.SIGKILL
