# SPDX-License-Identifier: Apache-2.0
"""One rank of a comparison: measure every wrapper on one workload, in interleaved rounds."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.comparison import measures
from benchmarks.comparison.model import Workload, build
from benchmarks.comparison.wrappers import REFERENCE, WRAPPERS, Step, bare, prepare_megatron_core

Figures = dict[str, float]


def tokens_of(workload: Workload, device: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Return the microbatches of one step."""
    shape = (workload.batch, workload.length + 1)
    return [
        torch.randint(workload.vocabulary, shape, generator=generator).to(device)
        for _ in range(workload.microbatches)
    ]


def memory_of(name: str, workload: Workload, device: str) -> Figures:
    """Return the peak memory of one wrapper that is alone in this process."""
    batches = tokens_of(workload, device, torch.Generator().manual_seed(0))

    def build_step() -> Callable[[], object]:
        return partial(WRAPPERS[name](build(workload, device), workload), batches)

    figures = measures.peak_memory(build_step)
    gc.collect()
    return figures


def compare(names: list[str], workload: Workload, rounds: int, steps: int) -> dict[str, Figures]:
    """Return the medians of all measures of every wrapper, and of ratios to the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Figures] = {name: memory_of(name, workload, device) for name in names}
    trained: dict[str, Step] = {
        name: WRAPPERS[name](build(workload, device), workload) for name in names
    }
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    timed: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds + 1):
        batches = tokens_of(workload, device, generator)
        for name, step in trained.items():
            figures = measures.time_steps(partial(step, batches), steps)
            results[name]["loss"] = step(batches).item()
            if number:  # the first round warms up
                timed[name].append(figures)
    # What the model and its optimizer copy by themselves.
    alone = measures.count_step(partial(bare(build(workload, device), workload), batches))
    for name, step in trained.items():
        results[name] |= measures.count_step(partial(step, batches))
        results[name]["copied MB"] -= alone["copied MB"]
        for figure in ("ms", "page faults"):
            results[name][figure] = statistics.median(each[figure] for each in timed[name])
        ratios = [
            each["ms"] / other["ms"]
            for each, other in zip(timed[name], timed.get(REFERENCE, timed[name]))
        ]
        results[name]["time ratio"] = statistics.median(ratios)
        tokens = workload.length * workload.batch * workload.microbatches * dist.get_world_size()
        results[name]["tokens/s"] = tokens / results[name]["ms"] * 1000
    return results


def main() -> None:
    """Read the job from the first argument, and write the figures of rank 0 to the second."""
    job = json.loads(sys.argv[1])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    names = list(job["wrappers"])
    if "megatron-core ddp" in names:
        try:
            prepare_megatron_core()
        except ImportError:
            names.remove("megatron-core ddp")
    figures = compare(names, Workload(**job["workload"]), job["rounds"], job["steps"])
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
