# SPDX-License-Identifier: Apache-2.0
"""The documented mesh, checkpoint and state-dict calls work as they are printed."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_fsdp import fully_shard
from tests.support.fsdp import models
from tests.support.fsdp.interface.walk import whole
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.reference import Ranks, batch, close, loss_of, on_ranks, optimizer_over
from tests.support.fsdp.state_dicts import sharded, train


class DocumentedModel(nn.Module):
    """Tensor parallelism of two by torch's DTensors, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.dense = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        dense = nn.functional.linear(
            DTensor.from_local(x, self.mesh) if self.mesh else x, self.dense.weight
        )
        return (dense.full_tensor() if self.mesh else dense).mean(-1, keepdim=True) + self.experts[
            0
        ](x)

    mesh: DeviceMesh | None = None


def documented_mesh(sizes: tuple[int, int, int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    mesh[("dp_outer", "dp_shard", "cp")]._flatten("hsdp")
    ranks_of = mesh.mesh
    # Expert parallelism of one: the expert's data ranks are those of an outer slice, for every
    # tensor-parallel rank.
    expert_ranks = ranks_of[mesh.get_local_rank("dp_outer")].reshape(-1, sizes[3])
    expert_mesh = DeviceMesh.from_group(
        [mesh["dp_shard_cp"].get_group(), mesh["tp"].get_group()],
        "cpu",
        expert_ranks,
        mesh_dim_names=("dp_shard_cp", "tp"),
    )
    module, reference = DocumentedModel().double(), DocumentedModel().double()
    module.mesh = mesh["tp"]
    module.dense.weight = nn.Parameter(
        distribute_tensor(module.dense.weight.detach(), mesh["tp"], [Shard(0)])
    )
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        device_mesh=mesh,
        dp_shard_dim="dp_shard_cp",
        dp_outer_dim="dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=mesh["hsdp"].get_group(),
        hybrid_fsdp_expt_group=mesh["hsdp"].get_group(),
        expt_device_mesh=expert_mesh,
        fsdp_unit_modules=[nn.Linear],
        outer_dp_sharding_strategy=1,
        preserve_fp32_weights=False,
    )
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    place, num_places = mesh["hsdp"].get_local_rank(), mesh["hsdp"].size()
    for step in range(2):
        loss_of(model(batch(step, place, 0))).backward()
        (
            sum(loss_of(reference(batch(step, other, 0))) for other in range(num_places))
            / num_places
        ).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for name, value in model.state_dict().items():
            close(
                whole(value),
                reference.get_parameter(name.removeprefix("module.")).detach(),
                f"{name} after step {step}",
                1e-9,
            )


@pytest.mark.always("(2, 1, 1, 2)")
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (2, 1, 2, 2)], ids=str)
def test_the_documented_mesh(ranks: Ranks, sizes: tuple[int, int, int, int]) -> None:
    ranks(int(torch.tensor(sizes).prod()), documented_mesh, sizes)


def fresh(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build("scalars")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return sharded("scalars", 3, module)


def trained_without_sharding(last: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build("scalars")
    optimizer = optimizer_over(module)
    train(module, optimizer, last)
    return module, optimizer


@pytest.mark.exhaustive
@on_ranks(3)
def test_full_states_of_torchs_functions_are_those_of_the_unsharded_model() -> None:
    """Sharded ones are in `test_checkpoint.py`."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = fresh()
    train(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer, options=options)
    expected, expected_optimizer = trained_without_sharding(2)
    names = [name for name, _ in expected.named_parameters()]
    for number, name in enumerate(names):
        value = weights["module." + name]
        assert not isinstance(value, DTensor)
        close(value, expected.get_parameter(name).detach(), name)
        for slot in ("exp_avg", "exp_avg_sq"):
            moment = expected_optimizer.state_dict()["state"][number][slot]
            found = state["state"]["module." + name][slot].view(moment.shape)
            close(found, moment, f"{slot} of {name}")

    other, other_optimizer = fresh(scale=-2.0)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=copy.deepcopy(weights),
        optim_state_dict=copy.deepcopy(state),
        options=options,
    )
    train(other, other_optimizer, range(2, 4))
    train(expected, expected_optimizer, range(2, 4))
    for name, value in other.state_dict().items():
        close(whole(value), expected.state_dict()[name.removeprefix("module.")], name)


def save_a_copy(path: str) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 2)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 3))
    dcp.save({"model": best}, checkpoint_id=path)


def load_the_copy(path: str) -> None:
    model, _ = fresh(scale=-2.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    expected, _ = trained_without_sharding(2)
    for name, value in model.state_dict().items():
        close(whole(value), expected.state_dict()[name.removeprefix("module.")], name)


@pytest.mark.exhaustive
def test_a_deep_copy_of_a_state_dict_is_saved_and_loaded_elsewhere(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, save_a_copy, str(tmp_path))
    ranks(3, load_the_copy, str(tmp_path))
