# SPDX-License-Identifier: Apache-2.0
"""Converted samples load strictly, and training continues as from the original."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.pretrain import loop
from tests.pretrain.test_sample_checkpoint import LOSS_TOLERANCE, NORM_TOLERANCE, batches_of
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run
from tests.support.pretrain.training_runs import build, load_checkpoint, save_checkpoint
from tests.support.rank_pool import run_ranks

OF_THE_RUN = {"--ckpt-format": 1, "--save": 1, "--save-interval": 1}
OF_OPTIMIZER_WITHOUT_FSDP = {
    "--use-distributed-optimizer": 0,
    "--dist-ckpt-optim-fully-reshardable": 0,
}

LOADED_BY_NOBODY_ELSE = ("dense_swiglu_bf16_dp2_dp_reshardable",)
"""Samples that Megatron-Core reads only under their own layout."""


def command_line(info: dict, checkpoint: Path, with_fsdp: bool) -> str:
    """Return the flags of the run that wrote a sample, in the spelling of this program."""
    words = list(info["megatron_lm_flags"])
    for flag, values in {**OF_THE_RUN, **(OF_OPTIMIZER_WITHOUT_FSDP if with_fsdp else {})}.items():
        if flag in words:
            position = words.index(flag)
            del words[position : position + 1 + values]
    words += ["--use-megatron-fsdp"] if with_fsdp else ["--dist-ckpt-strictness", "raise_all"]
    return shlex.join(
        [*words, "--load", str(checkpoint), "--num-workers", "0", "--eval-iters", "1"]
    )


@dataclass
class ConvertedContinued:
    """Losses and gradient norm of a run after the checkpoint."""

    loss_before: float
    loss: float
    gradient_norm: float
    loss_after: float


def continue_run(flags: str, batch_file: str, save: str) -> ConvertedContinued:
    """Job: load, evaluate, train one step, evaluate, save."""
    resumed = build(f"{flags} --save {save} --save-interval 1", bias_swiglu_fusion=True)
    load_checkpoint(resumed)
    init_num_microbatches_calculator(
        dist.get_rank(), None, 8, resumed.args.micro_batch_size, resumed.args.data_parallel_size
    )
    loop.connect(resumed)
    batch = torch.load(batch_file, weights_only=True)
    before = loop.evaluate(resumed, own_microbatches(resumed, batch["eval_tokens"]))
    loop.train_step(resumed, own_microbatches(resumed, batch["train_tokens"]))
    after = loop.evaluate(resumed, own_microbatches(resumed, batch["eval_tokens"]))
    save_checkpoint(resumed)
    step = resumed.report.record.steps[0]
    return ConvertedContinued(before, step["lm loss"], step["grad-norm"], after)


def own_microbatches(
    run: loop.TrainingRun, tokens: torch.Tensor
) -> Iterator[dict[str, torch.Tensor]]:
    place, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return batches_of(tokens.long().split(run.args.micro_batch_size)[place::size])


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

    def continued(checkpoint: Path, with_fsdp: bool, save: str) -> ConvertedContinued:
        flags = command_line(info, checkpoint, with_fsdp)
        return run_ranks(
            info["parallel"]["np"],
            continue_run,
            flags,
            str(sample / "batch.pt"),
            str(tmp_path / save),
        )[0]

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
        assert mine.loss == pytest.approx(
            info["next_step"]["loss"], abs=1e-6 if exact else LOSS_TOLERANCE
        )
        assert mine.gradient_norm == pytest.approx(
            info["next_step"]["grad_norm"], abs=1e-5 if exact else NORM_TOLERANCE
        )
    assert with_fsdp.loss_before == pytest.approx(without.loss_before, rel=1e-6)
    assert with_fsdp.loss == pytest.approx(without.loss, rel=1e-6)
    assert with_fsdp.gradient_norm == pytest.approx(without.gradient_norm, rel=1e-5)
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
        (continued.loss, info["next_step"]["loss"]),
    ):
        assert value == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert continued.gradient_norm == pytest.approx(
        info["next_step"]["grad_norm"], abs=NORM_TOLERANCE
    )
