# SPDX-License-Identifier: Apache-2.0
"""Ends the processes that a run of tests has left, when it ends and however it does.

    watch(folder)

starts a process that waits for the end of this one. It then kills all others that have the folder
as their `XDG_CACHE_HOME`, as every process that a test starts inherits it, and removes the folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import psutil

VARIABLE = "XDG_CACHE_HOME"


def watch(folder: str) -> None:
    """Start the process, in a session of its own: Ctrl-C is meant for this one."""
    subprocess.Popen(
        [sys.executable, __file__, folder, str(os.getpid())],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def kill_processes_of(folder: str) -> None:
    """Kill until there are none: one that is not yet killed may start others."""
    found = True
    while found:
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # of another user, or gone
                if process.pid != os.getpid() and process.environ().get(VARIABLE) == folder:
                    process.kill()
                    found = True
        time.sleep(0.05)


def main(folder: str, run: str) -> None:
    while os.getppid() == int(run):
        time.sleep(0.2)
    kill_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
