# SPDX-License-Identifier: Apache-2.0
"""Long lists, shortened for messages."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_PROBLEMS = 100
"""Problems that one error lists: a model can lack any number of tensors."""


def some(items: Sequence[str], limit: int = 6) -> str:
    """Return the first items on one line, and the number of those left out."""
    more = ""
    if len(items) > limit:
        more = f", … and {len(items) - limit} more"
    return ", ".join(items[:limit]) + more


def listed(
    title: str,
    items: Sequence[str],
    limit: int = 20,
) -> str:
    """Return a title and a line for each item.

    Args:
        title: first line, to which a colon is appended.
        items: the lines below it.
        limit: number of items that are printed; the last line counts those left out.
    """
    lines = [f"{title}:", *items[:limit]]
    if len(items) > limit:
        lines.append(f"… and {len(items) - limit} more")
    return "\n  ".join(lines)


def refuse(title: str, problems: Sequence[str]) -> None:
    """Raise one error that lists the problems, if there are any.

    Raises:
        ValueError: ``<title>:`` and a line for each problem; after 100, the number of the others.
    """
    if problems:
        raise ValueError(listed(title, problems, limit=_MOST_PROBLEMS))
