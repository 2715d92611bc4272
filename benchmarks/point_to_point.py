# SPDX-License-Identifier: Apache-2.0
"""Gloo's own all-gather and reduce-scatter against those made of sends and receives.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/point_to_point.py

Every round times each way in turn, from the start of the collective to the end of its wait, so that
a machine whose speed drifts treats both alike. A collective takes as long as on its slowest rank.
Printed are, for each size of the whole buffer, the medians of milliseconds over the rounds, the
median of the ratios of each round, and, over all ranks and rounds, the ratio of the processor
seconds of all threads, which other programs on the machine disturb least, and that of the calling
threads alone. The results are compared too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import click
import torch
import torch.distributed as dist

from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.device import Collective

KIB = 1024
SIZES = (16, 64, 256, 1024, 4096, 16384, 65536)

CLOCKS = (time.perf_counter, time.process_time, time.thread_time)
"""Of the wall, of all threads of this process, and of the thread that calls."""

Ways = dict[str, tuple[Collective, Collective]]
"""Operation -> gloo's own collective, and the one made of sends and receives."""


def make_ways(numel: int, dtype: torch.dtype) -> tuple[Ways, Callable[[], None]]:
    """Return the collectives over a buffer, and a check that both have the same result."""
    group = dist.group.WORLD
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # Small integers: their sums are exact, so the order of additions makes no difference.
    full = torch.randint(-8, 8, (numel,)).to(dtype)
    fulls = [torch.zeros_like(full) for _ in range(4)]
    shards = [torch.zeros_like(full.chunk(num_ranks)[0]) for _ in range(2)]
    shard = full.chunk(num_ranks)[rank].clone()
    # Beside a buffer of another dtype, of a sixteenth of the bytes.
    small = torch.randint(-8, 8, (max(full.nbytes // 128, num_ranks),)).double()
    small_shard = small.chunk(num_ranks)[rank].clone()
    smalls = [small_shard.new_zeros(num_ranks * small_shard.numel()) for _ in range(2)]
    messages = GlooMessages()
    pairs = [[torch.zeros_like(full), each] for each in smalls]
    two_shards = [shard, small_shard]
    own = [buffer.chunk(num_ranks)[rank] for buffer in fulls]
    for slice_ in own[2:]:
        slice_.copy_(shard)

    def gather_others(asynchronous: bool) -> dist.Work:
        slices = list(fulls[2].chunk(num_ranks))
        slices[rank] = torch.empty_like(shard)
        return dist.all_gather(slices, own[2], async_op=asynchronous)

    def check() -> None:
        for name, (left, right) in (
            ("reduce-scatter", shards),
            ("all-gather", fulls[:2]),
            ("all-gather in place", fulls[2:]),
            ("all-gather of two", [pair[0] for pair in pairs]),
            ("all-gather of two", smalls),
        ):
            if not torch.equal(left, right):
                raise click.ClickException(f"the results of {name} differ")

    return {
        "reduce-scatter": (
            lambda asynchronous: dist.reduce_scatter_tensor(shards[0], full, async_op=asynchronous),
            partial(messages.reduce_scatter, full, shards[1], group, dist.ReduceOp.SUM),
        ),
        "all-gather": (
            lambda asynchronous: dist.all_gather_into_tensor(
                fulls[0], shard, async_op=asynchronous
            ),
            partial(messages.all_gather, [fulls[1]], [shard], group),
        ),
        "all-gather in place": (
            gather_others,
            partial(messages.all_gather, [fulls[3]], [own[3]], group),
        ),
        "all-gather of two": (
            partial(collectives.Transport().all_gather, pairs[0], two_shards, group),
            partial(messages.all_gather, pairs[1], two_shards, group),
        ),
    }, check


def timed(collective: Collective, repeats: int) -> torch.Tensor:
    """Return float (3): milliseconds per collective by each of the CLOCKS."""
    dist.barrier()
    begin = [clock() for clock in CLOCKS]
    for _ in range(repeats):
        collective(True).wait()
    seconds = [clock() - start for clock, start in zip(CLOCKS, begin)]
    return torch.tensor(seconds, dtype=torch.float64) / repeats * 1000


def measure(ways: Ways, rounds: int, repeats: int) -> torch.Tensor:
    """Return float (operation, way, round, clock): the slowest rank's wall clock, or the sum."""
    times = torch.zeros(len(ways), 2, rounds, len(CLOCKS), dtype=torch.float64)
    for number in range(-1, rounds):  # the first does not count
        for operation, pair in enumerate(ways.values()):
            for way in range(2):
                # Either way begins every other round.
                index = (way + number) % 2
                measured = timed(pair[index], repeats)
                if number >= 0:
                    times[operation, index, number] = measured
    wall = times[..., 0].contiguous()
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(times)
    times[..., 0] = wall
    return times


def print_rows(name: str, kib: int, ways: Ways, times: torch.Tensor) -> None:
    for operation, (plain, ours) in zip(ways, times):
        ratio = statistics.median((ours[:, 0] / plain[:, 0]).tolist())
        _, processor, caller = ours.sum(dim=0) / plain.sum(dim=0)
        medians = [statistics.median(way[:, 0].tolist()) for way in (plain, ours)]
        print(
            f"| {name} | {operation} | {kib:,} | {medians[0]:.3f} | {medians[1]:.3f}"
            f" | {ratio:.2f} | {processor:.2f} | {caller:.2f} |",
            flush=True,
        )


@click.command()
@click.option("--rounds", default=15, show_default=True, help="timings of each way")
@click.option("--kib", "sizes", multiple=True, type=int, default=SIZES, show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["float32", "bfloat16"]),
    default=("float32", "bfloat16"),
    show_default=True,
)
def main(rounds: int, sizes: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Time all collectives and print a table."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks\n\n"
            "| dtype | operation | KiB | gloo ms | ours ms | ratio | processor | caller |\n"
            "|---|---|---|---|---|---|---|---|"
        )
    for name in dtypes:
        dtype = getattr(torch, name)
        for kib in sizes:
            ways, check = make_ways(kib * KIB // dtype.itemsize, dtype)
            times = measure(ways, rounds, repeats=max(1, min(10, 1024 // kib)))
            check()
            if dist.get_rank() == 0:
                print_rows(name, kib, ways, times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
