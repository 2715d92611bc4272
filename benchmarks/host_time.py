# SPDX-License-Identifier: Apache-2.0
"""Host time of sharding: many small units, so that neither compute nor bytes count.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 1 benchmarks/host_time.py [--units 64]

The model is a chain of units of two small linear layers. It is trained bare (every rank alone),
with FSDP2 and with this engine. Every round times one step of each in turn. The benchmark prints
the CPU time of the main thread, which does not count waiting for other ranks, in microseconds per
unit: medians over the rounds, and the median of each round's ratio to FSDP2. For forward and
backward the ratio is that of the times above the bare model's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp import MixedPrecisionPolicy, fully_shard

PHASES = ("forward and backward", "clip_grad_norm_", "step", "zero_grad")


class SmallUnit(nn.Module):
    """A unit, float (batch, width) to the same shape."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def build(units: int, width: int) -> nn.Module:
    """Build the same model on every call."""
    torch.manual_seed(0)
    return nn.Sequential(*[SmallUnit(width) for _ in range(units)])


Trained = tuple[nn.Module, torch.optim.Optimizer]


def bare(model: nn.Module, **options: bool) -> Trained:
    """Leave a model as it is, and make its optimizer."""
    return model, torch.optim.AdamW(model.parameters(), **options)


def with_fsdp2(model: nn.Module, **options: bool) -> Trained:
    """Shard a model with FSDP2, and make its optimizer."""
    for unit in model.children():
        torch_fully_shard(unit)
    torch_fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), **options)


def with_ours(model: nn.Module, **options: bool) -> Trained:
    """Shard a model with this engine, and make its optimizer."""
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), **options),
        fsdp_unit_modules=[SmallUnit],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )


def time_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[float]:
    """Train one step and return the seconds of each phase."""

    def forward_and_backward() -> None:
        model(x).sum().backward()

    phases: list[Callable[[], object]] = [
        forward_and_backward,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        optimizer.step,
        optimizer.zero_grad,
    ]
    seconds = []
    for phase in phases:
        begin = time.thread_time()
        phase()
        seconds.append(time.thread_time() - begin)
    return seconds


@click.command()
@click.option("--units", default=64, show_default=True)
@click.option("--width", default=16, show_default=True, help="inputs and outputs of every layer")
@click.option("--rounds", default=30, show_default=True, help="after three that do not count")
@click.option(
    "--update",
    default="plain",
    show_default=True,
    type=click.Choice(["plain", "foreach", "fused"]),
    help="the implementation of AdamW",
)
def main(units: int, width: int, rounds: int, update: str) -> None:
    """Time the phases of a step and print a line for each."""
    dist.init_process_group("gloo")
    wrappers = {"bare": bare, "fsdp2": with_fsdp2, "ours": with_ours}
    options = {} if update == "plain" else {update: True}
    trained = {name: wrap(build(units, width), **options) for name, wrap in wrappers.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in wrappers}
    x = torch.randn(4, width)
    for number in range(rounds + 3):
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            seconds = time_step(model, optimizer, x)
            if number >= 3:
                times[name].append([each * 1e6 / units for each in seconds])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {units} units, {update}: microseconds per unit")
        for phase, label in enumerate(PHASES):
            print_phase(label, {name: [row[phase] for row in rows] for name, rows in times.items()})
    dist.destroy_process_group()


def print_phase(label: str, values: dict[str, list[float]]) -> None:
    """Print the medians of a phase, and the ratio of this engine to FSDP2."""
    is_above_bare = label == PHASES[0]
    ratios = []
    for plain, other, own in zip(values["bare"], values["fsdp2"], values["ours"]):
        below = plain if is_above_bare else 0.0
        ratios.append((own - below) / (other - below))
    medians = "  ".join(f"{name} {statistics.median(row):7.1f}" for name, row in values.items())
    suffix = " above bare" if is_above_bare else ""
    print(f"{label:>20}: {medians}  ours / fsdp2 {statistics.median(ratios):.2f}{suffix}")


if __name__ == "__main__":
    main()
