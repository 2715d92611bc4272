# SPDX-License-Identifier: Apache-2.0
"""The fit of the constants of the model of time over published runs, and its cross-validation.

Constants are fitted over all runs together, and none for a run or a source. They are changed one at
a time, by smaller and smaller parts, as long as the mean of the errors' logarithms gets smaller;
errors above a half count as a half, since what a model of time does not know should not pull it.
Every fit begins in the middle of the limits, which no run has chosen. The cross-validation fits
without one source, and shows the errors on that source. What it does not leave out are the profiles
of frameworks (``run_software.py``): they were written with all sources at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from megatron.planning.costs.gpu_kernels import Fitted
from megatron.planning.published.compared_runs import Errors, errors_of
from megatron.planning.published.plan_run import formula_of
from megatron.planning.published.published_runs import PublishedRun

CHANGES = (0.16, 0.08, 0.04, 0.02)
"""Parts by which a constant is changed."""

LIMITS = {
    "product": (0.8, 1.0),
    "depth": (32.0, 256.0),
    "memory": (0.7, 0.92),
    "launch": (4e-6, 12e-6),
    "link": (0.75, 1.1),
    "contention": (0.05, 0.3),
    "power": (0.33, 0.8),
    "expert_calls": (100.0, 1000.0),
}
"""The least and the most that a constant can be in the physics that it stands for."""

NEAR_LIMIT = 1 + CHANGES[-1]
"""A constant that is as near to a limit as the smallest change has reached it."""

MOST = 0.5
"""The error of a run above which it counts no more."""


def ratios(runs: Sequence[PublishedRun], fitted: Fitted) -> list[float]:
    """Return the planned seconds of runs, in the measured ones."""
    return [formula_of(run, fitted).seconds / run.seconds for run in runs]


def loss(runs: Sequence[PublishedRun], fitted: Fitted) -> float:
    """Return what a fit makes small."""
    return sum(min(MOST, abs(math.log(ratio))) for ratio in ratios(runs, fitted)) / len(runs)


def neutral() -> Fitted:
    """Return the constants from which every fit begins: the middle of their limits."""
    middle = {name: math.sqrt(low * high) for name, (low, high) in LIMITS.items()}
    return Fitted(**middle)


def bound_of(name: str, fitted: Fitted) -> str:
    """Return which limit a constant has reached, or an empty text.

    Args:
        name: of the constant.
        fitted: all constants.
    """
    low, high = LIMITS[name]
    value = getattr(fitted, name)
    if value <= low * NEAR_LIMIT:
        return f"the least that is allowed, {low:g}"
    if value >= high / NEAR_LIMIT:
        return f"the most that is allowed, {high:g}"
    return ""


def fit(runs: Sequence[PublishedRun]) -> Fitted:
    """Return the constants with which the errors of runs are smallest.

    Raises:
        ValueError: if there are no runs.
    """
    if not runs:
        raise ValueError("a fit needs runs, but there are none")
    best = neutral()
    least = loss(runs, best)
    for change in CHANGES:
        is_better = True
        while is_better:
            is_better = False
            for name in [field.name for field in fields(Fitted)]:
                low, high = LIMITS[name]
                for factor in (1 + change, 1 / (1 + change)):
                    value = min(high, max(low, getattr(best, name) * factor))
                    tried = replace(best, **{name: value})
                    found = loss(runs, tried)
                    if found < least - 1e-5:
                        best, least, is_better = tried, found, True
    return best


def cross_validation(runs: Sequence[PublishedRun]) -> list[str]:
    """Return lines with the errors of each source, by constants that were fitted without it."""
    sources = {run.source for run in runs}
    if len(sources) < 2:
        return ["all runs have one source: there is nothing to fit without it"]
    lines = ["without each source: median and 90th percentile of its errors"]
    every: list[float] = []
    for source in sorted(sources):
        others = [run for run in runs if run.source != source]
        left_out = [run for run in runs if run.source == source]
        found = ratios(left_out, fit(others))
        every += found
        lines.append(f"  {_text(errors_of(found))}  {source}")
    lines.append(f"  {_text(errors_of(every))}  all")
    return lines


def _text(errors: Errors | None) -> str:
    assert errors is not None
    return f"{errors.median:6.1%} {errors.ninetieth:6.1%} of {errors.number:>3}"
