# SPDX-License-Identifier: Apache-2.0
"""Sharded models whose state dicts are compared with those of the unsharded model."""

from os import PathLike
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.reference import batch, close, loss_of, optimizer_over

NAMES = ["scalars", "tied_across_units", "frozen_in_part"]


def sharded(
    name: str, level: int, module: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name) if module is None else module
    return fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        fsdp_unit_modules=type(module).units,
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        **settings,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int | range) -> None:
    """Train on the same data on every rank, so that the result is the same in every world."""
    for step in range(steps) if isinstance(steps, int) else steps:
        loss_of(model(batch(step, 0, 0), step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_checkpoint(
    path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)


def load_checkpoint(
    path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def assert_equal(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close(actual[name], value, name, tolerance)


def whole_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the whole tensors of a state dict, by the names of the unsharded model."""
    return {
        name.removeprefix("module."): uneven_dtensor_to_full_tensor(value)
        for name, value in state.items()
    }
