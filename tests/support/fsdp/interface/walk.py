# SPDX-License-Identifier: Apache-2.0
"""The table of the published interface, and the models that its entries look at."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import trace
from megatron.fsdp.engine.observe import GATHER
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import BATCH, WIDTH, build_stack
from tests.support.fsdp.reference import batch, loss_of

OWNERS: dict[str, Any] = {
    "fully_shard_model": fully_shard_model,
    "fully_shard_optimizer": fully_shard_optimizer,
    "MegatronFSDP": MegatronFSDP,
    "FSDPDistributedIndex": FSDPDistributedIndex,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
}


WALK: dict[str, dict[str, tuple[int, Callable[..., None]]]] = defaultdict(dict)
"""By owner and name: the number of ranks, and the function that shows the effect to one of them."""


def shows(
    owner: str, *names: str, world_size: int = 2
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter the decorated function, which shows the effect of each of `names` of `owner`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            WALK[owner][name] = (world_size, function)
        return function

    return register


def wrapped(module: nn.Module, **arguments: Any) -> MegatronFSDP:
    """Wrap a module by the class, which unlike the function synchronises on request only."""
    return MegatronFSDP(
        module,
        FSDPDistributedIndex(mesh_of("dp")),
        **{"sync_model_each_microbatch": True, **arguments},
    )


def backward(model: nn.Module, rank: int | None = None, dtype: torch.dtype = torch.float64) -> None:
    loss_of(model(batch(0, dist.get_rank() if rank is None else rank, 0).to(dtype))).backward()


def whole(value: Tensor) -> Tensor:
    return uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value


def gradient(model: nn.Module) -> Tensor:
    """Return the whole gradient of one weight, in float64."""
    return whole(dict(model.named_parameters())["module.head.weight"].grad).double()


def mean_gradient(num_ranks: int) -> Tensor:
    reference = build_stack()
    for rank in range(num_ranks):
        (loss_of(reference(batch(0, rank, 0))) / num_ranks).backward()
    return reference.head.weight.grad


def names_of_units(model: MegatronFSDP) -> set[str]:
    """Return the names of the units that are gathered by themselves."""
    with trace.record() as recorder, torch.no_grad():
        model(torch.randn(BATCH, WIDTH, dtype=torch.float64))
    return {entry.unit for entry in recorder.collectives if entry.track == GATHER}


def num_on_all_ranks(model: nn.Module) -> int:
    count = torch.tensor(sum(each.to_local().numel() for each in model.parameters()))
    dist.all_reduce(count)
    return int(count)
