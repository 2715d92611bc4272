# SPDX-License-Identifier: Apache-2.0
"""Bytes a parameter that the state of optimizers takes, over all ranks, after one step.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/optimizer_memory.py

The model is a chain of transformer layers, sharded at level 3. Bytes are those of the memory behind
the local tensors: main weights, and everything in the optimizer's state. "largest rank" is that of
the rank with the most, times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from megatron_fsdp import MixedPrecisionPolicy, fully_shard

OPTIMIZERS: dict[str, Any] = {
    "torch AdamW": torch.optim.AdamW,
    "torchao AdamW8bit": AdamW8bit,
    "torchao AdamWFp8": AdamWFp8,
    "torchao AdamW4bit": AdamW4bit,
}
ROUNDED = {"bf16_stochastic_round": True}


def build(layers: int, width: int, dtype: torch.dtype) -> nn.Module:
    """Build the same model on every call."""
    torch.manual_seed(0)
    layer = partial(nn.TransformerEncoderLayer, width, width // 64, 4 * width, dropout=0.0)
    return nn.Sequential(*(layer(batch_first=True) for _ in range(layers))).to(dtype)


def tensors_inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the plain tensors that a tensor consists of on this rank."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return [local]
    names, _ = local.__tensor_flatten__()
    return [getattr(local, name) for name in names]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the elements of tensors on this rank."""
    return sum(part.nbytes for part in chain.from_iterable(map(tensors_inside, tensors)))


def measure(make: Any, module: nn.Module, **settings: Any) -> list[float]:
    """Train one step; return bytes a parameter of weights and state, and state of the largest."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    model, optimizer = fully_shard(
        module,
        make(module.parameters(), **settings),
        fsdp_unit_modules=[nn.TransformerEncoderLayer],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    weight = next(iter(module.parameters()))
    model(torch.randn(1, 8, weight.shape[-1], dtype=weight.dtype)).square().mean().backward()
    optimizer.step()
    own = [bytes_of(model.parameters())]
    own.append(sum(bytes_of(slots.values()) for slots in optimizer.state.values()))
    total, largest = torch.tensor(own), torch.tensor(own)
    dist.all_reduce(total)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [*(total / numel).tolist(), float(largest[1]) * dist.get_world_size() / numel]


@click.command()
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=512, show_default=True)
def main(layers: int, width: int) -> None:
    """Print a row for each optimizer."""
    dist.init_process_group("gloo")
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update
        rows = {
            name: measure(make, build(layers, width, torch.float32))
            for name, make in OPTIMIZERS.items()
        }
        for name in list(OPTIMIZERS)[1:]:
            module = build(layers, width, torch.bfloat16)
            rows[f"{name}, bf16 weights"] = measure(OPTIMIZERS[name], module, **ROUNDED)
    if dist.get_rank() == 0:
        print("| optimizer | main weights | state | state, largest rank |\n|---|---|---|---|")
        for name, values in rows.items():
            print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
