# SPDX-License-Identifier: Apache-2.0
"""Train models that Inductor has compiled, sharded, beside eager ones.

For each way to compile, FSDP2 trains the same modules in the same processes; its graphs and graph
breaks are what this project's are compared with.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

from tests.support.fsdp import models
from tests.support.fsdp.reference import loss_of, optimizer_over
from tests.support.fsdp.side_by_side import shard

STEPS = 3
MICROBATCHES = 2
SIZES = (3, 4, 6)
"""Rows of a batch, by step, where shapes are dynamic."""


class RecomputedStack(models.Stack):
    """Blocks whose activations are computed again in the backward."""

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@dataclass(frozen=True)
class CompiledWay:
    """`what` is compiled: "blocks" or "model"; `recomputes` blocks; batches' sizes `change`."""

    what: str
    recomputes: bool = False
    change: bool = False

    def build(self) -> models.Stack:
        torch.manual_seed(11)
        return (RecomputedStack if self.recomputes else models.Stack)().double()

    def compile_blocks(self, module: models.Stack) -> None:
        if self.what == "blocks":
            for block in module.blocks:
                block.compile(dynamic=self.change or None)

    def whole(self, model: nn.Module) -> nn.Module:
        return torch.compile(model, dynamic=self.change or None) if self.what == "model" else model


WAYS = {
    "model": CompiledWay("model"),
    "blocks_recomputed": CompiledWay("blocks", recomputes=True),
    "blocks_dynamic": CompiledWay("blocks", change=True),
}


@dataclass(frozen=True)
class CompiledGraphs:
    """Count the graphs that were compiled, and the breaks between them."""

    compiled: int
    breaks: int


@contextmanager
def counted() -> Iterator[list[CompiledGraphs]]:
    """Compile anew inside, and put what was counted into the list."""
    torch._dynamo.reset()
    counters.clear()
    counts: list[CompiledGraphs] = []
    yield counts
    counts.append(
        CompiledGraphs(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    )


def losses_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, change: bool, warm: int = STEPS
) -> list[float]:
    """Train, and return the losses of all microbatches; after `warm` steps nothing is compiled."""
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=step >= warm):
            for microbatch in range(MICROBATCHES):
                x = rows_of(step, microbatch, SIZES[step] if change else models.BATCH)
                loss = loss_of(model(x))
                (loss / MICROBATCHES).backward()
                losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def rows_of(step: int, microbatch: int, size: int) -> Tensor:
    seed = (step * 8 + dist.get_rank()) * 8 + microbatch
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, models.WIDTH, generator=generator, dtype=torch.float64)


def sharded(way: CompiledWay, level: int, compiled: bool) -> list[float]:
    module = way.build()
    if compiled:
        way.compile_blocks(module)
    model, optimizer = shard(module, level)
    called = way.whole(model) if compiled else model
    return losses_of(called, optimizer, way.change, warm=2 if compiled else STEPS)


def sharded_by_fsdp2(way: CompiledWay) -> list[float]:
    module = way.build()
    way.compile_blocks(module)
    for unit in (module.embed, *module.blocks, module.head, module):
        fsdp2(unit)
    optimizer = optimizer_over(module, "fused_adamw")
    return losses_of(way.whole(module), optimizer, way.change)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile inside, in this process, on a rank that was started with compilation off."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # the pool puts it back after the job
    plain_code = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp.threads": 1}
    plain_code["cpp_cache_precompile_headers"] = False
    with torch._dynamo.config.patch(disable=False), torch._inductor.config.patch(plain_code):
        try:
            yield
        finally:
            torch._dynamo.reset()


def compare_all(
    levels: dict[str, tuple[int, ...]], cache: str
) -> dict[str, dict[str, CompiledGraphs]]:
    """Compare ways, each at its levels, with eager training; return their graphs."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return {name: compare(name, levels[name]) for name in WAYS}


def compare(name: str, levels: tuple[int, ...]) -> dict[str, CompiledGraphs]:
    """Compare a way at some levels with eager training; return the graphs of each and of FSDP2."""
    way = WAYS[name]
    graphs: dict[str, CompiledGraphs] = {}
    runs: dict[str, Callable[[], list[float]]] = {"fsdp2": lambda: sharded_by_fsdp2(way)}
    for level in levels:
        runs[str(level)] = lambda level=level: sharded(way, level, compiled=True)
    eager = sharded(way, 3, compiled=False)
    with compiling():
        for key, run in runs.items():
            with counted() as counts:
                losses = run()
            torch.testing.assert_close(losses, eager, rtol=1e-11, atol=1e-11, msg=f"{name} {key}")
            (graphs[key],) = counts
    return graphs
