# SPDX-License-Identifier: Apache-2.0
"""A trace of torch's profiler and a snapshot of memory, of a small GPT at level 3.

    torchrun --nproc_per_node 8 -m tests.gpu.profiled_step FOLDER [--hidden 1024]

Rank 0 writes ``trace.json`` (for https://ui.perfetto.dev) and, with CUDA, ``memory.pickle`` (for
https://docs.pytorch.org/memory_viz), and prints how much of NCCL's time other kernels cover.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.profiler import profile

from benchmarks.comparison.model import Workload, build
from benchmarks.comparison.rank import tokens_of
from benchmarks.comparison.wrappers import WRAPPERS

Span = tuple[float, float]


def merged(spans: list[Span]) -> list[Span]:
    """Return the union of spans of time, in order and apart."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def duration(spans: list[Span]) -> float:
    """Return the time that is in at least one of the spans."""
    return sum(end - begin for begin, end in merged(spans))


def overlap(first: list[Span], second: list[Span]) -> float:
    """Return the time that is in spans of both lists."""
    return duration(first) + duration(second) - duration(first + second)


def covered_share(events: list[dict]) -> float | None:
    """Return the share of NCCL's time in which other kernels run; None without NCCL's kernels."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in kernels:
        is_nccl = "nccl" in event["name"].lower()
        spans[is_nccl].append((event["ts"], event["ts"] + event["dur"]))
    communication = duration(spans[True])
    if not communication:
        return None
    return overlap(spans[True], spans[False]) / communication


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--length", default=1024, show_default=True, help="tokens per sequence")
@click.option("--batch", default=4, show_default=True, help="sequences per rank")
def main(folder: Path, layers: int, hidden: int, length: int, batch: int) -> None:
    """Profile two steps after three others."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.memory._record_memory_history()
    dist.init_process_group("nccl" if has_cuda else "gloo")
    device = "cuda" if has_cuda else "cpu"
    workload = Workload(layers, hidden, length, batch, 512, "bfloat16", 1, recompute=False)
    step = WRAPPERS["ours, level 3"](build(workload, device), workload)
    tokens = tokens_of(workload, device, torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        step(tokens)
    with profile() as profiler:  # of the CPU, and of CUDA where it is
        for _ in range(2):
            step(tokens)
        if has_cuda:
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        share = covered_share(json.loads((folder / "trace.json").read_text())["traceEvents"])
        hidden_part = "no kernels of NCCL" if share is None else f"{share:.0%} of NCCL's time"
        print(f"figure: covered by other kernels: {hidden_part}")
        if has_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            peak = torch.cuda.max_memory_allocated() / 2**20
            print(f"figure: at most {peak:.0f} MiB of this GPU allocated")
        else:
            print("figure: no snapshot of memory: torch records it for CUDA only")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
