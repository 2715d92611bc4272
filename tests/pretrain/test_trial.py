# SPDX-License-Identifier: Apache-2.0
"""A small model of each command line runs before the run, or is refused with its flags."""

import os
import shlex

import pytest
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.pretrain.arguments import CommandLineError
from megatron.pretrain.trial import check_model, small
from tests.support.pretrain.arguments.command_lines import MOCK, parse

EXPERTS = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear"
DEEP = "--num-layers 24 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
LATENT = "--multi-latent-attention --position-embedding-type rope --q-lora-rank 1536"
RUNNING = (
    ("--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2", 1),
    (f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*1) --moe-grouped-gemm", 1),
    (f"{DEEP} {EXPERTS} --moe-layer-freq ([0]*3+[1]*21) {LATENT} --mtp-num-layers 2", 1),
    (f"{DEEP} --tensor-model-parallel-size 2 --sequence-parallel", 2),
    (f"{DEEP} --position-embedding-type rope --no-rope-freq 4", 1),
    (f"{DEEP} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
     " --global-batch-size 4", 2),
    (f"{DEEP} --context-parallel-size 2 --bf16 --recompute-granularity full"
     " --recompute-method uniform --recompute-num-layers 4", 2),
)  # fmt: skip


@pytest.mark.parametrize(("flags", "world_size"), RUNNING)
def test_a_model_that_runs_is_accepted(flags: str, world_size: int) -> None:
    line = f"{MOCK} {flags}"
    args, _ = parse(line, world_size=world_size)
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    check_model(args, shlex.split(line), lambda words: parse(shlex.join(words)))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is scale  # no trace of it is left


def test_a_small_model_has_a_layer_of_each_kind_and_small_sizes() -> None:
    args, _ = parse(f"{MOCK} {DEEP} {EXPERTS} --moe-layer-freq ([0]*3+[1]*21) {LATENT}")
    tried = small(args)
    assert tried.moe_layer_freq == [0, 0, 0, 1] and tried.num_layers == 4
    assert tried.hidden_size <= 64 and tried.q_lora_rank <= 64 and tried.seq_length <= 64
    assert tried.num_attention_heads == 32 and args.hidden_size == 4096


FAILING = {
    "--num-experts 4 --moe-router-topk 2": ("RuntimeError: ", "without --num-experts"),
    "--recompute-granularity selective --recompute-modules mlp": (
        "RecursionError: the backward of a recomputed layer begins itself again",
        "without --recompute-modules",
    ),
}


@pytest.mark.parametrize("flags", FAILING)
def test_a_model_that_dies_in_its_first_step_is_refused_with_its_flags(flags: str) -> None:
    line = f"{MOCK} {flags}"
    args, _ = parse(line)
    with pytest.raises(CommandLineError) as caught:
        check_model(args, shlex.split(line), lambda words: parse(shlex.join(words)))
    (problem,) = caught.value.problems
    error, cure = FAILING[flags]
    assert problem.startswith(f"Megatron-Core cannot run this model: {error}")
    assert "with --disable-bias-linear" in problem and cure in problem


class EndsForks:
    """Garbage that only its own process can collect, as a process group with threads."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.cycle = self

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(1)


def test_garbage_of_the_program_does_not_end_the_trial() -> None:
    line = f"{MOCK} --num-experts 4 --moe-router-topk 2"
    args, _ = parse(line)
    EndsForks()
    with pytest.raises(CommandLineError):
        check_model(args, shlex.split(line), lambda words: parse(shlex.join(words)))
