# SPDX-License-Identifier: Apache-2.0
"""Quantized parameters among plain and frozen ones, under random settings."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fsdp.quantized.test_transformer_engine_weights import recipe_of
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

DRAWS_PER_JOB = 3
WIDTHS = (32, 64, 96, 160)


class DrawnLayers(nn.Module):
    """Layers in order, each around a residual connection where the widths allow it."""

    def __init__(self, random: Random, recipe: Any) -> None:
        super().__init__()
        te = transformer_engine_on_cpu.use()
        layers: list[nn.Module] = []
        self.frozen: list[str] = []
        width = WIDTHS[0]
        for number in range(random.randint(2, 5)):
            inner = random.choice(WIDTHS)
            kind = random.choice(["quantized", "quantized", "normalized", "plain", "frozen"])
            size: dict[str, Any] = {"bias": random.random() < 0.5}
            with te.quantized_model_init(
                enabled=True, recipe=recipe, preserve_high_precision_init_val=True
            ):
                if kind == "plain":
                    layers.append(nn.Linear(width, inner, **size, dtype=torch.bfloat16))
                else:
                    cls = te.LayerNormLinear if kind == "normalized" else te.Linear
                    size |= {"params_dtype": torch.bfloat16, "device": "cpu"}
                    layers.append(cls(width, inner, **size))
            if kind == "frozen":
                layers[-1].weight.requires_grad_(False)
                self.frozen.append(f"layers.{number}.weight")
            width = inner
        self.layers = nn.ModuleList([*layers, nn.Linear(width, WIDTHS[0], dtype=torch.bfloat16)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            x = found + x if found.shape == x.shape else found
        return x


def draw_settings(random: Random) -> dict[str, Any]:
    from tests.support.fsdp.meshes import mesh_of

    te = transformer_engine_on_cpu.use()
    settings: dict[str, Any] = {"zero_dp_strategy": random.choice((1, 2, 3, 3, 3))}
    for name, share in {
        "overlap_grad_reduce": 0.5,
        "overlap_param_gather": 0.5,
        "disable_bucketing": 0.2,
        "enable_fine_grained_param_gather": 0.2,
        "fsdp_double_buffer": 0.3,
        "keep_fp8_transpose_cache": 0.5,
    }.items():
        settings[name] = random.random() < share
    if random.random() < 0.8:
        settings["fsdp_unit_modules"] = [te.Linear, te.LayerNormLinear][: random.randint(1, 2)]
    if settings["zero_dp_strategy"] == 3 and random.random() < 0.3:
        mesh = mesh_of("outer", "inner", sizes=random.choice([(2, 1), (1, 2)]))
        settings |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        settings["outer_dp_sharding_strategy"] = random.choice((0, 1))
    return settings


@torch.no_grad()
def install(reference: DrawnLayers, model: nn.Module) -> None:
    """Quantize the main weights into the unsharded model."""
    from megatron.fsdp.dtensor.tensor_part import full_tensor

    pairs = zip(reference.named_parameters(), model.parameters(), strict=True)
    for (name, parameter), main in pairs:
        whole = full_tensor(main)
        if name not in reference.frozen:
            parameter.copy_(whole.bfloat16())
        parameter.grad = None


def mean_gradients(reference: DrawnLayers) -> dict[str, Tensor]:
    """Return the gradients of the unsharded model, averaged over the ranks."""
    found = {}
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.float()
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
    return found


def compare_drawn(random: Random, recipes: list[str]) -> None:
    """Compare losses and gradients of each step with those of the unsharded model."""
    te = transformer_engine_on_cpu.use()
    from megatron.fsdp.dtensor.tensor_part import full_tensor
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    recipe = recipe_of(random.choice(recipes))
    state = random.getstate()
    models = []
    for _ in range(2):
        random.setstate(state)
        torch.manual_seed(random.getrandbits(30))
        models.append(DrawnLayers(random, recipe))
    module, reference = models
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(trained, lr=0.05, momentum=0.9),
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
        **draw_settings(random),
    )
    evaluates = random.random() < 0.5

    def loss_of(each: nn.Module, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(32, WIDTHS[0], generator=generator).bfloat16()
        with te.autocast(enabled=True, recipe=recipe):
            return each(x).float().pow(2).mean()

    for step in range(2):
        install(reference, model)
        if evaluates:
            with torch.no_grad():
                assert torch.equal(loss_of(model, 7), loss_of(reference, 7))
        losses = [loss_of(each, step) for each in (model, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        wanted = mean_gradients(reference)
        names = [name for name, _ in reference.named_parameters()]
        for name, own in zip(names, model.parameters(), strict=True):
            assert (name in wanted) == own.requires_grad
            if name in wanted:
                found = full_tensor(own.grad)
                torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()


def run_draws(first: int, recipes: list[str]) -> None:
    for number in range(first, first + DRAWS_PER_JOB):
        try:
            compare_drawn(Random(f"quantized/{number}"), recipes)
        except Exception as error:
            error.add_note(f"in draw {number}")
            raise


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 2 * DRAWS_PER_JOB, DRAWS_PER_JOB))
def test_random_models_train_as_unsharded_ones(blackwell: RunOnRanks, first: int) -> None:
    blackwell(run_draws, first, ["current", "block", "mxfp8", "nvfp4"])


@pytest.mark.exhaustive
def test_random_models_train_with_transposed_copies(hopper: RunOnRanks) -> None:
    hopper(run_draws, 1000, ["current", "block"])
