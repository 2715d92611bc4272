# SPDX-License-Identifier: Apache-2.0
"""Converted samples load strictly, and training continues as from the original."""

import json
from pathlib import Path

import pytest

from megatron.checkpoint.commands.formats import open_checkpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run
from tests.support.pretrain.sample_runs import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    Continued,
    command_line,
    continue_run,
)
from tests.support.rank_pool import run_ranks

LOADED_BY_NOBODY_ELSE = ("dense_swiglu_bf16_dp2_dp_reshardable",)
"""Samples that Megatron-Core reads only under their own layout."""


CONTINUED = (
    "dense_gelu_tied_fp32_dp2",
    "moe4_swiglu_bf16_ep2_dp2",
    "dense_swiglu_bf16_dp2_dp_reshardable",
)
"""Samples of which a run goes on; `tests/checkpoint` compares the state of all of them bitwise."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONTINUED)
def test_the_next_step_from_a_converted_sample_is_that_of_the_original(
    name: str, tmp_path: Path
) -> None:
    sample = samples.torch_dist(name)
    info = json.loads((sample / "info.json").read_text())
    there, back = tmp_path / "fsdp_dtensor", tmp_path / "torch_dist"
    run(TO_FSDP, sample, there)
    run(TO_TORCH_DIST, there, back)

    def continued(checkpoint: Path, with_fsdp: bool, save: str) -> Continued:
        flags = command_line(info, checkpoint, with_fsdp)
        batch = str(sample / "batch.pt")
        return run_ranks(info["parallel"]["np"], continue_run, flags, batch, str(tmp_path / save))[
            0
        ]

    direct, with_fsdp, without = (
        continued(sample, True, "saved_directly"),
        continued(there, True, "saved_with_fsdp"),
        continued(back, False, "saved_without"),
    )
    assert direct == with_fsdp
    if name not in LOADED_BY_NOBODY_ELSE:
        assert continued(sample, False, "saved_by_original") == without
    exact = info["dtype"] == "fp32"
    for mine in (with_fsdp, without):
        # The sample's own machine rounded products in bf16 otherwise.
        assert mine.loss_before == pytest.approx(
            info["eval_loss_at_checkpoint"], abs=1e-6 if exact else LOSS_TOLERANCE
        )
        assert mine.step["lm loss"] == pytest.approx(
            info["next_step"]["loss"], abs=1e-6 if exact else LOSS_TOLERANCE
        )
        assert mine.step["grad-norm"] == pytest.approx(
            info["next_step"]["grad_norm"], abs=1e-5 if exact else NORM_TOLERANCE
        )
    assert with_fsdp.loss_before == pytest.approx(without.loss_before, rel=1e-6)
    for name, tolerance in (("lm loss", 1e-6), ("grad-norm", 1e-5)):
        assert with_fsdp.step[name] == pytest.approx(without.step[name], rel=tolerance)
    for folder in ("saved_directly", "saved_with_fsdp", "saved_without"):
        weights = open_checkpoint(tmp_path / folder).state().weights
        norms = {each: weights[each].read().double().norm().item() for each in weights}
        # Adam moves an element whose gradient is nearly rounding alone by as much as any other: by
        # some of the rate, 5e-3.
        assert norms == pytest.approx(
            info["param_l2_after_next_step"], rel=1e-6 if exact else 1e-4, abs=1e-6
        )


@pytest.mark.exhaustive
def test_a_file_whose_common_state_is_an_object_loads_strictly(tmp_path: Path) -> None:
    """Megatron-Core 0.19 writes such files, which releases before it do not read themselves."""
    sample = samples.torch_dist(samples.WITHOUT_COMMON_FILE)
    info = json.loads((sample / "info.json").read_text())
    flags = command_line(info, sample, with_fsdp=False)
    (continued, _) = run_ranks(2, continue_run, flags, str(sample / "batch.pt"), str(tmp_path))
    for value, expected in (
        (continued.loss_before, info["eval_loss_at_checkpoint"]),
        (continued.step["lm loss"], info["next_step"]["loss"]),
    ):
        assert value == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert continued.step["grad-norm"] == pytest.approx(
        info["next_step"]["grad_norm"], abs=NORM_TOLERANCE
    )
