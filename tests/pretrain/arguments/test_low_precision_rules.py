# SPDX-License-Identifier: Apache-2.0
"""FP8 and FP4 are refused where they cannot work: every problem at once, with its fix."""

import pytest

from megatron.pretrain.arguments import low_precision_rules
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems

GPU = {"cuda": True, "transformer_engine": True}
FP8 = "--fp8-format hybrid"
STORED = f"{FP8} --fp8-param-gather"


def test_formats_need_layers_of_transformer_engine() -> None:
    needs = "--fp8-format needs layers of Transformer Engine:"
    missing = "it is not installed, or cannot be imported without CUDA; use --bf16"
    assert problems(f"{MOCK} {FP8}") == [f"{needs} {missing}"]
    assert problems(f"{MOCK} {FP8}", cuda=True) == [f"{needs} {missing}"]
    named = f"{needs} give --transformer-impl transformer_engine"
    assert problems(f"{MOCK} {FP8} --transformer-impl local", **GPU) == [named]
    # On a CPU the layers are for those who bring kernels, and ask for them.
    assert problems(f"{MOCK} {FP8}", transformer_engine=True) == [named]
    asked = f"{MOCK} {FP8} --transformer-impl transformer_engine"
    args, _ = parse(asked, transformer_engine=True)
    assert args.transformer_impl == "transformer_engine" and not args.apply_rope_fusion
    assert parse(f"{MOCK} {FP8}", **GPU)[0].fp8 == "hybrid"


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        (FP8, "delayed"),
        (f"{FP8} --fp8-recipe mxfp8", "mxfp8"),
        ("--fp4-format e2m1", "nvfp4"),
    ],
)
def test_a_recipe_that_the_device_lacks_is_refused_with_its_reason(
    flags: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {recipe: "Device compute capability 10.0 or higher is required"}
    monkeypatch.setattr(low_precision_rules, "recipe_obstacle", reasons.get)
    (problem,) = problems(f"{MOCK} {flags}", **GPU)
    flag = flags.split()[0]
    assert problem == f"{flag} with recipe {recipe}: {reasons[recipe]}"


def test_shapes_that_kernels_cannot_divide_are_refused_together() -> None:
    line = f"{MOCK} {FP8} --hidden-size 72 --ffn-hidden-size 80 --seq-length 31"
    found = problems(f"{line} --micro-batch-size 1", **GPU)
    starts = ["--hidden-size 72 must be a multiple of 16", "--num-attention-heads times"]
    starts += ["--fp8-format needs microbatches of a multiple of 8 tokens on a rank, not 31"]
    assert len(found) == len(starts)
    assert all(problem.startswith(start) for problem, start in zip(found, starts))
    line = f"{MOCK} {FP8} --fp8-recipe mxfp8 --ffn-hidden-size 48"
    (problem,) = problems(line, **GPU)
    assert problem.startswith("--ffn-hidden-size 48 must be a multiple of 32")


def test_stored_codes_need_main_weights() -> None:
    (problem,) = problems(f"{MOCK} {STORED}", **GPU)
    assert problem.startswith("--fp8-param-gather needs --use-megatron-fsdp or")
    parse(f"{MOCK} {STORED} --use-distributed-optimizer", **GPU)


def test_a_shared_buffer_of_gradients_and_codes_is_noted_away() -> None:
    flag = "--reuse-grad-buf-for-mxfp8-param-ag"
    line = f"{MOCK} {STORED} --fp8-recipe mxfp8 {flag} --use-megatron-fsdp"
    args, notes = parse(line, **GPU)
    assert not args.reuse_grad_buf_for_mxfp8_param_ag
    assert any(note.startswith(f"{flag}: off, ") for note in notes)


def test_weights_in_fp4_need_a_release_that_keeps_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_precision_rules, "DistributedDataParallelConfig", object)
    line = f"{MOCK} --fp4-format e2m1 --fp4-param-gather --use-megatron-fsdp"
    (problem,) = problems(line, **GPU)
    assert problem.startswith("--fp4-param-gather needs Megatron-Core 0.17 or newer")


def test_weights_in_mxfp8_need_a_buffer_of_their_own_without_fsdp() -> None:
    line = f"{MOCK} {STORED} --fp8-recipe mxfp8"
    (problem,) = problems(f"{line} --use-distributed-optimizer", **GPU)
    assert problem.startswith("--fp8-param-gather with recipe mxfp8 needs --reuse-grad-buf")
    parse(f"{line} --use-distributed-optimizer --reuse-grad-buf-for-mxfp8-param-ag", **GPU)
    parse(f"{line} --use-megatron-fsdp", **GPU)


AWARE = f"{MOCK} --use-megatron-fsdp --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ("--fp16", True),
        ("--megatron-fsdp-main-grads-dtype fp16", True),
        ("--fp16 --main-grads-dtype fp32", False),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", False),
        ("--bf16 --grad-reduce-in-bf16", False),
    ],
)
def test_the_precision_aware_optimizer_reads_no_gradients_in_fp16(
    flags: str, is_refused: bool
) -> None:
    # Transformer Engine is not here.
    package, *others = problems(f"{AWARE} {flags}")
    assert "FusedAdam" in package
    assert ["reads gradients in fp32 or bf16" in text for text in others] == [True] * is_refused


def test_gradients_contradict_none_of_two_flags() -> None:
    contradiction, _ = problems(
        f"{AWARE} --bf16 --main-grads-dtype fp32 --megatron-fsdp-main-grads-dtype bf16"
    )
    assert "--main-grads-dtype contradicts --megatron-fsdp-main-grads-dtype" in contradiction
