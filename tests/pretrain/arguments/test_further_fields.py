# SPDX-License-Identifier: Apache-2.0
"""Every field of the installed release is a flag: its value reaches the config, or is refused."""

import argparse
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Literal
from unittest.mock import patch

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.pretrain.arguments import further_fields
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.further_fields import (
    CONFIGS,
    NEEDS_ENGINE,
    absent_further_flags,
    further_flags,
    refusal,
)
from megatron.pretrain.arguments.parser import further_destinations
from megatron.pretrain.arguments.same_here import SAME_HERE
from tests.support.pretrain.arguments.command_lines import (
    LATENT,
    MOCK,
    PREDICTION,
    other_value,
    parse,
    problems,
)

FURTHER = sorted(further_destinations())
REFUSED = [dest for dest in FURTHER if refusal(dest)]
VIRTUAL = (
    "--pipeline-model-parallel-size 2 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
    " --global-batch-size 64"
)
PREDICTING = f"{PREDICTION} --mtp-num-layers 1"
STAGES = "--pipeline-model-parallel-size 2 --num-layers 7"
COMPANIONS = {
    "microbatch_group_size_per_vp_stage": VIRTUAL,
    "overlap_p2p_comm_warmup_flush": VIRTUAL,
    "account_for_embedding_in_pipeline_split": STAGES,
    "account_for_loss_in_pipeline_split": STAGES,
    "distribute_saved_activations": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "activation_func_clamp_value": "--swiglu",
    "glu_linear_offset": "--swiglu",
    "clone_scatter_output_in_embedding": "--tensor-model-parallel-size 2 --sequence-parallel",
    "use_fused_weighted_squared_relu": "--squared-relu --num-experts 4 --disable-bias-linear",
    "window_attn_skip_freq": "--window-size (8,0)",
    **dict.fromkeys(("original_max_position_embeddings", "beta_fast", "beta_slow"), LATENT),
    **dict.fromkeys(
        ("mtp_detach_heads", "mtp_use_repeated_layer"), f"{PREDICTION} --mtp-num-layers 1"
    ),
    **dict.fromkeys([dest for dest in FURTHER if dest.startswith("mup_")], "--use-mup"),
}
ALONE = {"config_logger_dir", "moe_layer_recompute", "moe_apply_probs_on_input"}
"""Fields with rules of Megatron-Core's own; each has a case below, or needs another machine."""


def names_of(dest: str, known: dict[str, argparse.Action]) -> tuple[str, argparse.Action]:
    return next((name, action) for name, action in known.items() if action.dest == dest)


@pytest.fixture(scope="module")
def refused_together(known: dict[str, argparse.Action]) -> list[str]:
    given = [
        (name, other_value(action)) for name, action in known.items() if action.dest in REFUSED
    ]
    return problems(MOCK + " " + " ".join(f"{name} {value}" for name, value in given))


SPEC = f"--spec {__name__}"
VALIDATE = "--rerun-mode validate_results"
block_of_two, block_of_three = (
    TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=TransformerLayer)] * number)
    for number in (2, 3)
)


@pytest.mark.parametrize("dest", REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    dest: str, known: dict[str, argparse.Action], refused_together: list[str]
) -> None:
    assert f"{names_of(dest, known)[0]}: {refusal(dest)}" in refused_together


def test_each_reason_of_a_refusal_is_of_some_field_of_some_release() -> None:
    known = {f.name for f in chain.from_iterable(map(fields, CONFIGS.values()))}
    known.update(further_fields.OF_SOME_RELEASES.split())
    for patterns in further_fields.REFUSED.values():
        assert any(further_fields.matches(name, patterns.split()) for name in known)


def accepted() -> list[str]:
    engine = {*NEEDS_ENGINE.split(), *ALONE, *SAME_HERE}
    skipped = ("tp_comm_", "moe_")
    return [
        dest
        for dest in FURTHER
        if not refusal(dest) and dest not in engine and not dest.startswith(skipped)
    ]


@pytest.mark.parametrize("dest", accepted())
def test_the_value_of_a_further_field_reaches_its_config(
    dest: str, known: dict[str, argparse.Action]
) -> None:
    name, action = names_of(dest, known)
    value = "2" if dest == "microbatch_group_size_per_vp_stage" else other_value(action)
    line = f"{MOCK} {COMPANIONS.get(dest, '')} {name} {value}"
    args, _ = parse(line, world_size=8)
    expected = action.const if action.nargs == 0 else action.type(value)
    expected = [expected] if action.nargs == "+" else expected
    made = [transformer_config(args), optimizer_config(args), ddp_config(args)]
    found = [getattr(config, dest) for config in made if hasattr(config, dest)]
    assert found and found[0] == expected


@pytest.mark.parametrize("dest", [d for d in NEEDS_ENGINE.split() if d in FURTHER])
def test_a_field_of_transformer_engine_is_refused_without_it(
    dest: str, known: dict[str, argparse.Action]
) -> None:
    name, action = names_of(dest, known)
    found = problems(f"{MOCK} {name} {other_value(action)}")
    assert any(p.startswith(f"{name} needs Transformer Engine") for p in found)


@dataclass
class NewerConfig:
    """The config of a release that nobody has seen."""

    warp_factor: int = 3
    """How fast."""
    engine_kind: Literal["ion", "warp"] = "ion"
    shields: bool = True
    decks: list[str] = field(default_factory=list)
    renamed: float = field(default=1.0, metadata={"argparse_meta": {"arg_names": ["--other"]}})
    muon_surprise: int = 0


def test_a_new_field_is_a_flag_with_type_choices_default_and_help() -> None:
    with patch.object(further_fields, "CONFIGS", {"new": NewerConfig}):
        flags = {flag.dest: flag for flag in further_flags((), ())["new"]}
    warp = flags["warp_factor"]
    assert (warp.names, warp.type, warp.default) == (("--warp-factor",), int, 3)
    assert warp.help == "How fast."
    assert flags["engine_kind"].choices == ("ion", "warp")
    assert flags["shields"].names == ("--no-shields", "--disable-shields")
    assert (flags["decks"].nargs, flags["decks"].default) == ("+", [])
    assert flags["renamed"].names == ("--other",)
    assert refusal("muon_surprise"), "a pattern covers fields that a feature gets later"


def test_a_flag_that_two_fields_would_bring_is_one_flag() -> None:
    with patch.object(further_fields, "CONFIGS", {"new": NewerConfig}):
        flags = further_flags((), ("--other",))["new"]
    assert "renamed" not in {flag.dest for flag in flags}
    assert "warp_factor" in {flag.dest for flag in flags}


def test_a_field_of_another_release_is_refused_by_name() -> None:
    for name in sorted(absent_further_flags()):
        assert any(p.startswith(f"{name}: Megatron-Core") for p in problems(f"{MOCK} {name}"))


def test_a_choice_of_another_release_is_refused_by_name() -> None:
    with patch(
        "megatron.pretrain.arguments.further_rules.absent_values",
        lambda: {"moe_router_score_function": {"sigmoid"}},
    ):
        found = problems(f"{MOCK} --num-experts 4 --moe-router-score-function sigmoid")
    assert any("--moe-router-score-function sigmoid: Megatron-Core" in p for p in found)


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
        ("--spec torch", "name a module and an attribute"),
        ("--spec torch nn", "nn is a module, but must be a ModuleSpec"),
        ("--spec nowhere nothing", "No module named"),
        (f"{SPEC} block_of_three", "it has 3 layers, and --num-layers is 2"),
        (
            f"{SPEC} block_of_two --pipeline-model-parallel-size 2",
            "is not divided between pipeline stages",
        ),
        ("--rotary-seq-len-interpolation-factor 2", "needs --position-embedding-type rope"),
        (f"{VALIDATE} --result-rejected-tracker-filename /nowhere/x", "/nowhere is no directory"),
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 1", "must be from 2"),
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 7", "leaves a group of 1"),
        (
            "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
            "--num-layers 2 and --account-for-loss-in-pipeline-split: 3 layers must be a multiple",
        ),
        (
            f"{STAGES} --account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 3",
            "divide layers evenly: leave out --decoder-first-pipeline-num-layers 3",
        ),
        (
            "--account-for-loss-in-pipeline-split",
            "needs --pipeline-model-parallel-size of at least",
        ),
        ("--moe-token-dispatcher-type flex --num-experts 4", "the package deep_ep, which is not"),
        ("--moe-enable-deepep --num-experts 4", "needs --moe-token-dispatcher-type flex"),
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
        ("--tp-comm-overlap-cfg x.yaml", "needs --tp-comm-overlap"),
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
