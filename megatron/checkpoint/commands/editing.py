# SPDX-License-Identifier: Apache-2.0
"""Edited copies of checkpoints: entries are removed or renamed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.dcp.dcp_target import DcpTarget, Entry, ObjectEntry, TensorEntry
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist.checkpoint import MARKER
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE

_NUM_WORDS = {"remove": 2, "rename": 3}


@dataclass(frozen=True)
class EditRule:
    """``remove PATTERN`` or ``rename PATTERN REPLACEMENT``.

    Attributes:
        pattern: a regular expression that is searched for in keys.
        replacement: replacement of every match, with references to groups as in :func:`re.sub`;
            None removes the entry.
    """

    pattern: re.Pattern[str]
    replacement: str | None

    @classmethod
    def parse(cls, text: str) -> EditRule:
        """Parse the words of an operation.

        Raises:
            ValueError: for anything but an operation, and for a pattern that matches every key.
        """
        words = text.split()
        if not words or len(words) != _NUM_WORDS.get(words[0]):
            raise ValueError(
                f"{text!r}: an operation is 'remove PATTERN' or 'rename PATTERN REPLACEMENT'"
            )
        try:
            pattern = re.compile(words[1])
        except re.error as error:
            raise ValueError(f"{text!r}: {words[1]!r} is no regular expression: {error}") from None
        if pattern.match(""):
            raise ValueError(
                f"{text!r}: the pattern matches every key, because it matches nothing at all"
            )
        if words[0] == "remove":
            return cls(pattern, replacement=None)
        return cls(pattern, replacement=words[2])

    def apply(self, key: str) -> str | None:
        """Return the key after this operation, or None if its entry is removed.

        Raises:
            ValueError: for a replacement that refers to a group which the pattern does not have.
        """
        if self.pattern.search(key) is None:
            return key
        if self.replacement is None:
            return None
        try:
            return self.pattern.sub(self.replacement, key)
        except re.error as error:
            raise ValueError(
                f"the replacement {self.replacement!r} does not fit {self.pattern.pattern!r}:"
                f" {error}"
            ) from None


def new_keys(keys: Sequence[str], rules: Sequence[EditRule]) -> dict[str, str]:
    """Apply rules, in their order, to keys.

    Returns:
        Old key -> new key of all entries that stay.

    Raises:
        ValueError: if there is no rule or one changes nothing, if nothing stays, and if two keys
            would become one or a key empty.
    """
    renamed = {}
    unused = set(rules)
    for key in keys:
        new: str | None = key
        for rule in rules:
            if new is None:
                break
            before, new = new, rule.apply(new)
            if new != before:
                unused.discard(rule)
        if new is not None:
            renamed[key] = new
    problems = []
    for rule in rules:
        if rule in unused:
            problems.append(f"{rule.pattern.pattern!r} fits no key")
    first: dict[str, str] = {}
    for old, name in renamed.items():
        other = first.setdefault(name, old)
        if other != old:
            problems.append(f"{old} and {other} would both be {name!r}")
        if not name:
            problems.append(f"the key of {old} would be empty")
    if not rules:
        problems.append(
            "no operation is given: --op 'remove PATTERN' or --op 'rename PATTERN REPLACEMENT'"
        )
    if not renamed and not problems:
        problems.append("no key would be left")
    refuse("nothing is written", problems)
    return renamed


def target(stored: StoredCheckpoint, renamed: dict[str, str]) -> DcpTarget:
    """Return a copy of ``stored`` with some of its entries under new names.

    Tensors keep their chunks, and the further files of torch_dist are copied.
    """
    entries: list[Entry] = []
    for key, new in renamed.items():
        if key not in stored.tensors:
            read = partial(stored.read_object, key)
            entries.append(ObjectEntry(new, read))
            continue
        for chunk in stored.chunks[key]:
            tensor = stored.lazy_chunk(key, chunk)
            shape = stored.shape(key)
            entries.append(TensorEntry(new, shape, chunk.offsets, tensor))
    paths = stored.metadata.planner_data
    new_paths: dict[str, tuple[Any, ...]] | None = None
    if paths:
        new_paths = {}
        for key, new in renamed.items():
            new_paths[new] = paths.get(key, ())
            if new != key:
                new_paths[new] = _path(new_paths[new], new)
    files = {}
    for name in (COMMON_FILE, MARKER):
        if (stored.directory / name).is_file():
            files[name] = (stored.directory / name).read_bytes
    more = {}
    # Releases of Megatron-Core up to 0.15 keep here, by key, how they have cut tensors.
    mcore_data = getattr(stored.metadata, "mcore_data", {})
    if mcore_data:
        more["mcore_data"] = {
            new: mcore_data[key] for key, new in renamed.items() if key in mcore_data
        }
    return DcpTarget(entries, paths=new_paths, extra_files=files, more=more)


def _path(path: tuple[Any, ...], new: str) -> tuple[Any, ...]:
    """Return the path of a renamed key in nested dicts.

    A key is the components of its path with dots between them. Components that the new key has as
    before, at its beginning or at its end, stay components. Everything between them is one: with
    ``a.b.c.d`` of the path ``("a", "b", "c", "d")`` renamed to ``a.x.y.d``, ``("a", "x.y", "d")``.
    """
    head = []
    for component in path[:-1]:
        if not new.startswith(f"{component}."):
            break
        head.append(component)
        new = new.removeprefix(f"{component}.")
    tail: list[Any] = []
    for component in reversed(path[1:]):
        if len(head) + len(tail) == len(path) - 1 or not new.endswith(f".{component}"):
            break
        tail.insert(0, component)
        new = new.removesuffix(f".{component}")
    return (*head, new, *tail)
