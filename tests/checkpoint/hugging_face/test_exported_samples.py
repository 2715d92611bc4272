# SPDX-License-Identifier: Apache-2.0
"""Samples of Megatron-Core exported to Hugging Face: transformers computes the loss of the run."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megatron.checkpoint.commands.command_line import main
from tests.support.checkpoint import samples
from tests.support.rank_pool import run_ranks


def loss_of(model: str, batch: str) -> float:
    """Job, because importing transformers takes seconds."""
    from transformers import AutoModelForCausalLM

    tokens = torch.load(batch, weights_only=True)["eval_tokens"].long()
    logits = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        .eval()(tokens[:, :-1])
        .logits
    )
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", samples.TORCH_DIST)
def test_transformers_finds_the_loss_of_the_run(name: str, tmp_path: Path) -> None:
    sample = samples.torch_dist(name)
    info = json.loads((sample / "info.json").read_text())
    result = CliRunner().invoke(
        main, ["convert-to-hf", str(sample), str(tmp_path / "model"), "--dtype", "fp32", "--quiet"]
    )
    assert result.exit_code == 0, result.output
    (loss,) = run_ranks(1, loss_of, str(tmp_path / "model"), str(sample / "batch.pt"))
    # Runs in bf16 have rounded weights and activations to three digits.
    assert loss == pytest.approx(
        info["eval_loss_at_checkpoint"], abs=1e-6 if info["dtype"] == "fp32" else 1e-3
    )


def test_rows_that_only_pad_the_vocabulary_are_no_difference_to_an_export(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    model = str(tmp_path / "model")
    invoke = CliRunner().invoke
    assert (
        invoke(
            main, ["convert-to-hf", str(sample), model, "--vocab-size", "150", "--quiet"]
        ).exit_code
        == 0
    )
    same = invoke(main, ["diff", str(sample), model, "--json"])
    assert same.exit_code == 0 and json.loads(same.stdout)["same"]
    other = invoke(main, ["diff", str(samples.torch_dist(samples.EXPERTS)), model, "--json"])
    assert other.exit_code == 1 and not json.loads(other.stdout)["same"]
