# SPDX-License-Identifier: Apache-2.0
"""Command-line flags as data, and flags made from the fields of Megatron-Core's config classes."""

import argparse
import ast
import enum
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal


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

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Declare this flag in an argparse group."""
        shown = str(getattr(self.default, "name", self.default))
        help = (
            f"{self.help} (default: {shown})"
            if self.kind == "value" and self.default is not None
            else self.help
        )
        shared = {"dest": self.dest, "default": self.default, "help": help.replace("%", "%%")}
        if self.kind == "value":
            group.add_argument(
                *self.names, type=self.type, choices=self.choices, nargs=self.nargs, **shared
            )
        else:
            action = "store_true" if self.kind == "switch" else "store_false"
            group.add_argument(*self.names, action=action, **shared)


@dataclass(frozen=True)
class ConfigFields:
    """Fields of one config class that become flags."""

    config: type
    names: tuple[str, ...]
    """The names of the fields."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a field -> settings of its `Flag` that the field itself does not imply."""

    def flags(self) -> list[Flag]:
        """Return the flags of the fields that this release has, in the order of `names`."""
        declared = {f.name: f for f in fields(self.config)}
        hints = typing.get_type_hints(self.config)
        helps = field_docstrings(self.config)
        made = []
        for name in self.names:
            if name not in declared:
                continue
            settings = from_annotation(hints[name], default_of(declared[name]))
            settings |= {"help": helps.get(name, "")} | from_metadata(declared[name])
            settings = with_changes(settings, self.changes.get(name, {}))
            settings.setdefault("dest", name)
            if "names" not in settings:
                prefixes = ("no-", "disable-") if settings["kind"] == "off" else ("",)
                settings["names"] = tuple(spelled(prefix + name) for prefix in prefixes)
            made.append(Flag(**settings))
        return made

    def absent_choices(self) -> dict[str, set[str]]:
        """Return choices of other releases that this release's fields lack, by destination."""
        hints = typing.get_type_hints(self.config)
        lacking: dict[str, set[str]] = {}
        for name, change in self.changes.items():
            annotation = without_none(hints.get(name))
            if "choices" in change and typing.get_origin(annotation) is Literal:
                here = set(typing.get_args(annotation))
                lacking[change.get("dest", name)] = set(change["choices"]) - here
        return lacking

    def absent(self) -> list[str]:
        """Return the flags of `names` that are fields of other releases, as they are written."""
        declared = {f.name for f in fields(self.config)}
        written: list[str] = []
        for name in self.names:
            if name not in declared:
                written.extend(self.changes.get(name, {}).get("names", (spelled(name),)))
        return written


def with_changes(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the changes, and with the choices of both."""
    choices = (*changes.get("choices", ()), *(settings.get("choices") or ()))
    both = settings | changes
    return both | {"choices": tuple(dict.fromkeys(choices))} if choices else both


def spelled(name: str) -> str:
    """Return a field's name as a flag is written."""
    return f"--{name.replace('_', '-')}"


def default_of(declared: Field[Any]) -> Any:
    """Return a field's default, None for a field that must be given."""
    if declared.default is not MISSING:
        return declared.default
    return None if declared.default_factory is MISSING else declared.default_factory()


def from_metadata(declared: Field[Any]) -> dict[str, Any]:
    """Return the `Flag` settings that a release of Megatron-Core adds to one of its fields."""
    given = declared.metadata.get("argparse_meta", {})
    settings = {name: given[name] for name in ("dest", "type", "choices", "nargs") if name in given}
    if "arg_names" in given:
        settings["names"] = tuple(given["arg_names"])
    return settings


def from_annotation(annotation: Any, default: Any) -> dict[str, Any]:
    """Return the `Flag` settings that a field's type and default imply."""
    annotation = without_none(annotation)
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return {"kind": "off" if default else "switch", "default": bool(default)}
    settings: dict[str, Any] = {"kind": "value", "default": default}
    if origin is Literal:
        choices = typing.get_args(annotation)
        return settings | {"choices": choices, "type": type(choices[0])}
    if is_list_or_item(annotation):
        return settings | {"type": frequency}
    if origin in (list, tuple):
        return settings | {"nargs": "+", "type": typing.get_args(annotation)[0]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return settings | {"choices": tuple(annotation), "type": enum_member(annotation)}
    if annotation in (int, float, str):
        return settings | {"type": annotation}
    return settings  # the table of changes must name the type


def without_none(annotation: Any) -> Any:
    """Return `X` for `Optional[X]`, anything else unchanged."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def is_list_or_item(annotation: Any) -> bool:
    """Return True for ``int | list[int]``, with or without None."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    lists = [part for part in parts if typing.get_origin(part) is list]
    return len(parts) == 2 and int in parts and [typing.get_args(x) for x in lists] == [(int,)]


def enum_member(members: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    """Return a converter from a member's name to the member."""

    def convert(text: str) -> enum.Enum:
        if text not in members.__members__:
            raise argparse.ArgumentTypeError(f"choose from {', '.join(members.__members__)}")
        return members[text]

    return convert


def one_of(table: dict[str, Any]) -> dict[str, Any]:
    """Return the `Flag` settings of words that are keys of `table` and mean its values."""

    def convert(text: str) -> Any:
        if text not in table:
            raise argparse.ArgumentTypeError(f"choose from {', '.join(table)}")
        return table[text]

    return {"kind": "value", "type": convert}


def frequency(text: str) -> int | list[int]:
    """Convert a number such as `3`, or a list expression such as `([0]*3+[1]*5)`.

    Only lists of zeros and ones, `+` and `*` are evaluated.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    if re.fullmatch(r"\d+", text):
        return int(text)
    if not re.fullmatch(r"[\[\]()0-9,+* ]+", text):
        raise argparse.ArgumentTypeError(
            "write a number or a list expression such as ([0]*3+[1]*5)"
        )
    try:
        pattern = list_expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        pattern = None
    if not isinstance(pattern, list) or not all(item in (0, 1) for item in pattern):
        raise argparse.ArgumentTypeError("the expression must give a list of zeros and ones")
    return pattern


def list_expression(node: ast.expr) -> Any:
    """Return the value of an expression of lists, integers, `+` and `*`.

    Raises:
        ValueError: the expression has anything else.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [list_expression(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return list_expression(node.left) + list_expression(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = list_expression(node.left), list_expression(node.right)
        # A repetition is bounded so that a typing error cannot exhaust the memory.
        if all(not isinstance(side, int) or side <= 10_000 for side in (left, right)):
            return left * right
    raise ValueError("not a list expression")


def integer_pair(text: str) -> tuple[int, int]:
    """Convert `(128,0)` or `128,0` to two integers."""
    match = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if match is None:
        raise argparse.ArgumentTypeError("write two integers such as (128,0)")
    return int(match[1]), int(match[2])


@functools.cache
def field_docstrings(config: type) -> dict[str, str]:
    """Return the string literals below the fields of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = literal_string(following)
                if text:
                    docs[statement.target.id] = " ".join(text.split())
    return docs


def literal_string(statement: ast.stmt) -> str | None:
    """Return the text of a statement that is nothing but a string, else None."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def row(names: str, kind: Any, help: str, default: Any = None, **more: Any) -> Flag:
    """Return a flag that is written as one line of a table.

    Args:
        names: its spellings, separated by blanks. The first gives the destination, unless `dest`
            does.
        kind: "switch", "off", or the type of the value.
        help: text for --help.
        default: the value without the flag.
        **more: other settings of `Flag`.
    """
    spellings: Sequence[str] = names.split()
    more.setdefault("dest", spellings[0].removeprefix("--").replace("-", "_"))
    if kind in ("switch", "off"):
        return Flag(tuple(spellings), kind=kind, default=kind == "off", help=help, **more)
    return Flag(tuple(spellings), type=kind, default=default, help=help, **more)
