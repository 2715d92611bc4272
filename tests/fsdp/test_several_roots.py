# SPDX-License-Identifier: Apache-2.0
"""Two models in one process, each sharded by itself: a vision tower and a language model."""

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp.models import WIDTH, ResidualBlock
from tests.support.fsdp.optimizers import OPTIMIZERS
from tests.support.fsdp.reference import Ranks, batch, close, loss_of
from tests.support.fsdp.state_dicts import whole


def build() -> nn.ModuleDict:
    torch.manual_seed(5)
    vision = nn.Sequential(nn.Linear(WIDTH, WIDTH), ResidualBlock(), ResidualBlock())
    language = nn.Sequential(ResidualBlock(), ResidualBlock(), nn.Linear(WIDTH, 3))
    return nn.ModuleDict({"vision": vision, "language": language}).double()


def meshes() -> dict[str, dict[str, Any]]:
    """Return a mesh of its own for each model: of one axis, and hybrid."""
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    hybrid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "shard"))
    return {
        "vision": {"device_mesh": flat},
        "language": {"device_mesh": hybrid, "dp_shard_dim": "shard", "dp_outer_dim": "outer"},
    }


def sharded(levels: tuple[int, int]) -> dict[str, MegatronFSDP]:
    places, modules = meshes(), build()
    return {
        name: fully_shard_model(
            modules[name],
            **places[name],
            fsdp_unit_modules=[ResidualBlock],
            zero_dp_strategy=level,
            preserve_fp32_weights=False,
        )
        for name, level in zip(modules, levels)
    }


def parameters_of(models: dict[str, nn.Module] | nn.ModuleDict) -> list[nn.Parameter]:
    return list(chain.from_iterable(model.parameters() for model in models.values()))


def optimizers_over(models: dict[str, MegatronFSDP], shared: bool) -> list[torch.optim.Optimizer]:
    of_each = [parameters_of(models)] if shared else [m.parameters() for m in models.values()]
    return [fully_shard_optimizer(OPTIMIZERS["adamw"](own)) for own in of_each]


def forward(models: dict[str, nn.Module] | nn.ModuleDict, step: int, rank: int) -> Tensor:
    seen = models["vision"](batch(step, rank, 0))
    return loss_of(models["language"](seen + batch(step, rank, 1)))


def reference_step(models: nn.ModuleDict, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    optimizer.zero_grad()
    size = dist.get_world_size()
    (sum(forward(models, step, rank) for rank in range(size)) / size).backward()
    norm = torch.nn.utils.clip_grad_norm_(models.parameters(), 0.5)
    optimizer.step()
    return norm


def compare(models: dict[str, MegatronFSDP], reference: nn.ModuleDict, what: str) -> None:
    for part, model in models.items():
        for name, value in whole(model.state_dict()).items():
            expected = reference[part].get_parameter(name.removeprefix("module.")).detach()
            close(value, expected, f"{what}: {part}.{name}")


def step_of(
    models: dict[str, MegatronFSDP], optimizers: list[torch.optim.Optimizer], step: int
) -> Tensor:
    forward(models, step, dist.get_rank()).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters_of(models), 0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return norm


def train(levels: tuple[int, int], shared: bool) -> None:
    reference, models = build(), sharded(levels)
    expected = OPTIMIZERS["adamw"](reference.parameters())
    optimizers = optimizers_over(models, shared)
    for step in range(3):
        expected_norm = reference_step(reference, expected, step)
        forward(models, step, dist.get_rank()).backward()
        ours = [each.grad for each in parameters_of(models)]
        norm = torch.nn.utils.clip_grad_norm_(parameters_of(models), 0.5)
        assert expected_norm > 0.5
        close(norm, expected_norm, f"norm in step {step}", 1e-6)
        whole_gradients = whole(dict(enumerate(ours)))
        for number, parameter in enumerate(reference.parameters()):
            close(whole_gradients[number], parameter.grad, f"gradient {number} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(models, reference, f"weight after step {step}")


@pytest.mark.always("3_and_3-one_optimizer", "0_and_2-one_optimizer")
@pytest.mark.parametrize("shared", [False, True], ids=["two_optimizers", "one_optimizer"])
@pytest.mark.parametrize(
    "levels", [(3, 3), (3, 1), (0, 2), (2, 3)], ids=["3_and_3", "3_and_1", "0_and_2", "2_and_3"]
)
def test_two_models_train_like_the_unsharded_ones(
    ranks: Ranks, levels: tuple[int, int], shared: bool
) -> None:
    ranks(2, train, levels, shared)


@pytest.mark.exhaustive
def test_two_models_train_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, train, (3, 3), True)


def state_of(
    models: dict[str, MegatronFSDP], optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any]:
    weights = {name: model.state_dict() for name, model in models.items()}
    return {**weights, **{f"optimizer{n}": o.state_dict() for n, o in enumerate(optimizers)}}


def save(path: str, levels: tuple[int, int], shared: bool) -> None:
    models = sharded(levels)
    optimizers = optimizers_over(models, shared)
    for step in range(2):
        step_of(models, optimizers, step)
    dcp.save(state_of(models, optimizers), checkpoint_id=path)


def load(path: str, levels: tuple[int, int], shared: bool) -> None:
    reference, models = build(), sharded(levels)
    expected = OPTIMIZERS["adamw"](reference.parameters())
    for step in range(2):
        reference_step(reference, expected, step)
    optimizers = optimizers_over(models, shared)
    step_of(models, optimizers, 7)
    state = state_of(models, optimizers)
    dcp.load(state, checkpoint_id=path)
    for name, model in models.items():
        model.load_state_dict(state[name])
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(state[f"optimizer{number}"])
    compare(models, reference, "loaded")
    for step in range(2, 4):
        reference_step(reference, expected, step)
        step_of(models, optimizers, step)
    compare(models, reference, "two steps after loading")


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [False, True], ids=["two_optimizers", "one_optimizer"])
def test_a_checkpoint_of_two_models_loads_at_other_levels(
    ranks: Ranks, tmp_path: Path, shared: bool
) -> None:
    ranks(2, save, str(tmp_path), (3, 3), shared)
    ranks(2, load, str(tmp_path), (1, 2), shared)


def go_on_by_torchs_functions(levels: tuple[int, int]) -> None:
    """Hand over the module that has both models inside to torch's state-dict functions."""
    reference, models = build(), sharded(levels)
    expected = OPTIMIZERS["adamw"](reference.parameters())
    both, (optimizer,) = nn.ModuleDict(models), optimizers_over(models, True)
    for step in range(2):
        reference_step(reference, expected, step)
        step_of(models, [optimizer], step)
    weights, moments = copy.deepcopy(get_state_dict(both, optimizer))
    assert "language.module.0.norm.weight" in weights.keys() & moments["state"].keys()
    step_of(models, [optimizer], 7)
    set_state_dict(both, optimizer, model_state_dict=weights, optim_state_dict=moments)
    compare(models, reference, "loaded")
    for step in range(2, 4):
        reference_step(reference, expected, step)
        step_of(models, [optimizer], step)
    compare(models, reference, "two steps after loading")


def test_torchs_state_dict_functions_take_a_module_of_two_models(ranks: Ranks) -> None:
    ranks(2, go_on_by_torchs_functions, (3, 1))
