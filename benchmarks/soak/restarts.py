# SPDX-License-Identifier: Apache-2.0
"""Ranks killed by SIGKILL at random moments: torchrun starts them again, and no loss changes.

    OMP_NUM_THREADS=1 python -m benchmarks.soak.restarts --restarts 20 --seed 1 [--loop megatron-lm]

Jobs of two ranks run under torchrun with --max-restarts, as one or two agents (nodes), with c10d
and static rendezvous. Random ranks are killed while they start, step or save. In the end all losses
are compared with those of an unbroken run. Megatron-LM's loop keeps no history of losses, and its
lines round them and may have the mean of two: there each step is recorded as it ends. The program
prints a table in Markdown.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median

import click
import psutil

from benchmarks.soak.loops import LOOPS, OWN, RELEASES, Loop, loop_of
from tests.support.pretrain.training_runs import SMALL, write_counting_corpus
from tests.support.warm_programs import ROOT, free_port

WORLD_SIZE = 2
LINE = (
    f"{SMALL} --use-megatron-fsdp --attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 60"
    " --save-interval 5 --log-interval 1 --distributed-timeout-minutes 1"
)
SETTINGS = [("c10d", 1), ("static", 1), ("c10d", 2), ("static", 2)]
"""Rendezvous, and number of agents."""

STEP = re.compile(r"^iteration +(\d+)/.*?(lm loss: \S+) [\s\S]*?(grad norm: \S+)", re.MULTILINE)
LOADED = re.compile(r"^loaded .*, iteration \d+", re.MULTILINE)
PROGRAM = str(ROOT / "pretrain_gpt.py")
RECORDING_PROGRAM = str(ROOT / "benchmarks" / "soak" / "faulty_run.py")
LONGEST_SILENCE = 600
"""Seconds without news from a job after which it counts as one that does not come back."""

Step = tuple[str, ...]
"""Iteration, loss and gradient norm, as printed or recorded."""
History = list[dict[str, float]]
Expected = tuple[dict[str, Step], History]
"""Steps by iteration, and the losses that a run has kept."""


class NotBackError(Exception):
    """A job that ended with an error, or does not come back."""


class RestartedJob:
    """A job under torchrun whose ranks can be killed.

    Args:
        folder: of its checkpoints and logs.
        rendezvous: "c10d" or "static".
        num_agents: number of agents, which share the ranks.
        line: words for the program.
        command: starts torchrun.
        before: words of torchrun before the program.
        environment: variables instead of those of this process.
        max_restarts: how often torchrun starts the ranks again.
        loop: that trains; this program's own if None.
    """

    def __init__(
        self,
        folder: Path,
        rendezvous: str,
        num_agents: int,
        line: str = LINE,
        command: Sequence[str] = (sys.executable, "-m", "torch.distributed.run"),
        before: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        max_restarts: int = 1000,
        loop: Loop | None = None,
    ):
        loop = loop or loop_of(OWN)
        self.saved = folder / "saved"
        self._record = None if loop.keeps_history else folder / "steps.jsonl"
        self._name = f"{folder.name}_{os.getpid()}_{free_port()}"
        self._logs = [folder / f"agent_{number}.log" for number in range(num_agents)]
        own = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        own = {**(environment or own), **loop.environment, "OMP_NUM_THREADS": "1"}
        program = PROGRAM
        if self._record is not None:
            program, own["RECORD_STEPS"] = RECORDING_PROGRAM, str(self._record)
        self._size_read = 0
        self._steps: list[Step] = []
        port = free_port()
        self.agents = []
        for number, log in enumerate(self._logs):
            words = f"--nnodes {num_agents} --nproc_per_node {WORLD_SIZE // num_agents}"
            words += f" --max-restarts {max_restarts} --rdzv-id {self._name}"
            if rendezvous == "c10d":
                words += f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
            else:
                words += f" --node-rank {number} --master-addr 127.0.0.1 --master-port {port}"
            every = [*command, *words.split(), *before, program, *loop.words(line)]
            with log.open("w") as output:
                self.agents.append(
                    subprocess.Popen(
                        [*every, "--save", str(self.saved), "--load", str(self.saved)],
                        cwd=folder,
                        env=own,
                        stdout=output,
                        stderr=output,
                    )
                )

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks that are alive."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("TORCHELASTIC_RUN_ID") == self._name:
                    found[int(environment["RANK"])] = process.pid
            except psutil.Error:
                continue
        return found

    def steps(self) -> list[Step]:
        """Return what was printed or recorded of each step, by all attempts."""
        files = self._logs if self._record is None else [self._record]
        size = sum(file.stat().st_size for file in files if file.exists())
        if size != self._size_read:
            self._size_read = size
            self._steps = []
            if self._record is not None:
                self._steps = [tuple(map(repr, step)) for step in self._recorded()]
            else:
                for log in self._logs:
                    self._steps += [step.groups() for step in STEP.finditer(log.read_text())]
        return self._steps

    def _recorded(self) -> Iterator[list[float]]:
        """Yield iteration, loss and gradient norm of all steps that were recorded."""
        assert self._record is not None
        for text in self._record.read_text().splitlines():
            with suppress(ValueError):  # the last words of a killed process
                facts = json.loads(text)
                if "step" in facts:
                    yield facts["step"]

    def num_loads(self) -> int:
        """Return how many attempts have loaded a checkpoint."""
        return sum(len(LOADED.findall(log.read_text())) for log in self._logs)

    def saves(self) -> set[int]:
        """Return the staging directories of saves, as inodes."""
        found = set()
        for path in self.saved.glob(".writing_*"):
            try:
                found.add(path.stat().st_ino)
            except FileNotFoundError:  # published meanwhile
                continue
        return found

    def wait(self, condition: Callable[[], bool], pause: float) -> bool:
        """Wait for a condition; return False if the job ends without it."""
        # A job that dies at the same step again and again repeats itself, and that is no news.
        news, deadline = len(set(self.steps())), time.monotonic() + LONGEST_SILENCE
        while not condition():
            codes = [agent.poll() for agent in self.agents]
            if any(codes):
                raise NotBackError(f"torchrun ended with {codes}:\n{self.last_lines()}")
            if all(code == 0 for code in codes):
                return False
            if len(set(self.steps())) > news:
                news, deadline = len(set(self.steps())), time.monotonic() + LONGEST_SILENCE
            if time.monotonic() > deadline:
                raise NotBackError(f"silent for {LONGEST_SILENCE} s:\n{self.last_lines()}")
            time.sleep(pause)
        return True

    def history(self) -> History:
        """Return the losses that the run has kept, or the last of those recorded, unrounded."""
        if self._record is not None:
            losses = {int(iteration): loss for iteration, loss, _ in self._recorded()}
            return [{"iteration": each, "train": losses[each]} for each in sorted(losses)]
        lines = (self.saved / "losses.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def last_lines(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self._logs)

    def stop(self) -> None:
        """End what still runs."""
        for agent in self.agents:
            agent.kill()
        for pid in self.ranks().values():
            os.kill(pid, signal.SIGKILL)


class Killer:
    """Kills of the ranks of a job at random moments.

    Args:
        job: whose ranks are killed.
        random_numbers: choose moments and ranks.
    """

    def __init__(self, job: RestartedJob, random_numbers: Random):
        self._job = job
        self._random = random_numbers
        self._killed_at: float | None = None
        self._start_seconds = 10.0
        self.came_back: list[float] = []
        """Seconds between a kill and the next step, where that was waited for."""

    def kill(self) -> str | None:
        """Kill one rank; return the moment, None if the job ended before."""
        job = self._job
        moment = self._random.choice(("start", "step", "save"))
        steps, saves = len(job.steps()), job.saves()
        if moment == "start":
            if not job.wait(lambda: len(job.ranks()) == WORLD_SIZE, 0.05):
                return None
            time.sleep(self._random.uniform(0, self._start_seconds))
        elif not self._wait_for_a_step(steps):
            return None
        ranks = job.ranks()
        if moment == "step":
            more = self._random.randint(1, 12)
            if not job.wait(lambda: len(job.steps()) > steps + more, 0.002):
                return None
            time.sleep(self._random.uniform(0, 0.05))
        elif moment == "save":
            if not job.wait(lambda: bool(job.saves() - saves), 0.002):
                return None
            time.sleep(self._random.uniform(0, 0.1))
        moment = "start" if len(job.steps()) == steps else moment
        pid = ranks.get(self._random.randrange(WORLD_SIZE))
        if pid is None or not psutil.pid_exists(pid):
            return None
        os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        return moment if job.wait(lambda: pid not in job.ranks().values(), 0.02) else None

    def _wait_for_a_step(self, steps: int) -> bool:
        if not self._job.wait(lambda: len(self._job.steps()) > steps, 0.02):
            return False
        if self._killed_at is not None:
            self._start_seconds = time.monotonic() - self._killed_at
            self.came_back.append(self._start_seconds)
        return True


def unbroken(folder: Path, loop: Loop) -> Expected:
    """Return the steps, by iteration, and the losses of a run that nobody kills."""
    job = RestartedJob(folder, "c10d", 1, loop=loop)
    job.wait(lambda: False, 0.1)
    return {step[0]: step for step in job.steps()}, job.history()


def differences(job: RestartedJob, steps: dict[str, Step], history: History) -> list[str]:
    """Describe what a job printed or kept and the unbroken run did not."""
    changed = [step for step in job.steps() if step != steps[step[0]]]
    wrong = [f"{step} instead of {steps[step[0]]}" for step in changed]
    if job.history() != history:
        wrong.append("the history of losses is another")
    return wrong


def kill_often(
    loop: Loop,
    settings: tuple[str, int],
    kills: int,
    random_numbers: Random,
    folder: Path,
    expected: Expected,
) -> tuple[Counter[str], list[float]]:
    """Run jobs until so many ranks were killed; return counts and the times until they were back.

    Raises:
        NotBackError: a job did not come back.
    """
    counts: Counter[str] = Counter()
    came_back = []
    while counts["kills"] < kills:
        counts["jobs"] += 1
        place = folder / f"{settings[0]}_{settings[1]}_{counts['jobs']}"
        place.mkdir()
        job = RestartedJob(place, *settings, loop=loop)
        try:
            killer = Killer(job, random_numbers)
            while counts["kills"] < kills and (moment := killer.kill()) is not None:
                counts["kills"] += 1
                counts[moment] += 1
            job.wait(lambda: False, 0.1)
        finally:
            job.stop()
        came_back += killer.came_back
        wrong = differences(job, *expected)
        counts["steps"] += len(job.steps())
        counts["wrong"] += len(wrong)
        for line in wrong:
            click.echo(line, err=True)
    return counts, came_back


@click.command()
@click.option("--restarts", default=8, show_default=True, help="In all.")
@click.option("--seed", default=0, show_default=True)
@click.option("--loop", "name", type=click.Choice(list(LOOPS)), default=OWN, show_default=True)
@click.option("--release", type=click.Choice(RELEASES), help="Of Megatron-Core.")
def main(restarts: int, seed: int, name: str, release: str | None) -> None:
    """Kill ranks, and print how often, when, and what became of the jobs."""
    loop = loop_of(name, release)
    write_counting_corpus()
    failed = False
    columns = "| rendezvous | agents | jobs | killed in start | step | save | steps printed"
    click.echo(f"{columns} | steps or histories that differ | back in training after |")
    click.echo("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "unbroken").mkdir()
        expected = unbroken(folder / "unbroken", loop)
        for number, settings in enumerate(SETTINGS):
            kills = restarts // len(SETTINGS) + (number < restarts % len(SETTINGS))
            random_numbers = Random(f"{seed}/{settings}")
            try:
                counts, times = kill_often(loop, settings, kills, random_numbers, folder, expected)
            except NotBackError as error:
                click.echo(f"{settings}: {error}", err=True)
                failed = True
                continue
            numbers = [counts[name] for name in ("jobs", "start", "step", "save", "steps", "wrong")]
            back = f"{median(times):.0f} s (longest {max(times):.0f} s)" if times else "-"
            click.echo(f"| {' | '.join(map(str, [*settings, *numbers, back]))} |")
            failed |= counts["wrong"] > 0
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
