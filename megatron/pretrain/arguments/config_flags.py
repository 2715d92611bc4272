# SPDX-License-Identifier: Apache-2.0
"""All flags: those of the program, and one for each field of Megatron-Core's config classes.

The installed release decides which fields there are, so that a new field is a flag at once. Its
name, type, choices, default and help are those of the field, except for what its row in `tables`
says. Its value reaches the config object (`configs`), or is refused by name.
"""

import ast
import enum
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

import megatron.core
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.pretrain.arguments.flags import DERIVED, Flag, Refused, Rule, Settings, spelled
from megatron.pretrain.arguments.tables import FIELD_GROUPS, LATER_FIELDS, PROGRAM_GROUPS
from megatron.pretrain.arguments.values import frequency, one_of

CONFIGS: dict[str, type] = {
    "model": TransformerConfig,
    "optimizer": OptimizerConfig,
    "data parallelism": DistributedDataParallelConfig,
    "multi-latent attention": MLATransformerConfig,
}
"""Title of a group in --help -> config. A field of several configs is a flag of the first."""


@dataclass
class Declared:
    """The row of a field, by its parts."""

    title: str = ""
    """The group in --help; empty for that of the config."""
    rules: list[Rule] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    """Settings of the `Flag` that the field itself does not imply."""


@functools.cache
def declared_fields() -> dict[str, Declared]:
    """Return the rows of `tables` by field; the installed release may lack some of the fields."""
    found = {}
    for title, rows in FIELD_GROUPS.items():
        for name, row in rows.items():
            found[name] = Declared(title)
            for part in row if isinstance(row, tuple) else (row,):
                if isinstance(part, str):
                    found[name].settings["help"] = part
                elif isinstance(part, dict):
                    found[name].settings |= part
                else:
                    found[name].rules.append(part)
    return found


def declaration(name: str) -> Declared:
    """Return the row of a field, or the rules of a field that only a later release has."""
    if name in declared_fields():
        return declared_fields()[name]
    for beginning, rule in LATER_FIELDS.items():
        if name.startswith(beginning):
            return Declared(rules=[rule])
    return Declared("mixture of experts" if name.startswith("moe_") else "")


def destination(name: str) -> str:
    """Return the attribute of the arguments that has the value of a field."""
    return declaration(name).settings.get("dest", name)


def all_flags() -> dict[str, list[Flag]]:
    """Return all flags by the title of their group in --help.

    Flags of Megatron-Core's configs come before those of the program.
    """
    groups: dict[str, list[Flag]] = {title: [] for title in FIELD_GROUPS}
    program_flags = list(itertools.chain.from_iterable(PROGRAM_GROUPS.values()))
    for title, flags in field_flags(program_flags).items():
        groups[title] += flags.values()
    for title, rows in PROGRAM_GROUPS.items():
        groups.setdefault(title, []).extend(rows)
    return groups


@functools.cache
def known_flags() -> dict[str, Flag]:
    """Return all flags by destination."""
    return {flag.dest: flag for flag in itertools.chain.from_iterable(all_flags().values())}


def field_flags(program_flags: Iterable[Flag] = ()) -> dict[str, dict[str, Flag]]:
    """Return the flags of fields by the title of their group in --help and the field's name.

    Args:
        program_flags: flags of other tables, which come before fields of the same name. Two fields
            may also have one flag: --fp4-param-gather is `fp4_param` and `fp4_param_gather`.
    """
    seen = {flag.dest for flag in program_flags}
    written = set(itertools.chain.from_iterable(flag.names for flag in program_flags))
    groups: dict[str, dict[str, Flag]] = {}
    for title, config in CONFIGS.items():
        hints = typing.get_type_hints(config)
        for declared in fields(config):
            name = declared.name
            row = declaration(name)
            if name in seen or name.startswith("_") or not declared.init or DERIVED in row.rules:
                continue
            settings = from_annotation(hints[name], default_of(declared))
            if not (can_be_written(settings) or row.settings):
                continue
            seen.add(name)
            flag = field_flag(config, declared, settings, row)
            if written.isdisjoint(flag.names):
                groups.setdefault(row.title or title, {})[name] = flag
            written.update(flag.names)
    return groups


def field_flag(
    config: type,
    declared: Field[Any],
    settings: Settings,
    row: Declared,
) -> Flag:
    """Return the flag of a field.

    Args:
        config: the dataclass of the field.
        declared: the field.
        settings: those that its type and default imply.
        row: its entry in the tables.
    """
    name = declared.name
    rules = list(row.rules)
    sentence = field_docstrings(config).get(name, "")
    settings |= {"dest": name, "help": sentence} | from_metadata(declared)
    implied = settings.get("choices", ())
    settings |= row.settings
    if settings["kind"] == "off" and settings["help"] == sentence:
        settings["help"] = f"off: {sentence}"
    if "choices" in settings:
        choices = tuple(dict.fromkeys((*settings["choices"], *implied)))
        settings["choices"] = choices
        absent = tuple(choice for choice in choices if choice not in implied)
        if implied and absent:
            release = megatron.core.__version__
            rules.append(Refused(f"Megatron-Core {release} has no such choice", absent))
    if "names" not in settings:
        prefixes = ("no_", "disable_") if settings["kind"] == "off" else ("",)
        settings["names"] = tuple(spelled(prefix + name) for prefix in prefixes)
    return Flag(rules=tuple(rules), **settings)


@functools.cache
def absent_flags() -> set[str]:
    """Return the flags of other releases' fields that this release lacks, as they are written."""
    here: set[str] = set()
    for config in CONFIGS.values():
        here.update(declared.name for declared in fields(config))
    written: set[str] = set()
    for name, row in declared_fields().items():
        if name not in here and DERIVED not in row.rules:
            written.update(row.settings.get("names", (spelled(name),)))
    return written


def default_of(declared: Field[Any]) -> Any:
    """Return a field's default, None for a field that must be given."""
    if declared.default is not MISSING:
        return declared.default
    return None if declared.default_factory is MISSING else declared.default_factory()


def from_metadata(declared: Field[Any]) -> Settings:
    """Return the `Flag` settings that a release of Megatron-Core adds to one of its fields."""
    given = dict(declared.metadata.get("argparse_meta", {}))
    if "arg_names" in given:
        given["names"] = tuple(given["arg_names"])
    known = ("names", "dest", "type", "choices", "nargs")
    return {name: given[name] for name in known if name in given}


def from_annotation(annotation: Any, default: Any) -> Settings:
    """Return the `Flag` settings that a field's type and default imply."""
    annotation = without_none(annotation)
    origin = typing.get_origin(annotation)
    parts = [typing.get_origin(part) or part for part in typing.get_args(annotation)]
    if annotation is bool:
        return {"kind": "off" if default else "switch", "default": bool(default)}
    settings: Settings = {"kind": "value", "default": default}
    if origin is Literal:
        choices = typing.get_args(annotation)
        settings |= {"choices": choices, "type": type(choices[0])}
    elif parts[:2] == [int, list]:
        settings["type"] = frequency
    elif origin in (list, tuple):
        settings |= {"nargs": "+", "type": typing.get_args(annotation)[0]}
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        members = dict(annotation.__members__)
        settings |= {"choices": tuple(annotation), "type": one_of(members)}
    elif annotation in (int, float, str):
        settings["type"] = annotation
    return settings  # without a type, the row must name it


def can_be_written(settings: Settings) -> bool:
    """Return True if values of a field with these settings can be written on a command line."""
    has_words = settings["kind"] != "value" or "choices" in settings
    return has_words or settings.get("type") in (int, float, str, frequency)


def without_none(annotation: Any) -> Any:
    """Return `X` for `Optional[X]`, anything else unchanged."""
    parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return parts[0] if is_union and len(parts) == 1 else annotation


@functools.cache
def field_docstrings(config: type) -> dict[str, str]:
    """Return the string literals below the fields of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = following.value if isinstance(following, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[statement.target.id] = " ".join(value.value.split())
    return docs
