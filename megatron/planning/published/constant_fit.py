# SPDX-License-Identifier: Apache-2.0
"""The fit of the constants of the model of time over published runs, and its cross-validation.

Constants are fitted over all runs together, and none for a run or a source. They are changed one at
a time, by smaller and smaller parts, as long as the mean of the errors' logarithms gets smaller;
errors above a half count as a half, since what a model of time does not know should not pull it.
The cross-validation fits without one source, and shows the errors on that source.
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

MOST = 0.5


def ratios(runs: Sequence[PublishedRun], fitted: Fitted) -> list[float]:
    """Return the planned seconds of runs, in the measured ones."""
    return [formula_of(run, fitted).seconds / run.seconds for run in runs]


def loss(runs: Sequence[PublishedRun], fitted: Fitted) -> float:
    """Return what a fit makes small."""
    return sum(min(MOST, abs(math.log(ratio))) for ratio in ratios(runs, fitted)) / len(runs)


def fit(runs: Sequence[PublishedRun], begin: Fitted) -> Fitted:
    """Return the constants with which the errors of runs are smallest.

    Args:
        runs: over which they are fitted.
        begin: the constants from which the fit begins.
    """
    best, least = begin, loss(runs, begin)
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


def cross_validation(runs: Sequence[PublishedRun], fitted: Fitted) -> list[str]:
    """Return lines with the errors of each source, by constants that were fitted without it.

    Args:
        runs: of all sources.
        fitted: over all of them, from which each fit begins.
    """
    lines = ["without each source: median and 90th percentile of its errors"]
    every: list[float] = []
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        left_out = [run for run in runs if run.source == source]
        found = ratios(left_out, fit(others, fitted))
        every += found
        lines.append(f"  {_text(errors_of(found))}  {source}")
    lines.append(f"  {_text(errors_of(every))}  all")
    return lines


def _text(errors: Errors | None) -> str:
    assert errors is not None
    return f"{errors.median:6.1%} {errors.ninetieth:6.1%} of {errors.number:>3}"
