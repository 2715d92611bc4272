# SPDX-License-Identifier: Apache-2.0
"""The text of --help, with the flags that people need, and of --help-all, one line a flag."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.pretrain.arguments.flags import Flag

COMMON = """use_megatron_fsdp data_parallel_sharding_strategy num_distributed_optimizer_instances lr
    num_layers hidden_size num_attention_heads swiglu position_embedding_type normalization
    num_experts tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size bf16 seq_length micro_batch_size global_batch_size train_iters
    data_path tokenizer_type tokenizer_model save load save_interval dry_run"""
"""Destinations that --help shows."""
WIDTH = 100
START_OF_HELP = 46
"""Columns of the text, and the column at which the help of a flag begins."""

HEAD = """usage: torchrun --nproc_per_node RANKS pretrain_gpt.py FLAGS

Train a GPT model with Megatron-Core."""
END_OF_COMMON = """
--help-all lists all flags. --dry-run checks a command line and prints what follows from it."""


def help_text(
    groups: Mapping[str, Sequence[Flag]], reason_of: Callable[[Flag], str | None], is_all: bool
) -> str:
    """Return the flags of every group, one line each, with type, help and default.

    Args:
        groups: flags by the title of their group.
        reason_of: says why a flag is refused, or None.
        is_all: show all flags instead of those of `COMMON`.
    """
    lines = [HEAD]
    common = COMMON.split()
    for title, flags in groups.items():
        shown = [flag for flag in flags if is_all or flag.dest in common]
        if shown:
            lines += ["", f"{title}:", *(line_of(flag, reason_of(flag)) for flag in shown)]
    return "\n".join(lines if is_all else [*lines, END_OF_COMMON])


def line_of(flag: Flag, reason: str | None) -> str:
    """Return the line of a flag; the help of a refused one is the reason."""
    words = " ".join([flag.names[0], *value_words(flag)])
    text = f"[only the default: {reason}]" if reason else flag.help
    # The docstrings of Megatron-Core have several sentences; the first says what a field is.
    text = re.split(r"(?<=[a-z\])])\. ", text)[0].rstrip(".")
    if flag.kind == "value" and flag.default not in (None, "", []) and not reason:
        default = f" (default: {getattr(flag.default, 'name', flag.default)})"
    else:
        default = ""
    room = WIDTH - START_OF_HELP - len(default)
    text = text if len(text) <= room else f"{text[: max(room, 3) - 3]}..."
    return f"  {words:<{START_OF_HELP - 4}}  {text}{default}".rstrip()


def value_words(flag: Flag) -> Iterator[str]:
    """Yield the words that stand for a flag's values."""
    if flag.kind != "value":
        return
    if flag.choices and len(flag.choices) < 3:
        yield "|".join(str(getattr(choice, "name", choice)) for choice in flag.choices)
    elif flag.type in (int, float):
        yield "N" if flag.type is int else "X"
    else:
        yield "WORD"
    if flag.nargs:
        yield "..."
