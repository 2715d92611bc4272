# SPDX-License-Identifier: Apache-2.0
"""Long lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def some(items: Sequence[str], limit: int = 6) -> str:
    """The first of them on one line, and how many there are beside."""
    more = f", … and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def listed(title: str, items: Sequence[str], limit: int = 20) -> str:
    """A title and a line for each of the first."""
    more = [f"… and {len(items) - limit} more"] if len(items) > limit else []
    return "\n  ".join([f"{title}:", *items[:limit], *more])
