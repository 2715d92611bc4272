# SPDX-License-Identifier: Apache-2.0
"""The parts of a step's time: what bounds level 3, FSDP2 and DDP on CPU ranks.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/step_profile.py [--dtype bfloat16]

Runs the GPT of ``compare.py`` bare (every rank alone) and with each wrapper, by turns, and prints
in ms per step: the time of the step; that in which the main thread computes, of which matrix
products, attention, copies, calls of torch.distributed (gloo begins to send in the thread that
calls it) and other operations of torch by its profiler, and the rest is Python; that in which it is
blocked, for other ranks or for a core; and the processor time of other threads, which are gloo's.
Profiled steps are others than timed ones. The last column is the ratio to FSDP2's time; no wrapper
can come below that of the bare model.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.comparison.model import Workload, build
from benchmarks.comparison.rank import tokens_of
from benchmarks.comparison.wrappers import REFERENCE, WRAPPERS, Step, bare

NAMES = (REFERENCE, "ours, level 3", "ddp")

OPERATIONS = {
    "matrix products": ("mm", "addmm", "bmm", "linear"),
    "attention": ("attention",),
    "copies": ("copy_", "clone", "cat", "all_gather_copy_in", "split_with_sizes_copy"),
}
"""Parts of the names of torch's operations; all others are "other operations"."""

KINDS = (*OPERATIONS, "collectives", "other operations")
COLUMNS = ("step", *KINDS, "Python", "blocked", "other threads")

Parts = dict[str, float]


def kind_of(operation: str) -> str:
    """Return the column of an operation, such as ``aten::addmm``."""
    namespace, _, name = operation.rpartition("::")
    if namespace in ("c10d", "_c10d_functional"):
        return "collectives"
    name = name.strip("_")
    for kind, parts in OPERATIONS.items():
        for part in parts:
            part = part.strip("_")
            if name.endswith(part) or (kind == "attention" and part in name):
                return kind
    return "other operations"


def time_step(step: Step, batches: list[torch.Tensor]) -> Parts:
    """Time one step: as a whole, without the processor, and on other threads."""
    dist.barrier()
    begin = time.perf_counter(), time.thread_time(), time.process_time()
    step(batches)
    wall, own, all_threads = (
        now - then
        for now, then in zip((time.perf_counter(), time.thread_time(), time.process_time()), begin)
    )
    return {
        "step": 1e3 * wall,
        "computes": 1e3 * own,
        "blocked": 1e3 * (wall - own),
        "other threads": 1e3 * (all_threads - own),
    }


def profile_step(step: Step, batches: list[torch.Tensor]) -> Parts:
    """Return the time of each kind of operation in one step."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batches)
    parts: Parts = defaultdict(float)
    for event in profiler.key_averages():
        if "::" in event.key and not event.key.startswith("FSDP::"):
            parts[kind_of(event.key)] += event.self_cpu_time_total / 1e3
    return parts


def medians(rows: list[Parts]) -> Parts:
    """Return the median of every part."""
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}


def measure(workload: Workload, rounds: int) -> dict[str, Parts]:
    """Return the parts of a step of each wrapper, and of the bare model."""
    batches = tokens_of(workload, "cpu", torch.Generator().manual_seed(dist.get_rank()))
    wrappers = {"bare": bare, **{name: WRAPPERS[name] for name in NAMES}}
    steps = {name: wrap(build(workload, "cpu"), workload) for name, wrap in wrappers.items()}
    timed: dict[str, list[Parts]] = defaultdict(list)
    profiled: dict[str, list[Parts]] = defaultdict(list)
    for number in range(rounds + 2):
        for name, step in steps.items():
            found = time_step(step, batches), profile_step(step, batches)
            if number >= 2:
                timed[name].append(found[0])
                profiled[name].append(found[1])
    results = {}
    for name in steps:
        parts = medians(timed[name]) | medians(profiled[name])
        of_torch = sum(parts.get(kind, 0.0) for kind in KINDS)
        parts["Python"] = max(parts["computes"] - of_torch, 0.0)
        ratios = [row["step"] / other["step"] for row, other in zip(timed[name], timed[REFERENCE])]
        results[name] = parts | {"ratio": statistics.median(ratios)}
    return results


@click.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--length", default=256, show_default=True, help="tokens per sequence")
@click.option("--microbatches", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="after two that do not count")
def main(dtype: str, layers: int, hidden: int, length: int, microbatches: int, rounds: int) -> None:
    """Print the table."""
    dist.init_process_group("gloo")
    workload = Workload(layers, hidden, length, 1, 512, dtype, microbatches, recompute=False)
    results = measure(workload, rounds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {workload.label}\n")
        print(f"| | {' | '.join(COLUMNS)} | ratio |")
        print("|---" * (len(COLUMNS) + 2) + "|")
        for name, parts in results.items():
            cells = [f"{parts.get(column, 0.0):.0f}" for column in COLUMNS]
            print(f"| {name} | {' | '.join(cells)} | {parts['ratio']:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
