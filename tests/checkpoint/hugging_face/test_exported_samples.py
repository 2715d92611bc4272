# SPDX-License-Identifier: Apache-2.0
"""Samples of Megatron-Core exported to Hugging Face: transformers computes the loss of the run."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import run, run_json
from tests.support.rank_pool import run_ranks


def loss_of(model: str, batch: str) -> float:
    """Job, because importing transformers takes seconds."""
    from transformers import AutoModelForCausalLM

    tokens = torch.load(batch, weights_only=True)["eval_tokens"].long()
    exported = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logits = exported(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", samples.TORCH_DIST)
def test_transformers_finds_the_loss_of_the_run(name: str, tmp_path: Path) -> None:
    sample = samples.torch_dist(name)
    info = json.loads((sample / "info.json").read_text())
    run("convert-to-hf", sample, tmp_path / "model", "--dtype", "fp32", "--quiet")
    (loss,) = run_ranks(1, loss_of, str(tmp_path / "model"), str(sample / "batch.pt"))
    # Runs in bf16 have rounded weights and activations to three digits.
    assert loss == pytest.approx(
        info["eval_loss_at_checkpoint"], abs=1e-6 if info["dtype"] == "fp32" else 1e-3
    )


def test_rows_that_only_pad_the_vocabulary_are_no_difference_to_an_export(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    model, other = tmp_path / "model", samples.torch_dist(samples.EXPERTS)
    run("convert-to-hf", sample, model, "--vocab-size", "150", "--quiet")
    assert run_json("diff", sample, model)["same"]
    assert not run_json("diff", other, model, code=1)["same"]
