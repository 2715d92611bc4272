# SPDX-License-Identifier: Apache-2.0
"""Rules between the flags of the model: sizes, attention, experts, multi-token prediction."""

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.not_built import NOT_BUILT
from megatron.pretrain.model.layer_specs import check_whole_block, named_spec


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
    check.require(
        not args.test_mode or args.normalization == "LayerNorm",
        "--test-mode compares weights and biases of norms: it needs --normalization LayerNorm",
    )
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True
    complete_sizes(check)
    complete_experts(check)
    check_tensor_parallel_sizes(check)
    check_token_prediction(check)
    check_named_spec(check)


def check_named_spec(check: Check) -> None:
    """Check that --spec names a specification of layers."""
    args = check.args
    if args.spec is None:
        return
    try:
        spec = named_spec(args.spec)
        check_whole_block(spec, args.num_layers, args.pipeline_model_parallel_size)
    except ValueError as error:
        check.problems.append(f"--spec {' '.join(check.args.spec)}: {error}")


def complete_latent_attention(check: Check) -> None:
    """Complete multi-latent attention, which has flags of its own for queries, keys and values."""
    args = check.args
    check.require(
        not args.group_query_attention,
        "--multi-latent-attention has its own keys and values: leave --group-query-attention out",
    )
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


def check_token_prediction(check: Check) -> None:
    """Check the layers that predict further tokens."""
    args = check.args
    if args.mtp_num_layers is None:
        return
    check.require(
        args.position_embedding_type in ("rope", "none"),
        "--mtp-num-layers needs --position-embedding-type rope or none, got"
        f" {args.position_embedding_type}",
    )
    check.require(
        args.recompute_method != "uniform" or args.recompute_num_layers == 1,
        "--mtp-num-layers needs --recompute-num-layers 1 with --recompute-method uniform, got"
        f" {args.recompute_num_layers}",
    )


def check_tensor_parallel_sizes(check: Check) -> None:
    """Check that tensor parallelism divides the model evenly."""
    args = check.args
    tensor, expert_tensor = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if tensor > 1:
        for dest in (
            "num_attention_heads",
            "ffn_hidden_size",
            "padded_vocab_size",
            "moe_shared_expert_intermediate_size",
        ):
            check.require_multiple(
                dest, tensor, f"--tensor-model-parallel-size {tensor} divides it"
            )
        if args.multi_latent_attention:
            check.require_multiple(
                "q_lora_rank", tensor, f"--tensor-model-parallel-size {tensor} divides it"
            )
            joint = args.kv_lora_rank + args.qk_pos_emb_head_dim
            check.require(
                joint % tensor == 0,
                f"--kv-lora-rank and --qk-pos-emb-head-dim together, {joint}, must be a multiple of"
                f" --tensor-model-parallel-size {tensor}",
            )
        groups = args.num_query_groups
        check.require(
            not args.group_query_attention
            or groups < 1
            or groups % tensor == 0
            or tensor % groups == 0,
            f"--num-query-groups {groups} must be a multiple of --tensor-model-parallel-size"
            f" {tensor}, or divide it",
        )
    if args.num_experts and expert_tensor > 1:
        why = f"--expert-tensor-parallel-size {expert_tensor} divides it"
        check.require_multiple("moe_ffn_hidden_size", expert_tensor, why)
        check.require(
            not args.add_bias_linear,
            f"experts with --expert-tensor-parallel-size {expert_tensor} have no biases: give"
            " --disable-bias-linear, or --expert-tensor-parallel-size 1",
        )


def complete_sizes(check: Check) -> None:
    """Complete the sizes that follow from hidden size, heads and sequence length."""
    args = check.args
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.seq_length and args.max_position_embeddings < args.seq_length:
        check.problems.append(
            f"--max-position-embeddings {args.max_position_embeddings} must be at least"
            f" --seq-length {args.seq_length}"
        )
    if args.hidden_size and args.ffn_hidden_size is None:
        width = 4 * args.hidden_size
        # A gated MLP has three matrices instead of two, so two thirds of the width keep the number
        # of parameters, in multiples of 64: with --hidden-size 256, 682 becomes 640.
        args.ffn_hidden_size = int(width * 2 / 3) // 64 * 64 if args.swiglu else width
        check.require(
            args.ffn_hidden_size,
            "--hidden-size is too small for --swiglu's default: give --ffn-hidden-size",
        )
    if args.hidden_size and args.num_attention_heads and args.num_attention_heads > 0:
        if args.kv_channels is None:
            check.require(
                args.hidden_size % args.num_attention_heads == 0,
                f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
                f"{args.num_attention_heads}, or give --kv-channels",
            )
            args.kv_channels = args.hidden_size // args.num_attention_heads
        if args.group_query_attention and args.num_query_groups > 0:
            check.require(
                args.num_attention_heads % args.num_query_groups == 0,
                f"--num-attention-heads {args.num_attention_heads} must be a multiple of"
                f" --num-query-groups {args.num_query_groups}",
            )


def complete_experts(check: Check) -> None:
    """Complete the settings of experts, and refuse them for a model without experts."""
    args = check.args
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, dest)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, dest, value[0])
    if args.num_experts is None:
        without = [
            check.flag(d)
            for d in check.given
            if d.startswith("moe_") and check.changed(d) and d not in NOT_BUILT
        ]
        if args.expert_model_parallel_size > 1:
            without.append(check.flag("expert_model_parallel_size"))
        if args.expert_tensor_parallel_size not in (1, args.tensor_model_parallel_size):
            check.notes.append(
                "--expert-tensor-parallel-size: there is nothing to divide, give --num-experts"
            )
            args.expert_tensor_parallel_size = args.tensor_model_parallel_size
        check.require(not without, f"without --num-experts these do nothing: {', '.join(without)}")
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
        check.notes.append(
            f"--moe-ffn-hidden-size is {args.ffn_hidden_size}, the width of dense layers"
        )
    ranks = args.expert_model_parallel_size
    if ranks > 1:
        check.require_multiple(
            "num_experts", ranks, f"--expert-model-parallel-size {ranks} divides them"
        )
    check.require(
        args.moe_layer_freq and (isinstance(args.moe_layer_freq, int) or any(args.moe_layer_freq)),
        "--moe-layer-freq gives experts to no layer: leave out --num-experts, or name at least one"
        " layer",
    )
    if isinstance(args.moe_layer_freq, list) and args.num_layers:
        check.require(
            len(args.moe_layer_freq) == args.num_layers,
            f"--moe-layer-freq names {len(args.moe_layer_freq)} layers, --num-layers"
            f" {args.num_layers}: name each once",
        )
    check_router(check)
    check_balancing(check)
    if args.moe_shared_expert_intermediate_size is None:
        for dest in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
            check.require(
                not getattr(args, dest),
                f"{check.flag(dest)} needs --moe-shared-expert-intermediate-size",
            )
    check.require(
        not args.moe_shared_expert_overlap or args.moe_token_dispatcher_type == "alltoall",
        "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall",
    )
    if args.moe_expert_capacity_factor is None:
        for dest in ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"):
            check.require(
                not check.changed(dest), f"{check.flag(dest)} needs --moe-expert-capacity-factor"
            )


def check_router(check: Check) -> None:
    """Check the number of experts that a token is sent to, their groups, and their scores."""
    args = check.args
    experts, chosen = args.num_experts, args.moe_router_topk
    groups, chosen_groups = args.moe_router_num_groups, args.moe_router_group_topk
    check.require(
        chosen <= experts, f"--moe-router-topk {chosen} must be at most --num-experts {experts}"
    )
    check.require(
        chosen != 1
        or args.moe_router_pre_softmax
        or args.moe_router_score_function != "softmax"
        or args.moe_router_load_balancing_type == "sinkhorn",
        "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one score has no"
        " gradient",
    )
    check.require(
        not args.moe_router_enable_expert_bias or args.moe_router_score_function == "sigmoid",
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
    )
    check.require(
        not check.changed("moe_router_bias_update_rate") or args.moe_router_enable_expert_bias,
        "--moe-router-bias-update-rate needs --moe-router-enable-expert-bias",
    )
    check.require(
        (groups is None) == (chosen_groups is None),
        "--moe-router-num-groups and --moe-router-group-topk need each other",
    )
    if groups and chosen_groups and min(groups, chosen_groups) > 0:
        check.require_multiple(
            "num_experts", groups, f"--moe-router-num-groups {groups} divides them"
        )
        check.require(
            chosen_groups <= groups,
            f"--moe-router-group-topk {chosen_groups} must be at most --moe-router-num-groups"
            f" {groups}",
        )
        check.require(
            chosen_groups <= chosen <= chosen_groups * max(1, experts // groups),
            f"--moe-router-topk {chosen} must be between --moe-router-group-topk {chosen_groups}"
            f" and the {chosen_groups * (experts // groups)} experts of as many groups",
        )


def check_balancing(check: Check) -> None:
    """Check the losses that balance the load of experts, and their weights."""
    args = check.args
    losses, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    num_losses = len(losses) if isinstance(losses, list) else 1
    num_weights = len(weights) if isinstance(weights, list) else 1
    check.require(
        num_losses == num_weights,
        "--moe-aux-loss-coeff needs one value for each --moe-router-load-balancing-type: got"
        f" {num_weights} for {num_losses}",
    )
    if losses in ("sinkhorn", "none"):
        check.require(
            not weights,
            f"--moe-aux-loss-coeff does nothing with --moe-router-load-balancing-type {losses}:"
            " leave it out",
        )
    balanced = {"sinkhorn", "quantile_balancing"}.isdisjoint(
        losses if isinstance(losses, list) else [losses]
    )
    check.require(
        args.moe_expert_capacity_factor is None or balanced,
        f"--moe-expert-capacity-factor does not go with --moe-router-load-balancing-type {losses}:"
        " use an aux_loss or none",
    )
