# SPDX-License-Identifier: Apache-2.0
"""The checks of a first day on one to eight GPUs, and one report of them.

    make gpu-check                          or: python -m tests.gpu.check
    make gpu-check ARGS=--rehearse          the same on CPU ranks, small

A step that fails does not keep the next ones from running. The report is written anew after every
step, so that it is there when a later one hangs or is interrupted.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import click
import torch
import torch.distributed as dist

from tests.gpu.steps import NOT_MEASURED, STEPS, SUSPECTED, Step

ROOT = Path(__file__).resolve().parents[2]
MOST_GPUS = 8
ALL_FAULTS = "suspected faults"
REHEARSE = "REHEARSE_GPU_CHECK"
"""Lets the tests of GPUs run on the CPU."""


@dataclass
class StepOutcome:
    """The end of a step: passed, failed, not measured, skipped, interrupted or not run."""

    step: Step
    command: str = ""
    result: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    figures: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The result of a step that settles a suspected fault."""
        word = {"passed": "pass", "failed": "fail"}.get(self.result, self.result)
        return f"{word}: {self.reason}" if self.reason else word

    @property
    def figure(self) -> str:
        """The last figure, without what precedes it and other columns in its line."""
        for line in reversed(self.figures):
            found = re.search(self.step.figures, line)
            if found is not None:
                return line[found.start() :].partition(" | ")[0].removeprefix("figure: ")
        return "none"


@dataclass
class GpuCheck:
    """All steps on one machine, and their report."""

    folder: Path
    ranks: int
    is_rehearsed: bool
    timeout: float
    outcomes: list[StepOutcome]

    def run(self) -> None:
        """Run every step; write the report before the first and after each."""
        self.write()
        for outcome in self.outcomes:
            print(f"{outcome.step.name} ...", end=" ", flush=True)
            try:
                self._run(outcome)
            finally:
                print(f"{outcome.result} in {outcome.seconds:.0f} s {outcome.reason}", flush=True)
                self.write()

    def _run(self, outcome: StepOutcome) -> None:
        step = outcome.step
        values = {"python": sys.executable, "folder": shlex.quote(str(self.folder))}
        text = step.command + step.rehearsal * self.is_rehearsed
        outcome.command = text.format(ranks=self.ranks, samples=2 * self.ranks, **values)
        missing = [name for name in step.needs if not is_there(name)]
        if self.is_rehearsed and step.cannot_rehearse:
            outcome.result, outcome.reason = "skipped", step.cannot_rehearse
            return
        if missing:
            outcome.result, outcome.reason = "skipped", f"not installed: {', '.join(missing)}"
            return
        log = self.folder / f"{step.name.replace(' ', '_')}.log"
        begin = time.monotonic()
        try:
            outcome.result, outcome.reason = self._finish(outcome, log)
        except KeyboardInterrupt:
            outcome.result = "interrupted"
            raise
        finally:
            outcome.seconds = time.monotonic() - begin
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            outcome.figures = [line for line in lines if re.search(step.figures, line)][-12:]
            if step.fault is not None and outcome.result == "passed":
                self._look_for_reason(outcome, lines)
            has_ended_well = outcome.result in ("passed", "not measured")
            outcome.last_lines = [] if has_ended_well else lines[-30:]

    def _finish(self, outcome: StepOutcome, log: Path) -> tuple[str, str]:
        """Run the command to its end, or end it with all of its processes."""
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **outcome.step.environment}
        environment |= {"PYTHONPATH": path, "GPU_CHECK_RANKS": str(self.ranks)}
        if self.is_rehearsed:
            environment |= {REHEARSE: "1", "CUDA_VISIBLE_DEVICES": ""}
            environment.pop("TORCH_CUDA_SANITIZER", None)  # the model has its own
        with log.open("w") as output:
            process = subprocess.Popen(
                shlex.split(outcome.command),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            limit = min(self.timeout, outcome.step.limit)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                more = ": --timeout SECONDS for more" if limit == self.timeout else ""
                return "failed", f"not over after {limit:.0f} s{more}"
            finally:
                end(process)
        return ("failed", f"exit code {code}") if code else ("passed", "")

    def _look_for_reason(self, outcome: StepOutcome, lines: list[str]) -> None:
        """Note that a step has not settled its suspected fault, if it has not."""
        reasons = [line for line in lines if line.startswith(NOT_MEASURED)]
        if self.is_rehearsed and not reasons:
            reasons = [f"{NOT_MEASURED}needs a GPU"]
        if reasons:
            outcome.result = "not measured"
            outcome.reason = reasons[-1].removeprefix(NOT_MEASURED)

    def write(self) -> None:
        """Replace the report by a newer one, in one move."""
        draft = self.folder / "report.md.new"
        draft.write_text("\n".join(self._lines()) + "\n")
        draft.replace(self.folder / "report.md")

    def _lines(self) -> list[str]:
        kind = "A rehearsal: nothing ran on a GPU" if self.is_rehearsed else "On GPUs"
        lines = ["# GPU check", "", f"{kind}. {datetime.now():%Y-%m-%d %H:%M}, {self.ranks} ranks."]
        lines += ["", *machine(), "", "| step | result | s | where |", "|---|---|---|---|"]
        for each in self.outcomes:
            result = f"{each.result}: {each.reason}" if each.reason else each.result
            where = each.step.on_cpu if self.is_rehearsed else "GPU"
            where = "nowhere" if each.result in ("skipped", "not run") else where
            lines.append(f"| {each.step.name} | {result} | {each.seconds:.0f} | {where} |")
        lines += self._suspected_faults()
        for each in self.outcomes:
            files = [name for name in each.step.files if (self.folder / name).exists()]
            lines += ["", f"## {each.step.name}: {each.result}", ""]
            if each.seconds:
                lines += [f"`{each.command}`", "", f"Files: {', '.join(files) or 'its log'}", ""]
                lines += ["```text", *(each.last_lines or each.figures), "```"]
            else:
                lines += [each.reason or "It has not run."]
        return lines

    def _suspected_faults(self) -> list[str]:
        """Return the table of suspected faults: pass, fail, or why they are not measured."""
        rows = []
        for each in self.outcomes:
            number = each.step.fault
            if number is not None:
                rows.append(f"| {number} | {SUSPECTED[number]} | {each.verdict} | {each.figure} |")
        if not rows:
            return []
        header = ["| fault | what is right | result | figure |", "|---|---|---|---|"]
        return ["", "## Suspected faults", "", *header, *rows]


def is_there(name: str) -> bool:
    """Return whether a program or a module is installed."""
    if shutil.which(name):
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around the module
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs; torchrun ends its ranks when it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)


def machine() -> list[str]:
    """Return hardware and versions, as a list of Markdown."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    core = version("megatron-core") if is_there("megatron.core") else "none"
    return [
        f"- hardware: {', '.join(gpus) or 'no GPU'}; {platform.machine()}, {os.cpu_count()} cores",
        f"- torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
        f"- Megatron-Core {core}, Python {platform.python_version()}, {platform.system()}",
    ]


def refuse_unusable(ranks: int) -> None:
    """Stop with one message where the steps cannot run on so many GPUs."""
    found, rehearse = torch.cuda.device_count(), "or see the steps on the CPU: --rehearse"
    if not found:
        reason = f"torch {torch.__version__} finds no CUDA device: install a CUDA build of torch"
    elif not dist.is_nccl_available():
        reason = f"torch {torch.__version__} was built without NCCL: install one that has it"
    elif not 1 <= ranks <= min(found, MOST_GPUS):
        reason = f"--ranks {ranks} with {found} GPUs: give 1 to {min(found, MOST_GPUS)}"
    else:
        return
    raise click.ClickException(f"{reason}, {rehearse}")


def chosen(only: tuple[str, ...]) -> list[Step]:
    """Return the steps of these names, or all of them."""
    names = [step.name for step in STEPS]
    unknown = set(only) - {*names, ALL_FAULTS}
    if unknown:
        raise click.UsageError(f"--only names a step: {', '.join([*names, ALL_FAULTS])}")
    steps = []
    for step in STEPS:
        is_fault = step.fault is not None and ALL_FAULTS in only
        if not only or step.name in only or is_fault:
            steps.append(step)
    return steps


@click.command()
@click.option("--ranks", type=int, help="all GPUs, at most eight; two in a rehearsal")
@click.option("--rehearse", is_flag=True, help="run the steps on CPU ranks, with small sizes")
@click.option("--folder", type=click.Path(path_type=Path), default="build/gpu_check")
@click.option("--only", multiple=True, help=f"a step by name, or {ALL_FAULTS!r}; may be repeated")
@click.option("--timeout", default=1800.0, show_default=True, help="of a step, in seconds")
def main(
    ranks: int | None, rehearse: bool, folder: Path, only: tuple[str, ...], timeout: float
) -> None:
    """Run all steps and write FOLDER/report.md; the exit code is 1 if a step failed."""
    ranks = ranks or (2 if rehearse else min(torch.cuda.device_count(), MOST_GPUS))
    if not rehearse:
        refuse_unusable(ranks)
    steps = chosen(only)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [StepOutcome(step) for step in steps]
    check = GpuCheck(folder.resolve(), ranks, rehearse, timeout, outcomes)
    try:
        check.run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        print(f"report: {folder / 'report.md'}")
    sys.exit(int(any(each.result == "failed" for each in outcomes)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the step, as Ctrl-C does
    main()
