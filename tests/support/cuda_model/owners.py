# SPDX-License-Identifier: Apache-2.0
"""Trainings with Muon on the model, whose matrices have owners; they are compared with others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from tests.support.fsdp import tensor_parallel
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, loss_of


def owners_of_matrices(
    level: int, meshes: Meshes, mesh: str = "flat", num_matrices: int | None = None
) -> Callable[[], None]:
    """Train with Muon, whose matrices are sent to their owners and back."""
    trained = trained_by_owners(level, meshes, mesh, num_matrices)

    def compare() -> None:
        again = trained_by_owners(level, Meshes(), mesh, num_matrices).parameters()  # on the CPU
        for own, expected in zip(trained.parameters(), again, strict=True):
            assert torch.equal(own.to_local(), expected.to_local())

    return compare


def trained_by_owners(level: int, meshes: Meshes, mesh: str, num_matrices: int | None) -> nn.Module:
    """Return a stack after three steps of Muon over its matrices, and AdamW over the rest.

    The state is sharded for a state dict before the last of them.
    """
    module = build_stack().to(device_type())
    model, optimizers = fully_shard(
        module,
        optimizers_by_dim(module, num_matrices),
        **meshes.arguments(mesh),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
    )
    for number in range(3):
        loss_of(model(batch(number, dist.get_rank(), 0))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                optimizer.state_dict()
    return model


def optimizers_by_dim(
    module: nn.Module, num_matrices: int | None = None
) -> list[torch.optim.Optimizer]:
    """Return Muon over the first matrices of a module, and AdamW over the rest."""
    parameters = list(module.parameters())
    matrices = [each for each in parameters if each.ndim == 2][:num_matrices]
    others = [each for each in parameters if not any(each is other for other in matrices)]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


def owners_of_slices(level: int, meshes: Meshes) -> Callable[[], None]:
    """Train with Muon on matrices that tensor parallelism divides, by rows and by columns."""
    trained = trained_by_owners_of_slices(level)

    def compare() -> None:
        again = trained_by_owners_of_slices(level).parameters()
        for own, expected in zip(trained.parameters(), again, strict=True):
            assert torch.equal(own.to_local(), expected.to_local())

    return compare


def trained_by_owners_of_slices(level: int) -> nn.Module:
    """Return a model after three steps on two data ranks, each of two tensor-parallel ones."""
    place = tensor_parallel.mesh_arguments("dp2_tp2")
    data_rank, _ = tensor_parallel.data_place(place["device_mesh"])
    module = tensor_parallel.split(
        tensor_parallel.build(10).to(device_type()), place["device_mesh"]["tp"], style="tensor"
    )
    model, optimizers = fully_shard(
        module,
        optimizers_by_dim(module),
        **place,
        tp_dim="tp",
        fsdp_unit_modules=[tensor_parallel.SplitBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )
    for number in range(3):
        tensor_parallel.loss_on(model, number, data_rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model
