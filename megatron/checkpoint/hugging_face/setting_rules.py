# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of config.json and Megatron-LM's arguments, and the plainest of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""The content of a config.json, or a part of it."""

Read = Callable[[Config, list[str]], dict[str, Any]]
"""A config -> arguments. Problems with the settings are appended to the list."""

Write = Callable[[argparse.Namespace, list[str]], Config]
"""Arguments -> keys of a config. Problems with the arguments are appended to the list."""


@dataclass(frozen=True)
class SettingRule:
    """Meaning of some keys of config.json in Megatron-LM's arguments.

    Attributes:
        keys: that it reads or writes, or that follow from those it writes.
        names: of arguments that it reads or writes.
        read: from the config.
        write: to the config.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Read
    write: Write


def read_nothing(config: Config, problems: list[str]) -> dict[str, Any]:
    """Stand for reading in a rule that only writes, or that allows any value."""
    return {}


def write_nothing(args: argparse.Namespace, problems: list[str]) -> Config:
    """Stand for writing in a rule that only reads."""
    return {}


_REQUIRED = object()


def same(keys: str, name: str, default: Any = _REQUIRED) -> SettingRule:
    """Make the rule of a key and an argument that mean the same.

    Args:
        keys: its spellings, separated by blanks; the first is written.
        name: of the argument.
        default: the meaning of a config without the key, or with null. Without a default such a
            config is a problem.
    """
    spellings = tuple(keys.split())

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        value = next((config[key] for key in spellings if config.get(key) is not None), default)
        if value is _REQUIRED:
            problems.append(f"{' or '.join(spellings)} is missing")
            return {}
        return {name: value}

    def write(args: argparse.Namespace, problems: list[str]) -> Config:
        value = getattr(args, name, None)
        if value is None and default is _REQUIRED:
            problems.append(f"{name} is not set")
        return {spellings[0]: value}

    return SettingRule(spellings, (name,), read, write)


def only(key: str, *allowed: Any, because: str = "", write: bool = True) -> SettingRule:
    """Make the rule of a key that must have one of the values which Megatron-Core can follow.

    Args:
        key: of the config.
        *allowed: the values, besides null.
        because: the reason for people.
        write: write the first of the values.
    """

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        if key in config and config[key] not in (*allowed, None):
            reason = because or f"Megatron-Core's counterpart has {in_words(allowed[0])} only"
            problems.append(f"{key} {in_words(config[key])}: {reason}")
        return {}

    def write_first(args: argparse.Namespace, problems: list[str]) -> Config:
        return {key: allowed[0]}

    return SettingRule((key,), (), read, write_first if write else write_nothing)


def without_meaning(*keys: str) -> SettingRule:
    """Make the rule of keys that follow from others, or are for training by other programs.

    They are not copied from a template.
    """
    return SettingRule(keys, (), read_nothing, write_nothing)


def in_words(value: Any) -> str:
    """Return a value as JSON spells it, for messages."""
    return str(value).lower() if isinstance(value, bool) else str(value)
