# SPDX-License-Identifier: Apache-2.0
"""Losses of the training program in FP8 beside bf16, on the data of the README.

    python -m benchmarks.low_precision.loss_curves [--iterations 100]

Two CPU ranks, fully sharded, with Transformer Engine's layers and kernels emulated in torch: the
numbers are those of the formats, the time says nothing. Prints a table.
"""

from __future__ import annotations

import argparse

from tests.support.transformer_engine.ranks import ranks

MODEL = (
    "--use-megatron-fsdp --bf16 --transformer-impl transformer_engine --num-layers 2"
    " --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --lr 2e-3"
    " --eval-iters 0 --log-interval 10"
)
CURVES = {
    "bf16": "",
    "FP8, delayed": "--fp8-format hybrid --fp8-param-gather",
    "FP8, blockwise": "--fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather",
}
TIMEOUT = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    args = parser.parse_args()
    # Later: ranks import Transformer Engine before Megatron-Core.
    from tests.support.pretrain.training_runs import train

    step = max(1, args.iterations // 5)
    shown = [1, *range(step, args.iterations + 1, step)]
    print(f"| iteration | {' | '.join(map(str, shown))} |\n|{'---|' * (1 + len(shown))}")
    run = ranks(2, timeout=TIMEOUT)
    for name, flags in CURVES.items():
        records = run(train, f"{MODEL} --train-iters {args.iterations} {flags}")
        losses = records[0][0].losses
        cells = [f"{losses[iteration - 1]:.4f}" for iteration in shown]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
