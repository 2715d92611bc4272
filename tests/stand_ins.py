# SPDX-License-Identifier: Apache-2.0
"""Commands that shell scripts find instead of torchrun, python and Slurm, for one machine.

Called with the name of the command and its words. `RECORD` names a file to which torchrun and
python then write their words and environment, instead of running anything; otherwise
`warm_programs` runs them. Imports no more than it needs: it starts often.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


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
        return int(stream.readline() or 1)


def sbatch(words: list[str]) -> int:
    """Run the job now, from a copy of the script as Slurm does it, with its output in a file."""
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
    with tempfile.TemporaryDirectory() as spool, open("slurm-1.out", "ab") as output:
        copy = shutil.copy(script, Path(spool, "slurm_script"))
        command = ["bash", str(copy), *words[first + 1 :]]
        code = subprocess.run(
            command, env={**os.environ, **slurm}, stdout=output, stderr=output
        ).returncode
    print("Submitted batch job 1")
    return code


def scontrol(words: list[str]) -> int:
    """Names of a job's nodes, all of them this machine."""
    assert words == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], words
    print("\n".join(["127.0.0.1"] * int(os.environ["SLURM_NNODES"])))
    return 0


def srun(words: list[str]) -> int:
    """Run the command once for each node, all at the same time."""
    while words[0].startswith("--"):
        words = words[1:]
    nodes = range(int(os.environ["SLURM_NNODES"]))
    steps = [
        subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(node)}) for node in nodes
    ]
    return max(step.wait() for step in steps)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "torchrun": torchrun,
    "python": python,
    "sbatch": sbatch,
    "scontrol": scontrol,
    "srun": srun,
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
