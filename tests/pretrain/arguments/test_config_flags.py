# SPDX-License-Identifier: Apache-2.0
"""Every field of the installed release is a flag: its value reaches the config, or is refused."""

import argparse
import ast
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal
from unittest.mock import patch

import torch

from megatron.pretrain.arguments import CommandLineError, config_flags
from megatron.pretrain.arguments.config_flags import Declared, absent_flags, field_flags
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.flags import Refused, integer
from megatron.pretrain.arguments.tables import FIELD_GROUPS, PROGRAM_GROUPS
from tests.support import megatron_release
from tests.support.pretrain.arguments.command_lines import (
    EXPERTS,
    LATENT,
    MOCK,
    PREDICTION,
    other_value,
    parse,
    problems,
    rows_not_refused,
)

GROUPS = field_flags([*chain.from_iterable(PROGRAM_GROUPS.values())])


def config_parts() -> list[tuple[str, str]]:
    """(field, flag) of every flag of a field that is built and shows its value alone."""
    flags = chain.from_iterable(named.items() for named in GROUPS.values())
    return [
        (name, flag.names[0])
        for name, flag in flags
        if not flag.refusal
        and name not in {*NOT_SEEN_ALONE.split(), *NEEDS_ENGINE.split()}
        and not name.startswith(DISPATCHERS)
    ]


NUMBERS = {
    "num_attention_heads": "8",
    "hidden_size": "128",
    "min_lr": "0.001",
    "optimizer_offload_fraction": "0.5",
    "decoupled_min_lr": "0.001",
    "num_query_groups": "2",
    "window_size": "(16,0)",
    "moe_layer_freq": "([0]*1+[1]*1)",
    "no_rope_freq": "([0]*1+[1]*1)",
    "moe_router_num_groups": "2",
    "moe_router_group_topk": "1",
    "num_moe_experts": "4",
    "recompute_modules": "mlp",
    "tensor_model_parallel_size": "2",
    "pipeline_model_parallel_size": "2",
    "context_parallel_size": "2",
    "expert_model_parallel_size": "2",
    "expert_tensor_parallel_size": "2",
    "num_distributed_optimizer_instances": "2",
    "num_layers_in_first_pipeline_stage": "1",
    "num_layers_in_last_pipeline_stage": "1",
    "moe_router_topk": "3",
    "attention_dropout": "0.5",
    "hidden_dropout": "0.5",
    "adam_beta1": "0.5",
    "adam_beta2": "0.5",
    "sgd_momentum": "0.5",
    "muon_momentum": "0.5",
    "muon_extra_scale_factor": "0.2",
    "microbatch_group_size_per_vp_stage": "2",
}

PIPELINE = "--pipeline-model-parallel-size 2"
STAGES = f"{PIPELINE} --num-layers 7"
VIRTUAL = (
    f"{PIPELINE} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 64"
)

FP8, FP4 = "--fp8-format hybrid", "--fp4-format e2m1"
BF16_LAYERS = f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers 20"
"""Two ends in bf16 are 14 of them."""

NO_CHECKS = "--no-check-for-nan-in-loss-and-grad"
READ_WITH_FP8 = """fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
    disable_parameter_transpose_cache"""

OFFLOAD = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --optimizer-cpu-offload"
COMPANIONS = {
    "optimizer_offload_fraction": OFFLOAD,
    "use_torch_optimizer_for_cpu_offload": OFFLOAD,
    "overlap_cpu_optimizer_d2h_h2d": OFFLOAD,
    "pin_cpu_grads": OFFLOAD,
    "pin_cpu_params": OFFLOAD,
    "moe_per_layer_logging": "--tensorboard-dir logs",
    "num_query_groups": "--group-query-attention",
    "overlap_param_gather": "--overlap-grad-reduce --use-distributed-optimizer",
    "sgd_momentum": "--optimizer sgd",
    **{name: "--optimizer muon" for name in GROUPS["optimizer"] if name.startswith("muon_")},
    "decoupled_min_lr": "--decoupled-lr 0.1",
    "recompute_granularity": "--recompute-method uniform --recompute-num-layers 1",
    "recompute_method": "--recompute-granularity full --recompute-num-layers 1",
    "recompute_num_layers": "--recompute-granularity full --recompute-method uniform",
    "recompute_modules": "--recompute-granularity selective",
    "rotary_interleaved": "--position-embedding-type rope",
    "no_rope_freq": "--position-embedding-type rope",
    "data_parallel_sharding_strategy": "--use-megatron-fsdp",
    "cross_entropy_fusion_impl": "--cross-entropy-loss-fusion",
    "moe_router_enable_expert_bias": "--moe-router-score-function sigmoid",
    "moe_pad_expert_input_to_capacity": "--moe-expert-capacity-factor 1.5",
    "moe_shared_expert_overlap": (
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"
    ),
    "overlap_moe_expert_parallel_comm": (
        f"{EXPERTS} --bf16 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
    ),
    "moe_router_num_groups": "--moe-router-group-topk 1",
    "moe_router_group_topk": "--moe-router-num-groups 2",
    "test_mode": "--qk-layernorm",
    "init_method_std": "--embedding-init-method-std 0.5",
    "initial_loss_scale": "--fp16",
    "min_loss_scale": "--fp16",
    "loss_scale_window": "--fp16",
    "hysteresis": "--fp16",
    "sequence_parallel": "--tensor-model-parallel-size 2",
    "expert_model_parallel_size": EXPERTS,
    "expert_tensor_parallel_size": f"{EXPERTS} --expert-model-parallel-size 2",
    "apply_wd_to_qk_layernorm": "--qk-layernorm",
    "num_layers_in_first_pipeline_stage": PIPELINE,
    "num_layers_in_last_pipeline_stage": PIPELINE,
    "num_distributed_optimizer_instances": "--use-distributed-optimizer",
    "outer_dp_sharding_strategy": "--use-megatron-fsdp --num-distributed-optimizer-instances 2",
    "init_model_with_meta_device": "--use-megatron-fsdp",
    "suggested_communication_unit_size": "--use-megatron-fsdp",
    "fsdp_double_buffer": "--use-megatron-fsdp",
    "disable_symmetric_registration": "--use-nccl-ub",
    "fsdp_manual_registration": "--use-megatron-fsdp --use-nccl-ub",
    "bucket_size": "--overlap-grad-reduce",
    "pad_buckets_for_high_nccl_busbw": "--use-distributed-optimizer",
    "reduce_scatter_with_fp32_accumulation": "--use-distributed-optimizer",
    "mtp_num_layers": PREDICTION,
    "mtp_loss_scaling_factor": f"{PREDICTION} --mtp-num-layers 1",
    "moe_token_drop_policy": "--moe-expert-capacity-factor 1.5",
    "moe_shared_expert_gate": "--moe-shared-expert-intermediate-size 64",
    "moe_router_bias_update_rate": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    "microbatch_group_size_per_vp_stage": VIRTUAL,
    "overlap_p2p_comm_warmup_flush": VIRTUAL,
    "account_for_embedding_in_pipeline_split": STAGES,
    "account_for_loss_in_pipeline_split": STAGES,
    "distribute_saved_activations": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "fp8_output_proj": f"{FP8} --fp8-recipe mxfp8",
    "cuda_graph_warmup_steps": (
        f"--cuda-graph-impl local --cuda-graph-scope full_iteration {NO_CHECKS}"
    ),
    "activation_func_clamp_value": "--swiglu",
    "glu_linear_offset": "--swiglu",
    "activation_func_fp8_input_store": "--swiglu --disable-bias-linear",
    "clone_scatter_output_in_embedding": "--tensor-model-parallel-size 2 --sequence-parallel",
    "use_fused_weighted_squared_relu": "--squared-relu --num-experts 4 --disable-bias-linear",
    **dict.fromkeys(
        ("mtp_detach_heads", "mtp_use_repeated_layer"), f"{PREDICTION} --mtp-num-layers 1"
    ),
    **dict.fromkeys(GROUPS["multi-latent attention"], LATENT),
    **dict.fromkeys(READ_WITH_FP8.split(), FP8),
    **dict.fromkeys(
        ("fp8_param", "keep_fp8_transpose_cache"), f"{FP8} --fp8-param-gather --use-megatron-fsdp"
    ),
    "fp8_quantizer_factory": f"{FP8} --fp8-recipe custom",
    "fp4_recipe": f"{FP4} --fp4-quantizer-factory package.module",
    "fp4_quantizer_factory": f"{FP4} --fp4-recipe custom",
    "first_last_layers_bf16": f"{FP8} --fp8-recipe tensorwise",
    **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), BF16_LAYERS),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        f"{FP8} --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer"
    ),
    **{name: "--use-mup" for name in GROUPS["model"] if name.startswith("mup_")},
}

# Where the machine decides, the value needs a GPU with Transformer Engine to arrive.
NEEDS_GPU = {
    "cuda_graph_warmup_steps",
    "nccl_ub",
    "disable_symmetric_registration",
    "fsdp_manual_registration",
    "moe_grouped_gemm",
    "moe_router_fusion",
    "layernorm_zero_centered_gamma",
    "cross_entropy_fusion_impl",
    "activation_func_fp8_input_store",
    "fp8",
    "fp4",
} | {name for name, beside in COMPANIONS.items() if beside.startswith((FP8, FP4))}

NOT_SEEN_ALONE = """optimizer_cpu_offload cuda_graph_impl cuda_graph_scope attention_backend
    transformer_impl align_param_gather overlap_p2p_comm pipeline_model_parallel_layout
    cp_comm_type moe_permute_fusion moe_enable_deepep moe_flex_dispatcher_backend
    hierarchical_context_parallel_sizes config_logger_dir moe_layer_recompute
    moe_expert_rank_capacity_factor moe_apply_probs_on_input async_tensor_model_parallel_allreduce
    use_precision_aware_optimizer main_params_dtype main_grads_dtype exp_avg_dtype exp_avg_sq_dtype
    moe_router_padding_for_fp8 moe_router_padding_for_quantization fp4_param"""
"""Fields with tests of their own (test_precision_aware.py, test_low_precision.py, others), or with
kernels or rules of Megatron-Core's own only."""

DISPATCHERS = ("moe_deepep_", "moe_hybridep_", "moe_ncclep_", "moe_flex_", "moe_permute_fusion_")
"""Settings of --moe-token-dispatcher-type flex, which needs its kernels."""

NEEDS_ENGINE = """memory_efficient_layer_norm fused_single_qkv_rope use_te_activation_func
    fused_residual_rmsnorm use_transformer_engine_op_fuser mla_down_proj_fusion
    flash_attention_version window_attn_skip_freq delay_wgrad_compute"""
"""Fields that only Transformer Engine's layers read, and those that are about its communication."""
NEEDS_ENGINE += " ".join(["", *(name for name in GROUPS["model parallelism"] if "tp_comm" in name)])


def values_of_configs(name: str, action: argparse.Action) -> tuple[Any, list[Any]]:
    """Return the value that the words of a flag mean, and those of the configs that have it."""
    flag = action.option_strings[0]
    value = NUMBERS.get(name) or other_value(action)
    expected = action.const if action.nargs == 0 else action.type(value)
    if isinstance(action.nargs, str) and name not in (
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
    ):
        expected = [expected]
    line = f"{MOCK} {flag} {value} {COMPANIONS.get(name, '')}"
    if name.startswith("moe_"):
        line += " --num-experts 4"
    if "moe_" in name:
        line += " --disable-bias-linear"
    # Without a GPU the machine's rules switch fusions off, whether the flag was read or not.
    gpu = name in NEEDS_GPU or (action.nargs == 0 and action.const is False)
    args, _ = parse(line, world_size=8, cuda=gpu, transformer_engine=gpu, fused_weight_gradient=gpu)
    made = (transformer_config(args), optimizer_config(args), ddp_config(args))
    return expected, [getattr(config, name) for config in made if hasattr(config, name)]


def test_every_generated_flag_reaches_its_config(known: dict[str, argparse.Action]) -> None:
    wrong = {}
    for name, flag in config_parts():
        try:
            expected, found = values_of_configs(name, known[flag])
        except CommandLineError as error:
            wrong[flag] = error.problems
            continue
        if not found or any(value != expected for value in found):
            wrong[flag] = [f"{found} instead of {expected}"]
    assert not wrong


def test_fields_with_other_names_are_filled_by_rule() -> None:
    args, _ = parse(
        f"{MOCK} --swiglu --disable-bias-linear --bf16 --position-embedding-type rope"
        " --num-experts 4"
    )
    config = transformer_config(args)
    assert config.activation_func is torch.nn.functional.silu and config.gated_linear_unit
    assert config.num_moe_experts == 4 and config.num_query_groups == 4
    assert config.persist_layer_norm is False and not config.deallocate_pipeline_outputs
    assert transformer_config(
        parse(MOCK, cuda=True)[0]
    ).deallocate_pipeline_outputs  # with NCCL only
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert optimizer_config(args).params_dtype == torch.bfloat16
    assert ddp_config(args).grad_reduce_in_fp32 and ddp_config(args).check_for_nan_in_grad


def test_gelu_keeps_its_numbers_where_the_fused_kernel_is_switched_off() -> None:
    x = torch.linspace(-3, 3, 101)
    without_flag = transformer_config(parse(MOCK)[0]).activation_func(x)
    exact = transformer_config(parse(f"{MOCK} --no-bias-gelu-fusion")[0]).activation_func(x)
    torch.testing.assert_close(without_flag, torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(exact, torch.nn.functional.gelu(x))
    assert not torch.equal(without_flag, exact)


def test_a_field_of_transformer_engine_is_refused_without_it(
    known: dict[str, argparse.Action],
) -> None:
    names = [name for name in NEEDS_ENGINE.split() if name in GROUPS["model"]]
    flags = [GROUPS["model"][name].names[0] for name in names]
    rows = [
        (f"{flag} {other_value(known[flag])}", f"{flag} needs Transformer Engine") for flag in flags
    ]
    assert rows and not rows_not_refused(MOCK, rows)


@dataclass
class NewerConfig:
    """The config of a release that nobody has seen."""

    warp_factor: int = 3
    """How fast."""
    engine_kind: Literal["ion", "warp"] = "ion"
    shields: bool = True
    decks: list[str] = field(default_factory=list)
    renamed: float = field(default=1.0, metadata={"argparse_meta": {"arg_names": ["--other"]}})
    soap_surprise: int = 0


def test_a_new_field_is_a_flag_with_type_choices_default_and_help() -> None:
    with patch.object(config_flags, "CONFIGS", {"new": NewerConfig}):
        flags = field_flags()["new"]
    warp = flags["warp_factor"]
    assert (warp.names, warp.type, warp.default) == (("--warp-factor",), int, 3)
    assert warp.help == "How fast."
    assert flags["engine_kind"].choices == ("ion", "warp")
    assert flags["shields"].names == ("--no-shields", "--disable-shields")
    assert (flags["decks"].nargs, flags["decks"].default) == ("+", [])
    assert flags["renamed"].names == ("--other",)
    assert flags["soap_surprise"].refusal, "a field that what is not built gets later"


def test_a_flag_that_two_fields_would_bring_is_one_flag() -> None:
    with patch.object(config_flags, "CONFIGS", {"new": NewerConfig}):
        flags = field_flags([integer("--other", "the flag of another field")])["new"]
    assert "renamed" not in flags and "warp_factor" in flags


def test_a_field_of_another_release_is_refused_by_name() -> None:
    for name in sorted(absent_flags()):
        assert any(p.startswith(f"{name}: Megatron-Core") for p in problems(f"{MOCK} {name}"))


def test_a_choice_of_another_release_is_refused_by_name() -> None:
    row = {"choices": ("ion", "antimatter", "warp")}
    with (
        patch.object(config_flags, "CONFIGS", {"new": NewerConfig}),
        patch.dict(config_flags.declared_fields(), engine_kind=Declared(settings=row)),
    ):
        flag = field_flags()["new"]["engine_kind"]
    assert flag.choices == ("ion", "antimatter", "warp")
    (rule,) = flag.rules_of(Refused)
    assert rule.values == ("antimatter",) and "has no such choice" in rule.reason


def names_in(source: str) -> set[str]:
    """Return the names that the classes of a module annotate."""
    nodes = ast.walk(ast.parse(source))
    return {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_rows_are_of_fields_of_some_release() -> None:
    """A row of a field that no release has would be a flag of another release."""
    known: set[str] = set()
    for config in config_flags.CONFIGS.values():
        known.update(each.name for each in fields(config))
    for release in megatron_release.RELEASES:
        megatron_release.require(release)
        core = megatron_release.unpack(release) / "megatron" / "core"
        for file in FILES_OF_CONFIGS:
            known |= names_in((core / file).read_text())
    assert not [name for name in chain.from_iterable(FIELD_GROUPS.values()) if name not in known]


FILES_OF_CONFIGS = (
    "model_parallel_config.py",
    "transformer/transformer_config.py",
    "optimizer/optimizer_config.py",
    "distributed/distributed_data_parallel_config.py",
)
