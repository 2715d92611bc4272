# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of plain models and of FSDP2, and state dicts that rank 0 alone has, both ways."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp.reference import Ranks, on_ranks


def plain_module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def whole_weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole weights by the names of the plain module."""
    return {
        name.removeprefix("module."): full_tensor(each) if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }


def differing(model: nn.Module, seed: int) -> list[str]:
    expected = plain_module(seed).state_dict()
    found = whole_weights_of(model)
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def exchange_with(kind: str, path: str) -> list[str]:
    """Load a checkpoint of another kind of model into ours, and one of ours into that."""
    theirs = plain_module(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "FSDP2":
        fsdp2(theirs, mesh=mesh)
    dcp.save(theirs.state_dict(), checkpoint_id=f"{path}/theirs")
    ours = fully_shard_model(plain_module(2))
    state = ours.module.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/theirs")
    ours.load_state_dict(state)
    problems = differing(ours, 1)

    ours = fully_shard_model(plain_module(3))
    dcp.save(ours.module.state_dict(), checkpoint_id=f"{path}/ours")
    theirs = plain_module(4)
    if kind == "FSDP2":
        fsdp2(theirs, mesh=mesh)
    state = theirs.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/ours")
    theirs.load_state_dict(state)
    problems += differing(theirs, 3)

    with pytest.raises(
        CheckpointException, match=r"Missing key.*module\.0\."
    ):  # the prefix of the wrapper
        dcp.load(ours.state_dict(), checkpoint_id=f"{path}/theirs")
    return problems


@pytest.mark.always("FSDP2")
@pytest.mark.parametrize("kind", ["plain", "FSDP2"])
def test_checkpoints_of_other_models_load_both_ways(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    assert ranks(2, exchange_with, kind, str(tmp_path)) == [[], []]


def save_the_module_inside(path: str) -> list[str]:
    """Save `model.module` in the ways that FSDP2's users know."""
    problems = []
    for number, state_of in enumerate((nn.Module.state_dict, get_model_state_dict)):
        model = fully_shard_model(plain_module(5))
        dcp.save(state_of(model.module), checkpoint_id=f"{path}/{number}")
        other = fully_shard_model(plain_module(6))
        state = state_of(other.module)
        dcp.load(state, checkpoint_id=f"{path}/{number}")
        other.load_state_dict(state)
        problems += differing(other, 5)
    whole = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    expected = plain_module(5).state_dict()
    problems += [name for name, value in expected.items() if not torch.equal(whole[name], value)]
    return problems


def test_state_dicts_of_the_module_inside_can_be_saved_and_loaded(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, save_the_module_inside, str(tmp_path)) == [[], []]


def trained(seed: int, level: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = plain_module(seed)
    model, optimizer = fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.1), zero_dp_strategy=level
    )
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def only_on_rank_0(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(state) if dist.get_rank() == 0 else {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "is_broadcast"), [(0, True), (1, False), (3, True), (3, False)])
@on_ranks(3)
def test_full_state_dicts_are_set_by_torch(level: int, is_broadcast: bool) -> None:
    model, optimizer = trained(0, level)
    full = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    other, other_optimizer = trained(9, level)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_broadcast)
    if is_broadcast:
        set_model_state_dict(other, only_on_rank_0(weights), options=options)
        set_optimizer_state_dict(other, other_optimizer, only_on_rank_0(moments), options=options)
    else:
        set_model_state_dict(other, copy.deepcopy(weights), options=options)
        set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(moments), options=options)
    problems = []
    x = torch.ones(2, 7)
    if not torch.equal(model(x), other(x)):
        problems.append("other outputs")
    for left, right in zip(model.parameters(), other.parameters()):
        if not torch.equal(full_tensor(left), full_tensor(right)):
            problems.append("other weights")
        for name, slot in optimizer.state[left].items():
            mine = other_optimizer.state[right][name]
            if isinstance(slot, DTensor):
                slot, mine = full_tensor(slot), full_tensor(mine)
            if not torch.equal(slot, mine):
                problems.append(f"other {name}")
    assert not problems, problems


def flat_and_whole(granularity: str) -> MegatronFSDP:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 31), nn.Linear(31, 2, bias=False))
    return fully_shard_model(module, granularity=granularity)


def save_for_hugging_face(granularity: str, path: str) -> str | None:
    model = flat_and_whole(granularity)
    state = model.module.state_dict()
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        return str(error)
    return None


def load_for_hugging_face(granularity: str, path: str) -> list[str]:
    expected = flat_and_whole("rows").module.state_dict()
    model = flat_and_whole(granularity)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.module.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{path}/sharded"))
    model.load_state_dict(state)
    whole = {name: full_tensor(value) for name, value in expected.items()}
    files = load_file(f"{path}/model-00001-of-00001.safetensors")
    problems = [name for name in whole if not torch.equal(files[name], whole[name])]
    loaded = model.module.state_dict()
    return problems + [n for n in whole if not torch.equal(full_tensor(loaded[n]), whole[n])]


def test_rows_are_saved_for_hugging_face_and_flat_runs_are_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, save_for_hugging_face, "prefer_rows", str(tmp_path))
    for message in (first, second):
        assert "weight" in message and "granularity='rows'" in message
    assert not list(tmp_path.rglob("*.safetensors"))
    assert ranks(2, save_for_hugging_face, "rows", str(tmp_path)) == [None, None]
    for granularity, size in (("rows", 2), ("prefer_rows", 3)):
        for problems in ranks(size, load_for_hugging_face, granularity, str(tmp_path)):
            assert not problems
