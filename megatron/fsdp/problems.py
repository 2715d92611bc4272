# SPDX-License-Identifier: Apache-2.0
"""A collection of the problems of a call, which are raised together, as one error on every rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeAlias, TypeVar

import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Groups: TypeAlias = Sequence[dist.ProcessGroup | None]

# Prefixes of problems, which are exchanged between ranks with them. Errors sort first.
_WRONG, _UNBUILT = "0", "1"


class Problems:
    """A list that checks add problems to, raised as one error.

    ``groups`` reach every rank if they are used one after the other; None: the group of all ranks.
    """

    def __init__(self, groups: Groups = (None,)) -> None:
        self._groups = groups
        self._found: dict[str, None] = {}  # prefixed texts in order, each once
        # Values that must be equal, with the groups of the ranks that have them.
        self._compared: list[tuple[Mapping[str, object], Callable[[], Groups]]] = []

    def add(self, text: str) -> None:
        """Add the text of a problem, which becomes part of a ``ValueError``."""
        self._found[_WRONG + text] = None

    def compare(self, values: Mapping[str, object], groups_of: Callable[[], Groups]) -> None:
        """Add values, by their names, that must be equal on all ranks of some groups.

        ``groups_of`` returns the groups; it is called if there are no problems.
        """
        self._compared.append((values, groups_of))

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
        if found:
            is_wrong = any(text.startswith(_WRONG) for text in found)
            message = "\n".join(text[1:] for text in found)
            raise ValueError(message) if is_wrong else NotImplementedError(message)
        for values, groups_of in self._compared if dist.is_initialized() else ():
            refuse_differences(values, groups_of())


def refuse_differences(values: Mapping[str, object], groups: Groups) -> None:
    """Raise one ``ValueError`` on every rank that names the values which differ; a collective."""
    # Only what differs is exchanged with the ranks that have it. The separator sorts before all
    # other characters.
    texts = agree([f"{name}\0{value}" for name, value in values.items()], groups)
    counts = Counter(text.partition("\0")[0] for text in texts)
    # What only some ranks have, as the last parameter of a larger model, is no difference: their
    # numbers differ then.
    different = [name for name in counts if counts[name] > 1]
    if not different:
        return
    own = [f"{name}\0{values.get(name, 'nothing')}\0{dist.get_rank()}" for name in different]
    ranks_of: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in different}
    for text in agree(own, groups):
        name, value, rank = text.split("\0")
        ranks_of[name][value].append(int(rank))
    lines = []
    for name, of_values in ranks_of.items():
        found = [
            f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
            for value, ranks in of_values.items()
        ]
        lines.append(f"{name} differs between ranks: {'; '.join(found)}")
    raise ValueError("\n".join(lines[:10]))
