# SPDX-License-Identifier: Apache-2.0
"""Entries of a checkpoint taken out or renamed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.core.dcp_target import DcpTarget, Entry, ObjectEntry, TensorEntry
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist


@dataclass(frozen=True)
class Rule:
    """``remove PATTERN`` or ``rename PATTERN REPLACEMENT``, a regular expression that is searched for in keys.

    Raises:
        ValueError: from :meth:`parse`, for anything else.
    """

    pattern: re.Pattern[str]
    replacement: str | None  # None removes

    @classmethod
    def parse(cls, text: str) -> Rule:
        words = text.split()
        if len(words) != {"remove": 2, "rename": 3}.get(words[0] if words else ""):
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
        return cls(pattern, words[2] if len(words) == 3 else None)

    def apply(self, key: str) -> str | None:
        """The key afterwards; None where it is removed."""
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


def new_keys(keys: Sequence[str], rules: Sequence[Rule]) -> dict[str, str]:
    """Old -> new key of all that stay.

    Raises:
        ValueError: for rules that change nothing, and where two keys would become one or a key
            empty.
    """
    renamed: dict[str, str] = {}
    idle = set(rules)
    for key in keys:
        new: str | None = key
        for rule in rules:
            after = rule.apply(new)
            if after != new:
                idle.discard(rule)
            new = after
            if new is None:
                break
        else:
            renamed[key] = new
    problems = [f"{rule.pattern.pattern!r} fits no key" for rule in rules if rule in idle]
    first = {new: old for old, new in reversed(renamed.items())}
    problems += [
        f"{old} and {first[new]} would both be {new!r}"
        for old, new in renamed.items()
        if first[new] != old
    ]
    problems += [f"the key of {old} would be empty" for old, new in renamed.items() if not new]
    if not rules:
        problems.append(
            "no operation is given: --op 'remove PATTERN' or --op 'rename PATTERN REPLACEMENT'"
        )
    if problems or not renamed:
        raise ValueError(listed("nothing is written", problems or ["no key would be left"]))
    return renamed


def target(stored: StoredCheckpoint, renamed: dict[str, str]) -> DcpTarget:
    """``stored`` with the keys of ``renamed`` only, under their new names; tensors keep their chunks."""
    paths = stored.metadata.planner_data
    entries: list[Entry] = []
    new_paths: dict[str, tuple[Any, ...]] = {}
    for key, new in renamed.items():
        if paths:
            new_paths[new] = paths[key] if new == key else _path(paths.get(key, ()), key, new)
        if key not in stored.tensors:
            entries.append(ObjectEntry(new, _reader(stored, key)))
            continue
        for chunk in stored.tensors[key].chunks:
            entries.append(
                TensorEntry(
                    new,
                    stored.shape(key),
                    tuple(chunk.offsets),
                    stored.lazy_region(key, chunk.offsets, chunk.sizes),
                )
            )
    files = {
        name: _file(stored, name)
        for name in (torch_dist.COMMON_FILE, torch_dist.MARKER)
        if (stored.directory / name).is_file()
    }
    pieces = getattr(
        stored.metadata, "mcore_data", {}
    )  # how releases up to 0.15 have cut tensors, by key
    more = (
        {"mcore_data": {new: pieces[key] for key, new in renamed.items() if key in pieces}}
        if pieces
        else {}
    )
    return DcpTarget(entries, paths=new_paths if paths else None, extra_files=files, more=more)


def _reader(stored: StoredCheckpoint, key: str) -> Any:
    return lambda: stored.read_object(key)


def _file(stored: StoredCheckpoint, name: str) -> Any:
    return lambda: (stored.directory / name).read_bytes()


def _path(path: tuple[Any, ...], key: str, new: str) -> tuple[Any, ...]:
    """The place of a renamed key in nested dicts: what stands at its beginning and end as before stays a component."""
    head, tail = [], []
    for part in path[:-1]:
        if not new.startswith(f"{part}."):
            break
        head.append(part)
        new = new[len(f"{part}.") :]
    for part in path[:0:-1][: len(path) - len(head) - 1]:
        if not new.endswith(f".{part}"):
            break
        tail.append(part)
        new = new[: -len(f".{part}")]
    return (*head, new, *tail[::-1])
