# SPDX-License-Identifier: Apache-2.0
"""Costs of test files: measured in every run, held to a budget, kept in `tests/costs.md`.

    make test-all                              prints the ten slowest files; fails over a budget
    make test-all && make test && .ci/run      leave what they measured in `build/test_costs`
    python -m tests.support.costs              write `tests/costs.md` and the figures of
                                               CONTRIBUTING.md from these three

A cost is the processor time of a file with all processes that work for it, so that other work on
the machine matters little. It is counted in references, the processor time of a small training
that is measured in the same run, so that a slow machine matters little either. Servers that ranks
are forked from are no file's; what else several files use, such as warm programs and the ranks
themselves, is paid by the first of them: `SHARED` allows it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import pytest

from tests.support import fork_servers, rank_pool
from tests.support.processor_time import descendants, seconds_of
from tests.support.selection import file_of

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "costs.md"
MEASURED = ROOT / "build" / "test_costs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DEFAULT, WHOLE = "test", "test-all"
CI_RUN = "ci_run"
"""File that `.ci/run` writes its duration in seconds and its date to."""

SHARED = 300.0
"""References that a file may cost beyond its budget, as the first to start what is shared."""
MARGIN = 1.5
"""Factor between the cost in the table and the budget."""
ON_GPUS = "tests/gpu/"
"""Files without a budget: the run that the table is from skips their cases."""
FILES_BETWEEN_REFERENCES = 20
SHOWN_FILES = 10


@dataclass
class FileCost:
    """Cost of one file: all its cases, and those that `make test` runs too.

    `processes` are those that the test process starts, `ranks` the calls on ranks of the pool,
    `steps` those of torch's optimizers in both. Times are in seconds; `references` is
    `processor_seconds` in units of the reference of the same run.
    """

    cases: int = 0
    default_cases: int = 0
    seconds: float = 0.0
    default_seconds: float = 0.0
    processor_seconds: float = 0.0
    processes: int = 0
    ranks: int = 0
    steps: int = 0
    references: float = 0.0


class CostPlugin:
    """Measures each file in the process that runs it, and fails its last test over the budget."""

    def __init__(self, budgets: dict[str, float]) -> None:
        self.files: dict[str, FileCost] = {}
        self.references: list[float] = []
        self._budgets = budgets
        self._file: str | None = None
        self._before = Usage()
        self._is_exhaustive = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = file_of(item)
        if file != self._file:
            if len(self.files) % FILES_BETWEEN_REFERENCES == 0:
                self.references.append(reference_seconds())
            self._file = file
            self._before = Usage.now()
        cost = self.files.setdefault(file, FileCost())
        self._is_exhaustive = item.get_closest_marker("exhaustive") is not None
        cost.cases += 1
        if not self._is_exhaustive:
            cost.default_cases += 1
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None:  # the process that only distributes the tests
            return
        cost = self.files[self._file]
        cost.seconds += report.duration
        if not self._is_exhaustive:
            cost.default_seconds += report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        yield
        file = file_of(item)
        if nextitem is not None and file_of(nextitem) == file:
            return
        cost = self.files[file]
        now = Usage.now()
        cost.processor_seconds += max(0.0, now.processor_seconds - self._before.processor_seconds)
        cost.processes += now.processes - self._before.processes
        cost.ranks += now.ranks - self._before.ranks
        cost.steps += now.steps - self._before.steps
        self._before = now
        cost.references = cost.processor_seconds / statistics.median(self.references)
        if self._budgets:
            problem = over_budget(file, cost.references, self._budgets.get(file))
            if problem is not None:
                pytest.fail(problem, pytrace=False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {
                file: dataclasses.asdict(cost) for file, cost in self.files.items()
            }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        for file, values in output.get("costs", {}).items():
            self.files[file] = FileCost(**values)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        if not self.files:
            return
        slowest = sorted(self.files.items(), key=lambda row: row[1].seconds, reverse=True)
        terminalreporter.section(f"slowest {min(SHOWN_FILES, len(slowest))} files")
        for file, cost in slowest[:SHOWN_FILES]:
            terminalreporter.line(
                f"{cost.seconds:7.1f} s {cost.processor_seconds:7.1f} s of processors  {file}"
            )
        total = sum(cost.processor_seconds for cost in self.files.values())
        took = time.time() - terminalreporter._session_start.time
        terminalreporter.line(
            f"total: {took:.0f} s, {total:.0f} s of processors, {len(self.files)} files"
        )
        is_over = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if is_over and is_whole_run(config):
            keep(WHOLE if config.option.markexpr == "" else DEFAULT, took, self.files)


@dataclass
class Usage:
    """Processor time, processes, calls of ranks and steps of the test process since its start."""

    processor_seconds: float = 0.0
    processes: int = 0
    ranks: int = 0
    steps: int = 0

    @classmethod
    def now(cls) -> Usage:
        """Read the counts of this moment."""
        return cls(
            processor_seconds=processor_seconds() + rank_pool.counts.lost_seconds,
            processes=_started_here + rank_pool.counts.processes,
            ranks=rank_pool.counts.calls,
            steps=_steps_here + rank_pool.counts.steps,
        )


_started_here = 0
_steps_here = 0


def count_processes_and_steps() -> None:
    """Count the processes that this one starts, and the steps of torch's optimizers in it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def process_starts(event: str, arguments: object) -> None:
        global _started_here
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            _started_here += 1

    def step_is_over(*arguments: object) -> None:
        global _steps_here
        _steps_here += 1

    sys.addaudithook(process_starts)
    register_optimizer_step_post_hook(step_is_over)


def processor_seconds() -> float:
    """Return the processor time of this process, its descendants, and those that have ended.

    That of servers, which import what all files use, is no file's.
    """
    here = psutil.Process()
    return seconds_of([here, *descendants(here.pid)], fork_servers.process_ids())


def reference_seconds() -> float:
    """Return the processor time of a small training in this process: torch's and Python's work."""
    import torch

    begin = time.process_time()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator, requires_grad=True) for _ in range(8)]
    inputs = torch.randn(32, 64, generator=generator)
    for _ in range(100):
        outputs = inputs
        for weight in weights:
            outputs = torch.tanh(outputs @ weight)
        outputs.sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 1e-3 * weight.grad
                weight.grad = None
    return time.process_time() - begin


def over_budget(file: str, references: float, in_table: float | None) -> str | None:
    """Return what is wrong with a file that costs more than its budget, None for any other."""
    budget = MARGIN * (in_table or 0.0) + SHARED
    if references <= budget or file.startswith(ON_GPUS):
        return None
    return (
        f"{file} costs {references:.0f} references of processor time, and its budget is"
        f" {budget:.0f} ({MARGIN} times what {TABLE.name} says, and {SHARED:.0f}). Make it cheaper,"
        " or write the table anew: python -m tests.support.costs"
    )


def is_whole_run(config: pytest.Config) -> bool:
    """Return True for a run of all tests, or of those of `make test`, which no failure ends."""
    option = config.option
    chooses = option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    chooses = chooses or config.getoption("turn", None) is not None
    return not (chooses or option.maxfail) and option.markexpr in ("", "not exhaustive")


def keep(target: str, seconds: float, files: dict[str, FileCost]) -> None:
    """Leave the measurements of a whole run in the folder of builds."""
    rows = {file: dataclasses.asdict(cost) for file, cost in sorted(files.items())}
    MEASURED.mkdir(parents=True, exist_ok=True)
    content = {"date": date.today().isoformat(), "seconds": seconds, "files": rows}
    (MEASURED / f"{target}.json").write_text(json.dumps(content, indent=1))


def read_table(path: Path = TABLE) -> dict[str, float]:
    """Return file -> references of a table as `table_of` writes it, empty where there is none."""
    text = path.read_text() if path.exists() else ""
    rows = re.findall(r"^\| (\S+\.py) \|.*\| ([\d.]+) \|$", text, re.MULTILINE)
    return {file: float(references) for file, references in rows}


def table_of(measured: dict) -> str:
    """Return the page of the costs of a whole run, the costliest file first."""
    files = {name: FileCost(**values) for name, values in measured["files"].items()}
    lines = [
        "# Costs of the test files",
        "",
        f"Measured by `make test-all` on {measured['date']}, {measured['seconds']:.0f} s in two"
        " processes; written by `python -m tests.support.costs`, which explains the columns. Cases"
        " and seconds in brackets are those of `make test`.",
        "",
        "| file | cases | seconds | of processors | processes | ranks | steps | references |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cost in sorted(files.items(), key=lambda row: row[1].references, reverse=True):
        lines.append(
            f"| {name} | {cost.cases} ({cost.default_cases})"
            f" | {cost.seconds:.1f} ({cost.default_seconds:.1f}) | {cost.processor_seconds:.1f}"
            f" | {cost.processes} | {cost.ranks} | {cost.steps} | {cost.references:.1f} |"
        )
    return "\n".join(lines) + "\n"


def with_figures(text: str, default: dict, ci_seconds: float, ci_date: str) -> str:
    """Return CONTRIBUTING.md with the durations of `make test` and `.ci/run` and their dates.

    Raises:
        ValueError: a line for one of them is missing.
    """
    figures = {
        "`make test` takes": (default["seconds"], default["date"]),
        "`.ci/run` takes": (ci_seconds, ci_date),
    }
    for words, (seconds, day) in figures.items():
        line = f"{words} {seconds / 60:.1f} minutes on two idle cores ({day})"
        pattern = re.escape(words) + r" [\d.]+ minutes on two idle cores \([\d-]+\)"
        text, times = re.subn(pattern, line, text)
        if times != 1:
            raise ValueError(f"{CONTRIBUTING.name} expects one line with {words!r}, not {times}")
    return text


def main() -> int:
    """Write the table and the figures from the last whole runs."""
    needed = {
        MEASURED / f"{DEFAULT}.json": "make test",
        MEASURED / f"{WHOLE}.json": "make test-all",
        MEASURED / CI_RUN: ".ci/run",
    }
    missing = [command for path, command in needed.items() if not path.exists()]
    if missing:
        print(f"run first: {', '.join(missing)}", file=sys.stderr)
        return 1
    default, whole = (
        json.loads((MEASURED / f"{name}.json").read_text()) for name in (DEFAULT, WHOLE)
    )
    ci_seconds, ci_date = (MEASURED / CI_RUN).read_text().split()
    TABLE.write_text(table_of(whole))
    text = with_figures(CONTRIBUTING.read_text(), default, float(ci_seconds), ci_date)
    CONTRIBUTING.write_text(text)
    print(f"{os.path.relpath(TABLE)} and {os.path.relpath(CONTRIBUTING)} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
