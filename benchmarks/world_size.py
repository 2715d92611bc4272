# SPDX-License-Identifier: Apache-2.0
"""Host time of sharding, steps and plans for worlds of any size, on one process.

    OMP_NUM_THREADS=1 python benchmarks/world_size.py [--ranks 8 --ranks 65536]

The process pretends to be rank 0 of a world, with torch's fake process group, and shards and trains
a small model on CPU. The collectives of tensors do nothing: torch's fake ones copy the shard of
every rank. Printed are the seconds of the main thread: to shard the model and the optimizer, and
the median of the steps after the first; and how long ``tools/plan.py`` takes for Llama 3 70B with
two sequences for each GPU, if the model fits there.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import click
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from megatron.fsdp.engine import collectives
from megatron.pretrain.dry_run import pretended_ranks
from megatron_fsdp import fully_shard

PLAN = Path(__file__).resolve().parents[1] / "tools/plan.py"


class FeedForwardUnit(nn.Module):
    """A unit, float (batch, width) to the same shape."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def shard_and_train(num_ranks: int, num_units: int, width: int) -> tuple[float, float]:
    """Return the seconds of sharding, and those of a step, on the first of many ranks."""
    do_nothing = mock.Mock(return_value=None)
    with (
        pretended_ranks(num_ranks),
        mock.patch.object(collectives, "_all_gather_single", do_nothing),
        mock.patch.object(collectives, "_reduce_scatter_single", do_nothing),
    ):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*[FeedForwardUnit(width) for _ in range(num_units)])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        begin = time.thread_time()
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[FeedForwardUnit])
        sharding = time.thread_time() - begin
        steps = []
        for _ in range(6):
            begin = time.thread_time()
            model(torch.randn(2, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.thread_time() - begin)
    return sharding, statistics.median(steps[1:])


def plan(num_ranks: int) -> float | None:
    """Return the seconds that a plan of Llama 3 70B takes for a number of GPUs; None: none fits."""
    command = [sys.executable, str(PLAN), "--model", "llama-3-70b", "--gpus", str(num_ranks)]
    command += ["--global-batch-size", str(2 * num_ranks)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if "nothing fits" in done.stderr:
        return None
    done.check_returncode()
    return time.perf_counter() - begin


@click.command()
@click.option("--ranks", multiple=True, default=(8, 64, 512, 4096, 8192, 65536), type=int)
@click.option("--units", default=32, show_default=True)
@click.option("--width", default=64, show_default=True)
@click.option("--plans/--no-plans", default=True, show_default=True)
def main(ranks: tuple[int, ...], units: int, width: int, plans: bool) -> None:
    """Print a row for each world."""
    torch.set_num_threads(1)
    shard_and_train(2, 2, width)  # imports and caches
    print("| ranks | sharding, s | step, s | plan, s |")
    print("|---|---|---|---|")
    for num_ranks in ranks:
        sharding, step = shard_and_train(num_ranks, units, width)
        planning = ""
        if plans:
            seconds = plan(num_ranks)
            planning = "nothing fits" if seconds is None else f"{seconds:.1f}"
        print(f"| {num_ranks} | {sharding:.3f} | {step:.4f} | {planning} |")


if __name__ == "__main__":
    main()
