# SPDX-License-Identifier: Apache-2.0
"""Marks choose the cases of long tables that `make test` runs."""

from collections.abc import Iterator
from itertools import groupby, product
from types import SimpleNamespace

import pytest

from tests.support.selection import (
    LONG,
    TURNS,
    leave_out_other_turns,
    long_files_first,
    mark_cases,
    shuffle,
    what_selects_nothing,
)

CASES = ("zero1-fp32", "zero3-fp32", "zero3-bf16", "[[2], []]")


class StubItem:
    """A collected case with marks."""

    def __init__(self, case: str, *marks: pytest.Mark, file: str = "tests/test_x.py") -> None:
        self.nodeid = f"{file}::test_x[{case}]"
        self.case = case
        self.marks = list(marks)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def left_to_the_full_run(mark: pytest.Mark) -> tuple[list[str], list[str]]:
    """Return the cases that a mark makes exhaustive, and what it names in vain."""
    items = [StubItem(case, mark) for case in CASES]
    unknown = mark_cases(items)
    return [item.case for item in items if any(item.iter_markers("exhaustive"))], unknown


def test_cases_that_are_named_always_run() -> None:
    mark = pytest.mark.always("zero3-*", "[[2], []]").mark
    assert left_to_the_full_run(mark) == (["zero1-fp32"], [])


def test_cases_that_are_named_seldom_run_in_full_only() -> None:
    mark = pytest.mark.seldom("*-fp32").mark
    assert left_to_the_full_run(mark) == (["zero1-fp32", "zero3-fp32"], [])


def test_a_mark_that_names_no_case_is_told() -> None:
    mark = pytest.mark.always("zero3-*", "zero2-*").mark
    assert left_to_the_full_run(mark)[1] == ["tests/test_x.py::test_x[zero2-*]"]


def test_long_files_come_first_and_others_keep_their_order() -> None:
    costs = {"tests/x.py": 10.0, "tests/long.py": LONG, "tests/longer.py": 2 * LONG}
    files = ["tests/y.py", "tests/long.py", "tests/x.py", "tests/longer.py"]
    items = [StubItem("a", file=file) for file in files]
    long_files_first(items, costs)
    sorted_files = [item.nodeid.partition("::")[0] for item in items]
    assert sorted_files == ["tests/longer.py", "tests/long.py", "tests/y.py", "tests/x.py"]


def test_exhaustive_cases_of_long_files_take_turns() -> None:
    costs = {"tests/long.py": LONG, "tests/short.py": LONG - 1}
    exhaustive = pytest.mark.exhaustive.mark
    always = [StubItem("a", exhaustive, file="tests/short.py"), StubItem("a", file="tests/long.py")]
    in_turns = [StubItem(str(case), exhaustive, file="tests/long.py") for case in range(7)]
    ran: list[StubItem] = []
    for turn in range(4, 4 + TURNS):
        items = [*always, *in_turns]
        left_out = leave_out_other_turns(items, costs, turn)
        assert items[:2] == always and 0 <= len(items[2:]) - len(in_turns) // TURNS <= 1
        assert sorted(items[2:] + left_out, key=in_turns.index) == in_turns
        ran += items[2:]
    assert sorted(ran, key=in_turns.index) == in_turns


def test_a_seed_draws_the_order_of_files_and_of_the_tests_of_each() -> None:
    names = [(f"tests/test_{file}.py", number) for file, number in product("abcdef", range(6))]
    orders = []
    for seed in (1, 1, 2):
        items = [StubItem(str(number), file=file) for file, number in names]
        shuffle(items, seed)
        orders.append([item.nodeid for item in items])
    first, same, other = orders
    assert first == same and first != other and sorted(first) == sorted(other)
    files = [name.partition("::")[0] for name in first]
    assert len(list(groupby(files))) == 6 and files != sorted(files)
    one = [name for name in first if name.startswith(files[0])]
    assert one != sorted(one)


def test_what_selects_nothing_is_named() -> None:
    option = SimpleNamespace(keyword="nothing", markexpr="not exhaustive")
    line = what_selects_nothing(SimpleNamespace(option=option, args=["tests"]))
    assert line == (
        'nothing was selected: no test in tests fits -k "nothing" and -m "not exhaustive"'
    )
