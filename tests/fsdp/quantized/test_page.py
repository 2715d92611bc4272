# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/quantized_weights.md and of quantized state in docs/optimizer_state.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.examples.blocks import python_of
from tests.support.fsdp.reference import Ranks
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

PAGE = "docs/quantized_weights.md"
OPTIMIZERS_PAGE = "docs/optimizer_state.md"


def run_block(number: int) -> list[str]:
    """Run a block with the imports of the first one; return the classes that forwards read."""
    if number:
        transformer_engine_on_cpu.use()
    import torch
    from torch import nn

    from megatron_fsdp import fully_shard

    names: dict[str, Any] = {"torch": torch, "nn": nn, "fully_shard": fully_shard}
    exec(python_of(PAGE)[number].code, names)
    return [type(group.parameters[0]).__name__ for group in names["model"].groups]


@pytest.mark.exhaustive
def test_the_program_with_torchao_runs(ranks: Ranks) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    assert len(python_of(PAGE)) == 2
    for classes in ranks(2, run_block, 0):
        assert classes.count("Float8TrainingTensor") == 2


@pytest.mark.exhaustive
def test_the_program_with_transformer_engine_runs(blackwell: RunOnRanks) -> None:
    for classes in blackwell(run_block, 1):
        assert classes.count("Float8Tensor") == 2


def step_of_eight_bits() -> set[str]:
    """Run the block of the page about optimizers; return the classes of moments."""
    import torch

    names: dict[str, Any] = {}
    block = python_of(OPTIMIZERS_PAGE)[0]
    with torch.compiler.set_stance("force_eager"):
        exec(block.code, names)
    slots = names["optimizer"].state.values()
    return {type(own["exp_avg"]._local_tensor).__name__ for own in slots}


def test_the_program_with_an_optimizer_of_eight_bits_runs(ranks: Ranks) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    for classes in ranks(2, step_of_eight_bits):
        assert classes == {"OptimState8bit", "Tensor"}
