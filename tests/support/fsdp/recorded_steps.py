# SPDX-License-Identifier: Apache-2.0
"""Training steps whose collectives are recorded."""

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp import trace
from megatron.fsdp.trace.recorder import TraceEntry
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock, Stack
from tests.support.fsdp.reference import loss_of, optimizer_over


def build_recorded(
    level: int, mesh: str | DeviceMesh = "flat", **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a stack of an embedding, three blocks and a head in float32."""
    module = Stack()
    if isinstance(mesh, DeviceMesh):
        arguments: dict[str, Any] = {"device_mesh": mesh}
    else:
        arguments = Meshes().arguments(mesh)
    return fully_shard(
        module,
        optimizer_over(module),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        **arguments,
        **settings,
    )


def train_step(
    model: MegatronFSDP, optimizer: torch.optim.Optimizer, microbatches: int = 1
) -> None:
    """Run forward and backward of every microbatch, and one step of the optimizer."""
    for number in range(microbatches):
        is_last = number == microbatches - 1
        with nullcontext() if is_last else model.no_sync():
            loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    optimizer.step()
    optimizer.zero_grad()


def record_step(
    level: int,
    mesh: str = "flat",
    microbatches: int = 1,
    directory: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> list[TraceEntry]:
    """Return all entries of the third step: the first has no order of units yet."""
    model, optimizer = build_recorded(level, mesh, **settings)
    for _ in range(2):
        train_step(model, optimizer, microbatches)
    with trace.record(directory) as recorder:
        train_step(model, optimizer, microbatches)
    return list(recorder.entries)
