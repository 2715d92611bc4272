# SPDX-License-Identifier: Apache-2.0
"""A collection of the problems of a call, which are raised together, as one error on every rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeAlias, TypeVar

import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree, exchange

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Groups: TypeAlias = Sequence[dist.ProcessGroup | None]

# Prefixes of problems, which are exchanged between ranks with them. Errors sort first.
_WRONG, _UNBUILT = "0", "1"


class Problems:
    """A list that checks add problems to, raised as one error.

    Args:
        groups: process groups that reach every rank if they are used one after the other; None in
            it is the group of all ranks.
    """

    def __init__(self, groups: Groups = (None,)) -> None:
        self._groups = groups
        self._found: dict[str, None] = {}  # prefixed texts in order, each once
        # Values that must be equal, with the groups of the ranks that have them.
        self._compared: list[tuple[Mapping[str, object], Callable[[], Groups]]] = []

    def add(self, text: str) -> None:
        """Add the text of a problem, which becomes part of a ``ValueError``."""
        self._found[_WRONG + text] = None

    def add_all(self, texts: Iterable[str]) -> None:
        """Add the texts of several problems."""
        for text in texts:
            self.add(text)

    def compare(self, values: Mapping[str, object], groups_of: Callable[[], Groups]) -> None:
        """Add values that must be equal on all ranks of some groups.

        Args:
            values: the values by their names.
            groups_of: returns the groups; it is called only if there are no problems.
        """
        self._compared.append((values, groups_of))

    def check(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result | None:
        """Return the result of a function, or None if it raises an error, which is a problem.

        Args:
            function: any function; ``ValueError`` and ``NotImplementedError`` become problems.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
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
            message = "\n".join(text[1:] for text in found)
            if any(text.startswith(_WRONG) for text in found):
                raise ValueError(message)
            raise NotImplementedError(message)
        if dist.is_initialized():
            for values, groups_of in self._compared:
                refuse_differences(values, groups_of())


def refuse_differences(values: Mapping[str, object], groups: Groups) -> None:
    """Raise one ``ValueError`` on every rank that names the values which differ; a collective."""
    # Only what differs is exchanged with the ranks that have it. The separator sorts before all
    # other characters.
    own_texts = [f"{name}\0{value}" for name, value in values.items()]
    texts = agree(own_texts, groups)
    counts = Counter(text.partition("\0")[0] for text in texts)
    # Values that only some ranks have, as the last parameter of a larger model, are no difference:
    # the numbers of parameters differ then.
    different = [name for name in counts if counts[name] > 1]
    if not different:
        return
    rank = dist.get_rank()
    found = []
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for name in different:
        value = values.get(name, "nothing")
        found.append(f"{name}\0{value}\0{rank}")
        ranks_of[name] = defaultdict(list)
    for text in exchange(found, groups):
        name, value, of_rank = text.split("\0")
        ranks_of[name][value].append(int(of_rank))
    lines = []
    for name, by_value in ranks_of.items():
        differences = []
        for value, ranks in by_value.items():
            differences.append(f"{value} on {_ranks(ranks)}")
        lines.append(f"{name} differs between ranks: {'; '.join(differences)}")
    raise ValueError("\n".join(lines[:10]))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in sorted(ranks))}"
