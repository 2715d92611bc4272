# SPDX-License-Identifier: Apache-2.0
"""Arguments of a checkpoint: a model that means something else is refused, or taken as it is."""

import argparse
import json
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint.hugging_face.model_arguments import ARGUMENTS, Argument
from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.torch_dist.checkpoint import MARKER
from megatron.mcore_adapter.checkpoints.checkpoint_arguments import (
    MAY_DIFFER,
    check_arguments,
    model_differences,
    training_differences,
)
from megatron.pretrain.arguments import checkpoint_rules
from megatron.pretrain.arguments.config_flags import field_flags
from tests.support.pretrain.arguments.command_lines import EXPERTS, MOCK, parse, problems
from tests.support.pretrain.saved_runs import FSDP, GATED, SIX
from tests.support.pretrain.training_runs import (
    DATA,
    NO_DROPOUT,
    STEPS,
    Record,
    error_of,
    prepare,
    train,
    trained,
)
from tests.support.rank_pool import run_ranks

TE = {"cuda": True, "transformer_engine": True}
ROPE = "--position-embedding-type rope"
LATENT = f"{ROPE} --multi-latent-attention"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"


def arguments(flags: str, **machine: Any) -> argparse.Namespace:
    """Return the arguments as they are in a file, after they were pickled."""
    args, _ = parse(f"{MOCK} {flags}", **machine)
    return pickle.loads(pickle.dumps(args))


@pytest.mark.parametrize(
    ("saved", "own", "lines"),
    [
        ("", "--num-attention-heads 8", ["--num-attention-heads: 4 ", "(--num-query-groups): 4 "]),
        ("--group-query-attention --num-query-groups 2", "", ["(--num-query-groups): 2 "]),
        ("--swiglu", "", ["activation: SwiGLU in the file, GELU by its tanh formula in this run"]),
        ("--squared-relu", "--no-bias-gelu-fusion", ["activation: squared ReLU "]),
        ("--openai-gelu", "--no-bias-gelu-fusion", ["activation: GELU by its tanh formula "]),
        ("", "--normalization RMSNorm", ["--normalization: LayerNorm "]),
        ("--norm-epsilon 1e-6", "", ["--norm-epsilon: 1e-06 in the file, 1e-05 in this run"]),
        (
            "--disable-bias-linear",  # GELU is fused only with biases
            "",
            ["--disable-bias-linear: True in the file, False in this", "activation: exact GELU "],
        ),
        ("", ROPE, ["--position-embedding-type: learned_absolute "]),
        (f"{ROPE} --rotary-base 500000", ROPE, ["--rotary-base: 500000 "]),
        (f"{ROPE} --rotary-percent 0.5", ROPE, ["--rotary-percent: 0.5 "]),
        (f"{ROPE} --rotary-interleaved", ROPE, ["--rotary-interleaved: True "]),
        (f"{ROPE} --use-rope-scaling", ROPE, ["--use-rope-scaling: True "]),
        (f"{ROPE} --no-rope-freq 2", ROPE, ["--no-rope-freq: [0, 1] in the file, [0, 0] "]),
        ("--softmax-scale 0.5", "", ["--softmax-scale: 0.5 in the file, None in this run"]),
        ("--window-size 8,0", "", ["--window-size: (8, 0) "]),
        ("--qk-layernorm", "", ["--qk-layernorm: True "]),
        ("--untie-embeddings-and-output-weights", "", ["--untie-embeddings-and-output-weights: "]),
        (f"{ROPE} --mtp-num-layers 1", ROPE, ["--mtp-num-layers: 1 in the file, 0 in this run"]),
        (f"{EXPERTS} --moe-router-topk 3", EXPERTS, ["--moe-router-topk: 3 "]),
        (SIGMOID, EXPERTS, ["--moe-router-score-function: sigmoid "]),
        (f"{SIGMOID} --moe-router-enable-expert-bias", SIGMOID, ["-enable-expert-bias: True "]),
        (f"{EXPERTS} --moe-router-pre-softmax", EXPERTS, ["--moe-router-pre-softmax: True "]),
        (
            f"{EXPERTS} --moe-router-topk-scaling-factor 2.5",
            EXPERTS,
            ["--moe-router-topk-scaling-factor: 2.5 in the file, 1.0 "],
        ),
        (
            f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1",
            EXPERTS,
            ["--moe-router-num-groups: 2 ", "--moe-router-group-topk: 1 "],
        ),
        (
            f"{EXPERTS} --moe-expert-capacity-factor 1.5",
            EXPERTS,
            ["--moe-expert-capacity-factor: 1.5 in the file, None "],
        ),
        (f"{EXPERTS} --moe-layer-freq [0,1]", EXPERTS, ["--moe-layer-freq: [0, 1] in the file, "]),
        (f"{LATENT} --qk-head-dim 64", LATENT, ["--qk-head-dim: 64 in the file, 128 "]),
        (f"{LATENT} --rope-type rope", LATENT, ["--rope-type: rope in the file, yarn "]),
        (f"{LATENT} --mscale 0.7", LATENT, ["--mscale: 0.7 "]),
    ],
)
def test_settings_that_weights_do_not_show_are_listed_with_both_values(
    saved: str, own: str, lines: list[str]
) -> None:
    found = model_differences(arguments(saved), arguments(own))
    assert len(found) == len(lines)
    assert all(any(words in line for line in found) for words in lines)
    assert model_differences(arguments(saved), arguments(saved)) == []
    assert len(model_differences(arguments(own), arguments(saved))) == len(lines)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("--seed 5 --hidden-dropout 0.3 --bf16", ""),
        ("--softmax-scale 0.25", ""),
        ("--group-query-attention --num-query-groups 4", ""),
        (f"{ROPE} --no-rope-freq 2", f"{ROPE} --no-rope-freq [0,1]"),
        (EXPERTS, f"{EXPERTS} --moe-layer-freq [1,1]"),
        (f"{EXPERTS} --moe-router-topk-scaling-factor 1", EXPERTS),
        ("--use-rotary-position-embeddings", ROPE),
        ("--position-embedding-type none", "--position-embedding-type none --rotary-base 10000"),
        ("--num-layers 4", "--num-layers 8 --hidden-size 128"),
    ],
)
def test_other_spellings_and_what_the_loaders_see_are_no_difference(saved: str, own: str) -> None:
    assert model_differences(arguments(saved), arguments(own)) == []


def test_the_same_command_line_is_the_same_model_on_other_machines() -> None:
    for flags in ("", "--swiglu", "--no-bias-gelu-fusion", EXPERTS, LATENT):
        for machine in (TE, {"cuda": True}):
            assert model_differences(arguments(flags, **machine), arguments(flags)) == []


def test_arguments_that_a_file_does_not_have_are_not_compared() -> None:
    own = arguments(f"{ROPE} --rotary-base 7 --swiglu --norm-epsilon 1e-6 --disable-bias-linear")
    assert model_differences(argparse.Namespace(num_layers=2, swiglu=True), own) == []
    older = argparse.Namespace(num_layers=2, norm_epsilon=1e-6, disable_bias_linear=True)
    assert model_differences(older, own) == []
    older.norm_epsilon = 1e-5
    assert model_differences(older, own) == ["--norm-epsilon: 1e-05 in the file, 1e-06 in this run"]


def test_differences_of_training_are_told_and_do_no_harm() -> None:
    saved = arguments("--seed 5 --global-batch-size 8 --clip-grad 2")
    assert training_differences(saved, arguments("--clip-grad 2")) == [
        "--seed: 5 in the file, 1234 in this run",
        "--global-batch-size: 8 in the file, 2 in this run",
    ]


@pytest.mark.parametrize(
    ("saved", "flag"),
    [
        ("--reset-position-ids", "--reset-position-ids"),
        ("--reset-attention-mask", "--reset-attention-mask"),
        ("--eod-mask-loss", "--eod-mask-loss"),
        ("--decoupled-lr 1e-4", "--decoupled-lr"),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-5", "--decoupled-min-lr"),
        (f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1", "-rate"),
        ("--qk-layernorm --apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm"),
    ],
)
def test_settings_of_data_rates_and_decay_that_differ_are_told(saved: str, flag: str) -> None:
    assert any(flag in line for line in training_differences(arguments(saved), arguments("")))


@pytest.fixture(scope="module")
def without_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step without FSDP, in torch_dist."""
    folder = tmp_path_factory.mktemp("torch_dist")
    line = f"{SIX} {GATED} --exit-interval 1 --save {folder} --save-interval 1"
    run_ranks(2, train, line)
    return folder


OTHER = "--num-attention-heads 8 --norm-epsilon 1e-6 --rotary-base 500 --seed 5"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fsdp_dtensor", "torch_dist"])
def test_a_model_that_means_something_else_is_refused_on_all_ranks_alike(
    kind: str, fp32: tuple[Path, Record], without_fsdp: Path
) -> None:
    load = f"{FSDP} --load {fp32[0]} --ckpt-step 3"
    if kind == "torch_dist":
        load = f"--load {without_fsdp} --ckpt-step 1"
    line = f"{SIX} {GATED} {OTHER} {load}"
    error = error_of(line)
    assert error.splitlines()[1:] == [
        "  --num-attention-heads: 4 in the file, 8 in this run",
        "  --rotary-base: 10000 in the file, 500 in this run",
        "  --norm-epsilon: 1e-05 in the file, 1e-06 in this run",
        "  keys and values (--num-query-groups): 4 in the file, 8 in this run",
        "--use-checkpoint-args takes the file's values, --no-check-checkpoint-args keeps this"
        " run's",
    ]
    assert error.startswith("ValueError") and "is a checkpoint of another model" in error
    (run,) = trained(f"{line} --no-check-checkpoint-args --exit-interval 1")
    assert len(run.steps) == 1 and not any("may differ" in words for words in run.lines)
    (run,) = trained(f"{SIX} {GATED} --seed 5 {load} --exit-interval 1")
    (told,) = [words for words in run.lines if "may differ" in words]
    assert "--seed: 1234 in the file, 5 in this run" in told


OF_TRAINING = f"{DATA} {STEPS} {NO_DROPOUT} --train-iters 6 --lr-decay-iters 20"
BATCH = "--micro-batch-size 2 --global-batch-size 8"


@pytest.mark.exhaustive
def test_the_model_of_the_checkpoint_takes_the_place_of_the_flags(
    fp32: tuple[Path, Record], without_fsdp: Path
) -> None:
    folder, unbroken = fp32
    line = f"{OF_TRAINING} {BATCH} --num-layers 3 --norm-epsilon 1e-6 --use-checkpoint-args"
    (run,) = trained(f"{line} {FSDP} --load {folder} --ckpt-step 3")
    assert run.losses == unbroken.losses[3:]
    args, notes = parse(f"{line} --load {without_fsdp}", world_size=2)
    assert (args.num_layers, args.hidden_size, args.seq_length) == (2, 32, 32)
    assert args.swiglu and not args.add_bias_linear and args.layernorm_epsilon == 1e-5
    expected = (
        f"--use-checkpoint-args: the model is that of {without_fsdp}/iter_0000001, instead of"
    )
    assert f"{expected} --num-layers 3, --norm-epsilon 1e-06" in notes


def test_arguments_of_training_are_taken_unless_they_are_given(tmp_path: Path) -> None:
    write_common(tmp_path, arguments("--hidden-dropout 0.3 --swiglu --seed 7"))
    line = "--micro-batch-size 2 --lr 0.005 --train-iters 20 --mock-data --vocab-size 100"
    line = f"{line} --load {tmp_path} --use-checkpoint-args"
    args, _ = parse(line)
    assert (args.hidden_dropout, args.swiglu, args.seed) == (0.3, True, 1234)
    args, _ = parse(f"{line} --hidden-dropout 0.2 --seq-length 16 --bf16")
    assert (args.hidden_dropout, args.seq_length, args.bf16) == (0.2, 16, True)
    args, notes = parse(f"{line} --squared-relu --use-rotary-position-embeddings")
    assert args.swiglu and not args.squared_relu
    assert args.position_embedding_type == "learned_absolute"
    replaced = "--use-rotary-position-embeddings, --squared-relu"
    assert any(note.endswith(f", instead of {replaced}") for note in notes)


def write_common(folder: Path, args: argparse.Namespace | None) -> None:
    """Write a checkpoint without tensors, whose common state has these arguments."""
    source = folder / "iter_0000001"
    source.mkdir(parents=True)
    (folder / TRACKER).write_text("1")
    dcp.save({}, checkpoint_id=source, no_dist=True)
    torch.save({"iteration": 1} | ({} if args is None else {"args": args}), source / "common.pt")
    (source / MARKER).write_text(json.dumps({"sharded_backend": "torch_dist"}))


def test_a_checkpoint_that_cannot_give_its_arguments_is_a_problem_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{MOCK} --use-checkpoint-args --load {tmp_path}"
    _, notes = parse(f"{line}/nothing")
    told = f"--use-checkpoint-args: {tmp_path}/nothing has no checkpoint yet, the model is that"
    assert any(note.startswith(told) for note in notes)
    write_common(tmp_path / "none", None)
    assert problems(f"{line}/none") == [
        f"--use-checkpoint-args: {tmp_path}/none/iter_0000001 has no arguments"
    ]
    # As in a file of another release, which has a setting more.
    later = Argument("setting_of_tomorrow", 0)
    monkeypatch.setattr(checkpoint_rules, "ARGUMENTS", (*checkpoint_rules.ARGUMENTS, later))
    write_common(tmp_path / "other", argparse.Namespace(num_layers=2, setting_of_tomorrow=1))
    assert problems(f"{line}/other") == [
        "--use-checkpoint-args: the file's setting_of_tomorrow 1 has no flag here"
    ]
    (tmp_path / "none" / "iter_0000001" / "common.pt").write_bytes(b"nothing")
    (problem,) = problems(f"{line}/none")
    assert problem.startswith("--use-checkpoint-args") and "common.pt is damaged" in problem


def refused_check(line: str, folder: str) -> str:
    """Job: compare arguments with those of a checkpoint; the error."""
    args, _ = prepare(line)
    with pytest.raises(ValueError) as caught:
        check_arguments(Path(folder) / "iter_0000001", args, print)
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda source: None, "its arguments cannot be compared: TypeError"),
        (lambda source: (source / "common.pt").write_bytes(b"nothing"), "common.pt is damaged"),
        (lambda source: (source / ".metadata").unlink(), "has no .metadata"),
    ],
    ids=["types", "damaged", "missing"],
)
def test_arguments_that_cannot_be_read_end_all_ranks_alike(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    args = arguments("--softmax-scale 0.3")
    args.kv_channels = "eight"
    write_common(tmp_path, args)
    damage(tmp_path / "iter_0000001")
    error = error_of(f"{SIX} {GATED}", str(tmp_path), job=refused_check)
    assert words in error and "iter_0000001" in error


ROUNDS = """activation_func_fp8_input_store disable_parameter_transpose_cache fp4_param
    first_last_layers_bf16 fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo
    fp8_amax_history_len fp8_dot_product_attention fp8_margin fp8_multi_head_attention
    fp8_param_gather fp8_quantizer_factory fp8_recipe fp8_wgrad moe_router_padding_for_fp8
    moe_router_padding_for_quantization num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    tp_only_amax_red fp8_output_proj"""
"""Fields of FP8 and FP4, beside the two that choose them and are told of."""

CHANGES_NO_OUTPUT = """account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding config_logger_dir
    decoupled_weight_decay distribute_saved_activations flash_attention_version
    fused_residual_rmsnorm fused_single_qkv_rope memory_efficient_layer_norm
    microbatch_group_size_per_vp_stage mla_down_proj_fusion mlp_chunks_for_training
    moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
    moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute
    moe_ncclep_static_shape moe_ncclep_zero_copy moe_permute_fusion_into_hybridep
    overlap_p2p_comm_warmup_flush param_name_patterns_for_fp32_local_accumulation
    perform_initialization use_fused_weighted_squared_relu use_te_activation_func
    use_transformer_engine_op_fuser use_cpu_initialization deterministic_mode
    gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
    attention_backend test_mode embedding_init_method_std init_model_with_meta_device
    apply_query_key_layer_scaling attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul
    masked_softmax_fusion bias_dropout_fusion apply_rope_fusion recompute_granularity
    recompute_method recompute_num_layers recompute_modules transformer_impl
    moe_shared_expert_overlap moe_router_force_load_balancing moe_grouped_gemm
    moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
    moe_per_layer_logging moe_permute_fusion moe_router_fusion overlap_moe_expert_parallel_comm
    cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps delay_wgrad_compute"""
OF_NO_MODEL = ("data parallelism", "model parallelism", "optimizer")
"""Groups of fields that change no output."""
SHAPES_CHANGE = "attention_output_gate moe_latent_size mtp_use_repeated_layer"


def test_every_config_field_that_changes_outputs_is_compared() -> None:
    groups = [named.values() for title, named in field_flags().items() if title not in OF_NO_MODEL]
    accepted = {flag.dest for flag in chain.from_iterable(groups) if not flag.refusal}
    compared = {argument.name for argument in ARGUMENTS}
    listed = {*CHANGES_NO_OUTPUT.split(), *SHAPES_CHANGE.split(), *ROUNDS.split()}
    found = {dest for dest in accepted - listed - compared if not dest.startswith("tp_comm_")}
    assert not found - set(MAY_DIFFER.split())


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        ("--swiglu --glu-linear-offset 1.0", "--glu-linear-offset"),
        ("--swiglu --activation-func-clamp-value 7.0", "--activation-func-clamp-value"),
        (f"{EXPERTS} --moe-apply-probs-on-input", "--moe-apply-probs-on-input"),
        (
            f"{ROPE} --rotary-seq-len-interpolation-factor 4",
            "--rotary-seq-len-interpolation-factor",
        ),
    ],
)
def test_fields_that_change_what_a_model_computes_must_agree(flags: str, label: str) -> None:
    plain, _, _ = flags.partition(label)
    saved, own = arguments(flags), arguments(plain)
    told = [line for line in model_differences(saved, own) if line.startswith(f"{label}: ")]
    assert len(told) == 1
