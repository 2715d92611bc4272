# SPDX-License-Identifier: Apache-2.0
"""Weights of a parameter group: installed, broadcast, written and read between steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.fsdp.test_mixed_precision import BF16_WITH_FP32
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import LEVELS, Ranks, batch, loss_of, on_ranks
from tests.support.fsdp.side_by_side import shard_two_layers, whole_weights
from tests.support.fsdp.state_dicts import whole_state


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", range(4))
@on_ranks(2)
def test_a_broadcast_keeps_fp32_main_weights(level: int) -> None:
    net = nn.Linear(8, 8).bfloat16()
    model, optimizer = fully_shard(
        net, torch.optim.AdamW(net.parameters(), lr=1e-5), zero_dp_strategy=level
    )
    model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = [full_tensor(parameter) for parameter in model.parameters()]
    model.broadcast_params()
    assert all(
        torch.equal(left, full_tensor(right)) for left, right in zip(before, model.parameters())
    )


@pytest.mark.always("0")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@on_ranks(2)
def test_weights_written_after_a_step_are_not_overwritten_by_its_gather(level: int) -> None:
    """Gloo writes a rank's own shard too, at any time before an in-place all-gather ends."""
    model, optimizer = shard_two_layers(level)
    wanted = {name: torch.full(value.shape, 0.25) for name, value in model.state_dict().items()}
    for _ in range(8):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        model.load_state_dict(wanted)
        assert all(bool((weight == 0.25).all()) for weight in whole_weights(model))
        expected = torch.full((4, 64), 0.25 + 64 * 0.25 * (0.25 + 64 * 0.25))
        torch.testing.assert_close(model(torch.ones(4, 64)), expected)


EDITS: dict[str, Callable[[DTensor], object]] = {
    "parameter": lambda parameter: parameter.mul_(0.5),
    "data": lambda parameter: parameter.data.mul_(0.5),
    "local_tensor": lambda parameter: parameter.to_local().mul_(0.5),
    "foreach": lambda parameter: torch._foreach_mul_([parameter], 0.5),
    "local_data": lambda parameter: parameter.to_local().data.mul_(0.5),
    "numpy": lambda parameter: np.multiply(own := parameter.to_local().numpy(), 0.5, out=own),
}


@torch.no_grad()
def edit_after_steps(edit: str, starts_early: bool, level: int) -> None:
    model, optimizer = shard_two_layers(level)
    for number in range(3):
        with torch.enable_grad():
            model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        between = {0: "UNSHARDED", 3: "SHARDED"}.get(level, "STALE")
        assert {group.state.name for group in model.groups} == {between}
        if starts_early:
            model.start_param_sync()
            states = {group.state.name for group in model.groups}
            gathering = {"UNSHARDING", "SHARDED"} if level == 3 else {"UNSHARDING"}
            assert number > 0 or states == gathering or level == 0
        for parameter in model.parameters():
            EDITS[edit](parameter)
        if starts_early:
            model.install_optimized_model_weights()
        first, second = (weight.mT for weight in whole_weights(model) if weight.ndim == 2)
        one, other = (weight for weight in whole_weights(model) if weight.ndim == 1)
        x = torch.ones(4, 64)
        torch.testing.assert_close(model(x), (x @ first + one) @ second + other)


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_weights_may_be_edited_between_a_step_and_a_forward(level: int) -> None:
    """Edit in every way, and start gathers before every other edit, which levels share out."""
    for number, edit in enumerate(EDITS):
        edit_after_steps(edit, (number + level) % 2 == 0, level)


@torch.no_grad()
def edit_main_weights_after_steps(edit: str, level: int, mesh: str, **settings: Any) -> None:
    """Job: edit fp32 main weights; the bf16 module inside and the next forward have the result."""
    model, optimizer = bf16_model(level, **Meshes().arguments(mesh), **settings)
    for step in range(2):
        with torch.enable_grad():
            loss_of(model(batch(step, dist.get_rank(), 0).bfloat16())).backward()
        optimizer.step()
        for parameter in model.parameters():
            EDITS[edit](parameter)
        if step:  # a look at the weights is no use of them: they are right, and nothing is gathered
            for shown, weight in zip(model.module.state_dict().values(), whole_weights(model)):
                whole = full_tensor(shown) if isinstance(shown, DTensor) else shown
                assert torch.equal(whole.bfloat16(), weight.bfloat16())
        outputs_are_those_of_the_main_weights(model, "several_units")


@pytest.mark.always("3-data", "3-numpy", "1-*")
@pytest.mark.parametrize(("level", "edit"), [*((3, edit) for edit in EDITS), *zip(range(3), EDITS)])
def test_main_weights_of_another_dtype_may_be_edited_too(
    ranks: Ranks, level: int, edit: str
) -> None:
    ranks(2, edit_main_weights_after_steps, edit, level, "flat")


@pytest.mark.always("1")
@pytest.mark.parametrize("outer", [0, 1])
def test_main_weights_may_be_edited_in_hybrid_sharding(ranks: Ranks, outer: int) -> None:
    ranks(4, edit_main_weights_after_steps, "data", 3, "outer2", outer_dp_sharding_strategy=outer)


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_a_step_that_installs_nothing_keeps_weights_that_no_forward_has_used(level: int) -> None:
    """Check that what a step installs is not what a later one without installing makes of it."""
    model, optimizer = bf16_model(level)
    x = batch(0, dist.get_rank(), 0).bfloat16()
    loss_of(model(x)).backward()
    optimizer.step()
    installed = whole_state(model.state_dict())
    optimizer.step(install_optimized_model_weights=False)  # no forward has used the others
    unsharded = models.build("several_units", torch.bfloat16)
    unsharded.load_state_dict({key: value.bfloat16() for key, value in installed.items()})
    with torch.no_grad():
        assert torch.equal(model(x), unsharded(x))
    model.install_optimized_model_weights()
    outputs_are_those_of_the_main_weights(model, "several_units")


@on_ranks(2)
def test_weights_loaded_after_a_step_that_installs_nothing_are_installed() -> None:
    model, optimizer = bf16_model(3)
    loss_of(model(batch(0, dist.get_rank(), 0).bfloat16())).backward()
    optimizer.step(install_optimized_model_weights=False)
    other = {name: value / 2 for name, value in models.build("several_units").state_dict().items()}
    model.module.load_state_dict(other)
    outputs_are_those_of_the_main_weights(model, "several_units")


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_weights_of_frozen_parameters_can_be_installed(level: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).requires_grad_(False)
    model = fully_shard_model(nn.Sequential(module, nn.Linear(8, 8)), zero_dp_strategy=level)
    for parameter in model.parameters():
        parameter.detach()._local_tensor.zero_()
    model.install_optimized_model_weights()
    assert model(torch.ones(1, 8)).abs().max() == 0


def outputs_are_those_of_the_main_weights(model: MegatronFSDP, name: str) -> None:
    """Compare outputs, in every bit, with a module that is built from the main weights."""
    unsharded = models.build(name, torch.bfloat16)
    unsharded.load_state_dict(
        {key: value.bfloat16() for key, value in whole_state(model.state_dict()).items()}
    )
    x = batch(9, 0, 0).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), unsharded(x))


def bf16_model(level: int, **settings: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = models.build("several_units", torch.bfloat16)
    settings = {
        "fsdp_unit_modules": [ResidualBlock],
        "mixed_precision_policy": BF16_WITH_FP32,
        **settings,
    }
    return fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), zero_dp_strategy=level, **settings
    )


def train_bf16_main_weights(level: int, mesh: str, **settings: Any) -> None:
    model, optimizer = bf16_model(level, **Meshes().arguments(mesh), **settings)
    for step in range(3):
        loss_of(model(batch(step, dist.get_rank(), 0).bfloat16())).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs_are_those_of_the_main_weights(model, "several_units")


@pytest.mark.always("1-flat", "3-*")
@pytest.mark.parametrize(("level", "mesh"), [*((level, "flat") for level in LEVELS), (3, "outer2")])
def test_every_forward_uses_the_weights_of_the_last_step(
    ranks: Ranks, level: int, mesh: str
) -> None:
    settings = {"outer_dp_sharding_strategy": 1} if mesh == "outer2" else {}
    ranks(4 if mesh == "outer2" else 2, train_bf16_main_weights, level, mesh, **settings)


def load_weights(level: int, mesh: str, path: str, **settings: Any) -> None:
    arguments = Meshes().arguments(mesh)
    model, _ = bf16_model(level, **arguments, **settings)
    model(batch(0, 0, 0).bfloat16())  # what was gathered before must not stay
    other = models.build("several_units", torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    model.load_state_dict({key: value.float() for key, value in other.state_dict().items()})
    x = batch(9, 0, 0).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), other(x))

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    fresh, _ = bf16_model(level, **arguments, **settings)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=path)
    fresh.load_state_dict(state["model"])
    with torch.no_grad():
        assert torch.equal(fresh(x), other(x))


@pytest.mark.always("1-flat", "3-flat")
@pytest.mark.parametrize(
    ("level", "mesh"), [*((level, "flat") for level in (0, 1, 3)), (3, "outer2")]
)
def test_loaded_weights_are_active_before_any_step(
    ranks: Ranks, tmp_path: Any, level: int, mesh: str
) -> None:
    settings = {"outer_dp_sharding_strategy": 1} if mesh == "outer2" else {}
    ranks(4 if mesh == "outer2" else 2, load_weights, level, mesh, str(tmp_path), **settings)
