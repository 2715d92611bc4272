# SPDX-License-Identifier: Apache-2.0
"""Long lists, shortened for messages."""

from __future__ import annotations

from collections.abc import Sequence


def some(items: Sequence[str], limit: int = 6) -> str:
    """Return the first items on one line, and the number of those left out."""
    more = f", … and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def listed(title: str, items: Sequence[str], limit: int = 20) -> str:
    """Return a title, a line for each of the first items, and the number of those left out."""
    more = [f"… and {len(items) - limit} more"] if len(items) > limit else []
    return "\n  ".join([f"{title}:", *items[:limit], *more])
