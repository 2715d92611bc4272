# SPDX-License-Identifier: Apache-2.0
"""Selection for `make test`: a few cases of a long table, all of which `make test-all` runs.

    @pytest.mark.always("zero3-*", "hsdp-bf16")    # `make test` runs these cases and no others
    @pytest.mark.seldom("mixtral")                 # `make test` runs all but these
    @pytest.mark.parametrize(...)

Cases are named by the ids that pytest prints in brackets; `*` stands for anything. A whole function
is left out by `pytest.mark.exhaustive`. `.ci/run` has the exhaustive cases of long files in turns:
a quarter of them with each commit.
"""

import random
import re
from collections.abc import Iterable
from itertools import chain

import pytest

LONG = 100.0
"""Cost in `tests/costs.md` from which a file is long.

Long files come first, so that no worker waits for another's, and take turns in `.ci/run`.
"""
TURNS = 4
"""Runs of `.ci/run`, one commit after another, in which every case runs."""


def mark_cases(items: Iterable[pytest.Item]) -> list[str]:
    """Mark cases as exhaustive by `always` and `seldom`; return the names that fit no case."""
    unused: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for item in items:
        function, _, case = item.nodeid.removesuffix("]").partition("[")
        for mark in (*item.iter_markers("always"), *item.iter_markers("seldom")):
            fitting = {pattern for pattern in mark.args if _fits(case, pattern)}
            if bool(fitting) == (mark.name == "seldom"):
                item.add_marker(pytest.mark.exhaustive)
            used |= {(function, pattern) for pattern in fitting}
            unused |= {(function, pattern) for pattern in mark.args}
    return [f"{function}[{pattern}]" for function, pattern in sorted(unused - used)]


def long_files_first(items: list[pytest.Item], costs: dict[str, float]) -> None:
    """Let long files come first, the costliest one at the start; others keep their order."""

    def position(item: pytest.Item) -> float:
        cost = costs.get(file_of(item), 0.0)
        return -cost if cost >= LONG else 0.0

    items.sort(key=position)


def leave_out_other_turns(
    items: list[pytest.Item], costs: dict[str, float], turn: int
) -> list[pytest.Item]:
    """Remove the exhaustive cases of long files that have another turn, and return them.

    Args:
        items: all tests; those of `make test`, and all of files that are not long, stay.
        costs: file -> its cost.
        turn: any number; turns that differ by `TURNS` have the same cases.
    """
    left_out: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    position = 0
    for item in items:
        takes_turns = costs.get(file_of(item), 0.0) >= LONG and any(item.iter_markers("exhaustive"))
        position += takes_turns
        is_left_out = takes_turns and (position - turn) % TURNS != 0
        (left_out if is_left_out else kept).append(item)
    items[:] = kept
    return left_out


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put files, and the tests of each, in an order that the seed draws."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(file_of(item), []).append(item)
    draw = random.Random(seed)
    files = list(by_file.values())
    draw.shuffle(files)
    for tests in files:
        draw.shuffle(tests)
    items[:] = chain.from_iterable(files)


def what_selects_nothing(config: pytest.Config) -> str:
    """Return a line that names what was asked for, of which there is no test."""
    flags = {"-k": config.option.keyword, "-m": config.option.markexpr}
    asked = " and ".join(f'{flag} "{text}"' for flag, text in flags.items() if text)
    return f"nothing was selected: no test in {' '.join(config.args)} fits {asked or 'this call'}"


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's file in the repository."""
    return item.nodeid.partition("::")[0]


def _fits(case: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), case) is not None
