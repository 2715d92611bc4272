# SPDX-License-Identifier: Apache-2.0
"""A small stack of blocks that trains on the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, loss_of, optimizer_over


def stack_on(
    level: int, meshes: Meshes, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Return a sharded stack and its optimizer."""
    module = settings.pop("module", None) or build_stack()
    if not settings.get("init_model_with_meta_device"):
        module = module.to(device_type())
    settings = {"mixed_precision_policy": MixedPrecisionPolicy(None), **settings}
    return fully_shard(
        module,
        optimizer_over(module, settings.pop("optimizer", "fused_adamw")),
        **meshes.arguments(settings.pop("mesh", "flat")),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        **settings,
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train one step."""
    loss_of(model(batch(number, dist.get_rank(), 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
