# SPDX-License-Identifier: Apache-2.0
"""Rules about flags that Megatron-Core's config fields bring without a line of ours."""

import megatron.core

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.config_flags import absent_values
from megatron.pretrain.arguments.further_fields import NEEDS_ENGINE, matches, refusal
from megatron.pretrain.arguments.not_built import Needs

FURTHER_NEEDS: tuple[Needs, ...] = (
    Needs(
        "original_max_position_embeddings beta_fast beta_slow mla_down_proj_fusion",
        "multi_latent_attention",
        (True,),
        "needs --multi-latent-attention",
    ),
    Needs(
        "attention_output_gate",
        "multi_latent_attention",
        (False,),
        "does nothing with --multi-latent-attention",
    ),
    Needs(
        "microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush",
        "virtual_pipeline_model_parallel_size",
        (),
        "needs virtual pipeline stages, see --num-virtual-stages-per-pipeline-rank",
    ),
    Needs(
        "distribute_saved_activations",
        "recompute_granularity",
        ("full",),
        "needs --recompute-granularity full",
    ),
    Needs("tp_comm_*_*", "tp_comm_overlap", (True,), "needs --tp-comm-overlap"),
    Needs("tp_comm_overlap", "sequence_parallel", (True,), "needs --sequence-parallel"),
    Needs(
        "moe_deepep_* moe_hybridep_* moe_ncclep_* moe_flex_dispatcher_num_sms"
        " moe_permute_fusion_into_hybridep",
        "moe_token_dispatcher_type",
        ("flex",),
        "needs --moe-token-dispatcher-type flex",
    ),
    Needs("activation_func_clamp_value glu_linear_offset", "swiglu", (True,), "needs --swiglu"),
    Needs("use_fused_weighted_squared_relu", "squared_relu", (True,), "needs --squared-relu"),
    Needs("window_attn_skip_freq", "window_size", (), "needs --window-size"),
    Needs("mup_*", "use_mup", (True,), "needs --use-mup"),
    Needs("mtp_*", "mtp_num_layers", (), "needs --mtp-num-layers"),
    Needs("decoupled_weight_decay", "optimizer", ("adam",), "needs --optimizer adam"),
    Needs(
        "clone_scatter_output_in_embedding",
        "sequence_parallel",
        (True,),
        "needs --sequence-parallel, without which nothing is scattered",
    ),
    Needs(
        "param_name_patterns_for_fp32_local_accumulation",
        "use_megatron_fsdp",
        (False,),
        "does nothing with --use-megatron-fsdp; see --megatron-fsdp-main-grads-dtype",
    ),
    Needs(
        "perform_initialization",
        "init_model_with_meta_device",
        (False,),
        "contradicts --init-model-with-meta-device, which initialises",
    ),
)
"""As `not_built.NEEDS`, with patterns: no release has all of these fields."""


def check_further_fields(check: Check) -> None:
    """Refuse what this program, machine or release of Megatron-Core cannot honour, by name."""
    refuse_absent_values(check)
    further = check.further | {"tp_comm_overlap_cfg"}
    changed = [dest for dest in check.given if dest in further and check.changed(dest)]
    for dest in changed:
        reason = refusal(dest)
        if reason:
            check.problems.append(f"{check.flag(dest)}: {reason}")
        elif dest in NEEDS_ENGINE.split() and check.args.transformer_impl != "transformer_engine":
            check.problems.append(
                f"{check.flag(dest)} needs Transformer Engine, which only --transformer-impl"
                " transformer_engine on GPUs uses; leave it out"
            )
    for rule in FURTHER_NEEDS:
        for dest in changed:
            is_meant = matches(dest, rule.dests.split()) and not refusal(dest)
            if is_meant and not rule.is_met(check.args):
                check.problems.append(f"{check.flag(dest)} {rule.remedy}")


def refuse_absent_values(check: Check) -> None:
    """Refuse choices of newer releases that this release of Megatron-Core lacks."""
    for dest, lacking in absent_values().items():
        value = check.given.get(dest)
        for item in value if isinstance(value, list) else [value]:
            if item in lacking:
                check.problems.append(
                    f"{check.flag(dest)} {item}: Megatron-Core {megatron.core.__version__} has no"
                    " such choice"
                )
