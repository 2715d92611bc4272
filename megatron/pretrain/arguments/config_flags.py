# SPDX-License-Identifier: Apache-2.0
"""Flags of the fields of Megatron-Core's config classes, so that new fields are flags at once.

The installed release decides which there are. Name, type, choices, default and help are those of
the field, except for `CHANGES`. Values reach the config object (`configs`), or are refused by name
(`not_built`).
"""

import ast
import enum
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.pretrain.arguments.flags import (
    FLOATS,
    STATE_DTYPES,
    Flag,
    frequency,
    integer_pair,
    one_of,
    spelled,
)

CONFIGS: dict[str, type] = {
    "model": TransformerConfig,
    "optimizer": OptimizerConfig,
    "data parallelism": DistributedDataParallelConfig,
    "multi-latent attention": MLATransformerConfig,
}
"""Title of a group in --help -> config. A field of several configs is a flag of the first."""
PARTS_OF_THE_MODEL: dict[str, str] = {
    "mixture of experts": "moe_* *_moe_* ep_overlap_* overlap_dispatch_* delay_wgrad_compute",
    "low precision and graphs": "fp16 bf16 fp8* fp4* *cuda_graph* *_bf16 use_te_rng_tracker",
    "model parallelism": """*_parallel_* *parallel sequence_parallel *pipeline* *_p2p_* *_vp_stage
        cp_comm_type *tp_comm_* *embedding_wgrad_compute wgrad_deferral_limit""",
}
"""Title of a group -> patterns of fields of the first config, which has most of all fields."""

NO_FLAG = """virtual_pipeline_model_parallel_size params_dtype pipeline_dtype autocast_dtype
    enable_autocast variable_seq_lengths batch_p2p_* deallocate_pipeline_outputs
    gated_linear_unit bias_activation_fusion persist_layer_norm quant_recipe is_hybrid_model
    mtp_standalone num_microbatches_with_partial_activation_checkpoints
    heterogeneous_block_specs hetereogenous_dist_checkpoint inference_sampling_seed
    inference_rng_tracker mup_width_mult gtp_weight_remat_size expert_gtp_weight_remat_size
    num_buckets cpu_offloading timers barrier_with_L1_time _*"""
"""Fields that the program derives, or whose flag has another name."""


def named(name: str, **more: object) -> dict[str, object]:
    """Return a change of the flag's name."""
    return {"names": (name,), **more}


def renamed(dest: str) -> dict[str, object]:
    """Return a change of the flag's name and of its destination alike."""
    return named(spelled(dest), dest=dest)


def off(name: str, **more: object) -> dict[str, object]:
    """Return a change that makes the flag a switch that turns a default off."""
    return {"names": (name,), "kind": "off", "default": True, **more}


CHANGES: dict[str, dict[str, Any]] = {
    # Data parallelism.
    "data_parallel_sharding_strategy": {
        "choices": ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "outer_dp_sharding_strategy": {"choices": ("no_shard", "optim")},
    "align_param_gather": off("--no-align-param-gather"),
    "grad_reduce_in_fp32": renamed("accumulate_allreduce_grads_in_fp32"),
    "check_for_nan_in_grad": off(
        "--no-check-for-nan-in-loss-and-grad", dest="check_for_nan_in_loss_and_grad"
    ),
    "bucket_size": renamed("ddp_bucket_size"),
    "pad_buckets_for_high_nccl_busbw": renamed("ddp_pad_buckets_for_high_nccl_busbw"),
    "reduce_scatter_with_fp32_accumulation": renamed("ddp_reduce_scatter_with_fp32_accumulation"),
    "average_in_collective": renamed("ddp_average_in_collective"),
    "param_name_patterns_for_fp32_local_accumulation": named(
        "--ddp-param-name-patterns-for-fp32-local-accumulation"
    ),
    "gradient_reduce_div_fusion": off("--no-gradient-reduce-div-fusion"),
    "nccl_ub": named("--use-nccl-ub"),
    # Optimizer.
    "optimizer": {"choices": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")},
    "muon_momentum": {"default": 0.9},
    "muon_split_qkv": off("--muon-no-split-qkv"),
    "muon_scale_mode": {"choices": ("spectral", "unit_rms_norm", "shape_scaling")},
    "muon_fp32_matmul_prec": {"choices": ("medium", "high", "highest")},
    "muon_tp_mode": {"choices": ("blockwise", "duplicated", "distributed")},
    "muon_scalar_optimizer": {"choices": ("adam", "lion")},
    "min_lr": {"default": 0.0},
    "optimizer_offload_fraction": {"default": 1.0},
    "main_grads_dtype": {"type": one_of({word: FLOATS[word] for word in ("fp32", "bf16")})},
    "main_params_dtype": {"type": one_of({word: FLOATS[word] for word in ("fp32", "fp16")})},
    "exp_avg_dtype": {"type": one_of(STATE_DTYPES)},
    "exp_avg_sq_dtype": {"type": one_of(STATE_DTYPES)},
    # Model.
    "num_layers": {"default": None, "names": ("--num-layers", "--encoder-num-layers")},
    "hidden_size": {"default": None},
    "num_attention_heads": {"default": None},
    "num_query_groups": {"default": 1},
    "layernorm_epsilon": named("--norm-epsilon"),
    "layernorm_zero_centered_gamma": named("--apply-layernorm-1p"),
    "add_bias_linear": off("--disable-bias-linear"),
    "attention_softmax_in_fp32": named("--attention-softmax-in-fp32", kind="switch", default=False),
    "no_rope_freq": {"type": frequency},
    "window_size": {"type": integer_pair, "nargs": None},
    "masked_softmax_fusion": off("--no-masked-softmax-fusion"),
    "bias_dropout_fusion": off("--no-bias-dropout-fusion"),
    "apply_rope_fusion": off("--no-rope-fusion"),
    "gradient_accumulation_fusion": off("--no-gradient-accumulation-fusion"),
    "q_lora_rank": {"default": None},
    "kv_lora_rank": {"default": 32},
    "rotary_scaling_factor": {"default": 1.0},
    "rope_type": {"default": None, "choices": ("rope", "yarn")},
    # Mixture of experts.
    "num_moe_experts": renamed("num_experts"),
    "moe_layer_freq": {"type": frequency},
    "moe_router_score_function": {"choices": ("softmax", "sigmoid", "sqrtsoftplus")},
    "moe_router_load_balancing_type": {
        "type": str,
        "nargs": "+",
        "choices": (
            *("aux_loss", "seq_aux_loss", "global_aux_loss"),
            *("sinkhorn", "quantile_balancing", "none"),
        ),
    },
    "moe_aux_loss_coeff": {"type": float, "nargs": "+"},
    "moe_flex_dispatcher_backend": {"choices": ("deepep", "hybridep", "ncclep")},
    # Low precision and graphs.
    "fp8": named("--fp8-format"),
    "fp8_param": renamed("fp8_param_gather"),
    "fp4": named("--fp4-format"),
    "fp4_param": named("--fp4-param-gather"),
    "cuda_graph_impl": {"choices": ("none", "local", "transformer_engine", "full_iteration")},
    "cuda_graph_scope": {"nargs": "+"},
    "cuda_graph_modules": {"nargs": "+"},
    "use_te_rng_tracker": renamed("te_rng_tracker"),
    # Model parallelism.
    "num_layers_in_first_pipeline_stage": renamed("decoder_first_pipeline_num_layers"),
    "num_layers_in_last_pipeline_stage": renamed("decoder_last_pipeline_num_layers"),
    "pipeline_model_parallel_layout": {"type": str},
    "overlap_p2p_comm": off("--no-overlap-p2p-communication"),
    "cp_comm_type": {
        "type": str,
        "nargs": "+",
        "default": ["p2p"],
        "choices": ("p2p", "a2a", "all_gather", "a2a+p2p"),
    },
}
"""Name of a field -> settings of its `Flag` that the field itself does not imply."""

OF_SOME_RELEASES = """async_tensor_model_parallel_allreduce moe_extended_tp fused_residual_rmsnorm
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    mtp_detach_heads mtp_use_repeated_layer flash_attention_version dsa_indexer_topk_freq
    dsa_kernel_backend use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult
    mup_base_head_dim mup_attn_scale_power use_transformer_engine_op_fuser fp8_output_proj
    high_priority_a2a_comm_stream use_grouped_gemm_for_shared_expert
    use_grouped_gemm_for_dense_mlp moe_router_force_biased moe_router_quantile_balancing_ema
    moe_single_grouped_weight moe_single_grouped_bias moe_permute_fusion_into_hybridep
    moe_flex_dispatcher_num_sms moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor moe_use_legacy_grouped_gemm
    mlp_chunks_for_training delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    activation_offload_fraction moe_paged_stash moe_paged_stash_page_size cuda_graph_modules
    overlap_dispatch_backward_with_experts_wgrad mla_down_proj_fusion muon_nesterov
    muon_use_nesterov muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2
    soap_shampoo_beta soap_precondition_frequency adaptive_muon_moment2_method
    adaptive_muon_beta2 adaptive_muon_eps grad_norm_skip_threshold optimizer_cuda_graph
    preserve_fp32_weights fsdp_all_gather_in_start_param_sync
    megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
    use_layer_wise_distributed_optimizer cpu_offloading_retain_pinned_cpu_buffers
    nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference
    mtp_hybrid_override_pattern param_name_patterns_for_fp32_local_accumulation"""
"""Fields that some of the releases 0.16 to 0.19 lack, to tell them from unknown flags."""


def field_flags(program_flags: Iterable[Flag] = ()) -> dict[str, dict[str, Flag]]:
    """Return the flags of fields by the title of their group in --help and the field's name.

    Args:
        program_flags: flags of other tables, which come before fields of the same name. Two fields
            may also have one flag: --fp4-param-gather is `fp4_param` and `fp4_param_gather`.
    """
    seen = {flag.dest for flag in program_flags}
    written = set(itertools.chain.from_iterable(flag.names for flag in program_flags))
    groups: dict[str, dict[str, Flag]] = {}
    for title, config in CONFIGS.items():
        hints = typing.get_type_hints(config)
        for declared in fields(config):
            name = declared.name
            is_taken = name in seen or not declared.init or matches(name, NO_FLAG)
            settings = from_annotation(hints[name], default_of(declared))
            if is_taken or not (can_be_written(settings) or name in CHANGES):
                continue
            seen.add(name)
            flag = field_flag(config, declared, settings)
            if written.isdisjoint(flag.names):
                parts = PARTS_OF_THE_MODEL if config is TransformerConfig else {}
                part = next((t for t, names in parts.items() if matches(name, names)), title)
                groups.setdefault(part, {})[name] = flag
            written.update(flag.names)
    return groups


def field_flag(config: type, declared: Field[Any], settings: dict[str, Any]) -> Flag:
    """Return the flag of a field; ``settings`` are those that its type implies."""
    name = declared.name
    settings |= {"dest": name, "help": field_docstrings(config).get(name, "")}
    settings |= from_metadata(declared)
    changes = CHANGES.get(name, {})
    choices = (*changes.get("choices", ()), *(settings.get("choices") or ()))
    settings |= changes
    if choices:
        settings["choices"] = tuple(dict.fromkeys(choices))
    if "names" not in settings:
        prefixes = ("no-", "disable-") if settings["kind"] == "off" else ("",)
        settings["names"] = tuple(spelled(prefix + name) for prefix in prefixes)
    return Flag(**settings)


@functools.cache
def absent_flags() -> set[str]:
    """Return the flags of other releases' fields that this release lacks, as they are written."""
    here = {f.name for f in itertools.chain.from_iterable(map(fields, CONFIGS.values()))}
    written: set[str] = set()
    for name in set(OF_SOME_RELEASES.split()) - here:
        written.update(CHANGES.get(name, {}).get("names", (spelled(name),)))
    return written


@functools.cache
def absent_values() -> dict[str, set[str]]:
    """Return the choices that this release of Megatron-Core lacks, by destination."""
    lacking: dict[str, set[str]] = {}
    for config in CONFIGS.values():
        for name, hint in typing.get_type_hints(config).items():
            choices = CHANGES.get(name, {}).get("choices")
            if choices and typing.get_origin(without_none(hint)) is Literal:
                lacking[name] = set(choices) - set(typing.get_args(without_none(hint)))
    return lacking


@functools.cache  # asked thousands of times for one command line
def matches(name: str, patterns: str) -> bool:
    """Return True if the name matches one of the patterns of `fnmatch`, separated by blanks."""
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def default_of(declared: Field[Any]) -> Any:
    """Return a field's default, None for a field that must be given."""
    if declared.default is not MISSING:
        return declared.default
    return None if declared.default_factory is MISSING else declared.default_factory()


def from_metadata(declared: Field[Any]) -> dict[str, Any]:
    """Return the `Flag` settings that a release of Megatron-Core adds to one of its fields."""
    given: Mapping[str, Any] = declared.metadata.get("argparse_meta", {})
    settings = {name: given[name] for name in ("dest", "type", "choices", "nargs") if name in given}
    if "arg_names" in given:
        settings["names"] = tuple(given["arg_names"])
    return settings


def from_annotation(annotation: Any, default: Any) -> dict[str, Any]:
    """Return the `Flag` settings that a field's type and default imply."""
    annotation = without_none(annotation)
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return {"kind": "off" if default else "switch", "default": bool(default)}
    settings: dict[str, Any] = {"kind": "value", "default": default}
    if origin is Literal:
        choices = typing.get_args(annotation)
        return settings | {"choices": choices, "type": type(choices[0])}
    if is_list_or_item(annotation):
        return settings | {"type": frequency}
    if origin in (list, tuple):
        return settings | {"nargs": "+", "type": typing.get_args(annotation)[0]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return settings | {
            "choices": tuple(annotation),
            "type": one_of(dict(annotation.__members__)),
        }
    if annotation in (int, float, str):
        return settings | {"type": annotation}
    return settings  # `CHANGES` must name the type


def can_be_written(settings: dict[str, Any]) -> bool:
    """Return True if values of a field with these settings can be written on a command line."""
    has_words = settings["kind"] != "value" or "choices" in settings
    return has_words or settings.get("type") in (int, float, str, frequency)


def without_none(annotation: Any) -> Any:
    """Return `X` for `Optional[X]`, anything else unchanged."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def is_list_or_item(annotation: Any) -> bool:
    """Return True for ``int | list[int]``, with or without None."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    lists = [part for part in parts if typing.get_origin(part) is list]
    return len(parts) == 2 and int in parts and [typing.get_args(x) for x in lists] == [(int,)]


@functools.cache
def field_docstrings(config: type) -> dict[str, str]:
    """Return the string literals below the fields of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = following.value if isinstance(following, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[statement.target.id] = " ".join(value.value.split())
    return docs
