# SPDX-License-Identifier: Apache-2.0
"""Words of the command line and the values that they stand for."""

import argparse
import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS_OR_AUTO = FLOATS | {"auto": None}
"""`auto` stands for the dtype of the parameter, or of the main gradient."""
STATE_DTYPES = FLOATS | {"fp8": torch.uint8}


def as_written(value: Any) -> str:
    """Return the words that stand for a value on the command line."""
    if isinstance(value, list):
        return " ".join(as_written(item) for item in value)
    for word, dtype in STATE_DTYPES.items():
        if value is dtype:
            return word
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
    if isinstance(node, ast.BinOp):
        left = list_expression(node.left)
        right = list_expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        # A repetition is bounded so that a typing error cannot exhaust the memory.
        is_short = all(not isinstance(side, int) or side <= 10_000 for side in (left, right))
        if isinstance(node.op, ast.Mult) and is_short:
            return left * right
    raise ValueError("not a list expression")


def integer_pair(text: str) -> tuple[int, int]:
    """Convert `(128,0)` or `128,0` to two integers."""
    match = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if match is None:
        raise argparse.ArgumentTypeError("write two integers such as (128,0)")
    return int(match[1]), int(match[2])
