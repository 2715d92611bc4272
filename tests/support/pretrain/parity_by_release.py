# SPDX-License-Identifier: Apache-2.0
"""A covering part of the parity table, on another release of Megatron-Core.

    python -m tests.support.pretrain.parity_by_release --release 0.19.2    every row
        tp2 mla                                                            rows with such words
        --write FILE                                                       and as Markdown

Both runs of a row are of that release: `python -m tests.support.pretrain.parity` says what is
compared. The release `installed` stands for the one of the virtual environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.support.megatron_release import ROOT, environment, obstacle

ROWS = (
    "4 ranks, tp2, level 0, llama",
    "4 ranks, tp2, level 2, gpt2",
    "4 ranks, tp2 sp, level 1, llama, bf16",
    "4 ranks, tp2 sp, level 3, llama",
    "4 ranks, pp2, level 3, gpt2",
    "4 ranks, pp2, level 0, gpt2",
    "4 ranks, pp2 vpp2, level 3, llama, overlap-grad-reduce, overlap-param-gather",
    "4 ranks, cp2, level 3, llama",
    "4 ranks, ep2, level 0, moe",
    "4 ranks, ep2, level 1, moe alltoall",
    "4 ranks, ep2, level 2, moe shared",
    "4 ranks, ep2, level 3, moe bias",
    "4 ranks, tp2 sp ep2 etp2, level 3, moe",
    "4 ranks, inst2, level 3, llama",
    "4 ranks, inst2, level 3, llama, outer-dp-sharding-strategy optim",
    "4 ranks, inst2 ep2, level 3, moe alltoall, outer-dp-sharding-strategy optim",
    "4 ranks, tp2, level 3, mla qk-layernorm",
    "2 ranks, dp, level 3, mla",
    "2 ranks, dp, level 3, mtp",
    "4 ranks, pp2, level 3, mtp",
    "8 ranks, tp2 sp pp2 ep2 etp1, level 3, deepseek mtp",
    "4 ranks, ep2, level 3, moe alltoall, bf16",
    "4 ranks, pp2, level 3, llama, calculate-per-token-loss",
)
"""Names of rows of the table: every model, axis, strategy and precision."""


def main(words: list[str]) -> int:
    """Run the rows in a process of the release; 1 if any of them differs, 2 without the release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", required=True)
    parser.add_argument("--write", default=None, help="file for the table")
    parser.add_argument("words", nargs="*", help="rows whose names contain one of them")
    args = parser.parse_args(words)
    variables = dict(os.environ)
    if args.release != "installed":
        reason = obstacle(args.release)
        if reason is not None:
            print(reason, file=sys.stderr)
            return 2
        variables |= environment(args.release)
    rows = [row for row in ROWS if not args.words or any(word in row for word in args.words)]
    command = [sys.executable, "-m", "tests.support.pretrain.parity", "--exactly", *rows]
    if args.write:
        command += ["--write", args.write]
    return subprocess.run(command, env=variables, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
