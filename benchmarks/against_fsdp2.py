# SPDX-License-Identifier: Apache-2.0
"""Step time of this engine, torch's FSDP2 and DDP on the same model in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/against_fsdp2.py [--layers 8]

Every round times each wrapper in turn, so that a machine whose speed drifts treats all alike. The
benchmark prints medians of milliseconds per step over the rounds, the median of the ratios to FSDP2
of each round, and losses after the last step, which must agree.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron.fsdp import MixedPrecisionPolicy, fully_shard

DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
VOCABULARY = 512


class CausalLayer(nn.Module):
    """A causal transformer layer, float (batch, length, hidden) to the same shape."""

    def __init__(self, hidden: int):
        super().__init__()
        self.heads = hidden // 64
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def build(layers: int, hidden: int, dtype: torch.dtype) -> nn.Module:
    """Build the same model of tokens to logits on every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, hidden),
        *[CausalLayer(hidden) for _ in range(layers)],
        nn.Linear(hidden, VOCABULARY),
    ).to(DEVICE, dtype)


def with_ours(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model with this engine, and make its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # FSDP2 keeps no second copy of the weights either.
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    return fully_shard(
        model, optimizer, fsdp_unit_modules=[CausalLayer], mixed_precision_policy=policy
    )


def with_fsdp2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model with FSDP2, and make its optimizer."""
    for layer in model:
        if isinstance(layer, CausalLayer):
            torch_fully_shard(layer)
    torch_fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Replicate a model with DDP, and make its optimizer."""
    model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def timed_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]
) -> tuple[float, float]:
    """Train on each batch and return milliseconds per step, and the last loss."""
    dist.barrier()
    begin = time.perf_counter()
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    last = loss.item()
    return (time.perf_counter() - begin) / len(batches) * 1000, last


@click.command()
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--length", default=256, show_default=True, help="tokens per sequence")
@click.option("--batch", default=1, show_default=True, help="sequences per rank")
@click.option("--steps", default=3, show_default=True, help="steps per timing")
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    help="timings of each wrapper, after one that does not count",
)
@click.option(
    "--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"])
)
def main(
    layers: int, hidden: int, length: int, batch: int, steps: int, rounds: int, dtype: str
) -> None:
    """Time all wrappers on the same batches and print a line for each."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    wrappers: dict[str, Callable] = {"ours": with_ours, "fsdp2": with_fsdp2, "ddp": with_ddp}
    sharded = {
        name: wrap(build(layers, hidden, getattr(torch, dtype))) for name, wrap in wrappers.items()
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in sharded}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        batches = [
            torch.randint(VOCABULARY, (batch, length + 1), generator=generator).to(DEVICE)
            for _ in range(steps)
        ]
        for name, (model, optimizer) in sharded.items():
            milliseconds, losses[name] = timed_steps(model, optimizer, batches)
            if number:
                times[name].append(milliseconds)
    if dist.get_rank() == 0:
        for name, values in times.items():
            ratio = statistics.median(value / other for value, other in zip(values, times["fsdp2"]))
            print(
                f"{name:>6}: {statistics.median(values):8.1f} ms/step (min {min(values):.1f}),"
                f" {ratio:.2f} x fsdp2, loss {losses[name]:.5f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
