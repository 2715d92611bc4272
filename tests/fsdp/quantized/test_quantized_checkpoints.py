# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models with FP8 weights in a loop of PyTorch, and the documented program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.fsdp.quantized.test_transformer_engine_weights import build, loss_of, recipe_of
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu


def shard(recipe_name: str, level: int) -> tuple[Any, Any, Any, dict[str, Tensor]]:
    """Return a sharded model, its optimizer and recipe, and what its next forward reads."""
    te = transformer_engine_on_cpu.use()
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    recipe = recipe_of(recipe_name)
    module = build(recipe)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        fsdp_unit_modules=[te.Linear, te.LayerNormLinear],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
        zero_dp_strategy=level,
    )
    read: dict[str, Tensor] = {}
    for name, layer in module.named_children():

        def keep(layer: Any, _: Any, name: str = name) -> None:
            read[name] = layer.weight.dequantize().clone()

        layer.register_forward_pre_hook(keep)
    return model, optimizer, recipe, read


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the main weights."""
    from megatron.fsdp.dtensor.tensor_part import full_tensor

    return {name: full_tensor(value) for name, value in model.named_parameters()}


def save(folder: str, recipe_name: str, level: int) -> tuple[Any, ...]:
    """Train and save; return main weights, and codes and loss of the next step."""
    model, optimizer, recipe, read = shard(recipe_name, level)
    for step in range(2):
        loss_of(model, recipe, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder
    )
    return whole(model), float(loss_of(model, recipe, 2, 0).detach()), dict(read)


def load(folder: str, recipe_name: str, level: int) -> tuple[Any, ...]:
    """Load into a new model, as the documentation of the published package says."""
    model, optimizer, recipe, read = shard(recipe_name, level)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return whole(model), float(loss_of(model, recipe, 2, 0).detach()), dict(read)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return True for the same weights, loss and codes, bit by bit."""
    tables = all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in ((one[0], other[0]), (one[2], other[2]))
    )
    return tables and one[1] == other[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "level", "other"), [("current", 3, 1), ("block", 1, 3), ("nvfp4", 3, 1)]
)
def test_main_weights_and_codes_come_back_at_another_level(
    blackwell: RunOnRanks, recipe: str, level: int, other: int, tmp_path: Path
) -> None:
    saved = blackwell(save, str(tmp_path), recipe, level)
    loaded = blackwell(load, str(tmp_path), recipe, other)
    assert all(map(same, saved, loaded))


def load_plain(folder: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the weights into one process, and an unsharded module of another precision."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    sizes = {
        key: entry.size
        for key, entry in entries.items()
        if key.startswith("model.") and not key.endswith("_extra_state")
    }
    state = {key: torch.empty(size, dtype=torch.float32) for key, size in sizes.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix("model.module."): value.to(dtype) for key, value in state.items()}


def load_from_plain(path: str, recipe_name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load full tensors into a sharded model of FP8; return main weights and codes."""
    model, _, recipe, read = shard(recipe_name, 3)
    model.load_state_dict(torch.load(path), strict=False)
    loss_of(model, recipe, 2, 0)
    return whole(model), dict(read)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_process_loads_and_saves_other_precisions(
    blackwell: RunOnRanks, dtype: torch.dtype, tmp_path: Path
) -> None:
    (weights, _, codes), _ = blackwell(save, str(tmp_path / "sharded"), "current", 3)
    plain = load_plain(str(tmp_path / "sharded"), dtype)
    assert plain.keys() == {name.removeprefix("module.") for name in weights}
    for name, value in weights.items():
        assert torch.equal(plain[name.removeprefix("module.")], value.to(dtype))
    torch.save(plain, tmp_path / "plain.pt")
    for back, read in blackwell(load_from_plain, str(tmp_path / "plain.pt"), "current"):
        for name, value in back.items():
            assert torch.equal(value, plain[name.removeprefix("module.")].float())
        if dtype == torch.float32:
            assert all(torch.equal(read[name], codes[name]) for name in codes)


def documented_program(recipe_name: str, num_layers: int) -> list[float]:
    """Train as the published package documents it for Transformer Engine: one layer is a model."""
    te = transformer_engine_on_cpu.use()
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    recipe = recipe_of(recipe_name)
    torch.manual_seed(3)
    with te.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layers = [
            te.TransformerLayer(
                *(128, 256, 4),
                fuse_qkv_params=True,  # Transformer Engine's own demand
                hidden_dropout=0.0,
                attention_dropout=0.0,
                params_dtype=torch.bfloat16,
                device="cpu",
            )
            for _ in range(num_layers)
        ]
    module = layers[0] if num_layers == 1 else nn.Sequential(*layers)
    model = fully_shard_model(module=module, fsdp_unit_modules=[te.TransformerLayer])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    data = torch.randn(16, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    losses = []
    for _ in range(4):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            loss = model(data).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(("recipe", "num_layers"), [("delayed", 2), ("current", 1)])
def test_the_documented_program_runs(blackwell: RunOnRanks, recipe: str, num_layers: int) -> None:
    first, second = blackwell(documented_program, recipe, num_layers)
    assert first == second and first[-1] < first[0]
