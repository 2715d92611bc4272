# SPDX-License-Identifier: Apache-2.0
"""The state of a step that waits to be repeated: there is none, this loop repeats no step."""

from collections.abc import Callable


def pending_state() -> str:
    """Return an empty text: no step waits to be repeated."""
    return ""


def resume(text: str, say: Callable[[str], None]) -> None:
    """Say that a step that waited to be repeated is not."""
    say("a step of the checkpoint's run waits to be repeated, which this loop does not: it goes on")
