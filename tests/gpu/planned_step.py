# SPDX-License-Identifier: Apache-2.0
"""A step of a small GPT at level 3 beside its plan.

    torchrun --nproc_per_node 8 -m tests.gpu.planned_step FOLDER [--hidden 1024]

Rank 0 writes ``measured_run.jsonl``, a row as ``tools/plan.py --check`` reads it, and prints what
was measured beside what is planned for it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.comparison.model import Workload, build
from benchmarks.comparison.rank import tokens_of
from benchmarks.comparison.wrappers import WRAPPERS
from megatron.planning.machine import MACHINES
from megatron.planning.published.compared_runs import compare
from megatron.planning.published.published_runs import read_runs

GIB = 2**30


def measure(workload: Workload, device: str, num_steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the most bytes that this GPU had allocated."""
    step = WRAPPERS["ours, level 3"](build(workload, device), workload)
    tokens = tokens_of(workload, device, torch.Generator().manual_seed(dist.get_rank()))
    seconds: list[float] = []
    for _ in range(3 + num_steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = step(tokens)
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    num_bytes = 0
    if device == "cuda":
        num_bytes = torch.cuda.max_memory_allocated()
    return statistics.median(seconds[3:]), num_bytes


def kind_of(gpu: str) -> str:
    """Return the kind of a GPU by its name, as plans know it, or the name itself."""
    known = [kind for kind in MACHINES if kind in gpu.lower()]
    return max(known, key=len, default=gpu)


def row_of(workload: Workload, kind: str, seconds: float, num_bytes: int) -> dict[str, Any]:
    """Return the row of a measured run.

    Args:
        workload: what was trained.
        kind: of GPU.
        seconds: of a step.
        num_bytes: at most allocated on a GPU; 0: not measured.
    """
    ranks = dist.get_world_size()
    hardware: dict[str, Any] = {"kind": kind, "gpus_per_node": ranks}
    measured: dict[str, Any] = {}
    if num_bytes:
        hardware["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
        measured = {"memory_gib": num_bytes / GIB, "memory_kind": "peak allocated"}
    return {
        "id": "gpu-check",
        "source": {"title": "make gpu-check"},
        "hardware": hardware,
        "model": {
            "name": workload.label,
            "seq_length": workload.length,
            "layers": workload.layers,
            "hidden": workload.hidden,
            "ffn": 4 * workload.hidden,
            "heads": workload.hidden // 64,
            "kv_heads": workload.hidden // 64,
            "vocab": workload.vocabulary,
            "gated": False,
            "activation": "gelu",
            "norm": "LayerNorm",
            "position": "learned",
            "tied": False,
        },
        "gpus": ranks,
        "framework": "fully_shard",
        "strategy": "fully_shard of megatron_fsdp, level 3",
        "zero_level": 3,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "dp": ranks,
        "micro_batch": workload.batch,
        "global_batch": workload.batch * ranks,
        "precision": "bf16",
        "gradient_reduction": "bf16",
        "recompute": "none",
        "measured": measured,
        "seconds_a_step": seconds,
    }


def print_beside_plan(path: Path) -> None:
    """Print the measured step and memory of the row in a file beside the planned ones."""
    compared, left_out = compare(read_runs(path))
    for not_planned in left_out:
        print(f"figure: not planned: {not_planned.reason}")
    for each in compared:
        measured = each.run.seconds * 1000
        planned = each.plan.seconds * 1000
        ratio = each.ratio_of_seconds
        print(f"figure: a step takes {measured:.1f} ms, planned {planned:.1f} ({ratio:.2f} of it)")
        if each.run.memory_gib is not None:
            print(
                f"figure: at most {each.run.memory_gib:.2f} GiB of a GPU are allocated, planned"
                f" {each.plan.memory_gib:.2f} ({each.ratio_of_memory:.2f} of it)"
            )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--length", default=1024, show_default=True, help="tokens per sequence")
@click.option("--batch", default=4, show_default=True, help="sequences per rank")
@click.option("--kind", help="kind of GPU that is planned; by default that of this machine")
def main(folder: Path, layers: int, hidden: int, length: int, batch: int, kind: str | None) -> None:
    """Measure steps, and compare them with their plan."""
    has_cuda = torch.cuda.is_available()
    device = "cpu"
    if has_cuda:
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_cuda else "gloo")
    workload = Workload(layers, hidden, length, batch, 512, "bfloat16", 1, recompute=False)
    seconds, num_bytes = measure(workload, device, num_steps=10)
    if kind is None:
        kind = kind_of(torch.cuda.get_device_name()) if has_cuda else "CPU"
    row = row_of(workload, kind, seconds, num_bytes)
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()  # plans pretend to have groups of their own
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "measured_run.jsonl"
        path.write_text(json.dumps(row) + "\n")
        print_beside_plan(path)


if __name__ == "__main__":
    main()
