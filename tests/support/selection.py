# SPDX-License-Identifier: Apache-2.0
"""Selection for `make test`: a few cases of a long table, all of which `make test-all` runs.

    @pytest.mark.always("zero3-*", "hsdp-bf16")    # `make test` runs these cases and no others
    @pytest.mark.seldom("mixtral")                 # `make test` runs all but these
    @pytest.mark.parametrize(...)

Cases are named by the ids that pytest prints in brackets; `*` stands for anything. A whole function
is left out by `pytest.mark.exhaustive`.
"""

import random
import re
from collections.abc import Iterable
from itertools import chain

import pytest

LONG = 300.0
"""Cost in `tests/costs.md` from which a file comes first, so that no worker waits for another's."""


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
        cost = costs.get(item.nodeid.partition("::")[0], 0.0)
        return -cost if cost >= LONG else 0.0

    items.sort(key=position)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put files, and the tests of each, in an order that the seed draws."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
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


def _fits(case: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), case) is not None
