# SPDX-License-Identifier: Apache-2.0
"""torch's async_save of sharded models and optimizers: a save has the state of its own step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from megatron_fsdp import fully_shard
from tests.fsdp.optimizer import test_matrix_owners, test_quantized_state
from tests.fsdp.optimizer.test_offload import lies_in_a_file
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.optimizers import sharding
from tests.support.fsdp.reference import Ranks

_STEPPED = threading.Event()


class HeldWriter(FileSystemWriter):
    """A writer that begins after the step that follows the call of the save."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert _STEPPED.wait(60)
        return super().write_data(*args, **kwargs)


class CopyingWriter(HeldWriter):
    """A writer of state in torchao's classes, which lack what torch's own copy calls."""

    def stage(self, state_dict: Any) -> Any:
        return copy.deepcopy(state_dict)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("muon", {}),
    "muon_on_host": ("muon", {"offload_policy": "host"}),
    "adamw_on_host": ("adamw", {"offload_policy": "host"}),
    "adamw_in_files": ("adamw", {"offload_policy": "files"}),
    "torchao": ("AdamW8bit", {}),
    "torchao_4bit": ("AdamW4bit", {}),
    "torchao_on_host": ("AdamW8bit", {"offload_policy": "host"}),
}
"""Name of the optimizer, and settings."""


def build(name: str, settings: dict[str, Any]) -> tuple[nn.Module, list[Any]]:
    if name == "muon":
        module = test_matrix_owners.build()
        optimizers = test_matrix_owners.optimizers_of(module)
        settings = {**sharding(module), **settings}
    else:
        module = test_quantized_state.LayersInBlocks()
        settings = {**test_quantized_state.UNITS, **settings}
        if name == "adamw":
            optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01)]
        else:
            optimizers = [test_quantized_state.optimizer_of(name, module)]
    return fully_shard(module, optimizers, mesh_of("shard"), **settings)


def step(name: str, model: nn.Module, optimizers: list[Any], number: int) -> None:
    if name == "muon":
        test_matrix_owners.step_on_the_same_data(model, optimizers, number)
    else:
        (optimizer,) = optimizers
        test_quantized_state.train(model, optimizer, range(number, number + 1))


def states(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": state}


def loaded(model: nn.Module, optimizers: list[Any], path: str) -> dict[str, Tensor]:
    """Return the rank's part of a checkpoint, by key."""
    content = states(model, optimizers)
    dcp.load(content, checkpoint_id=path)
    found: dict[str, Tensor] = {}
    entries = {"model": content["model"], **content["optimizer"]["state"]}
    for name, values in entries.items():
        for slot, value in values.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            is_quantized = hasattr(local, "__tensor_flatten__")
            found[f"{name}.{slot}"] = torch.as_tensor(
                local.dequantize() if is_quantized else local
            ).clone()
    return found


def save_in_background(name: str, settings: dict[str, Any], path: str) -> None:
    """Save twice after two steps, in the background with a step before anything is written."""
    if settings.get("offload_policy") == "files":
        Path(path, "files").mkdir(exist_ok=True)
        settings = {"offload_policy": f"{path}/files"}
    model, optimizers = build(name, settings)
    group = dist.new_group(backend="gloo")
    for number in range(2):
        step(name, model, optimizers, number)
    dcp.save(states(model, optimizers), checkpoint_id=f"{path}/blocking")
    _STEPPED.clear()
    content = states(model, optimizers)
    if "files" in str(settings):
        moments = [slots["exp_avg"].to_local() for slots in content["optimizer"]["state"].values()]
        assert all(lies_in_a_file(moment) for moment in moments if moment.numel())
    kind = HeldWriter if name in ("muon", "adamw") else CopyingWriter
    writer = kind(f"{path}/background")
    future = dcp.async_save(content, storage_writer=writer, process_group=group)
    for number in range(2, 4):
        step(name, model, optimizers, number)
    _STEPPED.set()
    future.result()
    background = loaded(model, optimizers, f"{path}/background")
    blocking = loaded(model, optimizers, f"{path}/blocking")
    assert background.keys() == blocking.keys()
    assert [key for key in blocking if not torch.equal(background[key], blocking[key])] == []


@pytest.mark.always("muon", "adamw_in_files", "torchao")
@pytest.mark.parametrize("case", CASES)
def test_a_save_has_the_state_before_the_step_that_follows(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    name, settings = CASES[case]
    ranks(2, save_in_background, name, settings, str(tmp_path))


# ---- without a writer


STAGERS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "plain": lambda: {
        "async_stager": DefaultStager(StagingOptions(False, False, False, False)),
    },
    "blocking": lambda: {"async_stager": BlockingAsyncStager()},
    "process": lambda: {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
}
"""Arguments of ``async_save``."""


def save_without_a_writer(name: str, settings: dict[str, Any], path: str) -> None:
    """Save by each stager what torch's functions return, and what the objects themselves do."""
    model, optimizers = build(name, settings)
    group = dist.new_group(backend="gloo")
    step(name, model, optimizers, 0)
    dcp.save(states(model, optimizers), checkpoint_id=f"{path}/blocking")
    blocking = loaded(model, optimizers, f"{path}/blocking")
    for stager, arguments in STAGERS.items():
        place = f"{path}/{stager}"
        contents = {
            place: states(model, optimizers),
            f"{place}_of_objects": {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "parameters": dict(model.named_parameters()),
            },
        }
        for place_of_one, content in contents.items():
            started = dcp.async_save(
                content, checkpoint_id=place_of_one, process_group=group, **arguments()
            )
            getattr(started, "upload_completion", started).result()
        background = loaded(model, optimizers, place)
        assert background.keys() == blocking.keys()
        different = [key for key in blocking if not torch.equal(background[key], blocking[key])]
        assert different == [], stager
        again = {"model": {name: each.clone() for name, each in model.state_dict().items()}}
        dcp.load(again, checkpoint_id=f"{place}_of_objects")
        for name_of_weight, weight in model.state_dict().items():
            assert torch.equal(again["model"][name_of_weight].to_local(), weight.to_local()), stager


@pytest.mark.always("adamw_on_host")
@pytest.mark.parametrize("case", ["muon", "adamw_on_host"])
def test_torchs_stagers_save_without_a_writer(ranks: Ranks, tmp_path: Path, case: str) -> None:
    name, settings = CASES[case]
    ranks(2, save_without_a_writer, name, settings, str(tmp_path))
