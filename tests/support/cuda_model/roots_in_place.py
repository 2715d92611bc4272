# SPDX-License-Identifier: Apache-2.0
"""Independent roots of one context, which train on the model of a CUDA device."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine import device
from megatron_fsdp.experimental import fully_shard, fully_shard_context, fully_shard_optimizer
from tests.support.cuda_model.machine import cuda_model
from tests.support.fsdp.in_place import SAME_DTYPE, compare_parts, on_one_axis
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import batch, loss_of, optimizer_over


def build() -> nn.Sequential:
    torch.manual_seed(5)
    roots = [nn.Sequential(ResidualBlock(), ResidualBlock()) for _ in range(2)]
    return nn.Sequential(*roots).double()


def train_roots(level: int, has_one_stream: bool) -> list[str]:
    """Train two roots, one after the other in a forward; return what the model reports."""
    reference = build()
    expected = optimizer_over(reference, "fused_adamw")
    for number in range(3):
        for rank in range(dist.get_world_size()):
            loss = loss_of(reference(batch(number, rank, 0))) / dist.get_world_size()
            loss.backward()
        expected.step()
        expected.zero_grad()
    streams = partial(device.CudaStreams, torch.device("cpu"), has_one_stream)
    with cuda_model() as machine, patch.object(device, "CpuStreams", streams):
        mesh = Meshes().arguments("flat")["device_mesh"]
        model, placements = build().to(mesh.device_type), on_one_axis(mesh, level).placements
        with fully_shard_context() as context:
            for root in model:
                for block in root:
                    fully_shard(block, mesh, placements, SAME_DTYPE)
                fully_shard(root, mesh, placements, SAME_DTYPE)
        optimizer = fully_shard_optimizer(optimizer_over(model, "fused_adamw"))
        for number in range(3):
            loss_of(model(batch(number, dist.get_rank(), 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
        used = context.streams(mesh.device_type)._streams
    assert len(used) == (1 if has_one_stream else 2)
    if not machine.reports:
        weights = dict(reference.named_parameters())
        compare_parts(model, dict(model.named_parameters()), weights, "weight")
    return [str(report) for report in machine.reports]
