# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by torch.distributed.checkpoint load into other worlds, strategies and layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.reference import Ranks, batch, evaluate, loss_of, on_ranks, optimizer_over
from tests.support.fsdp.state_dicts import (
    NAMES,
    assert_equal,
    load_checkpoint,
    save_checkpoint,
    sharded,
    train,
    whole,
)


def save(level: int, path: str, with_torch_functions: bool) -> None:
    """Save all models in one checkpoint."""
    states = {}
    for name in NAMES:
        model, optimizer = sharded(name, level)
        train(model, optimizer, 2)
        states[name] = checkpointed_state(model, optimizer, with_torch_functions)
    dcp.save(states, checkpoint_id=path)


def checkpointed_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, with_torch_functions: bool
) -> dict[str, Any]:
    if with_torch_functions:
        model_state, optimizer_state = torch_state_dict.get_state_dict(model, optimizer)
        assert set(optimizer_state["state"]) == {
            name for name, p in model.named_parameters() if p.requires_grad
        }
        return {"model": model_state, "optimizer": optimizer_state}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(level: int, path: str, with_torch_functions: bool) -> None:
    """Load into fresh models of other weights, then train on."""
    fresh, states = {}, {}
    for name in NAMES:
        module = models.build(name)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
        fresh[name] = sharded(name, level, module)
        states[name] = checkpointed_state(*fresh[name], with_torch_functions)
    dcp.load(states, checkpoint_id=path)
    for name in NAMES:
        train_on(name, *fresh[name], states[name], with_torch_functions)


def train_on(
    name: str,
    model: MegatronFSDP,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    with_torch_functions: bool,
) -> None:
    """Set what was loaded, then train like the model that was never saved."""
    expected = models.build(name)
    expected_optimizer = optimizer_over(expected)
    train(expected, expected_optimizer, 2)
    if with_torch_functions:
        torch_state_dict.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    else:
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    for left, right in zip(
        evaluate(model, 0), evaluate(expected, 0), strict=True
    ):  # active at once
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)
    train(model, optimizer, 2)
    train(expected, expected_optimizer, 2)
    assert_equal(
        whole(model.state_dict()),
        {"module." + key: value for key, value in expected.state_dict().items()},
        1e-11,
    )


PAIRS = [((3, 1), (2, 2)), ((4, 3), (1, 0)), ((1, 2), (4, 1)), ((2, 0), (3, 3))]
"""World size and level of saving, and of loading."""


@pytest.mark.always("(3, 1)-(2, 2)-False")
@pytest.mark.parametrize(
    ("saved", "loaded", "with_torch_functions"),
    [(*pair, number % 2 == 1) for number, pair in enumerate(PAIRS)],
    ids=str,
)
def test_checkpoint_loads_into_another_world_and_strategy(
    ranks: Ranks,
    tmp_path: Path,
    saved: tuple[int, int],
    loaded: tuple[int, int],
    with_torch_functions: bool,
) -> None:
    ranks(saved[0], save, saved[1], str(tmp_path), with_torch_functions)
    ranks(loaded[0], load, loaded[1], str(tmp_path), with_torch_functions)


@on_ranks(2)
def test_state_of_another_layout_is_refused() -> None:
    saved = fully_shard_model(
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 24, bias=False)]),
        shard_mesh(),
        disable_bucketing=True,
    )
    units = fully_shard_model(
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 24, bias=False)]),
        shard_mesh(),
        fsdp_unit_modules=[nn.Linear],
    )
    runs = [
        [value._local_tensor.part.chunks for value in model.state_dict().values()]
        for model in (saved, units)
    ]
    assert any(left != right for left, right in zip(*runs))
    with pytest.raises(RuntimeError) as error:
        units.load_state_dict(saved.state_dict())
    message = str(error.value)
    assert "sharded for another layout" in message, message
    assert "torch.distributed.checkpoint" in message, message


LAYOUTS: dict[str, tuple[int, str, int, int, torch.dtype]] = {
    "hybrid_optim": (4, "outer2", 3, 1, torch.float32),
    "hybrid_bf16": (4, "outer2", 2, 0, torch.bfloat16),
    "flat_of_three": (3, "flat", 3, 0, torch.float32),
    "bf16_on_two": (2, "flat", 1, 0, torch.bfloat16),
    "one_rank": (1, "flat", 0, 0, torch.float32),
    "more_outer_ranks": (4, "outer4", 3, 1, torch.float32),
}
"""World, mesh, level, outer level and compute dtype; main weights are fp32 everywhere."""


def laid_out(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, mesh, level, outer, dtype = LAYOUTS[layout]
    module = models.build("tied_across_units", dtype)
    return fully_shard(
        module,
        optimizer_over(module),
        **Meshes().arguments(mesh),
        fsdp_unit_modules=type(module).units,
        zero_dp_strategy=level,
        outer_dp_sharding_strategy=outer,
        grad_reduce_in_fp32=True,
    )


def all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return main weights and moments, whole, by name."""
    state = whole(model.state_dict())
    for name, parameter in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{slot}"] = uneven_dtensor_to_full_tensor(
                optimizer.state[parameter][slot]
            )
    return state


def save_layout(layout: str, path: str) -> dict[str, Tensor]:
    model, optimizer = laid_out(layout)
    for step in range(2):
        loss_of(model(batch(step, dist.get_rank(), 0).to(LAYOUTS[layout][4]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(path, model, optimizer)
    return all_state(model, optimizer)


def load_layout(layout: str, path: str, expected: dict[str, Tensor]) -> None:
    model, optimizer = laid_out(layout)
    load_checkpoint(path, model, optimizer)
    assert_equal(all_state(model, optimizer), expected)
    loss_of(model(batch(0, 0, 0).to(LAYOUTS[layout][4]))).backward()  # and training goes on
    optimizer.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(
            "hybrid_optim", ["hybrid_bf16", "flat_of_three", "one_rank"], id="hybrid_optim"
        ),
        pytest.param("bf16_on_two", ["more_outer_ranks"], id="bf16_on_two"),
    ],
)
def test_checkpoint_loads_bitwise_under_every_other_layout(
    ranks: Ranks, saved: str, loaded: list[str], tmp_path: Path
) -> None:
    expected = ranks(LAYOUTS[saved][0], save_layout, saved, str(tmp_path))[0]
    for layout in loaded:
        ranks(LAYOUTS[layout][0], load_layout, layout, str(tmp_path), expected)
