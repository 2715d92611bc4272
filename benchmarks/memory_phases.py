# SPDX-License-Identifier: Apache-2.0
"""Peak live memory in each phase of a step at level 3, beside FSDP2 and the arithmetic minimum.

    torchrun --nproc_per_node 2 benchmarks/memory_phases.py [--dtype bfloat16]

Runs three steps of the GPT of ``compare.py`` with each wrapper, samples the allocated bytes after
every operation, and prints the most in MB while the model is built and in each phase of the steps.

The minimum is what cannot be missing at the moment at which backward begins: the shards of main
weights and moments, the activations, and the weights and gradients of the last unit. The last row
is the same with communication that overlaps compute: the next unit's weights arrive, and the
gradients of a unit are reduced while those of the next one are computed.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.comparison.measures import heap_bytes
from benchmarks.comparison.model import Workload, build
from benchmarks.comparison.rank import tokens_of
from benchmarks.comparison.wrappers import REFERENCE, WRAPPERS, loss_of

NAMES = (REFERENCE, "ours, level 3")
PHASES = ("build", "forward", "backward", "step")


class PhasePeaks(TorchDispatchMode):
    """Samples the allocated bytes after every operation, and keeps the most of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = defaultdict(int)
        self.is_built = self._is_in_step = False
        self._before = heap_bytes()
        self._hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._set_step(True)),
            register_optimizer_step_post_hook(lambda *_: self._set_step(False)),
        )

    def _set_step(self, value: bool) -> None:
        self._is_in_step = value

    @property
    def phase(self) -> str:
        """The phase of the step in which the main thread is."""
        if not self.is_built:
            return "build"
        if self._is_in_step:
            return "step"
        is_in_backward = torch._C._current_graph_task_id() != -1
        return "backward" if is_in_backward else "forward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        phase = self.phase
        self.peaks[phase] = max(self.peaks[phase], heap_bytes() - self._before)
        return result

    def stop(self) -> None:
        """Notice no more steps of optimizers."""
        for hook in self._hooks:
            hook.remove()


def measure(name: str, workload: Workload) -> dict[str, int]:
    """Return the most bytes of each phase in three steps of one wrapper."""
    batches = tokens_of(workload, "cpu", torch.Generator().manual_seed(0))
    gc.collect()
    with PhasePeaks() as sampler:
        step = WRAPPERS[name](build(workload, "cpu"), workload)
        sampler.is_built = True
        for _ in range(3):
            step(batches)
    sampler.stop()
    return sampler.peaks


def activation_bytes(workload: Workload) -> int:
    """Return what the forward of the bare model leaves for its backward."""
    model = build(workload, "cpu")
    (tokens,) = tokens_of(workload, "cpu", torch.Generator().manual_seed(0))
    gc.collect()
    before = heap_bytes()
    loss = loss_of(model, tokens)
    num_bytes = heap_bytes() - before
    del loss
    return num_bytes


def minimum(workload: Workload, with_overlap: bool) -> int:
    """Return the bytes that cannot be missing when backward begins; see the top of this file."""
    model = build(workload, "cpu")
    num_ranks = dist.get_world_size()
    state = 3 * 4 * sum(each.numel() for each in model.parameters()) // num_ranks
    unit = sum(each.numel() * each.element_size() for each in model.layers[-1].parameters())
    units = 4 if with_overlap else 2
    return state + activation_bytes(workload) + units * unit


def row(name: str, values: list[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join([name, *values])} |"


@click.command()
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--length", default=256, show_default=True, help="tokens per sequence")
def main(dtype: str, layers: int, hidden: int, length: int) -> None:
    """Print the table."""
    dist.init_process_group("gloo")
    workload = Workload(layers, hidden, length, 1, 512, dtype, 1, recompute=False)
    peaks = {name: measure(name, workload) for name in NAMES}
    least = {
        "minimum": minimum(workload, with_overlap=False),
        "minimum with overlap": minimum(workload, with_overlap=True),
    }
    if dist.get_rank() == 0:
        reference = max(peaks[REFERENCE].values())
        print(f"{dist.get_world_size()} ranks, {workload.label}\n")
        print(row("", [*PHASES, "ratio"]))
        print("|---" * (len(PHASES) + 2) + "|")
        for name, of_phase in peaks.items():
            cells = [f"{of_phase[phase] / 1e6:.1f}" for phase in PHASES]
            print(row(name, [*cells, f"{max(of_phase.values()) / reference:.2f}"]))
        for name, num_bytes in least.items():
            cells = ["", "", f"{num_bytes / 1e6:.1f}", ""]
            print(row(name, [*cells, f"{num_bytes / reference:.2f}"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
