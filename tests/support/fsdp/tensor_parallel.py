# SPDX-License-Identifier: Apache-2.0
"""A model whose blocks torch's tensor parallelism divides."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.fsdp.meshes import device_type

WIDTH, LENGTH = 6, 8


class SplitBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SplitModel(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SplitBlock(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(hidden: int) -> SplitModel:
    torch.manual_seed(7)
    return SplitModel(hidden).double()


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 8 + data_rank)
    return torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def loss_on(model: nn.Module, step: int, data_rank: int) -> Tensor:
    output = model(batch(step, data_rank).to(device_type()))
    return output.pow(2).mean() + output.mean()


def split(model: SplitModel, mesh: DeviceMesh, style: str) -> SplitModel:
    """Divide the blocks, and the head, over the ranks of `mesh`."""
    for block in model.blocks:
        # Plain local tensors would say nothing of the whole's size where its parts are not equal.
        is_even = block.up.out_features % mesh.size() == 0
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=is_even),
            "down": RowwiseParallel(),
        }
        if style == "sequence":
            plan |= {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }
        parallelize_module(block, mesh, plan)
    if style == "sequence":
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    return model


SHAPES = {"dp2_tp2": (2, 2), "outer2_dp2_tp2": (2, 2, 2)}


AXES = {2: ("dp_shard", "tp"), 3: ("dp_outer", "dp_shard", "tp")}


def mesh_arguments(name: str) -> dict[str, Any]:
    shape = SHAPES[name]
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=AXES[len(shape)])
    outer = {"dp_outer_dim": "dp_outer"} if len(shape) == 3 else {}
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", **outer}


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's number among the data ranks, and how many there are."""
    tp = mesh["tp"].size()
    return dist.get_rank() // tp, dist.get_world_size() // tp
