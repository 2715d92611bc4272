# SPDX-License-Identifier: Apache-2.0
"""Fit the constants of the planner's model of time over published runs, and cross-validate them.

    python benchmarks/fit_planner.py published_runs.jsonl

The constants that it prints belong into ``Fitted`` of ``megatron/planning/costs/gpu_kernels.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.published.compared_runs import errors_of
from megatron.planning.published.constant_fit import bound_of, cross_validation, fit, ratios
from megatron.planning.published.plan_run import formula_of
from megatron.planning.published.published_runs import PublishedRun, read_runs
from megatron.planning.published.run_flags import NotExpressibleError


def main() -> None:
    """Print the constants, their errors, and those of the cross-validation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="published runs, one JSON object a line")
    runs = planned(read_runs(parser.parse_args().runs))
    print("before", errors_of(ratios(runs, FITTED)))
    fitted = fit(runs)
    for name, value in asdict(fitted).items():
        print(f"    {name} = {value:.4g}  {bound_of(name, fitted)}")
    print("fitted", errors_of(ratios(runs, fitted)))
    for line in cross_validation(runs):
        print(line)


def planned(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the runs that can be planned."""
    found: list[PublishedRun] = []
    for run in runs:
        try:
            formula_of(run)
        except NotExpressibleError:
            continue
        found.append(run)
    return found


if __name__ == "__main__":
    main()
