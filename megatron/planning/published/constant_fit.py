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
from dataclasses import replace

from megatron.planning.costs.gpu_kernels import FITTED, Fitted
from megatron.planning.costs.software import Software
from megatron.planning.layer_costs import MEGATRON_CORE
from megatron.planning.published.compared_runs import errors_of
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

LEAST_GAIN = 1e-5
"""By which a change has to make the loss smaller."""

NEAR_LIMIT = 1 + CHANGES[-1]
"""A constant that is as near to a limit as the smallest change has reached it."""

MOST = 0.5
"""The error of a run above which it counts no more."""


def ratios(
    runs: Sequence[PublishedRun],
    fitted: Fitted,
    profile: Software | None = None,
) -> list[float]:
    """Return the planned seconds of runs, in the measured ones.

    Args:
        runs: published ones.
        fitted: constants of the model of time.
        profile: of the software of all runs; None: that of each one's framework.
    """
    found: list[float] = []
    for run in runs:
        step = formula_of(run, fitted, profile)
        found.append(step.seconds / run.seconds)
    return found


def loss(runs: Sequence[PublishedRun], fitted: Fitted) -> float:
    """Return what a fit makes small."""
    total = 0.0
    for ratio in ratios(runs, fitted):
        error = abs(math.log(ratio))
        total += min(MOST, error)
    return total / len(runs)


def neutral() -> Fitted:
    """Return the constants from which every fit begins: the middle of their limits."""
    middle: dict[str, float] = {}
    for name, (low, high) in LIMITS.items():
        middle[name] = math.sqrt(low * high)
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
    for change in CHANGES:
        better = _changed_one_by_one(runs, best, change)
        while better != best:
            best = better
            better = _changed_one_by_one(runs, best, change)
    return best


def _changed_one_by_one(
    runs: Sequence[PublishedRun],
    begin: Fitted,
    change: float,
) -> Fitted:
    """Return constants of which each was changed by a part if that makes errors smaller."""
    best = begin
    least = loss(runs, best)
    for name, (low, high) in LIMITS.items():
        for factor in (1 + change, 1 / (1 + change)):
            value = getattr(best, name) * factor
            value = min(high, max(low, value))
            tried = replace(best, **{name: value})
            found = loss(runs, tried)
            if found < least - LEAST_GAIN:
                best = tried
                least = found
    return best


def cross_validation(runs: Sequence[PublishedRun]) -> list[str]:
    """Return lines with the errors of each source, by constants that were fitted without it."""
    sources = {run.source for run in runs}
    if len(sources) < 2:
        return ["all runs have one source: there is nothing to fit without it"]
    lines = ["without each source: median and 90th percentile of its errors"]
    every: list[float] = []
    for source in sorted(sources):
        others: list[PublishedRun] = []
        left_out: list[PublishedRun] = []
        for run in runs:
            if run.source == source:
                left_out.append(run)
            else:
                others.append(run)
        found = ratios(left_out, fit(others))
        every += found
        lines.append(f"  {_text(found)}  {source}")
    lines.append(f"  {_text(every)}  all")
    return lines


def without_profiles(runs: Sequence[PublishedRun]) -> str:
    """Return a line with the errors if all frameworks have one profile."""
    found = ratios(runs, FITTED, MEGATRON_CORE)
    return f"  {_text(found)}  all, with one profile for all frameworks"


def _text(found: Sequence[float]) -> str:
    """Return the errors of ratios of planned to measured seconds."""
    errors = errors_of(found)
    assert errors is not None
    return f"{errors.median:6.1%} {errors.ninetieth:6.1%} of {errors.number:>3}"
