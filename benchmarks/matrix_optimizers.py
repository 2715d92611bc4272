# SPDX-License-Identifier: Apache-2.0
"""Muon, whose matrices have owners, beside AdamW: the seconds of training steps of one model.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/matrix_optimizers.py [--tokens 1024]

The model is a chain of transformer layers, sharded at level 3. Every round times one step in turn:
with AdamW, with Muon over the matrices of layers and AdamW over the rest ("owners"), and with the
same Muon on DTensors, which gathers whole gradients on every rank ("gathered"). It prints medians
over the rounds, in milliseconds, and the median of each round's ratio to AdamW.

torch's Muon iterates in bfloat16, in which a matrix product takes many CPUs 60 times as long as in
float32. By default Muon is therefore written here, in float32; `--update torch` takes torch's.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.optimizer.matrix.owners import steps_whole_matrices
from megatron_fsdp import fully_shard

PHASES = ("forward and backward", "optimizer", "step")


class GatheredMuon(torch.optim.Optimizer):
    """Muon in float32."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update each matrix with its momentum, made orthogonal by five iterations."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                momentum.lerp_(parameter.grad, 0.05)
                update = orthogonal(parameter.grad.lerp(momentum, 0.95))
                parameter.mul_(1 - 0.1 * group["lr"]).add_(update, alpha=-group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the result of five Newton-Schulz iterations on a tensor, whole if it is sharded."""
    whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
    x = whole.T if whole.shape[0] > whole.shape[1] else whole
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T.contiguous() if whole.shape[0] > whole.shape[1] else x


@steps_whole_matrices
class OwnedMuon(GatheredMuon):
    """The same with owners."""


class GatheredTorchMuon(torch.optim.Muon):
    """torch's Muon with a step of its own, which has no owners therefore."""

    def step(self, closure: Any = None) -> Any:
        """Step on the DTensors."""
        return super().step(closure)


CLASSES = {
    "float32": {"adamw": None, "owners": OwnedMuon, "gathered": GatheredMuon},
    "torch": {"adamw": None, "owners": torch.optim.Muon, "gathered": GatheredTorchMuon},
}


def build(layers: int, width: int) -> nn.Module:
    """Build the same model on every call."""
    torch.manual_seed(0)
    layer = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(*layer, nn.Linear(width, 256))


def optimizers_of(model: nn.Module, matrix_class: Any) -> list[torch.optim.Optimizer]:
    """Make AdamW, and an optimizer of the given class over the matrices of layers, if any."""
    layers, head = list(model.children())[:-1], list(model.children())[-1]
    own = list(nn.ModuleList(layers).parameters())
    if matrix_class is None:
        return [torch.optim.AdamW(model.parameters())]
    matrices = [parameter for parameter in own if parameter.ndim == 2]
    others = [parameter for parameter in own if parameter.ndim != 2]
    return [matrix_class(matrices), torch.optim.AdamW([*others, *head.parameters()])]


def time_step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], x: torch.Tensor
) -> list[float]:
    """Train one step and return the milliseconds of its phases and of all of it."""
    dist.barrier()
    begin = time.perf_counter()
    model(x).square().mean().backward()
    middle = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    dist.barrier()
    end = time.perf_counter()
    return [1e3 * (middle - begin), 1e3 * (end - middle), 1e3 * (end - begin)]


@click.command()
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--tokens", default=1024, show_default=True, help="of each rank, in rows of 128")
@click.option("--rounds", default=12, show_default=True, help="after two that do not count")
@click.option("--update", default="float32", show_default=True, type=click.Choice(list(CLASSES)))
def main(layers: int, width: int, tokens: int, rounds: int, update: str) -> None:
    """Time training steps and print a line for each phase."""
    dist.init_process_group("gloo")
    classes = CLASSES[update]
    trained = {}
    for name, matrix_class in classes.items():
        module = build(layers, width)
        optimizers = optimizers_of(module, matrix_class)
        trained[name] = fully_shard(
            module, optimizers, fsdp_unit_modules=[nn.TransformerEncoderLayer]
        )
    times: dict[str, list[list[float]]] = {name: [] for name in classes}
    x = torch.randn(tokens // 128, 128, width)
    for number in range(rounds + 2):
        for name, (model, optimizers) in trained.items():
            milliseconds = time_step(model, optimizers, x)
            if number >= 2:
                times[name].append(milliseconds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {layers} layers of {width}, {tokens} tokens a rank")
        for phase, label in enumerate(PHASES):
            print_phase(label, {name: [row[phase] for row in rows] for name, rows in times.items()})
    dist.destroy_process_group()


def print_phase(label: str, values: dict[str, list[float]]) -> None:
    """Print the medians of a phase, and the ratios to AdamW."""
    medians = "  ".join(f"{name} {statistics.median(row):7.1f}" for name, row in values.items())
    ratios = []
    for name in ("owners", "gathered"):
        of_rounds = [own / plain for own, plain in zip(values[name], values["adamw"])]
        ratios.append(f"{name} / adamw {statistics.median(of_rounds):.2f}")
    print(f"{label:>20}: {medians}  {'  '.join(ratios)}")


if __name__ == "__main__":
    main()
