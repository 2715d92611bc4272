# SPDX-License-Identifier: Apache-2.0
"""The rule of --use-checkpoint-args, which comes before all others."""

from __future__ import annotations

import argparse

from megatron.checkpoint.hugging_face.model_arguments import ARGUMENTS, Argument, completed
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.checkpoint_arguments import is_stored, means_something, stored_arguments
from megatron.pretrain.checkpoint_source import find_source

LEFT_TO_THE_RUN = ("bf16", "fp16", "apply_layernorm_1p")
"""Precision is no property of weights. The last is another name of an argument that is taken."""
UNLESS_GIVEN = ("max_position_embeddings", "padded_vocab_size")
"""Sizes that a run may choose anew, like arguments of training such as dropout."""


def take_checkpoint_arguments(check: Check) -> None:
    """Give the model's arguments the values in the checkpoint, as if the command line had them."""
    args = check.args
    if not args.use_checkpoint_args or not (args.load or args.pretrained_checkpoint):
        return
    try:
        # What it passes over is told by the load, which passes over the same.
        source = find_source(args, lambda line: None, {})
        saved = stored_arguments(source.path) if source else None
    except (ValueError, OSError) as error:
        check.problems.append(f"--use-checkpoint-args: {error}")
        return
    if source is None:
        check.notes.append(f"--use-checkpoint-args: {args.load} has no checkpoint yet")
        return
    if saved is None:
        check.problems.append(f"--use-checkpoint-args: {source.path} has no arguments")
        return
    replaced = _take(check, saved)
    instead = f", instead of {', '.join(replaced)}" if replaced else ""
    check.notes.append(f"--use-checkpoint-args: the model is that of {source.path}{instead}")


def _take(check: Check, saved: argparse.Namespace) -> list[str]:
    """Take the arguments that a checkpoint has, and return the given flags that lose by it."""
    whole = completed(saved)
    replaced = []
    for argument in (*ARGUMENTS, Argument("seq_length", in_outputs=False)):
        dest = argument.name
        if dest in LEFT_TO_THE_RUN or not is_stored(argument, saved):
            continue
        is_forced = means_something(argument) and dest not in UNLESS_GIVEN
        if dest in check.given and not is_forced:
            continue
        value = getattr(whole, dest) if argument.counts(whole) else argument.default
        if dest not in check.defaults:
            check.require(
                value == argument.default,
                f"--use-checkpoint-args: the file's {dest} {value} has no flag here",
            )
            continue
        if dest in check.given and check.given[dest] != value:
            given = check.given[dest]
            shown = "" if isinstance(given, bool) else f" {given}"
            replaced.append(check.flag(dest) + shown)
        setattr(check.args, dest, value)
        check.given[dest] = value
        if dest == "position_embedding_type" and check.args.use_rotary_position_embeddings:
            # The older spelling of one value, rope.
            check.args.use_rotary_position_embeddings = False
            if value != "rope":
                replaced.append("--use-rotary-position-embeddings")
    return replaced
