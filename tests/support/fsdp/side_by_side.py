# SPDX-License-Identifier: Apache-2.0
"""A model trained with and without sharding by a loop of the test, where `Case` does not reach."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import (
    TOLERANCE,
    batch,
    close,
    compare_shards,
    loss_of,
    optimizer_over,
    shown_gradients,
)

Backward = Callable[[nn.Module, int, int], None]
"""`backward(model, step, rank)` runs the backward passes of one step on the data of a rank."""


def shard(
    module: nn.Module, level: int, mesh: DeviceMesh | None = None, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard `module` and an AdamW over it, all in one dtype, with blocks as units."""
    settings = {"fsdp_unit_modules": [ResidualBlock], "preserve_fp32_weights": False, **settings}
    settings = {"device_mesh": mesh or shard_mesh(), "dp_shard_dim": "dp_shard", **settings}
    optimizer = optimizer_over(module, "fused_adamw")
    return fully_shard(module, optimizer, zero_dp_strategy=level, **settings)


def mean_gradients(reference: nn.Module, backward: Backward, step: int) -> dict[str, Tensor]:
    """Return the unsharded model's gradients on the data of all ranks, and leave them on it."""
    reference.zero_grad()
    for rank in range(dist.get_world_size()):
        backward(reference, step, rank)
    trainable = {
        name: parameter
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    for parameter in trainable.values():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = gradient / dist.get_world_size()
    return {name: parameter.grad.clone() for name, parameter in trainable.items()}


def train_side_by_side(
    build: Callable[[], nn.Module],
    backward: Backward,
    level: int,
    steps: int = 3,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    mesh: DeviceMesh | None = None,
    tolerance: float = TOLERANCE,
    build_sharded: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> tuple[nn.Module, MegatronFSDP]:
    """Compare gradients before and weights after every step, and return both models.

    `prepare` is applied to both. `build_sharded` builds the model to shard, where that is not
    `build`; both begin with the same seed.
    """
    torch.manual_seed(7)
    reference = build()
    torch.manual_seed(7)
    model, optimizer = shard((build_sharded or build)(), level, mesh, **settings)
    expected_optimizer = optimizer_over(reference, "fused_adamw")
    for each in (reference, model):
        prepare(each)
    for step in range(steps):
        expected = mean_gradients(reference, backward, step)
        optimizer.zero_grad()
        backward(model, step, dist.get_rank())
        compare_shards(
            model, shown_gradients(model), expected, f"gradient in step {step}", tolerance
        )
        expected_optimizer.step()
        optimizer.step()
        weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        compare_shards(
            model, dict(model.named_parameters()), weights, f"weight after step {step}", tolerance
        )
    return reference, model


def plain_backward(model: nn.Module, step: int, rank: int) -> None:
    """Run one forward and one backward."""
    loss_of(model(batch(step, rank, 0))).backward()


def compare_plain_gradients(model: nn.Module, reference: nn.Module, step: int, what: str) -> None:
    """Run :func:`plain_backward` on both, and compare the gradients of trainable parameters."""
    expected = mean_gradients(reference, plain_backward, step)
    model.zero_grad()
    plain_backward(model, step, dist.get_rank())
    compare_shards(model, shown_gradients(model), expected, what)


def inner(model: nn.Module) -> nn.Module:
    """Return the user's module, sharded or not."""
    return model.module if isinstance(model, MegatronFSDP) else model


def compare_outputs(model: nn.Module, reference: nn.Module, x: Tensor, what: str) -> None:
    with torch.no_grad():
        close(model(x), reference(x), what)


def shard_two_layers(level: int = 3, **settings: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard two linear layers that two ranks divide evenly, in float32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.1), zero_dp_strategy=level, **settings
    )


def whole_weights(model: MegatronFSDP) -> list[Tensor]:
    return [full_tensor(parameter) for parameter in model.parameters()]
