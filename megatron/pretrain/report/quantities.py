# SPDX-License-Identifier: Apache-2.0
"""Quantities as people read them, and rows of them that fit a terminal.

A number keeps its significant digits however small it is, so that none is shown as 0.000.
"""

from __future__ import annotations

from collections.abc import Iterable

WIDTH = 100
"""Columns of a row."""
SEPARATOR = " | "
INDENT = "  "


def significant(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits; 12,345 and 0.000321 keep their size."""
    if value and not 1e-4 <= abs(value) < 1e15:  # infinities and NaN too
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".removesuffix(".")


def duration(seconds: float) -> str:
    """Return the time of a step, such as 0.312 ms, 205 ms or 12.3 s."""
    if seconds >= 1:
        return f"{significant(seconds)} s"
    return f"{significant(seconds * 1e3)} ms"


def clock(seconds: float) -> str:
    """Return a remaining time, such as 0:35, 1:02:03 or 3 d 04:05:06."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def size(num_bytes: float) -> str:
    """Return an amount of memory in MiB, or from 10 GiB on in GiB."""
    mib = num_bytes / 2**20
    if mib >= 10240:
        return f"{significant(mib / 1024)} GiB"
    return f"{significant(mib)} MiB"


def count(number: float) -> str:
    """Return a large number, such as 312, 3.21 M or 70.6 B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{significant(number / unit)} {name}"
    return f"{number:,.0f}"


def rows(parts: Iterable[str]) -> str:
    """Join parts by a separator, in rows of at most ``WIDTH`` columns; later ones are indented."""
    lines: list[str] = []
    for part in parts:
        if not lines:
            lines.append(part)
        elif len(lines[-1]) + len(SEPARATOR) + len(part) > WIDTH:
            lines.append(INDENT + part)
        else:
            lines[-1] += SEPARATOR + part
    return "\n".join(lines)
