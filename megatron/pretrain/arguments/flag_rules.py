# SPDX-License-Identifier: Apache-2.0
"""The rules that rows of flags declare, applied: refusals, needs, ranges and notes."""

import math
from collections.abc import Iterator

import torch

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.flags import REQUIRED, Idle, Needs, Range, Redundant, Refused
from megatron.pretrain.arguments.values import as_written

LARGEST_FLOAT = torch.finfo(torch.float32).max
"""The largest number in single precision, in which tensors have them."""
LARGEST_INTEGER = torch.iinfo(torch.int64).max


def refuse_values(check: Check) -> None:
    """Refuse what this program or this release cannot honour, and continue with the default."""
    for dest in list(check.given):
        problems = list(refusals(check, dest))
        if problems:
            check.problems += problems
            check.set_default(dest)


def refusals(check: Check, dest: str) -> Iterator[str]:
    """Yield why the given value of a destination is refused."""
    value = check.given[dest]
    words = "" if isinstance(value, bool) else f" {as_written(value)}"
    for rule in check.flags[dest].rules_of(Refused):
        found = value if isinstance(value, list) else [value]
        is_refused = any(item in rule.values for item in found)
        if is_refused or (rule.values == () and check.changed(dest)):
            yield f"{check.flag(dest)}{words}: {rule.reason}"


def note_what_is_the_same(check: Check) -> None:
    """Note flags that choose what this program does anyway."""
    for dest in check.given:
        for rule in check.flags[dest].rules_of(Redundant):
            if check.changed(dest):
                check.notes.append(f"{check.flag(dest)}: {rule.reason}; leave it out")


def check_needs(check: Check) -> None:
    """Refuse flags that would have no effect with the others."""
    refused = set()
    for dest in check.given:
        for rule in check.flags[dest].rules_of(Needs):
            if check.changed(dest) and not rule.is_met(check.args):
                check.problems.append(f"{check.flag(dest)} {rule.end(check.flag)}")
                refused.add(dest)
    for dest in refused:
        check.set_default(dest)


def note_idle_flags(check: Check) -> None:
    """Note which flags change nothing with the others."""
    idle: dict[Idle, list[str]] = {}
    for dest in check.given:
        for rule in check.flags[dest].rules_of(Idle):
            if check.changed(dest) and rule.is_idle(check.args):
                idle.setdefault(rule, []).append(check.flag(dest))
    for rule, names in idle.items():
        check.notes.append(f"{', '.join(names)}: no effect {rule.condition}; can be left out")


def check_numbers(check: Check) -> bool:
    """Refuse missing required flags, numbers that are not finite, and those out of their range.

    Returns:
        Whether the sizes are there and positive, so that rules can divide by them.
    """
    has_sizes = True
    missing = []
    for dest, flag in check.flags.items():
        if REQUIRED in flag.rules and getattr(check.args, dest) is None:
            has_sizes = False
            if dest not in check.refused:
                missing.append(flag.name)
    check.require(not missing, f"required but not given: {', '.join(missing)}")
    infinite = check_finite(check)
    for dest, value in check.given.items():
        for rule in check.flags[dest].rules_of(Range):
            is_checked = value is not None and dest not in infinite
            if is_checked and not rule.is_met(value):
                check.problems.append(f"{check.flag(dest)} must be {rule.words}, got {value}")
                has_sizes = has_sizes and not rule.is_size
    return has_sizes


def check_finite(check: Check) -> set[str]:
    """Refuse infinities, NaN, which comparisons let through, and numbers that no tensor can hold.

    Returns:
        The destinations of these.
    """
    infinite = set()
    for dest, value in check.given.items():
        for number in value if isinstance(value, list) else [value]:
            largest = LARGEST_FLOAT if isinstance(number, float) else LARGEST_INTEGER
            if not isinstance(number, (int, float)) or abs(number) <= largest:
                continue
            if isinstance(number, int):
                limit = "fit in 64 bits"
            elif math.isfinite(number):
                limit = "be a number that fits in 32 bits"
            else:
                limit = "be a finite number"
            check.problems.append(f"{check.flag(dest)} must {limit}, got {number}")
            infinite.add(dest)
    return infinite
