# SPDX-License-Identifier: Apache-2.0
"""The update of offloaded weights and of whole matrices, planned and measured on this machine.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m benchmarks.planned_updates [--rounds 9]

Each round measures AdamW (fused or not) over shards on the host, and Muon, whose matrices have
owners, and before each of them the machine: the bytes that ranks copy at once, the FLOP/s of a
matrix's Newton-Schulz iterations, and messages. The functions of a plan predict the update from
these. It prints medians of both, and of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.matrix_optimizers import OwnedMuon, orthogonal
from benchmarks.offload import ResidualMlp
from megatron.fsdp import Memory, fully_shard
from megatron.fsdp.optimizer.matrix.owners import cost_of
from megatron.planning.costs.update_bytes import ADAMW, ONE_PASS
from megatron.planning.machine import Cluster, Host, Link
from megatron.planning.matrix_owners import plan_owners

COPIED = 1 << 28
"""Bytes of the tensors by which copies are measured, more than caches hold."""

SENT = 1 << 24
"""Bytes of the messages by which links are measured."""


def seconds_of(action: Callable[[], object], repeats: int = 1) -> float:
    """Return the mean seconds of an action that all ranks begin together, on the slowest one."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        action()
    slowest = torch.tensor((time.perf_counter() - begin) / repeats)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measured_machine(width: int) -> Cluster:
    """Return the machine that these ranks share, as a plan describes one."""
    ranks = dist.get_world_size()
    source, target = torch.ones(2, COPIED // 4).unbind()
    copied = 2 * COPIED * ranks / seconds_of(lambda: target.copy_(source), 4)
    matrix = torch.randn(width, 4 * width)
    flops = cost_of(matrix.shape, 4).flops / seconds_of(lambda: orthogonal(matrix), 2)
    message, other = torch.ones(2, SENT // 4).unbind()
    rank = dist.get_rank()

    def exchange() -> None:
        works = [dist.irecv(other, (rank - 1) % ranks), dist.isend(message, (rank + 1) % ranks)]
        for work in works:
            assert work is not None
            work.wait()

    link = Link(SENT / seconds_of(exchange, 8), 1e-9)
    host = Host(ranks, 1, copied, copied, memory_efficiency=1.0)
    return Cluster("this", flops, 1, copied, ranks, link, link, 1.0, 1.0, host)


def layers_of(width: int, num_layers: int) -> nn.Sequential:
    """Return a chain of layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[ResidualMlp(width) for _ in range(num_layers)])


class OffloadedUpdate:
    """AdamW over shards on the host."""

    def __init__(self, width: int, num_layers: int, fused: bool):
        module = layers_of(width, num_layers)
        optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
        memory = Memory(offload="host")
        self.model, self.optimizer = fully_shard(
            module, optimizer, units=[ResidualMlp], memory=memory
        )
        self._num_elements = sum(group.layout.shard_size for group in self.model.groups)
        self._bytes = ONE_PASS if fused else ADAMW

    def measured(self) -> float:
        """Return the seconds of the update."""
        return seconds_of(self.optimizer.step)

    def planned(self, machine: Cluster) -> float:
        """Return the planned seconds of the update."""
        return machine.host_seconds(self._num_elements * self._bytes)


class OwnedUpdate:
    """Muon over matrices that have owners."""

    def __init__(self, width: int, num_layers: int):
        module = layers_of(width, num_layers)
        matrices = [each for each in module.parameters() if each.ndim == 2]
        others = [each for each in module.parameters() if each.ndim != 2]
        self._shapes = [each.shape for each in matrices]
        optimizers = [OwnedMuon(matrices), torch.optim.AdamW(others)]
        self.model, (self.optimizer, _) = fully_shard(module, optimizers, units=[ResidualMlp])

    def measured(self) -> float:
        """Return the seconds of the update."""
        return seconds_of(self.optimizer.step)

    def planned(self, machine: Cluster) -> float:
        """Return the planned seconds of the update."""
        return plan_owners(self._shapes, range(dist.get_world_size()), machine).seconds


@click.command()
@click.option("--rounds", default=9, show_default=True, help="after one that does not count")
@click.option("--width", default=384, show_default=True)
@click.option("--layers", default=12, show_default=True)
def main(rounds: int, width: int, layers: int) -> None:
    """Measure, and print a line for each update."""
    dist.init_process_group("gloo")
    if dist.get_world_size() < 2:
        raise click.ClickException("needs ranks that send each other messages: at least 2")
    updates = {
        "AdamW on the host": OffloadedUpdate(width, layers, fused=False),
        "AdamW on the host, fused": OffloadedUpdate(width, layers, fused=True),
        "Muon, with owners": OwnedUpdate(width, layers),
    }
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, update in updates.items():
            machine = measured_machine(width)
            update.model(torch.randn(8, width)).square().mean().backward()
            pair = (update.planned(machine), update.measured())
            update.optimizer.zero_grad()
            if number:
                found[name].append(pair)
    if not dist.get_rank():
        for name, pairs in found.items():
            planned, measured = (statistics.median(column) for column in zip(*pairs))
            ratio = statistics.median(own / real for own, real in pairs)
            print(
                f"{name:>26}: planned {1e3 * planned:7.1f} ms, measured {1e3 * measured:7.1f} ms,"
                f" planned / measured {ratio:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
