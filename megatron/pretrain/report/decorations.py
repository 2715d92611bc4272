# SPDX-License-Identifier: Apache-2.0
"""Files and services that only decorate a run: where one fails, training goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

_Entered = TypeVar("_Entered")


class Decorations:
    """A guard around everything that only decorates a run.

    Args:
        say: prints a line for the user.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._failed: set[str] = set()

    @contextmanager
    def guard(self, name: str, errors: type[Exception] = OSError) -> Iterator[None]:
        """Go on with training where ``name`` cannot be written, and say so once.

        No collective may be inside: its error would be passed over.

        Args:
            name: of the file or service, for the message.
            errors: those that are passed over.
        """
        try:
            yield
        except errors as error:
            if name not in self._failed:
                self._failed.add(name)
                self._say(f"{name} cannot be written, training goes on without: {error}")

    @contextmanager
    def guard_end(self, name: str, context: AbstractContextManager[_Entered]) -> Iterator[_Entered]:
        """Enter ``context``, and go on where ``name``, which it writes at its end, cannot be.

        Errors from inside of the context, and of entering it, are raised.
        """
        with ExitStack() as stack:
            entered = stack.enter_context(context)
            yield entered
            with self.guard(name):
                stack.close()
