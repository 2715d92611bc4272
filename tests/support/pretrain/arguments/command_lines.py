# SPDX-License-Identifier: Apache-2.0
"""Command lines of the training program, and what its parser makes of them."""

import argparse
import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron.pretrain.arguments import CommandLineError, parse_arguments
from megatron.pretrain.arguments.config_flags import absent_flags, known_flags

DATA = Path(__file__).parents[3] / "pretrain" / "data"
ROWS_OF_ALL_RELEASES = json.loads((DATA / "flags.json").read_text())

TABLE = [row for row in ROWS_OF_ALL_RELEASES if row["name"] not in absent_flags()]
"""Flags of Megatron-LM, but those whose field the installed release of Megatron-Core lacks."""

REFUSED_HERE = {dest for dest, flag in known_flags().items() if flag.refusal}
"""Destinations of flags that are refused at any value but the default."""

SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --lr 0.005 --train-iters 20"""

MOCK = SMALL + " --mock-data --vocab-size 100"

OWN_DEFAULTS = {"rerun_mode": "disabled"}
"""This program differs on purpose: it repeats no iteration."""


def parse(line: str, **machine: object) -> tuple[argparse.Namespace, list[str]]:
    settings = {
        "world_size": 1,
        "cuda": False,
        "transformer_engine": False,
        "fused_weight_gradient": False,
        "emerging_optimizers": True,
    } | machine
    settings.setdefault("environment", {})
    return parse_arguments(shlex.split(line), **settings)


def problems(line: str, **machine: object) -> list[str]:
    with pytest.raises(CommandLineError) as caught:
        parse(line, **machine)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def rows_not_refused(
    line: str, rows: Iterable[tuple[str, str]], **machine: object
) -> dict[str, list[str]]:
    """Return the flags of rows (flags, problem) whose problem is not found; what is, beside them.

    Args:
        line: goes before the flags of every row.
        rows: flags, and a part of the problem that they bring.
        **machine: as for `parse`.
    """
    others = {}
    for flags, problem in rows:
        found = []
        try:
            parse(f"{line} {flags}", **machine)
        except CommandLineError as error:
            found = error.problems
        if not any(problem in text for text in found):
            others[f"{flags} -> {problem}"] = found
    return others


def other_value(action: argparse.Action) -> str | None:
    """Words for the flag that mean something else than its default."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return next(
            getattr(c, "name", str(c)) for c in action.choices if action.default not in (c, [c])
        )
    for text in ("7", "bf16", "fp16", "text"):
        try:
            value = action.type(text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
        if value != action.default:
            return " ".join([text] * (action.nargs if isinstance(action.nargs, int) else 1))
    return None


LATENT = "--multi-latent-attention"
PREDICTION = "--position-embedding-type rope"
EXPERTS = "--num-experts 4 --disable-bias-linear"
DEEP = MOCK.replace("--num-layers 2", "--num-layers 8")
