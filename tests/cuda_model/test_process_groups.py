# SPDX-License-Identifier: Apache-2.0
"""Process groups of the library on the model of a CUDA device: a bound device, and priorities."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp.engine.device import CudaStreams
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.optimizer.matrix.matrix_parts import OwnerRanks
from megatron.mcore_adapter import axes
from megatron.mcore_adapter.releases import process_groups
from tests.support.cuda_model.machine import bound_device, cuda_model
from tests.support.fsdp.reference import Ranks
from tools.cuda_model.groups import NcclOptions


def group_for_gathers(mesh: DeviceMesh) -> dist.ProcessGroup:
    with patch.object(process_groups, "accepts", lambda function, name: False):
        return process_groups.all_gather_group(None, mesh["tp"].get_group())


def group_of_one_rank(mesh: DeviceMesh) -> Any:
    config: Any = SimpleNamespace(num_moe_experts=None)
    return axes.complete(SimpleNamespace(), config)


def group_of_owners(mesh: DeviceMesh) -> OwnerRanks:
    own = Mesh(device_mesh=mesh["dp", "tp"], inner="dp", tensor="tp")
    return OwnerRanks(own.dense)


def made_by_a_pair(make: Callable[[DeviceMesh], object]) -> list[str]:
    """Make a group of the ranks 0 and 1 where a device is bound to all four."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    with cuda_model() as model, bound_device():
        if dist.get_rank() < 2:
            make(mesh)
    return [str(report) for report in model.reports]


@pytest.mark.parametrize("make", [group_for_gathers, group_of_one_rank, group_of_owners])
def test_a_group_of_some_ranks_needs_no_others(
    ranks: Ranks, make: Callable[[DeviceMesh], object]
) -> None:
    for reports in ranks(4, made_by_a_pair, make):
        assert not reports, "\n\n".join(reports)


@pytest.mark.parametrize("is_high", [False, True], ids=["default", "high"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
def test_streams_have_the_priority_of_a_group(is_high: bool, is_wrapped: bool) -> None:
    plain = SimpleNamespace(options=NcclOptions())
    backend = SimpleNamespace(options=NcclOptions(is_high))
    if is_wrapped:  # by torch, with TORCH_DISTRIBUTED_DEBUG=DETAIL; it has no options
        backend = SimpleNamespace(wrapped_pg=backend)
    groups: list[Any] = []
    for each in (plain, backend, plain):
        groups.append(SimpleNamespace(_get_backend=lambda device, each=each: each))
    with cuda_model(compares_order=False):
        streams = CudaStreams(torch.device("cpu"))
        streams.serve(groups)
        streams.launch("gather", lambda asynchronous: None)
        assert streams._streams["gather"].priority == (-1 if is_high else 0)
