# SPDX-License-Identifier: Apache-2.0
"""Arguments of a run that define its model: their defaults in Megatron-LM, and their flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any


def _always(args: Namespace) -> bool:
    return True


def _with(name: str) -> Callable[[Namespace], bool]:
    return lambda args: bool(getattr(args, name))


_latent = _with("multi_latent_attention")
_grouped = _with("group_query_attention")
_stretched = _with("use_rope_scaling")
_windowed = _with("window_size")
_mup = _with("use_mup")
_experts = _with("num_experts")


def _not_latent(args: Namespace) -> bool:
    return not args.multi_latent_attention


def _own_bias_of_qkv(args: Namespace) -> bool:
    # With add_bias_linear every linear layer has a bias, and this argument is set too.
    return not args.multi_latent_attention and not args.add_bias_linear


def _yarn(args: Namespace) -> bool:
    return bool(args.multi_latent_attention) and args.rope_type != "rope"


def _rotary(args: Namespace) -> bool:
    return bool(args.position_embedding_type == "rope")


def _rotates(args: Namespace) -> bool:
    return _rotary(args) or _latent(args)


def _limited(args: Namespace) -> bool:
    return _experts(args) and args.moe_expert_capacity_factor is not None


def _plain_gelu(args: Namespace) -> bool:
    others = args.swiglu or args.squared_relu or args.openai_gelu
    return bool(args.add_bias_linear) and not others


@dataclass(frozen=True)
class Argument:
    """One destination of the command line.

    Attributes:
        name: the destination.
        default: default of Megatron-LM.
        flag: flag of the command line; default: its name. It is a switch if the default is True or
            False.
        counts: arguments -> True if this one has any meaning with the others; else its value is no
            part of the model.
        in_outputs: outputs of the trained model depend on it, beyond rounding.
        in_megatron_lm: Megatron-LM's command line has the flag.
    """

    name: str
    default: Any = None
    flag: str = ""
    counts: Callable[[Namespace], bool] = _always
    in_outputs: bool = True
    in_megatron_lm: bool = True

    @property
    def spelling(self) -> str:
        """The flag of the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def name_of_flag(self) -> str:
        """The flag as a name, under which some programs store the argument."""
        return self.spelling.removeprefix("--").replace("-", "_")

    def default_in(self, known: Mapping[str, Any]) -> Any:
        """Return the default, which can depend on other arguments.

        Some programs store an argument under the name of its flag: ``norm_epsilon`` is
        ``layernorm_epsilon``, ``disable_bias_linear`` True means ``add_bias_linear`` False.
        """
        stored = known.get(self.name_of_flag)
        if isinstance(self.default, bool):
            return self.default != (stored is True)
        if stored is None:
            return self.default
        return stored

    def words(self, value: Any) -> list[str]:
        """Return words of a command line that set it to ``value``.

        A number of the model is written even if it is the default: the words can follow a script
        that sets another one, such as ``--rotary-base``.
        """
        if value is None or (value == self.default and not self._is_number_of_model):
            return []
        if isinstance(self.default, bool):
            return [self.spelling]
        return [self.spelling, _as_written(value)]

    @property
    def _is_number_of_model(self) -> bool:
        # type(), because True and False are integers too.
        return type(self.default) in (int, float) and self.in_outputs and self.in_megatron_lm


ARGUMENTS: tuple[Argument, ...] = (
    Argument("num_layers"),
    Argument("hybrid_layer_pattern"),
    Argument("hidden_size"),
    Argument("ffn_hidden_size"),
    Argument("num_attention_heads"),
    Argument("kv_channels", counts=_not_latent),
    Argument("group_query_attention", False),
    Argument("num_query_groups", 1, counts=_grouped),
    Argument("max_position_embeddings"),
    Argument("padded_vocab_size"),
    Argument("untie_embeddings_and_output_weights", False),
    Argument("position_embedding_type", "learned_absolute"),
    Argument("rotary_base", 10000, counts=_rotates),
    Argument("rotary_percent", 1.0, counts=_rotates),
    Argument("rotary_interleaved", False, counts=_rotary),
    Argument("use_rope_scaling", False, counts=_rotary),
    Argument("rope_scaling_factor", 8.0, counts=_stretched),
    Argument("rotary_seq_len_interpolation_factor", counts=_rotary),
    Argument("no_rope_freq", counts=_rotary),
    Argument("normalization", "LayerNorm"),
    Argument("layernorm_epsilon", 1e-5, "--norm-epsilon"),
    Argument("layernorm_zero_centered_gamma", False, "--apply-layernorm-1p"),
    Argument("apply_layernorm_1p", False),  # Megatron-LM's own destination of the same flag
    Argument("swiglu", False),
    Argument("squared_relu", False),
    Argument("openai_gelu", False),
    Argument("glu_linear_offset", 0.0),
    Argument("activation_func_clamp_value"),
    # The fused GELU is the tanh formula.
    Argument("bias_gelu_fusion", True, "--no-bias-gelu-fusion", counts=_plain_gelu),
    Argument("add_bias_linear", True, "--disable-bias-linear"),
    Argument("add_qkv_bias", False, counts=_own_bias_of_qkv),
    Argument("qk_layernorm", False),
    Argument("qk_l2_norm", False),
    Argument("window_size"),
    Argument("window_attn_skip_freq", counts=_windowed),
    Argument("softmax_type", "vanilla"),
    Argument("softmax_scale"),
    Argument("attention_dropout", 0.1, in_outputs=False),
    Argument("hidden_dropout", 0.1, in_outputs=False),
    Argument("init_method_std", 0.02, in_outputs=False),
    Argument("multi_latent_attention", False),
    Argument("q_lora_rank", counts=_latent),
    Argument("kv_lora_rank", 32, counts=_latent),
    Argument("qk_head_dim", 128, counts=_latent),
    Argument("qk_pos_emb_head_dim", 64, counts=_latent),
    Argument("v_head_dim", 128, counts=_latent),
    Argument("rope_type", counts=_latent),
    Argument("rotary_scaling_factor", 1.0, counts=_latent),
    Argument("mscale", 1.0, counts=_yarn),
    Argument("mscale_all_dim", 0.0, counts=_latent),
    # Megatron-LM has no flags for these, but its config takes them from arguments of these names.
    Argument("original_max_position_embeddings", 4096, counts=_yarn, in_megatron_lm=False),
    Argument("beta_fast", 32, counts=_yarn, in_megatron_lm=False),
    Argument("beta_slow", 1, counts=_yarn, in_megatron_lm=False),
    Argument("num_experts"),
    Argument("moe_ffn_hidden_size", counts=_experts),
    Argument("moe_layer_freq", 1, counts=_experts),
    Argument("moe_shared_expert_intermediate_size", counts=_experts),
    Argument("moe_shared_expert_gate", False, counts=_experts),
    Argument("moe_router_topk", 2, counts=_experts),
    Argument("moe_router_score_function", "softmax", counts=_experts),
    Argument("moe_router_pre_softmax", False, counts=_experts),
    Argument("moe_router_num_groups", counts=_experts),
    Argument("moe_router_group_topk", counts=_experts),
    Argument("moe_router_topk_scaling_factor", counts=_experts),
    Argument("moe_router_enable_expert_bias", False, counts=_experts),
    Argument("moe_apply_probs_on_input", False, counts=_experts),
    Argument("moe_router_dtype", counts=_experts, in_outputs=False),
    # No model of transformers drops tokens; an export leaves the capacity out.
    Argument("moe_expert_capacity_factor", counts=_experts, in_outputs=False),
    Argument("moe_pad_expert_input_to_capacity", False, counts=_limited, in_outputs=False),
    Argument("moe_token_drop_policy", "probs", counts=_limited, in_outputs=False),
    Argument("moe_expert_rank_capacity_factor", counts=_experts, in_outputs=False),
    Argument("mtp_num_layers"),
    Argument("use_mup", False),
    Argument("mup_base_hidden_size", counts=_mup),
    Argument("mup_base_head_dim", counts=_mup),
    Argument("mup_embedding_mult", 1.0, counts=_mup),
    Argument("mup_output_mult", 1.0, counts=_mup),
    Argument("mup_attn_scale_power", 1.0, counts=_mup),
    Argument("bf16", False, in_outputs=False),
    Argument("fp16", False, in_outputs=False),
)
"""Arguments that define a model.

Those that only concern its training, such as losses that balance experts, are not here.
"""


def completed(args: Namespace) -> Namespace:
    """Return a copy with defaults for missing arguments, and sizes that follow from others."""
    known = vars(args)
    defaults = {}
    for argument in ARGUMENTS:
        defaults[argument.name] = argument.default_in(known)
    args = Namespace(**(defaults | known))
    args.group_query_attention = bool(args.group_query_attention)
    if args.kv_channels is None and args.hidden_size and args.num_attention_heads:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.num_experts and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    return args


def layers_with_experts(args: Namespace) -> list[int]:
    """Return for every layer 1 if its MLP is made of experts, else 0.

    ``moe_layer_freq`` is such a list, or a number: with 3 layers 0, 3, 6 and so on have experts.
    """
    if not args.num_experts:
        return [0] * args.num_layers
    pattern = getattr(args, "moe_layer_freq", 1)
    if not isinstance(pattern, int):
        return list(pattern)
    has_experts = []
    for number in range(args.num_layers):
        has_experts.append(int(number % pattern == 0))
    return has_experts


def num_query_groups(args: Namespace) -> int:
    """Return how many keys, each with a value, a layer of attention has."""
    groups: int = args.num_attention_heads
    if args.group_query_attention:
        groups = args.num_query_groups
    return groups


def model_flags(args: Namespace) -> list[str]:
    """Return the words of a command line of pretrain_gpt.py that build the model of ``args``.

    Flags that only concern its training are not among them.
    """
    args = completed(args)
    words_of: dict[str, list[str]] = {}  # by flag, because two destinations can have the same
    for argument in ARGUMENTS:
        if argument.counts(args):
            words = argument.words(getattr(args, argument.name))
            if words:
                words_of[words[0]] = words
    return [*chain(*words_of.values())]


def _as_written(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    # [0, 1, 1] is written as ([0]*1+[1]*2).
    lists = [f"[{item}]*{len(list(equal))}" for item, equal in groupby(value)]
    return f"({'+'.join(lists)})"
