# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with a fault on one rank: a program for torchrun.

    export FAULT="hang 1 3" TIMEOUT=6 RECORD_STEPS=steps.jsonl
    torchrun --nproc_per_node 2 benchmarks/soak/faulty_run.py FLAGS [--loop megatron-lm]

FAULT names what happens, on which rank, and after how many iterations; TIMEOUT is that of
collectives, in seconds. The last rank adds what it loads and every step to the file RECORD_STEPS,
one a line. All may be left out.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.soak.loops import Loop, chosen
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.watch import watch


def read_for_ever() -> None:
    """Stand for a file system that does not answer."""
    while True:
        time.sleep(0.5)


def compute_for_ever() -> None:
    """Stand for a defect that never lets other threads run."""
    sum(range(10**13))


def raise_run_error() -> None:
    raise RunError("the data of this rank is damaged")


def raise_type_error() -> None:
    raise TypeError("a defect of this rank")


def reduce_something_else() -> None:
    """Begin a collective that no other rank has."""
    dist.all_reduce(torch.zeros(7))


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "hang": read_for_ever,
    "compute": compute_for_ever,
    "error": raise_run_error,
    "defect": raise_type_error,
    "differ": reduce_something_else,
}


def install(loop: Loop, fault: str) -> None:
    """Let `fault`, as in the environment variable, happen in the forward of a microbatch."""
    name, rank, iteration = fault.split()

    def fail(done: int) -> None:
        if os.environ["RANK"] == rank and done == int(iteration):
            FAULTS[name]()

    loop.before_forward(fail)


def record(loop: Loop, path: Path) -> None:
    """Let the last rank write to a file what it loads, and loss and gradient norm of each step."""
    if int(os.environ["RANK"]) + 1 < int(os.environ["WORLD_SIZE"]):
        return

    def write(**facts: object) -> None:
        with path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    loop.on_load(lambda iteration, history: write(loaded=iteration))
    loop.on_step(lambda *step: write(step=step))


def main() -> int:
    loop = chosen(sys.argv[1:])
    if "FAULT" in os.environ:
        install(loop, os.environ["FAULT"])
    if "ABORTING_BACKEND" in os.environ:
        watch.ABORTING_BACKENDS = (os.environ["ABORTING_BACKEND"],)
    if "TIMEOUT" in os.environ:
        loop.set_timeout(float(os.environ["TIMEOUT"]))
    if "RECORD_STEPS" in os.environ:
        record(loop, Path(os.environ["RECORD_STEPS"]))
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
