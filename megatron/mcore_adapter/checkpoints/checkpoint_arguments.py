# SPDX-License-Identifier: Apache-2.0
"""Comparison of a checkpoint's arguments with those of the run that loads it.

Weights fit wherever their names and shapes do, but mean something else with another number of
attention heads, another activation, or another choice of experts. Such arguments must agree. Others
may differ, such as the seed and the schedule. Arguments that the checkpoint lacks are not compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_arguments import (
    ARGUMENTS,
    Argument,
    completed,
    layers_with_experts,
    num_query_groups,
)
from megatron.checkpoint.hugging_face.model_directory import is_model_directory
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, COMMON_OBJECT, read_common
from megatron.mcore_adapter.run.first_rank import Log, on_first_rank

CAPACITY = (
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_expert_rank_capacity_factor",
)
SEEN_IN_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "max_position_embeddings",
    "padded_vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
)
"""Arguments that determine shapes: the loaders refuse other ones, and name the tensors."""
ACTIVATION = ("swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")
PARTS_OF_OTHERS = (*ACTIVATION, "group_query_attention", "apply_layernorm_1p")
"""Arguments that follow from others, or that are compared together with others."""

MAY_DIFFER = """seed seq_length global_batch_size rampup_batch_size train_iters train_samples
    optimizer lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters
    lr_warmup_samples lr_warmup_fraction lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples
    lr_wsd_decay_style start_weight_decay end_weight_decay weight_decay_incr_style clip_grad
    adam_beta1 adam_beta2 adam_eps sgd_momentum bf16 fp16 fp8 fp4 attention_dropout hidden_dropout
    moe_router_dtype moe_aux_loss_coeff moe_router_load_balancing_type moe_z_loss_coeff
    moe_input_jitter_eps mtp_loss_scaling_factor calculate_per_token_loss data_path train_data_path
    split tokenizer_type tokenizer_model vocab_size vocab_file merge_file tiktoken_pattern fim_data
    grad_norm_skip_threshold mtp_detach_heads moe_router_quantile_balancing_ema
    moe_router_force_biased moe_router_bias_update_rate decoupled_lr decoupled_min_lr
    apply_wd_to_qk_layernorm eod_mask_loss reset_position_ids reset_attention_mask mock_data
    data_args_path per_split_data_args_path fp32_residual_connection"""
"""Arguments of training and data, whose differences are printed and are no errors."""


def means_something(argument: Argument) -> bool:
    """Return True if what the model computes depends on the argument, beyond rounding."""
    return argument.in_outputs or argument.name in CAPACITY


def is_stored(argument: Argument, saved: argparse.Namespace) -> bool:
    """Return True if the file's arguments have this one, under its name or that of its flag."""
    return argument.name in saved or argument.name_of_flag in saved


# ---- reading


def stored_arguments(source: Path) -> argparse.Namespace | None:
    """Read the arguments of the run that wrote a checkpoint; None if the file has none.

    Raises:
        ValueError: the file is damaged.
    """
    if is_model_directory(source):
        return hugging_face.read(source).args
    # Objects have checksums of their own; digests would read files of tensors as a whole.
    stored = StoredCheckpoint(source, verify=False)
    arguments = None
    if "args" in stored.objects:
        arguments = stored.read_object("args")
    elif (source / COMMON_FILE).is_file() or COMMON_OBJECT in stored.objects:
        arguments = read_common(stored).get("args")
    return arguments if isinstance(arguments, argparse.Namespace) else None


# ---- comparing


@dataclass(frozen=True)
class Setting:
    """A property of the model that names and shapes of weights do not show.

    Attributes:
        label: name in messages, in most cases its flag.
        parts: arguments that determine it.
        value: function of complete arguments that returns its value, the same for all spellings.
    """

    label: str
    parts: tuple[Argument, ...]
    value: Callable[[argparse.Namespace], Any]

    def is_stored(self, saved: argparse.Namespace) -> bool:
        """Return True if the file's arguments have all parts."""
        return all(is_stored(part, saved) for part in self.parts)

    def difference(self, saved: argparse.Namespace, own: argparse.Namespace) -> str | None:
        """Describe the difference between two complete sets of arguments, if both use it."""
        counts = self.parts[0].counts
        if not (counts(saved) and counts(own)):
            return None  # neither uses it, or what it depends on differs and is reported
        saved_value = self.value(saved)
        own_value = self.value(own)
        if saved_value == own_value:
            return None
        return _difference_line(self.label, saved_value, own_value)


def _difference_line(
    label: str,
    saved_value: Any,
    own_value: Any,
) -> str:
    return f"{label}: {saved_value} in the file, {own_value} in this run"


def settings() -> Iterator[Setting]:
    """Yield the settings that must agree."""
    by_name = {argument.name: argument for argument in ARGUMENTS}
    left_out = {*SEEN_IN_SHAPES, *PARTS_OF_OTHERS}
    for argument in ARGUMENTS:
        if means_something(argument) and argument.name not in left_out:
            value = ONE_SPELLING.get(argument.name, _value_of(argument.name))
            yield Setting(argument.spelling, (argument,), value)
    groups = (by_name["group_query_attention"], by_name["num_query_groups"])
    yield Setting("keys and values (--num-query-groups)", groups, num_query_groups)
    yield Setting("--spec", (Argument("spec"),), _value_of("spec"))
    yield Setting("activation", tuple(by_name[name] for name in ACTIVATION), activation)


def _value_of(name: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: getattr(args, name)


def activation(args: argparse.Namespace) -> str:
    """Return the name of the MLP's activation."""
    if args.swiglu:
        return "SwiGLU"
    if args.squared_relu:
        return "squared ReLU"
    is_fused = args.bias_gelu_fusion and args.add_bias_linear
    if args.openai_gelu or is_fused:  # the fused GELU computes the tanh formula
        return "GELU by its tanh formula"
    return "exact GELU"


def softmax_scale(args: argparse.Namespace) -> float | None:
    """Return the factor of attention scores, None for the default one."""
    scale: float | None = args.softmax_scale
    is_default = args.kv_channels and scale == args.kv_channels**-0.5
    if args.multi_latent_attention or is_default:
        return None
    return scale


def layers_without_rotation(args: argparse.Namespace) -> list[int]:
    """Return for every layer 1 if it does not rotate queries and keys, else 0."""
    pattern = args.no_rope_freq or [0]
    if isinstance(pattern, int):  # 4: three layers rotate, the fourth does not, and so on
        pattern = [0] * (pattern - 1) + [1]
    without = []
    for number in range(args.num_layers):
        without.append(pattern[number % len(pattern)])
    return without


ONE_SPELLING: dict[str, Callable[[argparse.Namespace], Any]] = {
    "add_bias_linear": lambda args: not args.add_bias_linear,  # as --disable-bias-linear has it
    "mtp_num_layers": lambda args: args.mtp_num_layers or 0,
    "softmax_scale": softmax_scale,
    "no_rope_freq": layers_without_rotation,
    "moe_layer_freq": layers_with_experts,
    "window_size": lambda args: args.window_size and tuple(args.window_size),
    "rope_type": lambda args: args.rope_type or "yarn",
    "moe_router_topk_scaling_factor": lambda args: args.moe_router_topk_scaling_factor or 1.0,
}
"""Argument with several spellings of one value -> function that returns the same for them all."""
BY_LAYER = ("no_rope_freq", "moe_layer_freq")
"""Arguments with a value for each layer, compared only between models of the same depth."""


def model_differences(saved: argparse.Namespace, own: argparse.Namespace) -> list[str]:
    """List the settings of the model that differ, with the values of the file and of this run."""
    is_same_depth = getattr(saved, "num_layers", None) == own.num_layers
    complete_saved = completed(saved)
    complete_own = completed(own)
    lines = []
    for setting in settings():
        if not setting.is_stored(saved):
            continue
        if setting.parts[0].name in BY_LAYER and not is_same_depth:
            continue
        line = setting.difference(complete_saved, complete_own)
        if line is not None:
            lines.append(line)
    return lines


def training_differences(saved: argparse.Namespace, own: argparse.Namespace) -> list[str]:
    """List the arguments that may differ and do, with the values of the file and of this run."""
    lines = []
    for name in MAY_DIFFER.split():
        if name not in saved or name not in own:
            continue
        saved_value = getattr(saved, name)
        own_value = getattr(own, name)
        if saved_value != own_value:
            flag = f"--{name.replace('_', '-')}"
            lines.append(_difference_line(flag, saved_value, own_value))
    return lines


def check_arguments(
    source: Path,
    args: argparse.Namespace,
    log: Log,
) -> None:
    """Refuse a checkpoint whose weights mean something else in this run; a collective.

    Print one line about arguments that differ and may do so.

    Args:
        source: directory of the checkpoint, whose arguments the first rank reads.
        args: arguments of this run.
        log: prints a line on the first rank.

    Raises:
        ValueError: on every rank, listing the values of the file and of this run.
    """
    harmless = on_first_rank(lambda: _compared(source, args))
    if harmless:
        log(f"arguments that may differ from those of {source}, and do: {'; '.join(harmless)}")


def _compared(source: Path, args: argparse.Namespace) -> list[str]:
    """Return the differences that are allowed.

    Raises:
        ValueError: other arguments differ too, or some cannot be compared.
    """
    saved = stored_arguments(source)
    if saved is None:
        return []
    try:
        different = model_differences(saved, args)
        harmless = training_differences(saved, args)
    except Exception as error:  # values of no sensible type
        raise ValueError(f"{source}: its arguments cannot be compared: {error!r}") from error
    if different:
        lines = "\n  ".join(different)
        raise ValueError(
            f"{source} is a checkpoint of another model, whose weights would mean something else"
            f" here:\n  {lines}\n--use-checkpoint-args takes the file's values,"
            " --no-check-checkpoint-args keeps this run's"
        )
    return harmless
