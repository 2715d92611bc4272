# SPDX-License-Identifier: Apache-2.0
"""Make the defects, one at a time, and print which are reported: see the package."""

from __future__ import annotations

import sys

from benchmarks.stream_defects.defect import missing_kinds
from benchmarks.stream_defects.table import DEFECTS


def main(words: list[str]) -> int:
    """Print every defect; 1 if one of them is not reported on some rank."""
    chosen = [each for each in DEFECTS if not words or any(word in each.name for word in words)]
    num_missed = 0
    for defect in chosen:
        missing = missing_kinds(defect)
        num_missed += bool(missing)
        outcome = f"MISSED {', '.join(sorted(missing))}" if missing else "reported"
        print(f"{defect.name}: {outcome}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} defects are reported")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
