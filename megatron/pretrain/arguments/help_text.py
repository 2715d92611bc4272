# SPDX-License-Identifier: Apache-2.0
"""The text of --help and --help-all: a sentence for each flag, with its type and default."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from megatron.pretrain.arguments.config_flags import known_flags
from megatron.pretrain.arguments.flags import IN_SHORT_HELP, Flag, Implied, Needs
from megatron.pretrain.arguments.values import as_written

WIDTH = 100
START_OF_HELP = 46
"""Columns of --help, and the column at which the help of a flag begins."""

HEAD = """usage: torchrun --nproc_per_node RANKS pretrain_gpt.py FLAGS

Train a GPT model with Megatron-Core."""
END_OF_SHORT_HELP = """
--help-all lists all flags. --dry-run checks a command line and prints what follows from it."""


def help_text(groups: Mapping[str, Sequence[Flag]], is_all: bool) -> str:
    """Return the flags of every group with type, help and default.

    Args:
        groups: flags by the title of their group.
        is_all: show all flags instead of those that are marked as `IN_SHORT_HELP`.
    """
    lines = [HEAD]
    for title, flags in groups.items():
        shown = [flag for flag in flags if is_all or IN_SHORT_HELP in flag.rules]
        if shown:
            lines += ["", f"{title}:"]
            lines += [lines_of(flag) for flag in shown]
    if not is_all:
        lines.append(END_OF_SHORT_HELP)
    return "\n".join(lines)


def lines_of(flag: Flag) -> str:
    """Return the help of a flag, of a refused one the reason; long ones continue below."""
    if flag.refusal:
        text = f"[only the default: {flag.refusal}]"
    else:
        # The docstrings of Megatron-Core have several sentences; the first describes the field.
        sentence = re.split(r"(?<=[a-z\])])(?<!\be\.g)(?<!\bi\.e)\. ", flag.help)[0].rstrip(".")
        text = sentence + default_words(flag)
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {flag.name + value_words(flag):<{START_OF_HELP - 4}}  ",
        subsequent_indent=" " * START_OF_HELP,
        break_on_hyphens=False,
    )


def default_words(flag: Flag) -> str:
    """Return the default that holds where the flag has an effect, in brackets."""
    default = as_written(flag.default)
    for rule in flag.rules_of(Implied):
        other = known_flags()[rule.other].name
        if flag.kind != "value":
            return f" (set by {other})"
        value = as_written(rule.value)
        if Needs(rule.other) in flag.rules:
            default = value
        else:
            default += f", with {other} {value}"
    if flag.kind != "value" or default in ("None", ""):
        return ""
    return f" (default: {default})"


def value_words(flag: Flag) -> str:
    """Return the words that stand for a flag's values."""
    if flag.kind != "value":
        return ""
    if flag.choices and len(flag.choices) < 3:
        words = " " + "|".join(as_written(choice) for choice in flag.choices)
    elif flag.type is int:
        words = " N"
    elif flag.type is float:
        words = " X"
    else:
        words = " WORD"
    return words + " ..." if flag.nargs else words
