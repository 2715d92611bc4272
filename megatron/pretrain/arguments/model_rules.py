# SPDX-License-Identifier: Apache-2.0
"""Rules between the flags of the model: sizes, attention, experts, multi-token prediction.

What Megatron-Core's config checks itself is left to it.
"""

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.flags import DIVIDED


def complete_model(check: Check) -> None:
    """Complete the settings of the model, and check the rules between them."""
    args = check.args
    check.at_most_one("swiglu", "squared_relu", "openai_gelu")
    if args.use_rotary_position_embeddings:
        other = check.given.get("position_embedding_type", "rope")
        check.require(
            other == "rope",
            f"--use-rotary-position-embeddings contradicts --position-embedding-type {other}",
        )
        args.position_embedding_type = "rope"
    if args.recompute_activations:
        check.require(
            args.recompute_granularity != "full",
            "--recompute-activations means --recompute-granularity selective, not full: leave"
            " one out",
        )
        args.recompute_granularity = args.recompute_granularity or "selective"
    if args.position_embedding_type != "rope":
        args.apply_rope_fusion = False
    if args.multi_latent_attention:
        complete_latent_attention(check)
    if args.squared_relu or args.openai_gelu or not args.add_bias_linear:
        args.bias_gelu_fusion = False
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True
    complete_experts(check)
    check.require(
        not args.mtp_num_layers
        or args.recompute_method != "uniform"
        or args.recompute_num_layers == 1,
        "--mtp-num-layers needs --recompute-num-layers 1 with --recompute-method uniform, got"
        f" {args.recompute_num_layers}",
    )


def complete_latent_attention(check: Check) -> None:
    """Complete multi-latent attention, which has flags of its own for queries, keys and values."""
    args = check.args
    if check.changed("kv_channels"):
        check.notes.append(
            "--kv-channels does nothing with --multi-latent-attention: --qk-head-dim,"
            " --qk-pos-emb-head-dim and --v-head-dim size its heads"
        )
    args.rope_type = args.rope_type or "yarn"
    if args.rope_type == "rope":
        args.apply_rope_fusion = False
        check.require(not check.changed("mscale"), "--mscale needs --rope-type yarn")
    else:
        check.require(
            not check.changed("rotary_percent"),
            "--rotary-percent needs --rope-type rope: yarn rotates all of it",
        )


def complete_experts(check: Check) -> None:
    """Complete the settings of experts, and refuse them for a model without experts."""
    args = check.args
    losses = args.moe_router_load_balancing_type
    weights = args.moe_aux_loss_coeff
    if isinstance(losses, list) and len(losses) == 1:
        args.moe_router_load_balancing_type = losses[0]
    if isinstance(weights, list) and len(weights) == 1:
        args.moe_aux_loss_coeff = weights[0]
    if args.num_experts is None:
        without = [d for d in check.given if d.startswith("moe_") and check.changed(d)]
        flags = ", ".join(map(check.flag, without))
        check.require(not without, f"without --num-experts these do nothing: {flags}")
        for dest in without:
            check.set_default(dest)
        if args.expert_tensor_parallel_size not in (None, 1, args.tensor_model_parallel_size):
            check.notes.append(
                "--expert-tensor-parallel-size: there is nothing to divide, give --num-experts"
            )
            args.expert_tensor_parallel_size = args.tensor_model_parallel_size
        return
    check.require(
        isinstance(args.moe_router_load_balancing_type, list)
        or not isinstance(args.moe_aux_loss_coeff, list),
        "--moe-aux-loss-coeff needs one value for each --moe-router-load-balancing-type",
    )
    check.require(
        args.moe_layer_freq and (isinstance(args.moe_layer_freq, int) or any(args.moe_layer_freq)),
        "--moe-layer-freq gives experts to no layer: leave out --num-experts, or name at least one"
        " layer",
    )


def complete_sizes(check: Check) -> None:
    """Complete the sizes that follow from others, and check that they can be divided."""
    args = check.args
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    check.require(
        args.max_position_embeddings >= args.seq_length,
        f"--max-position-embeddings {args.max_position_embeddings} must be at least"
        f" --seq-length {args.seq_length}",
    )
    if args.ffn_hidden_size is None:
        width = 4 * args.hidden_size
        # A gated MLP has three matrices instead of two, so two thirds of the width keep the number
        # of parameters, in multiples of 64: with --hidden-size 256, 682 becomes 640.
        args.ffn_hidden_size = int(width * 2 / 3) // 64 * 64 if args.swiglu else width
        check.require(
            args.ffn_hidden_size,
            "--hidden-size is too small for --swiglu's default: give --ffn-hidden-size",
        )
    heads = args.num_attention_heads
    if args.kv_channels is None:
        check.require(
            args.hidden_size % heads == 0,
            f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
            f"{heads}, or give --kv-channels",
        )
        args.kv_channels = args.hidden_size // heads
    check.require(
        not args.group_query_attention or heads % args.num_query_groups == 0,
        f"--num-attention-heads {heads} must be a multiple of --num-query-groups"
        f" {args.num_query_groups}",
    )
    if args.num_experts is not None:
        complete_expert_sizes(check)
    check_tensor_parallel_sizes(check)


def complete_expert_sizes(check: Check) -> None:
    """Complete the width of experts, and check their number and the number that a token takes."""
    args = check.args
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
        check.notes.append(
            f"--moe-ffn-hidden-size is {args.ffn_hidden_size}, the width of dense layers"
        )
    ranks = args.expert_model_parallel_size
    check.require_multiple("num_experts", ranks, f"--expert-model-parallel-size {ranks} divides it")
    for dest in ("expert_data_parallel_sharding_strategy", "expert_outer_dp_sharding_strategy"):
        # A search for settings asks for the model on one rank, before it chooses their sizes.
        check.require(
            getattr(args, dest) is None or ranks > 1 or check.machine.world_size == 1,
            f"{check.flag(dest)} is for experts that have a mesh of their own: give"
            " --expert-model-parallel-size, at least 2",
        )
    if isinstance(args.moe_layer_freq, list):
        check.require(
            len(args.moe_layer_freq) == args.num_layers,
            f"--moe-layer-freq names {len(args.moe_layer_freq)} layers, --num-layers"
            f" {args.num_layers}: name each once",
        )
    experts = args.num_experts
    chosen = args.moe_router_topk
    check.require(
        chosen <= experts, f"--moe-router-topk {chosen} must be at most --num-experts {experts}"
    )
    groups = args.moe_router_num_groups
    chosen_groups = args.moe_router_group_topk
    if groups and chosen_groups and chosen_groups <= groups:
        check.require(
            chosen_groups <= chosen <= chosen_groups * max(1, experts // groups),
            f"--moe-router-topk {chosen} must be between --moe-router-group-topk {chosen_groups}"
            f" and the {chosen_groups * (experts // groups)} experts of as many groups",
        )


def check_tensor_parallel_sizes(check: Check) -> None:
    """Check that tensor parallelism divides the model evenly."""
    args = check.args
    tensor = args.tensor_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size
    for dest, flag in check.flags.items():
        if DIVIDED in flag.rules:
            why = f"--tensor-model-parallel-size {tensor} divides it"
            check.require_multiple(dest, tensor, why)
    joint = args.kv_lora_rank + args.qk_pos_emb_head_dim
    check.require(
        not args.multi_latent_attention or joint % tensor == 0,
        f"--kv-lora-rank and --qk-pos-emb-head-dim together, {joint}, must be a multiple of"
        f" --tensor-model-parallel-size {tensor}",
    )
    if args.num_experts:
        check.require_multiple(
            "moe_ffn_hidden_size",
            expert_tensor,
            f"--expert-tensor-parallel-size {expert_tensor} divides it",
        )
