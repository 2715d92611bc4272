# SPDX-License-Identifier: Apache-2.0
"""Losses of one run with every sharding strategy, compared with those of Megatron-Core's DDP.

    python benchmarks/parity_with_ddp.py [--iterations 20] [--ranks 2] [-- FLAGS]

Starts pretrain_gpt.py under torchrun five times, with FLAGS, on the same data and seed. Prints the
largest relative difference of each strategy.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--lr", "2e-3", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--eval-iters", "0", "--num-workers", "0"),
]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def losses(ranks: int, iterations: int, flags: list[str]) -> list[float]:
    """Train once and return the losses, as exactly as the program has them."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *("torchrun", "--standalone", "--nproc_per_node", str(ranks)),
            *(str(ROOT / "pretrain_gpt.py"), *MODEL),
            *("--train-iters", str(iterations), *flags),
            *("--save", directory, "--save-interval", str(iterations), "--no-save-optim"),
        ]
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        entries = [
            json.loads(line) for line in (Path(directory) / "losses.jsonl").read_text().splitlines()
        ]
    return [entry["train"] for entry in entries if "train" in entry]


@click.command()
@click.option("--iterations", default=20, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(iterations: int, ranks: int, flags: tuple[str, ...]) -> None:
    """Print the reference and the largest difference of each strategy."""
    reference = losses(ranks, iterations, list(flags))
    print(
        f"{'ddp':>20}: loss {reference[0]:.6f} -> {reference[-1]:.6f} in {iterations} iterations on"
        f" {ranks} ranks"
    )
    for strategy in STRATEGIES:
        ours = losses(
            ranks,
            iterations,
            ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy, *flags],
        )
        difference = max(abs(a - b) / b for a, b in zip(ours, reference, strict=True))
        print(
            f"{strategy:>20}: loss {ours[0]:.6f} -> {ours[-1]:.6f}, largest relative difference"
            f" {difference:.1e}"
        )


if __name__ == "__main__":
    main()
