# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with a fault on one rank: a program for torchrun.

    export FAULT="hang 1 3" TIMEOUT=6
    torchrun --nproc_per_node 2 benchmarks/soak/faulty_run.py FLAGS

FAULT names what happens, on which rank, and after how many iterations; TIMEOUT is that of
collectives, in seconds. Both may be left out.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.watch import watch
from megatron.pretrain.model.forward_step import ForwardStep


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


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "hang": read_for_ever,
    "compute": compute_for_ever,
    "error": raise_run_error,
    "defect": raise_type_error,
}


def install(fault: str) -> None:
    """Let `fault`, as in the environment variable, happen in the forward of a microbatch."""
    name, rank, iteration = fault.split()
    forward = ForwardStep.__call__

    def fail(self: ForwardStep, *args: Any) -> Any:
        if os.environ["RANK"] == rank and self._iteration == int(iteration):
            FAULTS[name]()
        return forward(self, *args)

    ForwardStep.__call__ = fail


def main() -> int:
    if "FAULT" in os.environ:
        install(os.environ["FAULT"])
    if "ABORTING_BACKEND" in os.environ:
        watch.ABORTING_BACKENDS = (os.environ["ABORTING_BACKEND"],)
    parse = pretrain_gpt.parse_arguments

    def parse_with_timeout(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        found, notes = parse(*args, **kwargs)
        if "TIMEOUT" in os.environ:
            found.distributed_timeout_minutes = float(os.environ["TIMEOUT"]) / 60
        return found, notes

    pretrain_gpt.parse_arguments = parse_with_timeout
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
