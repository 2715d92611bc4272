# SPDX-License-Identifier: Apache-2.0
"""Runs that go on from the sample checkpoints, on the batch that the run before them had next."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.pretrain import loop
from tests.support.pretrain.training_runs import build, load_checkpoint, save_checkpoint

OF_THE_RUN = {"--ckpt-format": 1, "--save": 1, "--save-interval": 1}
OF_OPTIMIZER_WITHOUT_FSDP = {
    "--use-distributed-optimizer": 0,
    "--dist-ckpt-optim-fully-reshardable": 0,
}

# What a resumed run may differ by. Weights and moments are equal to the bit, and so is the training
# loss on the machine that made the sample. Everything after the first backward is not: products in
# bf16 round otherwise for other processors, kernels and orders of summation (the two forms of
# SwiGLU alone move the norm by 1.3e-4).
LOSS_TOLERANCE = 1.5e-4
NORM_TOLERANCE = 5e-4


def command_line(info: dict, checkpoint: Path, with_fsdp: bool) -> str:
    """Return the flags of the run that wrote a sample, in the spelling of this program."""
    words = list(info["megatron_lm_flags"])
    for flag, values in {**OF_THE_RUN, **(OF_OPTIMIZER_WITHOUT_FSDP if with_fsdp else {})}.items():
        if flag in words:
            position = words.index(flag)
            del words[position : position + 1 + values]
    words += ["--use-megatron-fsdp"] if with_fsdp else ["--dist-ckpt-strictness", "raise_all"]
    words += ["--num-workers", "0", "--eval-iters", "1", "--global-batch-size", "8"]
    return shlex.join([*words, "--load", str(checkpoint)])


@dataclass
class Continued:
    """The report of a run on the step after the checkpoint, and losses of evaluations around it."""

    loss_before: float
    step: dict[str, float]
    loss_after: float


def continue_run(flags: str, batch_file: str, save: str = "") -> Continued:
    """Job: load, evaluate, train one step, evaluate, and save if there is a folder for it."""
    flags += f" --save {save} --save-interval 1" if save else ""
    # As in the run that wrote the sample; here it costs no compilation.
    run = build(flags, bias_swiglu_fusion=True)
    load_checkpoint(run)
    loop.connect(run)
    batch = torch.load(batch_file, weights_only=True)
    before = loop.evaluate(run, own_microbatches(run, batch["eval_tokens"]))
    loop.train_step(run, own_microbatches(run, batch["train_tokens"]))
    after = loop.evaluate(run, own_microbatches(run, batch["eval_tokens"]))
    if save:
        save_checkpoint(run)
    return Continued(before, run.report.record.steps[0], after)


def own_microbatches(
    run: loop.TrainingRun, tokens: torch.Tensor
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's microbatches of rows of tokens that are one longer than a sequence.

    Data ranks take turns.
    """
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    for rows in tokens.long().split(run.args.micro_batch_size)[rank::size]:
        inputs = rows[:, :-1]
        yield {
            "tokens": inputs,
            "labels": rows[:, 1:],
            "loss_mask": torch.ones(inputs.shape),
            "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
            "attention_mask": torch.ones(1, 1, inputs.shape[1], inputs.shape[1]).triu(1).bool(),
        }
