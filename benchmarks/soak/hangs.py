# SPDX-License-Identifier: Apache-2.0
"""Runs in which a rank dies, hangs or falls behind, or that are interrupted, under real torchrun.

    python -m benchmarks.soak.hangs [NAME ...] [--verbose] [--loop megatron-lm --release 0.19.2]

Each must end in time, with one message that names the rank and the unit, with the right exit code,
without a traceback of this program, and with no process left.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.soak.loops import LOOPS, OWN, RELEASES, Loop, loop_of
from tests.support.pretrain.training_runs import DATA, NO_DROPOUT, write_counting_corpus
from tests.support.warm_programs import ROOT, free_port

PROGRAM = str(ROOT / "benchmarks" / "soak" / "faulty_run.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LINE = (
    "--use-megatron-fsdp --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    f" --micro-batch-size 1 --global-batch-size 6 {DATA} {NO_DROPOUT} --lr 1e-3"
    " --train-iters 1000000 --log-interval 1"
)
UNIT = r"unit '[\w.]+'"
MARK = "HANGS_MARK"
"""An environment variable that all processes of a run inherit."""


@dataclass(frozen=True)
class Variant:
    """One way in which a run ends."""

    name: str
    limit: float
    """Seconds in which it must end, from the fault on."""
    words: tuple[str, ...] = ()
    """Patterns that the message has."""
    fault: str = ""
    timeout: float = 6
    num_ranks: int = 3
    signals: tuple[int, ...] = ()
    """Sent one second apart, after three iterations (before any, if `early`)."""
    to: str = "torchrun"
    """Who gets the signals: torchrun, or a rank by number."""
    early: bool = False
    codes: tuple[int, ...] = (1,)
    """Exit codes that are right."""
    messages: int = 1
    launcher: str = "torchrun"
    """Or "none": processes of their own, of which rank 0 has the store."""
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


WAIT = rf"ranks? [\d, -]+ waits? in .*{UNIT} since"
VARIANTS = (
    Variant("killed", 15, ("rank 1 has died", WAIT, "dmesg"), "kill 1 3"),
    Variant("killed_first", 15, ("rank 0 has died", WAIT, "dmesg"), "kill 0 3"),
    Variant(
        "killed_with_save", 15, ("rank 1 has died", WAIT), "kill 1 3", flags="--save {folder}/saved"
    ),
    Variant("exits", 15, ("rank 1 has died", WAIT), "exit 1 3"),
    Variant("hangs", 20, ("rank 1 hangs", "read_for_ever", WAIT), "hang 1 3"),
    Variant(
        "hangs_with_save", 20, ("rank 2 hangs", WAIT), "hang 2 3", flags="--save {folder}/saved"
    ),
    Variant("stopped", 50, ("rank 1 is suspended", WAIT, "SIGSTOP"), "stop 1 3"),
    Variant("computes", 50, ("rank 1 is silent", WAIT, "py-spy"), "compute 1 3"),
    Variant(
        "announced",
        20,
        ("rank 1 hangs", "read_for_ever", WAIT),
        "hang 1 3",
        timeout=12,
        environment={"ABORTING_BACKEND": "gloo"},
    ),
    Variant("differs", 20, ("rank 1 is the first that differs, in collective", UNIT), "differ 1 3"),
    Variant("own_error", 15, ("the data of this rank is damaged",), "error 1 3"),
    Variant("store_dies", 20, ("store .* does not answer", UNIT), "kill 0 3", launcher="none"),
    Variant("killed_alone", 15, ("rank 1 has died", WAIT), "kill 1 3", launcher="none"),
    Variant("hangs_alone", 25, ("rank 1 hangs", WAIT), "hang 1 3", launcher="none"),
    Variant("terminated", 10, signals=(signal.SIGTERM,), messages=0),
    Variant("interrupted", 10, ("interrupted after iteration",), signals=(signal.SIGINT,)),
    Variant(
        "interrupted_workers",
        10,
        ("interrupted after iteration",),
        signals=(signal.SIGINT,),
        flags="--num-workers 2 --save {folder}/saved",
    ),
    Variant(
        "interrupted_rank", 10, ("interrupted after iteration",), signals=(signal.SIGINT,), to="1"
    ),
    Variant(
        "interrupted_one_process",
        10,
        ("interrupted after iteration",),
        signals=(signal.SIGINT,),
        num_ranks=1,
        launcher="none",
        codes=(130,),
        flags="--num-workers 2",
    ),
    Variant(
        "interrupted_early",
        10,
        signals=(signal.SIGINT,),
        early=True,
        num_ranks=1,
        launcher="none",
        messages=0,
        codes=(130, -2),
    ),
    Variant(
        "interrupted_twice",
        10,
        ("interrupted after iteration",),
        "hang 0 3",
        signals=(signal.SIGINT, signal.SIGINT),
        timeout=60,
        num_ranks=1,
        launcher="none",
        codes=(130,),
    ),
    Variant(
        "interrupted_hang",
        20,
        ("interrupted after iteration",),
        "hang 1 3",
        signals=(signal.SIGINT,),
        timeout=60,
    ),
)


@dataclass
class Ending:
    """The end of a run."""

    seconds: float
    """From the fault, or the first signal, on."""
    codes: list[int]
    output: str
    errors: str
    left: list[str]
    """Command lines of processes that are still there."""

    @property
    def messages(self) -> list[str]:
        """The messages of the program, each with its indented lines."""
        return re.findall(r"^(?:error: |interrupted).*\n(?:  .*\n)*", self.errors, re.MULTILINE)

    def problems(self, variant: Variant) -> list[str]:
        """List everything that is not as it should be."""
        found = []
        if self.seconds > variant.limit:
            found.append(f"ended after {self.seconds:.1f} s, more than {variant.limit}")
        if len(self.messages) != variant.messages:
            found.append(f"{len(self.messages)} messages instead of {variant.messages}")
        for words in variant.words:
            if not re.search(words, "".join(self.messages)):
                found.append(f"no {words!r} in the message")
        if not set(variant.codes) & set(self.codes):
            found.append(f"exit codes {self.codes}")
        # torchrun has tracebacks of its own, the program has none.
        if re.search(r'File ".*/(pretrain_gpt|faulty_run|megatron/\w+/.*)\.py", line', self.errors):
            found.append("a traceback")
        if self.left:
            found.append(f"{len(self.left)} processes are left: {self.left[0][:80]}")
        return found


def commands_of(
    variant: Variant, folder: Path, torchrun: tuple[str, ...], loop: Loop
) -> list[list[str]]:
    """Return the commands that start the ranks of a run."""
    words = [PROGRAM, *loop.words(f"{LINE} {variant.flags.format(folder=folder)}")]
    if "--save " in variant.flags:
        words += ["--save-interval", "1000000"]
    if variant.launcher == "torchrun":
        return [[*torchrun, "--standalone", "--nproc_per_node", str(variant.num_ranks), *words]]
    return [[sys.executable, *words] for _ in range(variant.num_ranks)]


def run(
    variant: Variant,
    folder: Path,
    torchrun: tuple[str, ...] = TORCHRUN,
    environment: Mapping[str, str] = os.environ,
    loop: Loop | None = None,
) -> Ending:
    """Run one variant to its end, or for a minute longer than it may take.

    Args:
        variant: how the run ends.
        folder: an empty one.
        torchrun: the words that start it.
        environment: variables of the run.
        loop: that trains; this program's own if None.
    """
    loop = loop or loop_of(OWN)
    mark = uuid.uuid4().hex
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", MARK: mark}
    own |= loop.environment
    own |= {"TIMEOUT": str(variant.timeout), **variant.environment}
    if variant.fault:
        own["FAULT"] = variant.fault
    port = str(free_port())
    processes: list[subprocess.Popen[bytes]] = []
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        for rank, command in enumerate(commands_of(variant, folder, torchrun, loop)):
            place = {"RANK": str(rank), "WORLD_SIZE": str(variant.num_ranks)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, **own, **(place if variant.launcher == "none" else {})},
                stdout=out,
                stderr=err,
            )
            processes.append(process)
        try:
            wait_for_fault(variant, output, processes)
            began = time.monotonic()
            send_signals(variant, processes, mark)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(began + variant.limit + 60 - time.monotonic(), 0.1))
            seconds = time.monotonic() - began
            left = left_behind(mark)
        finally:
            for process in marked(mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    codes = [process.wait() for process in processes]
    return Ending(seconds, codes, output.read_text(), errors.read_text(), left)


def wait_for_fault(
    variant: Variant, output: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Wait until the third iteration is over, after which faults happen."""
    if variant.early:
        time.sleep(1.5)
        return
    deadline = time.monotonic() + 120
    while not re.search("iteration +3/", output.read_text()) and time.monotonic() < deadline:
        if all(process.poll() is not None for process in processes):
            return
        time.sleep(0.02)


def send_signals(variant: Variant, processes: list[subprocess.Popen[bytes]], mark: str) -> None:
    """Send the signals of a variant, to the launcher or to one rank."""
    pid = processes[0].pid
    if variant.to != "torchrun":
        pid = next(
            process.pid
            for process in marked(mark)
            if process.environ().get("RANK") == variant.to and PROGRAM in process.cmdline()
        )
    for count, number in enumerate(variant.signals):
        if count:
            time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def left_behind(mark: str) -> list[str]:
    """Return the command lines of what is left of a run that has ended, after some seconds."""
    deadline = time.monotonic() + 5
    while True:
        time.sleep(0.2)
        left = [" ".join(process.cmdline()) for process in marked(mark)]
        if not left or time.monotonic() > deadline:
            return left


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of a run that have not ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and process.environ().get(MARK) == mark:
                yield process


def main() -> int:
    """Run the variants that are named, or all, and print a line for each."""
    parser = argparse.ArgumentParser(description="Run jobs with failing ranks.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--verbose", action="store_true", help="print what runs wrote to stderr")
    parser.add_argument("--loop", choices=LOOPS, default=OWN)
    parser.add_argument("--release", choices=RELEASES, help="of Megatron-Core")
    wanted = parser.parse_args()
    loop = loop_of(wanted.loop, wanted.release)
    chosen = [each for each in VARIANTS if not wanted.names or each.name in wanted.names]
    write_counting_corpus()
    num_wrong = 0
    today = time.strftime("%Y-%m-%d")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {today}\n")
    print("| variant | ends after | limit | messages | problems |\n|---|---|---|---|---|")
    for variant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            ending = run(variant, Path(folder), loop=loop)
        problems = ending.problems(variant)
        num_wrong += bool(problems)
        cells = (variant.name, f"{ending.seconds:.1f} s", f"{variant.limit} s")
        cells += (str(len(ending.messages)), "; ".join(problems) or "none")
        print(f"| {' | '.join(cells)} |", flush=True)
        if wanted.verbose:
            print(ending.errors, flush=True)
    print(f"\n{len(chosen) - num_wrong} of {len(chosen)} variants end as they should")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
