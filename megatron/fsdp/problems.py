# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call: collected, and raised together and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree

_WRONG, _UNBUILT = 0, 1


class Problems:
    """A list that checks add to."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], None] = {}  # in order, each once

    def add(self, text: str) -> None:
        self._found[_WRONG, text] = None

    def check(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call; None, and another problem, where it raises ValueError or NotImplementedError."""
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            self._found[_UNBUILT, str(error)] = None
        except ValueError as error:
            self._found[_WRONG, str(error)] = None

    def raise_everywhere(self, groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
        """Raise what any rank has found, on all ranks that ``groups`` reach one after the other.

        Raises:
            ValueError: listing everything that is wrong.
            NotImplementedError: where all is right, but something is not built yet.
        """
        found = list(self._found)
        if dist.is_initialized():
            found = agree(found, groups)
        if found:
            kind = ValueError if any(kind == _WRONG for kind, _ in found) else NotImplementedError
            raise kind("\n".join(text for _, text in found))


def agree_on(settings: dict[str, Any], groups: Sequence[dist.ProcessGroup]) -> list[str]:
    """What of ``settings`` differs between ranks, as problems; the same list on every rank."""
    everybodys = agree([(name, str(value)) for name, value in settings.items()], groups)
    values = {name: [value for other, value in everybodys if other == name] for name in settings}
    return [
        f"{name} differs between ranks: {'; '.join(each)}"
        for name, each in values.items()
        if len(each) > 1
    ]
