# SPDX-License-Identifier: Apache-2.0
"""Rules of layers, experts and kernels: a flag that cannot do what it says names the fix."""

import pytest

from megatron.pretrain.arguments.configs import transformer_config
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems

VIRTUAL = (
    "--pipeline-model-parallel-size 2 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
    " --global-batch-size 64"
)
STAGES = "--pipeline-model-parallel-size 2 --num-layers 7"


def test_flags_that_choose_what_is_the_same_say_so() -> None:
    _, notes = parse(f"{MOCK} --no-one-logger --one-logger-run-name mine --use-mcore-models")
    assert "--use-mcore-models: deprecated, is the default; leave it out" in notes
    assert sum("logger" in note for note in notes) == 2


def test_all_unknown_flags_are_listed_each_with_the_nearest() -> None:
    found = problems(f"{MOCK} --num-layer 3 --hiden-size 3 --qqqqqq")
    assert found == [
        "--num-layer: unknown flag, did you mean --num-layers?",
        "--hiden-size: unknown flag, did you mean --hidden-size?",
        "--qqqqqq: unknown flag",
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 1", "must be from 2"),
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 7", "leaves a group of 1"),
        (
            "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
            "number of middle layers: 3 must be divisible by middle pipeline_model_parallel_size 2",
        ),
        (
            f"{STAGES} --account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 3",
            "the same time with account_for_embedding_in_pipeline_split",
        ),
        (
            "--account-for-loss-in-pipeline-split",
            "needs --pipeline-model-parallel-size of at least",
        ),
        ("--moe-token-dispatcher-type flex --num-experts 4", "the package deep_ep, which is not"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p",
            "--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes need each other",
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p"
            " --hierarchical-context-parallel-sizes 2 4",
            "must multiply to --context-parallel-size 4",
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p"
            " --hierarchical-context-parallel-sizes 2 2",
            "--cp-comm-type a2a+p2p needs Transformer Engine",
        ),
        ("--test-mode --qk-layernorm --normalization RMSNorm", "needs --normalization LayerNorm"),
        ("--use-megatron-fsdp --dist-ckpt-strictness log_unexpected", "give one of raise_all"),
    ],
)
def test_a_flag_that_cannot_do_what_it_says_names_the_fix(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems(f"{MOCK} {flags}", world_size=8))


def test_kernels_that_are_installed_are_passed_to_megatron_core() -> None:
    gpu = {"cuda": True, "transformer_engine": True, "world_size": 8}
    flags = "--moe-token-dispatcher-type flex --num-experts 4 --moe-enable-deepep"
    args, _ = parse(f"{MOCK} {flags}", expert_dispatch=True, **gpu)
    assert transformer_config(args).moe_token_dispatcher_type == "flex"
    two_levels = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    args, _ = parse(f"{MOCK} --context-parallel-size 4 {two_levels}", **gpu)
    assert transformer_config(args).hierarchical_context_parallel_sizes == [2, 2]
    parallel = "--tensor-model-parallel-size 2 --sequence-parallel"
    args, _ = parse(f"{MOCK} {parallel} --tp-comm-overlap --no-tp-comm-overlap-ag", **gpu)
    config = transformer_config(args)
    assert config.tp_comm_overlap and not config.tp_comm_overlap_ag


def test_expert_tensor_parallelism_without_experts_divides_nothing() -> None:
    args, notes = parse(f"{MOCK} --expert-tensor-parallel-size 4", world_size=8)
    assert args.expert_tensor_parallel_size == args.tensor_model_parallel_size == 1
    assert any("there is nothing to divide" in note for note in notes)


def test_strictness_of_loads_reaches_fsdp_dtensor() -> None:
    args, notes = parse(f"{MOCK} --use-megatron-fsdp --dist-ckpt-strictness log_all")
    assert not args.strict_fsdp_dtensor_load
    assert "--dist-ckpt-strictness log_all sets --no-strict-fsdp-dtensor-load" in notes
