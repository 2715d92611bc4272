# SPDX-License-Identifier: Apache-2.0
"""Commands that shell scripts find instead of torchrun, python and Slurm, for one machine.

Called with the name of the command and its words. `RECORD` names a file to which torchrun and
python then write their words and environment, instead of running anything; otherwise
`warm_programs` runs them. Imports no more than it needs: it starts often.

`END_AT`, such as "limit: iteration 2/", tells sbatch to signal a job that has printed this: that
its time limit is near, or, as "preempt: ...", that it is preempted.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TERMINATE = b"T"
"""Asks `warm_programs` to send SIGTERM to the ranks of a request."""
QUEUED, PREEMPTED, TASKS = "queued", "preempted", "tasks"
"""Files in which the stand-ins of Slurm keep the state of a job."""


def install(folder: Path) -> None:
    """Write the commands into `folder`."""
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{__file__}" {name} "$@"\n')
        path.chmod(0o755)


def torchrun(words: list[str]) -> int:
    """One node's ranks."""
    return ask("torchrun", words)


def python(words: list[str]) -> int:
    """Run a script of this repository; leave anything else to the real Python."""
    if not words or not words[0].endswith(".py"):
        os.execv(sys.executable, [sys.executable, *words])
    return ask("python", words)


def ask(program: str, words: list[str]) -> int:
    """Have the words run, with this process' directory, environment and streams; the exit code."""
    request = {
        "program": program,
        "words": words,
        "directory": os.getcwd(),
        "environment": {**os.environ},
    }
    if "RECORD" in os.environ:
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps(request) + "\n")
        return 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["WARM_PROGRAMS"])
        socket.send_fds(connection, [b"."], [0, 1, 2])
        stream = connection.makefile("rw")
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        # As torchrun does: tell the ranks, and wait for them.
        signal.signal(signal.SIGTERM, lambda *_: connection.send(TERMINATE))
        return int(stream.readline() or 1)


def sbatch(words: list[str]) -> int:
    """Run the job now, from a copy of the script as Slurm does it, with its output in a file.

    Run it again as long as it goes back into the queue.
    """
    first = next(number for number, word in enumerate(words) if not word.startswith("-"))
    script = Path(words[first])
    directives = re.findall(r"^#SBATCH (--\S+)$", script.read_text(), re.MULTILINE)
    settings = dict(
        word.removeprefix("--").partition("=")[::2] for word in [*directives, *words[:first]]
    )
    assert settings["ntasks-per-node"] == "1", "torchrun is started once on every node"
    nodes = settings["nodes"]
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"node[1-{nodes}]"}
    slurm["SLURM_SUBMIT_DIR"] = os.getcwd()
    code, end_at = 0, os.environ.get("END_AT", "")
    with tempfile.TemporaryDirectory() as spool, open("slurm-1.out", "ab") as output:
        copy = shutil.copy(script, Path(spool, "slurm_script"))
        environment = {**os.environ, **slurm, "SPOOL": spool}
        queued = Path(spool, QUEUED)
        queued.touch()
        while queued.exists():
            queued.unlink()
            Path(spool, PREEMPTED).unlink(missing_ok=True)
            job = subprocess.Popen(
                ["bash", str(copy), *words[first + 1 :]],
                env=environment,
                stdout=output,
                stderr=output,
            )
            if end_at:
                end(job, end_at, settings, spool)
                end_at = ""
            code = job.wait()
            assert not queued.exists() or "requeue" in settings, "the job may not be queued again"
    print("Submitted batch job 1")
    return code


def end(job: "subprocess.Popen[bytes]", end_at: str, settings: dict[str, str], spool: str) -> None:
    """Wait for what the job prints, and signal what Slurm does before it ends a job."""
    reason, _, text = end_at.partition(": ")
    while text not in Path("slurm-1.out").read_text():
        assert job.poll() is None, f"the job has ended and not printed {text!r}"
        time.sleep(0.01)
    if reason == "preempt":
        Path(spool, PREEMPTED).touch()
        signal_tasks(spool)
    name = re.fullmatch(r"B:(\w+)@\d+", settings["signal"])
    assert name is not None, settings["signal"]
    job.send_signal(signal.Signals[f"SIG{name[1]}"])


def signal_tasks(spool: str) -> None:
    """Send SIGTERM to the tasks of the running step."""
    for task in Path(spool, TASKS).read_text().split():
        os.kill(int(task), signal.SIGTERM)


def scontrol(words: list[str]) -> int:
    """Names of a job's nodes, all of them this machine; its state; its return to the queue."""
    spool = Path(os.environ["SPOOL"])
    if words == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]:
        print("\n".join(["127.0.0.1"] * int(os.environ["SLURM_NNODES"])))
    elif words == ["show", "job", "1"]:
        at = "2026-01-01T00:00:00" if (spool / PREEMPTED).exists() else "None"
        print(f"JobId=1 JobName=stand_in\n   SuspendTime=None PreemptTime={at} Requeue=1")
    else:
        assert words == ["requeue", "1"], words
        (spool / QUEUED).touch()
    return 0


def scancel(words: list[str]) -> int:
    """Signal the tasks of a job, but not its batch script."""
    assert words == ["--signal=TERM", "1"], words
    signal_tasks(os.environ["SPOOL"])
    return 0


def srun(words: list[str]) -> int:
    """Run the command once for each node, all at the same time."""
    while words[0].startswith("--"):
        words = words[1:]
    nodes = range(int(os.environ["SLURM_NNODES"]))
    steps = [
        subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(node)}) for node in nodes
    ]
    Path(os.environ["SPOOL"], TASKS).write_text(" ".join(str(step.pid) for step in steps))
    return max(step.wait() for step in steps)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "torchrun": torchrun,
    "python": python,
    "sbatch": sbatch,
    "scontrol": scontrol,
    "scancel": scancel,
    "srun": srun,
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
