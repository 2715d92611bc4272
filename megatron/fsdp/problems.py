# SPDX-License-Identifier: Apache-2.0
"""A collection of the problems of a call, which are raised together, as one error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Prefixes of problems, which are exchanged between ranks with them. Errors sort first.
_WRONG, _UNBUILT = "0", "1"


class Problems:
    """A list that checks add problems to, raised as one error.

    ``groups`` reach every rank if they are used one after the other; None: the group of all ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
        self._groups = groups
        self._found: dict[str, None] = {}  # prefixed texts in order, each once

    def add(self, text: str) -> None:
        """Add the text of a problem, which becomes part of a ``ValueError``."""
        self._found[_WRONG + text] = None

    def check(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result | None:
        """Return the result of ``function``, or None if it raises an error, which is a problem."""
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            self._found[_UNBUILT + str(error)] = None
        except ValueError as error:
            self.add(str(error))
        return None

    def raise_everywhere(self) -> None:
        """Raise the problems of all ranks on every rank, if there are any.

        The error is a ``ValueError`` unless every problem is a feature that is not built yet.
        """
        found = list(self._found)
        if dist.is_initialized():
            found = agree(found, self._groups)
        if not found:
            return
        is_wrong = any(text.startswith(_WRONG) for text in found)
        message = "\n".join(text[1:] for text in found)
        raise ValueError(message) if is_wrong else NotImplementedError(message)
