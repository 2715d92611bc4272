# SPDX-License-Identifier: Apache-2.0
"""DTensors that programs make of a local tensor and the placements of a sharded one."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_fsdp import fully_shard_model
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import Stack
from tests.support.fsdp.reference import Ranks, on_ranks


def rebuilt(tensor: DTensor, local: Tensor | None = None) -> DTensor:
    """Make a DTensor as averages, offload and Muon code for FSDP2 do."""
    return DTensor.from_local(
        tensor.to_local() if local is None else local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def sharded_tensors(level: int, mesh: str) -> Iterator[tuple[str, DTensor]]:
    """Yield weights, gradients and entries of a state dict."""
    torch.manual_seed(3)
    settings = {"outer_dp_sharding_strategy": 1} if mesh == "outer2" and level == 3 else {}
    model = fully_shard_model(
        Stack().double(),
        zero_dp_strategy=level,
        fsdp_unit_modules=Stack.units,
        **Meshes().arguments(mesh),
        **settings,
    )
    model(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
    for name, parameter in model.named_parameters():
        yield name, parameter
        yield f"gradient of {name}", parameter.grad
    for name, entry in model.state_dict().items():
        yield f"entry of {name}", entry


def compare(level: int, mesh: str) -> None:
    for name, tensor in sharded_tensors(level, mesh):
        whole = tensor.detach().full_tensor()
        copies = rebuilt(tensor.detach())
        assert str(tensor.placements) == str(copies.placements), name
        assert all(isinstance(each, (Shard, Replicate)) for each in tensor.placements), name
        assert torch.equal(copies.full_tensor(), whole), name
        result = copies * 2 + tensor.detach()  # a whole tensor, where both are replicated
        result = result.full_tensor() if isinstance(result, DTensor) else result
        assert torch.equal(result, whole * 3), name
        halves = rebuilt(tensor, tensor.detach().to_local() / 2)
        assert torch.equal(halves.full_tensor(), whole / 2), name
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        assert torch.equal(halves.redistribute(placements=everywhere).to_local(), whole / 2), name
        with torch.no_grad():
            target = tensor.detach().clone()
            target.copy_(halves)
        assert torch.equal(target.full_tensor(), whole / 2), name
        by_torch = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        assert torch.equal(by_torch.full_tensor(), whole), name
        assert torch.equal((by_torch * 2).full_tensor(), whole * 2), name
        copied = copy.deepcopy(tensor.detach())
        assert torch.equal(rebuilt(copied).full_tensor(), whole), name


@pytest.mark.always("2-3-flat")
@pytest.mark.parametrize(
    ("num_ranks", "level", "mesh"),
    [(2, 3, "flat"), (3, 2, "flat"), (2, 0, "flat"), (4, 3, "outer2"), (4, 1, "outer2")],
)
def test_rebuilt_tensors_are_those_of_the_model(
    ranks: Ranks, num_ranks: int, level: int, mesh: str
) -> None:
    ranks(num_ranks, compare, level, mesh)


@on_ranks(2)
def test_a_local_tensor_of_another_size_is_refused() -> None:
    model = fully_shard_model(nn.Linear(3, 5))
    weight = model.get_parameter("module.weight").detach()
    with pytest.raises(ValueError, match="sharded tensor of shape"):
        rebuilt(weight, torch.zeros(weight.to_local().numel() + 1))
    with pytest.raises(NotImplementedError, match="has no backward"):
        rebuilt(weight, weight.to_local().clone().requires_grad_() * 2)
    even = weight.redistribute(placements=[Shard(0)])
    assert even.to_local().shape[1:] == (3,) and dist.get_world_size() == 2
    assert torch.equal(even.full_tensor(), weight.full_tensor())


@on_ranks(2)
def test_scalars_that_one_rank_has_are_rebuilt_on_all() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(3.0))
    module.weight = nn.Parameter(torch.ones(5))
    state = fully_shard_model(module, fsdp_unit_modules=[nn.Module]).state_dict()
    assert rebuilt(state["module.scale"]).full_tensor().item() == 3.0
