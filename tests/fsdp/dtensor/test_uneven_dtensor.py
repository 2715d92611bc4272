# SPDX-License-Identifier: Apache-2.0
"""DTensors that clients make from their own parts of a tensor."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import FSDPDistributedIndex, fully_shard
from megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
from megatron_fsdp.uneven_dtensor import (
    get_state_dict,
    make_uneven_dtensor,
    update_uneven_dtensor_chunk_metadata,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import on_ranks
from tests.support.fsdp.wrong_calls import message_of


@on_ranks(2)
def test_parts_of_any_size_make_a_dtensor(tmp_path: object) -> None:
    whole, rank = torch.arange(35.0).view(7, 5), dist.get_rank()
    mesh = mesh_of("dp")
    for parts in (whole.split([2, 5]), [whole.flatten()[:9], whole.flatten()[9:]]):
        made = make_uneven_dtensor(parts[rank], whole.shape, mesh, [Shard(0)])
        assert torch.equal(full_tensor(made), whole)
        made.to_local().mul_(2)
        assert torch.equal(parts[rank].flatten(), made.to_local().flatten())  # the same storage
        made.to_local().div_(2)
        update_uneven_dtensor_chunk_metadata(made)
        dcp.save({"value": made}, checkpoint_id=tmp_path)
        loaded = {"value": torch.zeros(7, 5)}
        dcp.load(loaded, checkpoint_id=tmp_path)
        assert torch.equal(loaded["value"], whole)
    message_of(ValueError, make_uneven_dtensor, whole, whole.shape, mesh, [Shard(0), Replicate()])


@on_ranks(4)
def test_the_part_of_a_parameter_makes_a_dtensor_of_its_whole_shape() -> None:
    mesh = mesh_of("dp", "tp", sizes=(2, 2))
    index = FSDPDistributedIndex(mesh, "dp", tp_dim="tp")
    data, tensor = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    whole = torch.arange(40.0).view(8, 5)
    parameter = nn.Parameter(torch.empty(4, 5))  # tensor parallelism divides dim 0
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    local = whole[4 * tensor : 4 * tensor + 4].split([1, 3])[data]
    made = make_fsdp_dtensor(
        local, parameter, index, run_check=True, update_uneven_dtensor_chunk_meta=True
    )
    assert made.shape == (8, 5) and made.placements == (Shard(0), Shard(0))
    assert torch.equal(full_tensor(made), whole)
    copy = make_fsdp_dtensor(whole[4 * tensor : 4 * tensor + 4], parameter, index, False)
    assert copy.placements == (Shard(0), Replicate()) and torch.equal(full_tensor(copy), whole)
    message_of(ValueError, make_fsdp_dtensor, local[:1], parameter, index, run_check=True)
    message_of(
        NotImplementedError,
        make_fsdp_dtensor,
        *(local, parameter, index),
        force_sync_tp_duplicated_param=True,
    )


@on_ranks(2)
def test_state_dicts_of_model_and_optimizer_are_ready_for_checkpoints(tmp_path: object) -> None:
    module = nn.Linear(5, 7)
    model, optimizer = fully_shard(module, torch.optim.AdamW(module.parameters()))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert isinstance(model_state["module.weight"], DTensor)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    loaded = {"model": {"module.weight": torch.zeros(7, 5)}}
    dcp.load(loaded, checkpoint_id=tmp_path)
    weight = dict(model.named_parameters())["module.weight"]
    assert torch.equal(loaded["model"]["module.weight"], full_tensor(weight).detach())
