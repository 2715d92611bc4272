# SPDX-License-Identifier: Apache-2.0
"""Collection of everything that is wrong with a call, raised together and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Marks in front of a problem, which travel between ranks with it. Sorting puts wrong ones first.
_WRONG, _UNBUILT = "0", "1"


class Problems:
    """A list of problems that checks add to, raised as one error."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}  # marked texts in order, each once

    def add(self, text: str) -> None:
        """Add something that is wrong."""
        self._found[_WRONG + text] = None

    def check(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result | None:
        """Call ``function`` and return its result.

        A ``ValueError`` or ``NotImplementedError`` that it raises becomes a problem, and the result
        is None then.
        """
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            self._found[_UNBUILT + str(error)] = None
        except ValueError as error:
            self._found[_WRONG + str(error)] = None
        return None

    def raise_everywhere(self, groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
        """Raise the problems of all ranks on every rank; return where there are none.

        Args:
            groups: process groups that together reach every rank, one after the other. None: the
                group of all ranks.

        Raises:
            ValueError: listing everything that is wrong.
            NotImplementedError: where nothing is wrong, but something is not built yet.
        """
        found = list(self._found)
        if dist.is_initialized():
            found = agree(found, groups)
        if not found:
            return
        is_wrong = any(each.startswith(_WRONG) for each in found)
        message = "\n".join(each[1:] for each in found)
        raise ValueError(message) if is_wrong else NotImplementedError(message)
