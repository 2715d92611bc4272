# SPDX-License-Identifier: Apache-2.0
"""Models split by torch's tensor parallelism match the unsharded ones and load elsewhere."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.reference import Ranks, close, optimizer_over
from tests.support.fsdp.state_dicts import load_checkpoint, save_checkpoint
from tests.support.fsdp.tensor_parallel import (
    SplitBlock,
    batch,
    build,
    data_place,
    loss_on,
    mesh_arguments,
    split,
)

STEPS = 2


def whole(tensor: Tensor) -> Tensor:
    return full_tensor(tensor).detach()


def compare_all(
    model: MegatronFSDP, expected: dict[str, Tensor], what: str, gradients: bool = False
) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name.removeprefix("module.")]
        close(whole(parameter.grad if gradients else parameter), wanted, f"{what}: {name}")


def train(mesh_name: str, level: int, hidden: int, style: str, outer: int = 0) -> None:
    """Compare gradients, their norm after clipping and weights with the unsharded model."""
    place = mesh_arguments(mesh_name)
    data_rank, data_size = data_place(place["device_mesh"])
    reference, module = build(hidden), split(build(hidden), place["device_mesh"]["tp"], style)
    expected_optimizer = optimizer_over(reference, "fused_adamw")
    settings = {
        "fsdp_unit_modules": [SplitBlock],
        "zero_dp_strategy": level,
        "preserve_fp32_weights": False,
    }
    optimizer = optimizer_over(module, "fused_adamw")
    model, optimizer = fully_shard(
        module, optimizer, **place, tp_dim="tp", **settings, outer_dp_sharding_strategy=outer
    )
    for step in range(STEPS):
        expected_optimizer.zero_grad()
        (sum(loss_on(reference, step, rank) for rank in range(data_size)) / data_size).backward()
        optimizer.zero_grad()
        loss_on(model, step, data_rank).backward()
        gradients = {
            name: parameter.grad.clone() for name, parameter in reference.named_parameters()
        }
        compare_all(model, gradients, f"gradient in step {step}", gradients=True)
        limit = 0.05  # well below what it is
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert expected_norm > limit
        close(norm, expected_norm, f"norm in step {step}", 1e-9)
        expected_optimizer.step()
        optimizer.step()
        compare_all(model, dict(reference.named_parameters()), f"weight after step {step}")
        with torch.no_grad():
            close(model(batch(9, 0)), reference(batch(9, 0)), f"output after step {step}")


@pytest.mark.always("0-tensor")
@pytest.mark.parametrize(
    ("level", "style"),
    [(0, "tensor"), (1, "sequence"), (2, "tensor"), (3, "tensor"), (3, "sequence")],
)
def test_torch_tensor_parallel_models_match_the_unsharded_one(
    ranks: Ranks, level: int, style: str
) -> None:
    ranks(4, train, "dp2_tp2", level, 10, style)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [1, 3])
def test_hidden_sizes_that_ranks_do_not_divide_match_too(ranks: Ranks, level: int) -> None:
    ranks(4, train, "dp2_tp2", level, 7, "tensor")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "outer"), [(2, 0), (3, 1)])
def test_hybrid_sharding_with_tensor_parallelism_matches(
    ranks: Ranks, level: int, outer: int
) -> None:
    ranks(8, train, "outer2_dp2_tp2", level, 10, "tensor", outer)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same data everywhere, so that the number of data ranks does not matter."""
    for step in steps:
        optimizer.zero_grad()
        loss_on(model, step, 0).backward()
        optimizer.step()


def sharded(
    hidden: int, tensor_parallel: bool, level: int
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module, place = build(hidden), {"device_mesh": shard_mesh()}
    if tensor_parallel:
        place = mesh_arguments("dp2_tp2") | {"tp_dim": "tp"}
        module = split(module, place["device_mesh"]["tp"], "tensor")
    settings = {
        "fsdp_unit_modules": [SplitBlock],
        "zero_dp_strategy": level,
        "preserve_fp32_weights": False,
    }
    return fully_shard(module, optimizer_over(module), **place, **settings)


def save(path: str, hidden: int, tensor_parallel: bool, level: int) -> None:
    model, optimizer = sharded(hidden, tensor_parallel, level)
    take_steps(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)


def load_and_go_on(path: str, hidden: int, tensor_parallel: bool, level: int) -> None:
    reference = build(hidden)
    expected_optimizer = optimizer_over(reference)
    take_steps(reference, expected_optimizer, range(2))
    model, optimizer = sharded(hidden, tensor_parallel, level)
    take_steps(
        model, optimizer, range(5, 6)
    )  # weights and moments that are not those of the checkpoint
    load_checkpoint(path, model, optimizer)
    compare_all(model, dict(reference.named_parameters()), "loaded")
    take_steps(reference, expected_optimizer, range(2, 4))
    take_steps(model, optimizer, range(2, 4))
    compare_all(model, dict(reference.named_parameters()), "two steps after loading")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "loaded", "hidden"),
    [((True, 3), (False, 3), 7), ((False, 2), (True, 3), 10), ((True, 1), (True, 3), 7)],
    ids=["uneven_tp2_to_dp4", "dp4_to_tp2", "uneven_zero1_to_zero3"],
)
def test_a_checkpoint_loads_into_another_layout_with_its_optimizer(
    ranks: Ranks, tmp_path: Path, saved: tuple[bool, int], loaded: tuple[bool, int], hidden: int
) -> None:
    ranks(4, save, str(tmp_path), hidden, *saved)
    ranks(4, load_and_go_on, str(tmp_path), hidden, *loaded)


def load_without_sharding(path: str, hidden: int) -> None:
    reference, module = build(hidden), build(hidden)
    take_steps(reference, optimizer_over(reference), range(2))
    state = {"model": {f"module.{name}": value for name, value in module.state_dict().items()}}
    checkpoint.load(state, checkpoint_id=path)
    for name, parameter in reference.named_parameters():
        close(state["model"][f"module.{name}"], parameter.detach(), name)


@pytest.mark.exhaustive
def test_a_checkpoint_of_both_parallelisms_loads_into_the_unsharded_model(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(4, save, str(tmp_path), 7, True, 3)
    ranks(1, load_without_sharding, str(tmp_path), 7)
