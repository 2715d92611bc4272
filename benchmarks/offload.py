# SPDX-License-Identifier: Apache-2.0
"""Training with optimizer state in files, under a limit of the memory of each process.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=131072 torchrun --nproc_per_node 2 \
        benchmarks/offload.py --folder DIR [--limit 512] [--figure FILE]

A chain of layers is trained by AdamW at level 3, whose two moments are `--times` the limit (MiB) on
each rank. The limit is the kernel's RLIMIT_DATA: memory of a process that is in no file. A thread
samples what is resident, as the kernel counts it: memory of its own, and pages of files. Without
`--folder` everything is in memory, without a limit. Prints the seconds of each step, their parts,
and peaks of rank 0; `--figure FILE` draws the samples.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time

import click
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import Memory, MetaInitialisation, clip_grad_norm_, fully_shard

Sample = tuple[float, int, int]  # seconds, bytes of its own, bytes of files


class Sampler(threading.Thread):
    """A thread that samples the resident memory of the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.start()

    def run(self) -> None:
        """Sample twenty times a second until the process ends."""
        while True:
            self.samples.append((time.perf_counter(), resident("RssAnon"), resident("RssFile")))
            time.sleep(0.05)


def resident(name: str) -> int:
    """Return a line of the kernel's account of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


class ResidualMlp(nn.Module):
    """A transformer layer's feed-forward network, with its residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with what the network adds."""
        out: torch.Tensor = x + self.out(torch.relu(self.into(self.norm(x))))
        return out


@click.command()
@click.option("--folder", type=click.Path(exists=True, file_okay=False))
@click.option("--limit", default=512, help="MiB of memory of a process")
@click.option("--times", default=4.0, help="moments of a rank, in limits")
@click.option("--width", default=768)
@click.option("--tokens", default=16)
@click.option("--steps", default=4)
@click.option("--figure", type=click.Path(dir_okay=False))
def main(
    folder: str | None,
    limit: int,
    times: float,
    width: int,
    tokens: int,
    steps: int,
    figure: str | None,
) -> None:
    """Train, and print what it took."""
    if folder:
        resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    of_layer = 8 * width**2 + 7 * width
    num_layers = -(-int(times * (limit << 20)) * ranks // (8 * of_layer))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[ResidualMlp(width) for _ in range(num_layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sampler, start = Sampler(), time.perf_counter()
    model, optimizer = fully_shard(
        model,
        optimizer,
        units=[ResidualMlp],
        memory=Memory(offload=folder),
        initialisation=MetaInitialisation(),
    )
    begun = time.perf_counter()
    if not rank:
        moments = 8 * num_layers * of_layer / ranks / 2**20
        print(f"{num_layers} layers, moments of a rank {moments:,.0f} MiB, limit {limit} MiB")
        print(f"sharded in {begun - start:.1f} s")
    generator = torch.Generator().manual_seed(rank)
    durations = []
    for number in range(steps):
        begin = time.perf_counter()
        x = torch.randn(tokens, width, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        middle = time.perf_counter()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        durations.append(end - begin)
        if not rank:
            parts = f"forward and backward {middle - begin:.1f} s, update {end - middle:.1f} s"
            told = f"loss {loss.item():.9f}, norm {norm.item():.6f}"
            print(f"step {number}: {told}, {end - begin:.1f} s: {parts}")
    if not rank:
        own, files = (max(sample[at] for sample in sampler.samples) >> 20 for at in (1, 2))
        together = max(own + files for _, own, files in sampler.samples) >> 20
        print(f"median {statistics.median(durations):.1f} s a step")
        print(f"peaks: own memory {own} MiB, pages of files {files} MiB, together {together} MiB")
        if figure:
            draw(sampler.samples, begun, limit, times, figure)
    dist.destroy_process_group()


def draw(samples: list[Sample], begun: float, limit: int, times: float, path: str) -> None:
    """Draw resident memory over time, and the limit and the state beside it."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4))).add_subplot()
    seconds = [at - begun for at, _, _ in samples]
    own, files = ([sample[at] / 2**20 for sample in samples] for at in (1, 2))
    axes.stackplot(seconds, own, files, labels=["own memory", "pages of files"])
    axes.axhline(limit, color="black", linestyle="--", label="limit of own memory")
    axes.axhline(limit * times, color="red", label="Adam's moments")
    axes.set(xlabel="seconds since sharding", ylabel="MiB resident on rank 0")
    axes.legend(loc="center right")
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
