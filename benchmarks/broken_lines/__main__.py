# SPDX-License-Identifier: Apache-2.0
"""Break lines, one at a time, and run the tests: see the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest

from benchmarks.broken_lines.broken_line import REPOSITORY, BrokenLine
from benchmarks.broken_lines.drawn_lines import PARTS, drawn_lines, files_of
from benchmarks.broken_lines.table import BROKEN_LINES

RESULTS = REPOSITORY / "build" / "broken_lines.jsonl"
LISTED = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
"""Command that lists the files of the repository."""
NUMBER, SEED = 120, 20261128
"""Lines in all, and the seed of those that are drawn."""
ELSEWHERE = "elsewhere"
OF_THE_TABLE = "tests/test_broken_lines.py"
"""Tests that the lines stand where the table says: they notice every change, and say nothing."""
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", f"--ignore={OF_THE_TABLE}")
TIMEOUT = 3600
"""Seconds; a run of tests that takes longer has noticed the line."""


def selections(line: BrokenLine, root: Path) -> list[tuple[str, list[str]]]:
    """Return (who notices, arguments of pytest), the cheapest first.

    What `make test-all` is said to notice may be noticed by tests of other folders in `make test`.
    """
    stem = Path(line.file).stem
    folders = [name for name in line.tests.split() if (root / name).exists()]
    own: list[str] = []
    for name in folders:
        files = sorted((root / name).rglob(f"test_*{stem}*.py"))
        own += [file.relative_to(root).as_posix() for file in files]
    default, others = ["-m", "not exhaustive"], ["-m", "exhaustive"]
    elsewhere = ["tests", *(f"--ignore={name}" for name in folders)]
    chosen = [
        ("make test", [*dict.fromkeys(own), *default]),
        *(("make test", [folder, *default]) for folder in folders),
        *(("make test-all", [folder, *others]) for folder in folders),
        ("make test", [*elsewhere, *default]),
        ("make test-all", [*elsewhere, *others]),
    ]
    return [(who, arguments) for who, arguments in chosen if arguments[0] != "-m"]


def first_failure(root: Path, arguments: list[str]) -> str | None:
    """Run tests of the copy until one fails; return its name, None where all pass.

    Raises:
        RuntimeError: pytest could not begin.
    """
    command = [sys.executable, "-m", "pytest", *PYTEST, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found:
        return found.group(1)
    if done.returncode == pytest.ExitCode.USAGE_ERROR and "ModuleNotFoundError" in done.stderr:
        raise RuntimeError(f"the copy of the repository is not whole:\n{done.stderr}")
    return f"pytest ended with {done.returncode}"


def copy_with_tests_of(commit: str | None, root: Path) -> None:
    """Copy the repository, with the tests and helpers of another commit if one is named."""
    listed = subprocess.run(LISTED, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():  # else it is removed, and not yet committed
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, root / name)
    (root / "build").symlink_to(REPOSITORY / "build")  # wheels that tests have downloaded
    if commit is not None:
        shutil.rmtree(root / "tests")
        archive = subprocess.run(
            ["git", "archive", commit, "tests", "pyproject.toml"],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x"], cwd=root, input=archive.stdout, check=True)


def known(tests: str) -> dict[str, dict]:
    """Return name of a line -> what earlier runs with these tests have found."""
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {row["name"]: row for row in rows if row["tests"] == tests}


def is_known(row: dict | None, deep: bool) -> bool:
    """Return False for a line that has not run, or that only likely tests have not noticed."""
    return row is not None and (row["by"] is not None or row["deep"] or not deep)


def report(lines: list[BrokenLine], tests: str) -> None:
    """Print a table of the parts of the library: lines, noticed at all, and by `make test`."""
    rows = known(tests)
    print("| part | lines | noticed | by `make test` |\n|---|---|---|---|")
    total = [0, 0, 0]
    for part in [*PARTS, ELSEWHERE]:
        inside = [rows[line.name] for line in lines if line.name in rows and part_of(line) == part]
        by_default = sum(row["by"] == "make test" for row in inside)
        counts = [len(inside), sum(row["by"] is not None for row in inside), by_default]
        total = [one + other for one, other in zip(total, counts)]
        print(f"| {part} | " + " | ".join(map(str, counts)) + " |")
    print("| all | " + " | ".join(map(str, total)) + " |")
    for line in lines:
        if line.name in rows and rows[line.name]["by"] is None:
            print(f"not noticed: {line.name}")


def part_of(line: BrokenLine) -> str:
    """Return the part of the library that a line is in."""
    return next((part for part in PARTS if line.file in files_of(part)), ELSEWHERE)


@click.command()
@click.argument("words", nargs=-1)
@click.option("--tests-of", help="Commit whose tests run, in place of those that are here.")
@click.option("--deep/--likely", default=True, help="Run everything where a part noticed nothing.")
@click.option("--report", "only_report", is_flag=True, help="Print what is known, and run nothing.")
def main(words: tuple[str, ...], tests_of: str | None, deep: bool, only_report: bool) -> None:
    """Break lines, one at a time, and say which test notices."""
    lines = [*BROKEN_LINES, *drawn_lines(NUMBER - len(BROKEN_LINES), SEED)]
    chosen = [
        line
        for line in lines
        if not words or part_of(line) in words or any(word in line.name for word in words)
    ]
    tests = tests_of or "here"
    if not only_report:
        done = known(tests)
        with tempfile.TemporaryDirectory(prefix="broken_lines_") as directory:
            root = Path(directory, "repository")
            copy_with_tests_of(tests_of, root)
            for line in chosen:
                if not is_known(done.get(line.name), deep):
                    found = notice(line, root, deep)
                    row = {"name": line.name, "tests": tests, "deep": deep, **found}
                    RESULTS.parent.mkdir(exist_ok=True)
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(f"{line.name}: {row['test'] or 'NOT NOTICED'}", flush=True)
    report(chosen, tests)
    sys.exit(any(row["by"] is None for row in known(tests).values()))


def notice(line: BrokenLine, root: Path, deep: bool) -> dict[str, str | None]:
    """Break a line in the copy; return which target of make notices, and by which test."""
    line.apply(root)
    try:
        for who, arguments in selections(line, root):
            if "tests" in arguments and not deep:
                break
            failed = first_failure(root, arguments)
            if failed is not None:
                return {"by": who, "test": failed}
        return {"by": None, "test": None}
    finally:
        line.undo(root)


if __name__ == "__main__":
    main()
