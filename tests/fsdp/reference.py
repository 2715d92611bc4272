# SPDX-License-Identifier: Apache-2.0
"""Training with and without sharding, side by side: the central assertion of the engine's tests.

The unsharded side runs on every rank, over the data of all ranks, and is plain PyTorch. Gradients are compared before every
step (losses would not do: Adam hides a constant factor), weights after every step and, through a forward in evaluation, as
the next forward sees them.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.fsdp.hooks import tensors_in
from tests.fsdp import models

TOLERANCE = 1e-11
"""For float64: a few hundred roundings of 1e-16 with sums over at most four ranks."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `sync`: "auto" (each backward), "no_sync" (the last one), "manual" (finish_grad_sync), "step"."""

    model: str
    sync: str = "auto"
    microbatches: int = 1
    steps: int = 2
    forwards: int = 1  # of the root before one backward
    evaluate: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def shard_mesh() -> DeviceMesh:
    """One per job: every mesh costs process groups."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def batch(step: int, rank: int, microbatch: int, forward: int = 0) -> Tensor:
    """Data of its own for every rank and microbatch, float64 [BATCH, WIDTH]."""
    generator = torch.Generator().manual_seed(((step * 8 + rank) * 8 + microbatch) * 8 + forward)
    return torch.randn(models.BATCH, models.WIDTH, generator=generator, dtype=torch.float64)


def loss_of(output: object) -> Tensor:
    """A number that every tensor of `output` adds to, each in its own way."""
    return sum((number + 1) * (tensor.pow(2).mean() + tensor.mean()) for number, tensor in enumerate(tensors_in(output)))


def loss_on(model: nn.Module, step: int, rank: int, microbatch: int, forwards: int) -> Tensor:
    return sum(loss_of(model(batch(step, rank, microbatch, forward), step=step)) for forward in range(forwards))


def optimizer_over(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


@dataclass(frozen=True)
class Step:
    """What one step of training leaves: final gradients and new weights by name, and outputs on data of its own."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: list[Tensor]


@cache
def unsharded_training(name: str, steps: int, microbatches: int, forwards: int, mean: bool) -> list[Step]:
    """Plain PyTorch over the data of all ranks: gradients are summed over microbatches, averaged (or summed) over ranks."""
    model = models.build(name)
    optimizer = optimizer_over(model)
    trace = []
    for step in range(steps):
        model.zero_grad()
        for rank in range(dist.get_world_size()):
            for microbatch in range(microbatches):
                loss_on(model, step, rank, microbatch, forwards).backward()
        trainable = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
        for parameter in trainable.values():  # sharding gives a gradient of zero to what was not used
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient / (dist.get_world_size() if mean else 1)
        optimizer.step()
        gradients = {key: parameter.grad.clone() for key, parameter in trainable.items()}
        weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        trace.append(Step(gradients, weights, evaluate(model, step)))
    return trace


@torch.no_grad()
def evaluate(model: nn.Module, step: int) -> list[Tensor]:
    return list(tensors_in(model(batch(99, 0, 0), step=step)))


def sharded_backward(case: Case, model: nn.Module, step: int) -> None:
    for microbatch in range(case.microbatches):
        last = microbatch == case.microbatches - 1
        with model.no_sync() if case.sync == "no_sync" and not last else nullcontext():
            loss_on(model, step, dist.get_rank(), microbatch, case.forwards).backward()
    if case.sync == "manual":
        model.finish_grad_sync()


def compare(case: Case, mesh: DeviceMesh) -> None:
    """Raise AssertionError where gradients, weights or outputs of the sharded model are not those of the unsharded one."""
    mean = not case.settings.get("calculate_per_token_loss", False)
    trace = unsharded_training(case.model, case.steps, case.microbatches, case.forwards, mean)
    module = models.build(case.model)
    settings = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None), **case.settings}
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        device_mesh=mesh,
        fsdp_unit_modules=type(module).units,
        sync_model_each_microbatch=case.sync in ("auto", "no_sync"),
        **settings,
    )
    for number, step in enumerate(trace):
        sharded_backward(case, model, number)
        if case.sync == "step":
            optimizer.step()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
        compare_pieces(model, gradients, step.gradients, f"gradient in step {number}")
        if case.sync != "step":
            optimizer.step()
        optimizer.zero_grad()
        compare_pieces(model, dict(model.named_parameters()), step.weights, f"weight after step {number}")
        if case.evaluate:
            for index, (left, right) in enumerate(zip(evaluate(model, number), step.outputs, strict=True)):
                close(left, right, f"output {index} after step {number}")


def compare_pieces(
    model: nn.Module, actual: dict[str, DTensor], expected: dict[str, Tensor], what: str, tolerance: float = TOLERANCE
) -> None:
    """Compare what this rank holds; that the pieces of all ranks make up the whole is for test_layout and test_state_dict."""
    parameters = dict(model.named_parameters())
    assert list(actual) == ["module." + key for key in expected]
    for key, whole in expected.items():
        run = parameters["module." + key]._fsdp_sharded.run
        piece = actual["module." + key].to_local().detach()
        close(piece.reshape(-1), whole.reshape(-1)[run.start : run.stop], f"{what}: {key}", tolerance)


def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
