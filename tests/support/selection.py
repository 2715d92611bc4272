# SPDX-License-Identifier: Apache-2.0
"""Selection for `make test`: a few cases of a long table, all of which `make test-all` runs."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

Case = TypeVar("Case")


def only_in_full(cases: Iterable[Case]) -> list[ParameterSet]:
    """Mark all cases as exhaustive; a tuple has the values of several parameters."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=pytest.mark.exhaustive) for value in values]


def mostly_in_full(cases: Collection[Case], always: Collection[Case]) -> list[Case | ParameterSet]:
    """Return the cases for `parametrize`, all but those in `always` marked as exhaustive.

    Raises:
        ValueError: if `always` names a case that does not exist.
    """
    unknown = [case for case in always if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}")
    return [case if case in always else only_in_full([case])[0] for case in cases]
