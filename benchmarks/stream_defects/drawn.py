# SPDX-License-Identifier: Apache-2.0
"""Draw defects at random, make each, and say what finds it.

    python -m benchmarks.stream_defects.drawn --seed 1 --count 40
    python -m benchmarks.stream_defects.drawn --seed 1 --count 40 --list    what is drawn
    python -m benchmarks.stream_defects.drawn --seed 1 --count 40 --report  what is known

Which trainings execute a line is found out first. Those that execute the changed one run with the
defect, the quickest first, until one of them shows it: the model reports something, numbers are
others than without the defect, there is an error, ranks wait for ever, or the training costs more.
It costs more if it uses or holds more memory, keeps more storages alive, launches fewer kernels
between an event of another stream and the wait for it, or has fewer collectives in registered
memory; such a count must be the same each time, with the defect and without.

A run that was interrupted goes on where it was: what is known stands in
`build/drawn_defects.jsonl`, for each state of the sources.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import click

from benchmarks.broken_lines.broken_line import REPOSITORY
from benchmarks.stream_defects.grammar import DrawnDefect, draw
from benchmarks.stream_defects.places import places
from benchmarks.stream_defects.programs import PROGRAMS, RunOutcome, are_same, outcome_of
from tests.support.mcore_adapter.runs_on_cuda_model import reports_of_run
from tests.support.pretrain.training_runs import write_counting_corpus
from tests.support.rank_pool import RankFailure, run_ranks, shut_down

RESULTS = REPOSITORY / "build" / "drawn_defects.jsonl"
SOURCES = (
    *("megatron", "megatron_fsdp", "tests/support", "tools/cuda_model"),
    "benchmarks/stream_defects",
)
"""What the results depend on."""
RACE, NUMBERS, ERROR, HANG, MEMORY = "race", "wrong numbers", "error", "hang", "more memory"
LEAK, OVERLAP, REGISTERED = "leak", "less overlap", "less registered memory"
PATIENCE = 6, 30.0
"""A training hangs that takes so many times as long as without a defect, and seconds more."""


def run_program(name: str, defect: DrawnDefect | None, notes_lines: bool, timeout: float) -> Any:
    """Run a training on its ranks; return the outcome of each."""
    program = PROGRAMS[name]
    marks = []
    if program.uses_core:
        marks.append(reports_of_run)  # the pool has ranks of their own for such functions
        write_counting_corpus()
    with tempfile.TemporaryDirectory(prefix="drawn_defects_") as folder:
        arguments = (name, folder, defect, notes_lines, *marks)
        return run_ranks(program.num_ranks, outcome_of, *arguments, timeout=timeout)


# ---- what is known


@cache
def state_of_sources() -> str:
    """Return a hash of the sources that the results depend on."""
    digest = hashlib.sha256()
    for name in SOURCES:
        for file in sorted((REPOSITORY / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def known(what: str) -> dict[str, dict[str, Any]]:
    """Return name -> row, of "program" or "defect", for this state of the sources."""
    found = {}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    for row in map(json.loads, lines):
        if row["what"] == what and row["state"] == state_of_sources():
            found[row["name"]] = row
    return found


def keep(what: str, name: str, **found: Any) -> dict[str, Any]:
    """Write a row to the results, and return it."""
    row = {"what": what, "name": name, "state": state_of_sources(), **found}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


# ---- trainings without a defect


def unbroken(name: str) -> dict[str, Any]:
    """Return what a training without a defect comes to, and the lines that it executes."""
    row = known("program").get(name)
    if row is not None:
        return row
    outcomes: list[RunOutcome] = run_program(name, None, True, 600)
    for outcome in outcomes:
        if outcome.reports or outcome.problem:
            raise RuntimeError(f"{name}: {outcome.reports or outcome.problem}")
    ranks = [{**asdict(outcome), "lines": sorted(outcome.lines)} for outcome in outcomes]
    return keep("program", name, ranks=ranks)


@cache
def executed(name: str) -> tuple[float, frozenset[tuple[str, int]]]:
    """Return the seconds that a training takes, and the (file, line) that some rank executes."""
    ranks = ranks_of(unbroken(name))
    lines = frozenset().union(*(rank.lines for rank in ranks))
    return max(rank.seconds for rank in ranks), lines


def programs_for(defect: DrawnDefect) -> list[str]:
    """Return the trainings that execute the line of a defect, the quickest first."""
    chosen = [name for name in PROGRAMS if (defect.file, defect.line) in executed(name)[1]]
    return sorted(chosen, key=lambda name: executed(name)[0])


def ranks_of(row: dict[str, Any]) -> list[RunOutcome]:
    """Return what is known of a training without a defect, on each of its ranks."""
    ranks = [{**rank, "lines": set(map(tuple, rank["lines"]))} for rank in row["ranks"]]
    return [RunOutcome(**rank) for rank in ranks]


@cache
def repeated(name: str) -> list[RunOutcome]:
    """Return what a training without a defect comes to once more, on ranks that begin with it."""
    shut_down()
    again: list[RunOutcome] = run_program(name, None, False, 600)
    return again


def has_same_values(name: str) -> bool:
    """Return True if a training without a defect has the same numbers each time."""
    before = ranks_of(unbroken(name))
    return all(are_same(one.values, other.values) for one, other in zip(repeated(name), before))


# ---- trainings with a defect


def found_by(defect: DrawnDefect) -> dict[str, Any]:
    """Run the trainings that execute a defect's line, until one shows it."""
    names = programs_for(defect)
    begin = time.monotonic()
    for name in names:
        shown = show(defect, name)
        if shown is not None:
            by, text = shown
            return {"by": by, "program": name, "text": text, "seconds": _since(begin)}
    text = f"{len(names)} trainings execute it" if names else "no training executes it"
    return {"by": None, "program": None, "text": text, "seconds": _since(begin)}


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 1)


def show(defect: DrawnDefect, name: str) -> tuple[str, str] | None:
    """Run a training with a defect; return what shows it, and how."""
    times, more = PATIENCE
    before = ranks_of(unbroken(name))

    def again() -> list[RunOutcome]:
        timeout = times * executed(name)[0] + more
        outcomes: list[RunOutcome] = run_program(name, defect, False, timeout)
        return outcomes

    try:
        outcomes = again()
    except RankFailure as failure:
        text = str(failure)
        if "DefectFound: reported: " in text:
            return RACE, text.partition("DefectFound: reported: ")[2].partition("\n")[0]
        if "DefectFound: " in text:
            return ERROR, text.partition("DefectFound: ")[2].partition("\n")[0]
        return (HANG if "did not finish" in text else ERROR), text.partition("\n")[0]
    for outcome in outcomes:
        if outcome.reports:
            return RACE, outcome.reports[0]
    for outcome in outcomes:
        if outcome.problem:
            return NUMBERS, outcome.problem
    for outcome, own in zip(outcomes, before, strict=True):
        if not are_same(outcome.values, own.values) and has_same_values(name):
            return NUMBERS, "gradients or weights are others than without the defect"
    if not any(costs(name, outcomes, before)):
        return None
    repeats = [*costs(name, repeated(name), before), *costs(name, before, repeated(name))]
    unstable = {by for by, _ in repeats}
    shown = [each for each in costs(name, outcomes, before) if each[0] not in unstable]
    shut_down()
    found = list(costs(name, again(), before)) if shown else []
    return next((each for each in shown if each in found), None)


def costs(
    name: str, outcomes: list[RunOutcome], before: list[RunOutcome]
) -> Iterator[tuple[str, str]]:
    """Yield what a training needs more of than before, or does less of, on some rank."""
    for outcome, own in zip(outcomes, before, strict=True):
        # The first training of Megatron-Core in a process fills caches.
        if not PROGRAMS[name].uses_core:
            if outcome.peak > own.peak:
                yield MEMORY, f"{outcome.peak:,} bytes, without the defect {own.peak:,}"
            for held, less in zip(outcome.held, own.held):
                if held > less:
                    yield MEMORY, f"{held:,} bytes are held, without the defect {less:,}"
            for alive, fewer in zip(outcome.storages, own.storages):
                if alive > fewer:
                    yield LEAK, f"{alive} storages are alive, without the defect {fewer}"
        if outcome.num_registered < own.num_registered:
            text = f"{outcome.num_registered} collectives in it, without the defect"
            yield REGISTERED, f"{text} {own.num_registered}"
        if outcome.num_beside < own.num_beside:
            text = f"{outcome.num_beside} kernels beside other streams, without the defect"
            yield OVERLAP, f"{text} {own.num_beside}"


# ---- the table


def report(defects: list[DrawnDefect], seed: int) -> int:
    """Print the table of what is known; return how many defects were not found."""
    rows = known("defect")
    print("| place | statement | change | found by |\n|---|---|---|---|")
    num_missed = num_known = 0
    for defect in defects:
        row = rows.get(defect.name)
        if row is None:
            continue
        num_known += 1
        num_missed += row["by"] is None
        place = f"`{defect.file.removeprefix('megatron/')}`, `{defect.function}`"
        by = f"{row['by']}, in `{row['program']}`" if row["by"] else f"NOT FOUND: {row['text']}"
        statement = defect.statement.replace("|", "\\|")
        print(f"| {place} | `{statement}` | {defect.change.replace('|', chr(92) + '|')} | {by} |")
    print(
        f"\n{num_known - num_missed} of {num_known} defects are found "
        f"(seed {seed}, of {len(places())} places)"
    )
    return num_missed


@click.command()
@click.option("--seed", default=41, show_default=True, help="Seed of the draw.")
@click.option("--count", default=40, show_default=True, help="Defects to draw.")
@click.option("--list", "only_list", is_flag=True, help="Print what is drawn, and run nothing.")
@click.option("--report", "only_report", is_flag=True, help="Print what is known, and run nothing.")
def main(seed: int, count: int, only_list: bool, only_report: bool) -> None:
    """Draw defects in the handling of streams, and say what finds them."""
    defects = draw(count, seed)
    if only_list:
        for defect in defects:
            print(f"{defect.file}:{defect.line}: {defect.statement} -> {defect.change}")
        return
    if not only_report:
        done = known("defect")
        for defect in defects:
            if defect.name in done:
                continue
            found = found_by(defect)
            keep("defect", defect.name, **found)
            shut_down()  # what a defect has left behind in the ranks
            by = f"{found['by']}, in {found['program']}: " if found["by"] else "NOT FOUND: "
            print(f"{defect.name}: {by}{found['text']} ({found['seconds']} s)", flush=True)
    sys.exit(report(defects, seed) > 0)


if __name__ == "__main__":
    main()
