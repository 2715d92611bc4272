# SPDX-License-Identifier: Apache-2.0
"""Quantities keep their digits, and rows of them fit a terminal."""

import pytest

from megatron.pretrain.report.quantities import (
    WIDTH,
    clock,
    count,
    duration,
    rows,
    significant,
    size,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (1.25, "1.25"),
        (99.96, "100"),
        (0.000321, "0.000321"),
        (3.2e-7, "3.20e-07"),
        (12345.6, "12,346"),
        (2.0**60, "1.15e+18"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (-0.5, "-0.500"),
    ],
)
def test_a_number_keeps_its_significant_digits(value: float, shown: str) -> None:
    assert significant(value) == shown


def test_quantities_have_units_that_fit_their_size() -> None:
    durations = [duration(each) for each in (0.000312, 0.2054, 12.34)]
    assert durations == ["0.312 ms", "205 ms", "12.3 s"]
    clocks = [clock(each) for each in (0, 35.4, 3723, 273906)]
    assert clocks == ["0:00", "0:35", "1:02:03", "3 d 04:05:06"]
    sizes = [size(each * 2**20) for each in (0.5, 812, 80_000)]
    assert sizes == ["0.500 MiB", "812 MiB", "78.1 GiB"]
    assert [count(each) for each in (312, 3_212_544, 70_553_706_496)] == ["312", "3.21 M", "70.6 B"]


def test_rows_are_broken_between_parts() -> None:
    parts = [f"part {number}: {'x' * 20}" for number in range(8)]
    lines = rows(parts).splitlines()
    assert len(lines) == 3 and all(len(line) <= WIDTH for line in lines)
    assert [line.startswith("  part") for line in lines] == [False, True, True]
    assert " | ".join(line.strip() for line in lines) == " | ".join(parts)
