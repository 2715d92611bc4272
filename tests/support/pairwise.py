# SPDX-License-Identifier: Apache-2.0
"""Coverings of tables of cases: few cases that have every value, or every pair of values.

    @pytest.mark.parametrize(
        ("strategy", "model", "dtype"),
        pairwise(strategy=range(4), model=MODELS, dtype=["bf16", "fp32"]),
    )

Cases are in the order of the names, with ids such as `strategy=2-gpt-bf16`. A table of two columns
has all of its pairs in its full product only: `each_value` chooses as many cases as the longer
column has values.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]
Cell = tuple[int, int]
"""A value of a case: the numbers of its column and of its row in the column."""


def pairwise(
    always: Iterable[tuple[Any, ...]] = (),
    allowed: Callable[..., bool] = lambda **case: True,
    **values: Iterable[Any],
) -> list[Any]:
    """Choose cases in which every allowed pair of values of two columns occurs.

    Args:
        always: Cases that are chosen in any case, each with a value of every column.
        allowed: Called with a case as keyword arguments; a case that it refuses is not chosen.
        values: The columns. Of a mapping the keys count.

    Returns:
        One `pytest.param` a case, the same ones in every call.
    """
    return _covering(2, always, allowed, values)


def each_value(
    always: Iterable[tuple[Any, ...]] = (),
    allowed: Callable[..., bool] = lambda **case: True,
    **values: Iterable[Any],
) -> list[Any]:
    """Choose cases in which every value occurs, with the arguments of `pairwise`."""
    return _covering(1, always, allowed, values)


def _covering(
    strength: int,
    always: Iterable[tuple[Any, ...]],
    allowed: Callable[..., bool],
    values: dict[str, Iterable[Any]],
) -> list[Any]:
    columns = {name: list(column) for name, column in values.items()}
    table = _Table(columns, allowed)
    cases = []
    for wanted in always:
        rows = zip(columns.values(), wanted, strict=True)
        cases.append([column.index(value) for column, value in rows])
    missing = table.combinations(strength)
    for case in cases:
        missing.difference_update(_parts(case, strength))
    uses = dict.fromkeys(table.cells(), 0)
    for wanted_cells in sorted(missing):
        if wanted_cells in missing:
            case = table.fill(dict(wanted_cells), missing, uses)
            if case is not None:
                missing.difference_update(_parts(case, strength))
                for cell in enumerate(case):
                    uses[cell] += 1
                cases.append(case)
    return [table.param(case) for case in cases]


def _parts(case: list[int], strength: int) -> Iterator[tuple[Cell, ...]]:
    return combinations(enumerate(case), strength)


class _Table:
    """Columns of values, and the cases that are allowed of their product."""

    def __init__(self, columns: dict[str, list[Any]], allowed: Callable[..., bool]) -> None:
        self._names = list(columns)
        self._columns = list(columns.values())
        self._allowed = allowed

    def cells(self) -> Iterator[Cell]:
        for number, column in enumerate(self._columns):
            for row in range(len(column)):
                yield number, row

    def combinations(self, strength: int) -> set[tuple[Cell, ...]]:
        """Return all combinations of cells of different columns, `strength` cells in each."""
        found: set[tuple[Cell, ...]] = set()
        for numbers in combinations(range(len(self._columns)), strength):
            choices = [[(number, row) for row in self._rows(number)] for number in numbers]
            found.update(product(*choices))
        return found

    def _rows(self, number: int) -> range:
        return range(len(self._columns[number]))

    def fill(
        self, chosen: dict[int, int], missing: set[tuple[Cell, ...]], uses: dict[Cell, int]
    ) -> list[int] | None:
        """Complete a case, value by value those that bring most of what is missing.

        Among equals the value that was used least comes first. Returns the rows, or None if no
        case with the chosen values is allowed.
        """
        rest = [number for number in range(len(self._columns)) if number not in chosen]
        if not rest:
            case = [chosen[number] for number in range(len(self._columns))]
            return case if self._allowed(**self._named(case)) else None
        number = rest[0]
        ranking = []
        for row in self._rows(number):
            cell = (number, row)
            gain = sum(tuple(sorted((cell, other))) in missing for other in chosen.items())
            ranking.append((-gain, (cell,) not in missing, uses[cell], row))
        for *_, row in sorted(ranking):
            case = self.fill({**chosen, number: row}, missing, uses)
            if case is not None:
                return case
        return None

    def _named(self, case: list[int]) -> Case:
        cells = zip(self._names, self._columns, case, strict=True)
        return {name: column[row] for name, column, row in cells}

    def param(self, case: list[int]) -> Any:
        named = self._named(case)
        return pytest.param(
            *named.values(), id="-".join(_label(name, value) for name, value in named.items())
        )


def _label(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return getattr(value, "__name__", f"{name}={value}")
