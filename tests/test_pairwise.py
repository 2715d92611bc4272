# SPDX-License-Identifier: Apache-2.0
"""Coverings have every value, or every pair of values, in few cases."""

from itertools import combinations, product

import pytest

from tests.support.pairwise import each_value, pairwise

COLUMNS = {"level": range(4), "dtype": ["bf16", "fp32"], "model": "abcde", "mesh": "xyz"}


def pairs(case: tuple[object, ...]) -> set[object]:
    return set(combinations(enumerate(case), 2))


def test_every_pair_occurs_in_about_as_many_cases_as_the_longest_pair_of_columns() -> None:
    chosen = [case.values for case in pairwise(**COLUMNS)]
    every = set().union(*map(pairs, product(*COLUMNS.values())))
    assert set().union(*map(pairs, chosen)) == every
    assert 4 * 5 <= len(chosen) <= 24 and len(set(chosen)) == len(chosen)


def test_every_value_occurs_in_as_many_cases_as_the_longest_column_has_values() -> None:
    chosen = [case.values for case in each_value(**COLUMNS)]
    for values, column in zip(zip(*chosen), COLUMNS.values(), strict=True):
        assert set(values) == set(column)
        assert max(map(values.count, values)) - min(map(values.count, values)) <= 1
    assert len(chosen) == 5


def test_a_table_of_one_column_is_that_column() -> None:
    assert [case.values for case in each_value(model="abc")] == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("choose", [pairwise, each_value])
def test_cases_that_are_always_in_come_first_and_count(choose: type) -> None:
    plain = choose(a="xyz", b="uv", c="st")
    named = choose(a="xyz", b="uv", c="st", always=[("z", "v", "t")])
    assert named[0].values == ("z", "v", "t")
    assert len(named) <= len(plain) + 1
    with pytest.raises(ValueError):
        choose(a="xyz", always=[("w",)])


@pytest.mark.parametrize("choose", [pairwise, each_value])
def test_cases_that_are_not_allowed_are_not_chosen(choose: type) -> None:
    def allowed(level: int, dtype: str, model: str, mesh: str) -> bool:
        return (level > 1 or dtype == "fp32") and model + mesh != "ax"

    chosen = [case.values for case in choose(allowed=allowed, **COLUMNS)]
    assert all(allowed(*case) for case in chosen)
    found = set().union(*map(pairs, chosen))
    possible = [case for case in product(*COLUMNS.values()) if allowed(*case)]
    if choose is pairwise:
        assert found == set().union(*map(pairs, possible))


def test_ids_are_readable_and_the_same_in_every_call() -> None:
    ids = [case.id for case in each_value(model={"gpt": 1}, level=[3], made=[dict])]
    assert ids == ["gpt-level=3-dict"]
    assert pairwise(**COLUMNS) == pairwise(**COLUMNS)
