# SPDX-License-Identifier: Apache-2.0
"""MXFP8: the backward reads other codes than the forward, and each pass gathers its own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.quantized.test_transformer_engine_weights import WIDTH, loss_of, recipe_of
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

NUMEL = WIDTH * WIDTH


def recompute(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module, and again in the backward, with the same recipe."""
    te = transformer_engine_on_cpu.use()

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), te.autocast(enabled=True, recipe=recipe_of("mxfp8"))

    result: Tensor = checkpoint(module, x, use_reentrant=False, context_fn=contexts)
    return result


class RecomputedBlock(nn.Module):
    """Two linear layers, of which activations of one, of both, or of none are recomputed."""

    def __init__(self, recomputed: str):
        super().__init__()
        te = transformer_engine_on_cpu.use()
        size = dict(in_features=WIDTH, out_features=WIDTH, bias=False)
        self.first = te.Linear(**size, params_dtype=torch.bfloat16, device="cpu")
        self.second = te.Linear(**size, params_dtype=torch.bfloat16, device="cpu")
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed == "inner":
            return self.second(recompute(self.first, x))
        return self.second(self.first(x))


class CheckpointedBlocks(nn.Module):
    """Blocks in order; whole ones are recomputed."""

    def __init__(self, recomputed: str):
        super().__init__()
        self.blocks = nn.ModuleList(RecomputedBlock(recomputed) for _ in range(3))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            whole = self.recomputed == "whole"
            x = recompute(block, x) if whole else block(x)
        return x


def blocks(recomputed: str) -> CheckpointedBlocks:
    te = transformer_engine_on_cpu.use()
    torch.manual_seed(3)
    with te.quantized_model_init(
        enabled=True, recipe=recipe_of("mxfp8"), preserve_high_precision_init_val=True
    ):
        return CheckpointedBlocks(recomputed)


def train_blocks(recomputed: str, level: int, overlap: bool) -> tuple[list[float], list[int]]:
    """Return losses, and the bytes of each all-gather of the last step."""
    from megatron.fsdp import trace
    from megatron.fsdp.engine.observe import GATHER
    from megatron_fsdp import fully_shard

    module = blocks(recomputed)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        fsdp_unit_modules=[RecomputedBlock],
        zero_dp_strategy=level,
        overlap_param_gather=overlap,
    )
    losses = []
    for step in range(3):
        with trace.record() as recording:
            loss = loss_of(model, recipe_of("mxfp8"), step, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    gathers = [entry.num_bytes for entry in recording.collectives if entry.track == GATHER]
    return losses, gathers


@pytest.mark.exhaustive
@pytest.mark.parametrize("recomputed", ["inner", "whole"])
def test_recomputation_in_a_backward_reads_the_codes_of_the_forward(
    blackwell: RunOnRanks, recomputed: str
) -> None:
    expected = [losses for losses, _ in blackwell(train_blocks, "none", 1, True)]
    assert [losses for losses, _ in blackwell(train_blocks, recomputed, 3, True)] == expected


def train_hidden(level: int) -> list[float]:
    """Return losses of a layer that recomputes its activations in its own backward."""
    from megatron_fsdp import fully_shard

    te = transformer_engine_on_cpu.use()
    from transformer_engine.pytorch.module import layernorm_mlp

    layernorm_mlp._get_cuda_rng_state = torch.get_rng_state
    layernorm_mlp._set_cuda_rng_state = torch.set_rng_state
    recipe = recipe_of("mxfp8")
    torch.manual_seed(3)
    with te.quantized_model_init(
        enabled=True, recipe=recipe, preserve_high_precision_init_val=True
    ):
        settings = dict(params_dtype=torch.bfloat16, device="cpu", checkpoint=level == 3)
        module = nn.Sequential(*(te.LayerNormMLP(WIDTH, WIDTH, **settings) for _ in range(2)))
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        fsdp_unit_modules=[te.LayerNormMLP],
        zero_dp_strategy=level,
    )
    losses = []
    for step in range(3):
        loss = loss_of(model, recipe, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.exhaustive
def test_layers_that_recompute_in_their_own_backward_find_both(blackwell: RunOnRanks) -> None:
    assert blackwell(train_hidden, 3) == blackwell(train_hidden, 2)


@pytest.mark.exhaustive
def test_each_pass_gathers_its_own_codes(blackwell: RunOnRanks) -> None:
    unit = 2 * NUMEL  # bytes of a block's codes, of one side
    for _, gathers in blackwell(train_blocks, "none", 3, False):
        assert gathers == [unit] * 6
    for _, gathers in blackwell(train_blocks, "whole", 3, False):
        assert gathers == [unit] * 9
    for _, gathers in blackwell(train_blocks, "none", 2, False):
        assert gathers == [2 * unit] * 3


def pass_by_pass(level: int) -> None:
    """Check what a weight has: in an evaluation, in a forward, in its backward, after an edit."""
    from megatron_fsdp import fully_shard

    recipe = recipe_of("mxfp8")
    module = blocks("none")
    block = module.blocks[1]
    model, _ = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        fsdp_unit_modules=[RecomputedBlock],
        zero_dp_strategy=level,
    )
    weight = next(
        group.parameters[0] for group in model.groups if "blocks.1.first.weight" in group.names
    )
    seen: list[tuple[bool, bool]] = []

    def note(*_: Any) -> None:
        seen.append((weight._rowwise_data is not None, weight._columnwise_data is not None))

    def note_backward(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(note)

    block.first.register_forward_pre_hook(note)
    with torch.no_grad():
        loss_of(model, recipe, 0, 0)
    block.second.register_forward_hook(note_backward)
    first = loss_of(model, recipe, 0, 0)
    first.backward()
    whole = level < 3
    assert seen == [(True, whole), (True, whole), (whole, True)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        assert float(loss_of(model, recipe, 0, 0)) > 2 * float(first.detach())


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [2, 3])
def test_weights_have_the_codes_of_the_pass(blackwell: RunOnRanks, level: int) -> None:
    blackwell(pass_by_pass, level)
