# SPDX-License-Identifier: Apache-2.0
"""Parity with Megatron-Core's DDP: losses and norms of ten steps, in a table of combinations.

    python -m benchmarks.parity.table                        every row
        "tp2 pp2" cp                                         rows whose names have one of the words
        --release 0.19.2                                     of `COVERING`, both runs on a release
        --write FILE                                         and the table as Markdown

Bounds are those of `tests.support.pretrain.parity`. `tests/pretrain/test_parity.py` runs
`COVERING`, which has each pair of features once, with fewer steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.support.fork_servers import INSTALLED, Packages
from tests.support.megatron_release import RELEASES, obstacle
from tests.support.pretrain.parity import (
    ALLTOALL,
    BF16,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MLA,
    MOE,
    MOE_BIAS,
    MOE_SHARED,
    MTP,
    OF_EXPERTS,
    OPTIM_OF_EXPERTS,
    OPTIM_OUTSIDE,
    Combination,
    measure,
)
from tests.support.pretrain.training_runs import write_counting_corpus

OVERLAP = "--overlap-grad-reduce"
PER_TOKEN = "--calculate-per-token-loss"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DENSE_FIRST = "--moe-layer-freq ([0]*1+[1]*1)"
EVERYTHING = "tp2 sp pp2 ep2 etp1"

COVERING = [
    Combination(2, "dp", 3, f"{LLAMA} {MTP}"),
    Combination(4, "tp2", 2, GPT2),
    Combination(4, "tp2", 3, f"{MLA} --qk-layernorm"),
    Combination(4, "tp2 sp", 1, LLAMA, BF16),
    Combination(4, "tp2 sp", 3, LLAMA, RECOMPUTED),
    Combination(4, "tp2 cp2", 3),
    Combination(4, "pp2", 0, GPT2),
    Combination(4, "pp2", 3, GPT2, BF16),
    Combination(4, "pp2", 3, LLAMA, PER_TOKEN),
    Combination(4, "pp2 pp-first", 3, GPT2),
    Combination(4, "pp2 cp2", 2),
    Combination(4, "pp2 vpp2", 1, LLAMA, OVERLAP, layers=4),
    Combination(4, "pp2 vpp2", 3, LLAMA, OVERLAP, "--overlap-param-gather", layers=4),
    Combination(4, "cp2", 1, GPT2),
    Combination(4, "inst2", 1),
    Combination(4, "inst2", 2),
    Combination(4, "inst2", 3),
    Combination(4, "inst2", 3, LLAMA, BF16, OPTIM_OUTSIDE),
    Combination(4, "inst2 ep2", 3, ALLTOALL, fsdp=OPTIM_OUTSIDE),
    Combination(4, "dp", 3, MOE_SHARED),
    Combination(4, "ep2", 1, ALLTOALL),
    Combination(4, "ep2", 2, MOE_SHARED),
    Combination(4, "ep2", 3, MOE_BIAS),
    Combination(4, "ep2", 3, ALLTOALL, BF16),
    Combination(4, "ep2", 3, ALLTOALL, PER_TOKEN),
    # experts with another strategy
    Combination(4, "ep2", 3, ALLTOALL, fsdp=f"{OF_EXPERTS} optim"),
    Combination(4, "ep2", 0, MOE, fsdp=f"{OF_EXPERTS} optim_grads_params"),
    Combination(4, "ep2", 3, MOE, fsdp=f"{OF_EXPERTS} no_shard"),
    Combination(4, "inst2 ep2", 3, ALLTOALL, fsdp=f"{OPTIM_OUTSIDE} {OF_EXPERTS} optim"),
    Combination(4, "inst2 ep2", 1, MOE, fsdp=f"{OF_EXPERTS} optim_grads_params {OPTIM_OF_EXPERTS}"),
    Combination(4, "pp2 ep2", 3, ALLTOALL, DENSE_FIRST, f"{OF_EXPERTS} no_shard"),
    # layouts that need eight ranks to shard
    Combination(8, "tp2 inst2", 3, fsdp=OPTIM_OUTSIDE),
    Combination(8, "tp2 pp2 vpp2", 3, layers=4),
    Combination(8, "tp2 sp ep2 etp2", 3, ALLTOALL),
    Combination(8, EVERYTHING, 3, f"{DEEPSEEK} {MTP}", layers=4),
]
"""Every axis, level, model, precision and flag, and each pair of them that meets in our code.

Rows that differ in flags of our run alone share the run of DDP.
"""

TABLE = [
    *COVERING,
    # tensor and sequence parallelism
    Combination(2, "tp2", 3),
    Combination(4, "tp2", 0),
    Combination(4, "tp2", 1),
    Combination(4, "tp2", 3),
    Combination(4, "tp2 sp", 3),
    Combination(4, "tp2 sp", 0, GPT2),
    Combination(4, "tp2 sp", 3, GPT2, "--qk-layernorm"),
    Combination(8, "tp4 sp", 3, GPT2),
    # pipelines
    Combination(2, "pp2", 3),
    Combination(2, "pp2", 3, GPT2),
    Combination(4, "pp2", 1),
    Combination(4, "pp2", 2, GPT2),
    Combination(4, "pp2", 3, GPT2),
    Combination(4, "pp2", 3, LLAMA, OVERLAP),
    Combination(4, "pp4", 3, GPT2, layers=4),
    Combination(2, "pp2 vpp2", 3, LLAMA, layers=4),
    Combination(4, "pp2 vpp2", 3, GPT2, layers=4),
    # context parallelism
    Combination(2, "cp2", 3),
    Combination(4, "cp2", 3),
    Combination(4, "cp4", 3),
    # experts
    Combination(2, "ep2", 3, MOE),
    Combination(2, "ep2", 3, ALLTOALL),
    Combination(4, "ep2", 0, MOE),
    Combination(4, "ep2", 3, MOE_SHARED),
    Combination(4, "ep4", 3, ALLTOALL),
    Combination(4, "tp2 sp ep2 etp1", 3, ALLTOALL),
    Combination(4, "tp2 sp ep2 etp2", 3, MOE),
    Combination(8, "tp2 sp ep2 etp1", 0, ALLTOALL),
    # hybrid sharding
    Combination(4, "inst2", 3, fsdp=OPTIM_OUTSIDE),
    # products
    Combination(8, "tp2 pp2", 3, GPT2),
    Combination(8, "tp2 sp pp2", 1),
    Combination(8, "tp2 cp2", 3),
    Combination(8, "pp2 cp2", 3),
    Combination(8, "tp2 sp pp2 pp-first", 2, GPT2),
    Combination(8, "pp2 ep2", 3, ALLTOALL),
    # other models
    Combination(2, "dp", 3, MLA),
    Combination(4, "tp2 sp", 3, MLA),
    Combination(4, "pp2", 3, f"{LLAMA} {MTP}"),
    Combination(8, "tp2 sp pp2 ep2 etp1", 3, DEEPSEEK, layers=4),
    # precision and what the loss is divided by
    Combination(4, "tp2", 3, LLAMA, BF16),
]


def main(words: list[str]) -> int:
    """Print every row with its differences; 1 if any of them is too large, 2 without a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", choices=RELEASES, help="of Megatron-Core")
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument("words", nargs="*", help="rows whose names contain one of them")
    args = parser.parse_args(words)
    reason = obstacle(args.release) if args.release else None
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    rows = COVERING if args.release else TABLE
    if args.words:
        rows = [row for row in rows if any(word in row.name for word in args.words)]
    write_counting_corpus()
    packages = Packages(args.release) if args.release else INSTALLED
    lines = ["| combination | loss | gradient norm | weight norm |", "|---|---|---|---|"]
    num_failures = 0
    for row in rows:
        began = time.perf_counter()
        try:
            difference = measure(row, packages=packages)
        except Exception as error:
            num_failures += 1
            print(f"FAILED {row.name}\n{error}", flush=True)
            continue
        problems = difference.problems(row)
        num_failures += bool(problems)
        seconds = time.perf_counter() - began
        print(
            f"{'BAD ' if problems else 'ok  '} {row.name}: {difference} {'; '.join(problems)}"
            f" ({seconds:.0f} s)",
            flush=True,
        )
        lines.append(
            f"| {row.name} | {difference.loss:.1e} | {difference.norm:.1e} |"
            f" {difference.params_norm:.1e} |"
        )
    print(f"{len(rows) - num_failures} of {len(rows)} combinations agree")
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
