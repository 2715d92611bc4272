# SPDX-License-Identifier: Apache-2.0
"""A flag of the command line: one row of a table, which declares everything about it.

A row has the spelling, the type, a sentence for --help, and rules: the range of the value, what the
flag needs, why it is refused, where its value goes. `flag_rules` applies the rules of all rows.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from megatron.pretrain.arguments.values import as_written


@dataclass(frozen=True)
class Mark:
    """A property that a flag has or does not have."""

    meaning: str


IN_SHORT_HELP = Mark("--help shows it; --help-all shows all flags")
REQUIRED = Mark("every command line must give it")
DERIVED = Mark("no flag: the program derives the field, or a flag of another name has its value")
EMPTY_IS_NONE = Mark("an empty text stands for none, as in Megatron-LM")
ENGINE = Mark("the fully sharded wrapper reads it from the data-parallel config, field or not")
DIVIDED = Mark("tensor-parallel ranks divide it")


@dataclass(frozen=True)
class Range:
    """The values that a number may have."""

    is_met: Callable[[float], bool]
    words: str
    """The end of an error message."""
    is_size: bool = False
    """Rules divide by the number, and wait until it is in the range."""


AT_LEAST_1 = Range(lambda value: value > 0, "at least 1")
SIZE = Range(lambda value: value > 0, "at least 1", is_size=True)
AT_LEAST_0 = Range(lambda value: value >= 0, "at least 0")
ABOVE_0 = Range(lambda value: value > 0, "above 0")


@dataclass(frozen=True)
class Refused:
    """Values that cannot be honoured: they are refused with the reason, never ignored."""

    reason: str
    values: tuple[Any, ...] = ()
    """The values. Empty for any but the default, so that a script may spell the default out."""


IN_THE_OTHER_LOOP = "Megatron-LM's loop has it: --loop megatron-lm"


def only_in_other_loop(reason: str) -> Refused:
    """Refuse what this loop leaves to Megatron-LM's."""
    return Refused(f"{reason}; {IN_THE_OTHER_LOOP}")


@dataclass(frozen=True)
class Redundant:
    """A choice of what the program does anyway, which is noted."""

    reason: str


DEFAULT = Redundant("is the default")
DEPRECATED_DEFAULT = Redundant("deprecated, is the default")


@dataclass(frozen=True)
class Needs:
    """Another flag without which this one has no effect, and is refused."""

    other: str
    """The destination of the other flag."""
    values: tuple[Any, ...] = ()
    """Its values that are needed; empty for any that is set."""
    remedy: str = ""
    """The end of the error message, where it is not the plain one of `end`."""
    unless: str = ""
    """Another destination that also gives the flag an effect when it is set."""
    above: int = 0
    """A number that the value must exceed."""

    def is_met(self, args: object) -> bool:
        """Return True if the flag has an effect."""
        if self.unless and getattr(args, self.unless):
            return True
        value = getattr(args, self.other)
        if self.above:
            return bool(value > self.above)
        if not self.values:
            return bool(value)
        found = value if isinstance(value, list) else [value]
        return any(item in self.values for item in found)

    def end(self, flag: Callable[[str], str]) -> str:
        """Return the end of the error message, in which `flag` gives the spelling of flags."""
        if self.remedy:
            return self.remedy
        if self.values == (False,):
            return f"does nothing with {flag(self.other)}"
        words = f"needs {flag(self.other)}"
        if self.above:
            return f"{words} of at least {self.above + 1}"
        if self.values:
            words += f" {' or '.join(as_written(value) for value in self.values)}"
        if self.unless:
            words += f" or {flag(self.unless)}"
        return words


@dataclass(frozen=True)
class Idle:
    """A setting that changes nothing with others, which is noted."""

    is_idle: Callable[[argparse.Namespace], object]
    condition: str


@dataclass(frozen=True)
class Implied:
    """A value that another flag sets, unless the command line gives this one."""

    other: str
    """The destination of the other flag."""
    value: Any


@dataclass(frozen=True)
class NotCaptured:
    """The reason for which captured iterations do not go with the flag."""

    reason: str


Rule = Mark | Range | Refused | Redundant | Needs | Idle | Implied | NotCaptured
Kind = TypeVar("Kind", Range, Refused, Redundant, Needs, Idle, Implied, NotCaptured)
ClassOf = type[Kind]


@dataclass(frozen=True)
class Flag:
    """One flag of the command line."""

    names: tuple[str, ...]
    """Its spellings."""
    dest: str
    """The attribute of the namespace that it sets."""
    kind: Literal["switch", "off", "value"] = "value"
    """A "switch" sets True, an "off" sets False where True is the default, a "value" has words."""
    type: Callable[[str], Any] = str
    """Makes the value from a word."""
    default: Any = None
    """The value without the flag, after `type` was applied."""
    choices: tuple[Any, ...] | None = None
    """The values that are allowed, after `type` was applied."""
    nargs: str | int | None = None
    """Number of words, as argparse takes it."""
    help: str = ""
    """Text for --help."""
    rules: tuple[Rule, ...] = ()

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.names[0]

    @property
    def refusal(self) -> str | None:
        """The reason why any value but the default is refused, or None."""
        for rule in self.rules_of(Refused):
            if not rule.values:
                return rule.reason
        return None

    def rules_of(self, kind: ClassOf[Kind]) -> list[Kind]:
        """Return the rules of a class."""
        return [rule for rule in self.rules if isinstance(rule, kind)]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare this flag in a parser."""
        settings: dict[str, Any] = {"dest": self.dest, "default": self.default}
        if self.kind == "value":
            settings |= {"type": self.type, "choices": self.choices, "nargs": self.nargs}
        else:
            settings["action"] = "store_true" if self.kind == "switch" else "store_false"
        parser.add_argument(*self.names, **settings)


Settings = dict[str, Any]
Row = Rule | str | Settings | tuple[Rule | str | Settings, ...]
"""The row of a field of Megatron-Core: rules, a sentence for --help, other fields of `Flag`."""


def spelled(name: str) -> str:
    """Return a field's name as a flag is written."""
    return f"--{name.replace('_', '-')}"


def named(name: str) -> Settings:
    """Give the flag of a field another name."""
    return {"names": (name,)}


def renamed(dest: str) -> Settings:
    """Give the flag of a field another name and destination alike."""
    return {"names": (spelled(dest),), "dest": dest}


def off(name: str) -> Settings:
    """Make the flag of a field a switch that turns a default off."""
    return {"names": (name,), "kind": "off", "default": True}


def text(
    names: str,
    *parts: str | Rule,
    **settings: Any,
) -> Flag:
    """Return a flag of the program itself that takes a text.

    Args:
        names: spellings, separated by blanks. The destination is the first one as an identifier,
            unless `dest` is given. That of an "off" flag is the positive name: --no-x sets `x` to
            False, --disable-x sets `enable_x`.
        *parts: a sentence for --help, without the default, and rules.
        **settings: other fields of `Flag`.
    """
    spellings = tuple(names.split())
    dest = spellings[0].removeprefix("--").replace("-", "_")
    if settings.get("kind") == "off":
        dest = dest.replace("no_", "", 1).replace("disable_", "enable_", 1)
    sentences = [part for part in parts if isinstance(part, str)]
    settings = {"dest": dest, "help": "".join(sentences)} | settings
    rules = tuple(part for part in parts if not isinstance(part, str))
    return Flag(spellings, rules=rules, **settings)


integer = partial(text, type=int)
number = partial(text, type=float)
switch = partial(text, kind="switch", default=False)
off_switch = partial(text, kind="off", default=True)


def choice(
    names: str,
    words: str,
    *parts: str | Rule,
    **settings: Any,
) -> Flag:
    """Return a flag that takes one of the `words`, which are written as "one|other"."""
    return text(names, *parts, choices=tuple(words.split("|")), **settings)
