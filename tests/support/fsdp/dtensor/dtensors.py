# SPDX-License-Identifier: Apache-2.0
"""DTensors whose local parts torch would have cut otherwise, beside the whole tensors."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.fsdp import models, reference
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.reference import batch, loss_of, optimizer_over


class Odd(models.Scaled):
    """A scalar, and matrices that cuts divide inside of rows or cannot divide there."""

    units = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.odd_cube = (
            nn.Parameter(torch.randn(3, 67)),
            nn.Parameter(torch.randn(3, 5, 23)),
        )
        self.rows, self.blocks = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(5, 2, 4))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return (
            super().forward(x)
            + self.odd.sum()
            + self.odd_cube.sum()
            + self.rows.prod()
            + self.blocks.prod()
        )


class TwoLayers(nn.Module):
    """Two layers split by tensor parallelism, the first by rows, the second by columns."""

    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(5, 8),
            nn.Linear(8, 5),
            nn.Parameter(torch.tensor(0.5)),
        )

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


CUT_INSIDE_ROWS = ("odd", "inner.weight", "element runs")
"""In names of tensors of which some rank owns more, or less, than chunks of whole rows."""


def build(
    kind: str, shift: float = 0.0, train: bool = True, ready: bool = True
) -> tuple[Any, Any, nn.Module, Any]:
    """Return a sharded model and optimizer, and the same without sharding.

    Kinds: "level0" to "level3", "hybrid", "hybrid_optim", "tensor".

    Both have taken one step and have the gradients of another.
    """
    torch.manual_seed(3)
    plain = (TwoLayers if kind == "tensor" else Odd)().double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(shift)
    module = copy.deepcopy(plain)
    size = dist.get_world_size()
    mesh: DeviceMesh = shard_mesh()
    settings: dict[str, Any] = {
        "zero_dp_strategy": int(kind[-1]) if kind.startswith("level") else 3
    }
    if kind.startswith("hybrid"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        settings |= {
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "outer_dp_sharding_strategy": int(kind == "hybrid_optim"),
        }
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        settings |= {"dp_shard_dim": "data", "tp_dim": "tensor"}
        parallelize_module(
            module, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    model, optimizer = fully_shard(
        module,
        optimizer_over(module, "fused_adamw"),
        device_mesh=mesh,
        fsdp_unit_modules=type(plain).units,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        preproc_state_dict_for_dcp_ckpt=ready,
        **settings,
    )
    plain_optimizer = optimizer_over(plain, "fused_adamw")
    for step in range(2 if train else 0):
        run_step(model, step, optimizer if step == 0 else None)
        run_step(plain, step, plain_optimizer if step == 0 else None)
    return model, optimizer, plain, plain_optimizer


def run_step(model: nn.Module, step: int, optimizer: torch.optim.Optimizer | None) -> None:
    """Run one forward and backward on the same data on every rank, and perhaps a step."""
    loss_of(model(batch(step, 0, 0), step=step)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def everything(
    model: Any, optimizer: Any, plain: nn.Module, plain_optimizer: Any
) -> Iterator[tuple[str, DTensor, Tensor]]:
    """Yield every DTensor that a user can reach, beside the whole tensor."""
    state, optimizer_state = model.state_dict(), optimizer.state_dict()["state"]
    for position, ((name, sharded), whole) in enumerate(
        zip(model.named_parameters(), plain.parameters(), strict=True)
    ):
        yield f"{name} parameter", sharded, whole.detach()
        yield f"{name} gradient", sharded.grad, whole.grad
        yield f"{name} in the model's state dict", state[name], whole.detach()
        moment = plain_optimizer.state[whole]["exp_avg"]
        yield f"{name} state", optimizer.state[sharded]["exp_avg"], moment
        yield f"{name} in the optimizer's state dict", optimizer_state[position]["exp_avg"], moment


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    """Compare in the shape of `actual`: the optimizer sees a scalar as a vector of one."""
    reference.close(actual, expected.reshape(actual.shape), name)


def uneven(whole: Tensor, mesh: DeviceMesh, sizes: list[int], dim: int = 0) -> DTensor:
    """Return a user's own DTensor with ranges of `sizes` of `dim` over a mesh of one axis."""
    local = whole.split(sizes, dim)[dist.get_rank()]
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def users_own(with_runs_of_columns: bool = False) -> Iterator[tuple[str, DTensor, Tensor]]:
    """Yield DTensors over four ranks: even, uneven and empty parts, of one mesh axis and of two.

    Flat ranges of the columns of a slice can be gathered, but have no chunks.
    """
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(6 * 10, dtype=torch.float64).view(6, 10)
    yield "even", distribute_tensor(whole, line, [Shard(0)]), whole
    yield "columns", distribute_tensor(whole, line, [Shard(1)]), whole
    yield "cube", distribute_tensor(whole.view(6, 5, 2), line, [Shard(1)]), whole.view(6, 5, 2)
    yield "replicated", distribute_tensor(whole, grid, [Replicate(), Replicate()]), whole
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
    ):
        yield str(placements), distribute_tensor(whole, grid, placements), whole
    yield "uneven", uneven(whole, line, [0, 4, 0, 2]), whole
    yield "uneven columns", uneven(whole, line, [1, 0, 7, 2], dim=1), whole
    yield "bf16", uneven(whole.bfloat16(), line, [5, 0, 1, 0]), whole.bfloat16()
    flat = whole.view(-1).split([13, 0, 40, 7])[dist.get_rank()]
    runs = DTensor.from_local(
        flat, line, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    yield "element runs", runs, whole
    runs_of_columns = "element runs of columns"
    for name, parts in {
        runs_of_columns: [
            *whole[:, :3].reshape(-1).split([7, 11]),
            *whole[:, 3:].reshape(-1).split([0, 42]),
        ],
        "empty without a width": [whole[:, :4], whole.new_empty(0), whole[:2, 4:], whole[2:, 4:]],
    }.items():
        if name == runs_of_columns and not with_runs_of_columns:
            continue
        local = parts[dist.get_rank()]
        dtensor = DTensor.from_local(
            local,
            grid,
            [Shard(1), Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        yield name, dtensor, whole
