# SPDX-License-Identifier: Apache-2.0
"""Flags of the command line as data: rows of tables, their values, and their lines in --help."""

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS_OR_AUTO = FLOATS | {"auto": None}
"""`auto` stands for the dtype of the parameter, or of the main gradient."""
STATE_DTYPES = FLOATS | {"fp8": torch.uint8}

COMMON = """use_megatron_fsdp data_parallel_sharding_strategy num_distributed_optimizer_instances lr
    num_layers hidden_size num_attention_heads swiglu position_embedding_type normalization
    num_experts tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size bf16 seq_length micro_batch_size global_batch_size train_iters
    data_path tokenizer_type tokenizer_model save load save_interval dry_run"""
"""Destinations that --help shows."""
WIDTH = 100
START_OF_HELP = 46
"""Columns of --help, and the column at which the help of a flag begins."""

HEAD = """usage: torchrun --nproc_per_node RANKS pretrain_gpt.py FLAGS

Train a GPT model with Megatron-Core."""
END_OF_COMMON = """
--help-all lists all flags. --dry-run checks a command line and prints what follows from it."""


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

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare this flag in a parser."""
        settings: dict[str, Any] = {"dest": self.dest, "default": self.default}
        if self.kind == "value":
            settings |= {"type": self.type, "choices": self.choices, "nargs": self.nargs}
        else:
            settings["action"] = "store_true" if self.kind == "switch" else "store_false"
        parser.add_argument(*self.names, **settings)


def row(names: str, kind: Any, help: str, default: Any = None, **more: Any) -> Flag:
    """Return a flag that is written as one line of a table.

    Args:
        names: spellings, separated by blanks. The first gives the destination, unless `dest` does:
            that of an "off" is what `no` and `disable` in it switch off.
        kind: "switch", "off", the words that are allowed as "one|other", or the type of the value.
        help: text for --help.
        default: value without the flag.
        **more: other settings of `Flag`.
    """
    spellings = tuple(names.split())
    dest = spellings[0].removeprefix("--").replace("-", "_")
    settings: dict[str, Any] = {"type": kind, "default": default}
    if kind == "off":
        dest = dest.replace("no_", "", 1).replace("disable_", "enable_", 1)
        settings = {"kind": kind, "default": True}
    elif kind == "switch":
        settings = {"kind": kind, "default": bool(default)}
    elif isinstance(kind, str):
        settings = {"choices": tuple(kind.split("|")), "default": default}
    return Flag(spellings, **({"dest": dest, "help": help} | settings | more))


def spelled(name: str) -> str:
    """Return a field's name as a flag is written."""
    return f"--{name.replace('_', '-')}"


def as_written(value: Any) -> str:
    """Return the words that stand for a value on the command line."""
    if isinstance(value, list):
        return " ".join(map(as_written, value))
    if isinstance(value, torch.dtype):
        return next(word for word, dtype in STATE_DTYPES.items() if dtype == value)
    return str(getattr(value, "name", value))


def one_of(table: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a converter from words that are keys of `table` to its values."""

    def convert(text: str) -> Any:
        if text not in table:
            raise argparse.ArgumentTypeError(f"choose from {', '.join(table)}")
        return table[text]

    return convert


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


def help_text(
    groups: Mapping[str, Sequence[Flag]], reason_of: Callable[[str], str | None], is_all: bool
) -> str:
    """Return the flags of every group, one line each, with type, help and default.

    Args:
        groups: flags by the title of their group.
        reason_of: function that says why the flag of a destination is refused, or None.
        is_all: show all flags instead of those of `COMMON`.
    """
    lines = [HEAD]
    common = COMMON.split()
    for title, flags in groups.items():
        shown = [flag for flag in flags if is_all or flag.dest in common]
        if shown:
            lines += ["", f"{title}:", *(line_of(flag, reason_of(flag.dest)) for flag in shown)]
    return "\n".join(lines if is_all else [*lines, END_OF_COMMON])


def line_of(flag: Flag, reason: str | None) -> str:
    """Return the line of a flag; the help of a refused one is the reason."""
    words = " ".join([flag.names[0], *value_words(flag)])
    text = f"[only the default: {reason}]" if reason else flag.help
    # The docstrings of Megatron-Core have several sentences; the first says what a field is.
    text = re.split(r"(?<=[a-z\])])\. ", text)[0].rstrip(".")
    if flag.kind == "value" and flag.default not in (None, "", []) and not reason:
        default = f" (default: {getattr(flag.default, 'name', flag.default)})"
    else:
        default = ""
    room = WIDTH - START_OF_HELP - len(default)
    text = text if len(text) <= room else f"{text[: max(room, 3) - 3]}..."
    return f"  {words:<{START_OF_HELP - 4}}  {text}{default}".rstrip()


def value_words(flag: Flag) -> Iterator[str]:
    """Yield the words that stand for a flag's values."""
    if flag.kind != "value":
        return
    if flag.choices and len(flag.choices) < 3:
        yield "|".join(str(getattr(choice, "name", choice)) for choice in flag.choices)
    elif flag.type in (int, float):
        yield "N" if flag.type is int else "X"
    else:
        yield "WORD"
    if flag.nargs:
        yield "..."
