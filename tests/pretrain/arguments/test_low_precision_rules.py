# SPDX-License-Identifier: Apache-2.0
"""FP8 and FP4 are refused where they cannot work: every problem at once, with its fix."""

import pytest

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
def test_a_recipe_that_the_device_lacks_is_refused_with_its_reason(flags: str, recipe: str) -> None:
    reasons = {recipe: "Device compute capability 10.0 or higher is required"}
    (problem,) = problems(f"{MOCK} {flags}", **GPU, recipe_obstacle=reasons.get)
    flag = flags.split()[0]
    assert problem == f"{flag} with recipe {recipe}: {reasons[recipe]}"


def test_shapes_that_kernels_cannot_divide_are_refused_together() -> None:
    line = f"{MOCK} {FP8} --hidden-size 72 --seq-length 31 --micro-batch-size 1"
    found = problems(line, **GPU)
    assert [problem.partition(" makes them ")[2] for problem in found[1:]] == ["72", "72"]
    assert "31 tokens" in found[0] and "--hidden-size" in found[1]
    line = f"{MOCK} {FP8} --fp8-recipe mxfp8 --ffn-hidden-size 48"
    (problem,) = problems(line, **GPU)
    assert "multiples of 32 rows and columns" in problem and problem.endswith("makes them 48")


@pytest.mark.parametrize(
    "flags",
    [
        "--data-parallel-sharding-strategy no_shard",
        "--fsdp-double-buffer",
        "--use-nccl-ub",
        "--init-model-with-meta-device",
    ],
)
def test_stored_codes_need_shards_that_stay_at_one_place(flags: str) -> None:
    line = f"{MOCK} {STORED} --use-megatron-fsdp {flags}"
    assert any(
        problem.startswith(f"--fp8-param-gather does not go with {flags}: ")
        for problem in problems(line, **GPU)
    )
    parse(line.replace("--fp8-param-gather", ""), **GPU)


def test_stored_codes_need_main_weights() -> None:
    (problem,) = problems(f"{MOCK} {STORED}", **GPU)
    assert problem.startswith("--fp8-param-gather needs --use-megatron-fsdp or")
    parse(f"{MOCK} {STORED} --use-distributed-optimizer", **GPU)


def test_a_shared_buffer_of_gradients_and_codes_is_noted_away() -> None:
    flag = "--reuse-grad-buf-for-mxfp8-param-ag"
    line = f"{MOCK} {STORED} --fp8-recipe mxfp8 {flag} --use-megatron-fsdp"
    args, notes = parse(line, **GPU)
    assert not args.reuse_grad_buf_for_mxfp8_param_ag
    assert any(note.startswith(f"{flag} does nothing with --use-megatron-fsdp") for note in notes)
