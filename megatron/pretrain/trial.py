# SPDX-License-Identifier: Apache-2.0
"""A trial of the model of a command line: its layers, small, on one rank, before the run.

Megatron-Core checks some combinations of its settings only where a layer runs.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megatron.mcore_adapter.coded_weights import PLAIN
from megatron.pretrain.arguments import CommandLineError, all_flags
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.arguments.parser import one_flag_each
from megatron.pretrain.dry_run import pretending
from megatron.pretrain.model.gpt_model import build_chunk

Parse: TypeAlias = Callable[[list[str]], tuple[argparse.Namespace, list[str]]]
"""Completes the arguments of a command line, see `parse_arguments`."""
ONE_RANK = {
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "hierarchical_context_parallel_sizes": None,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "init_model_with_meta_device": False,
    "gradient_accumulation_fusion": False,
    "defer_embedding_wgrad_compute": False,
}
"""Arguments that divide a model between ranks, with values for a single one."""
SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "kv_channels": 16,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "seq_length": 16,
    "mtp_num_layers": 1,
}
"""Sizes of which no setting depends on the value, and the most of each that a trial needs."""
ROWS = 64
"""Rows of the embedding."""
TOGGLES = ("model", "multi-latent attention", "mixture of experts")
"""Sections of --help-all whose switches may be the cure."""
PATIENCE_SECONDS = 120
"""Time that all trials of a command line may take."""
MOST_NESTED = 8
"""Backward passes inside of each other: recomputation of a layer, and of modules in it."""
NAMED = 4
"""Flags that a message names, at most."""


def small(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of a small model on one rank with the same kinds of layers."""
    values = vars(args) | PLAIN | ONE_RANK
    if args.moe_token_dispatcher_type == "flex":  # which needs several ranks
        values["moe_token_dispatcher_type"] = "alltoall"
    for name, most in SIZES.items():
        if values.get(name):
            values[name] = min(values[name], most)
    kept = layers_of_each_kind(args)
    values["num_layers"] = kept
    for name, value in vars(args).items():
        if isinstance(value, list) and len(value) == args.num_layers:  # one for each layer
            values[name] = value[:kept]
    if values["recompute_num_layers"]:
        values["recompute_num_layers"] = min(values["recompute_num_layers"], kept)
    return argparse.Namespace(**values)


def layers_of_each_kind(args: argparse.Namespace) -> int:
    """Return the number of first layers among which are a dense one and one with experts."""
    frequency = args.moe_layer_freq
    number = 1
    if args.num_experts and isinstance(frequency, list):
        has_experts = [bool(entry) for entry in frequency]
        while len(set(has_experts[:number])) < len(set(has_experts)):
            number += 1
    elif args.num_experts and frequency > 1:
        number = 2
    if isinstance(args.no_rope_freq, int):  # of which it must be a multiple
        number += -number % args.no_rope_freq
    return int(min(args.num_layers, number))


def check_model(
    args: argparse.Namespace,
    argv: Sequence[str],
    parse: Parse,
) -> None:
    """Run forward and backward of a small model, before there are process groups.

    Nothing is tried on GPUs, nor layers of Transformer Engine, which need one, nor in a program
    that has initialized the default process group itself.

    Args:
        args: completed arguments.
        argv: the words of the command line.
        parse: completes the arguments of other words, to find the flags that matter.

    Raises:
        CommandLineError: Megatron-Core cannot run the model.
    """
    needs_gpu = args.transformer_impl == "transformer_engine"
    if needs_gpu or torch.cuda.is_available() or dist.is_initialized():
        return
    # In a process of its own: layers leave scales of losses, trackers and random states behind in
    # Megatron-Core's modules. It has the modules that are loaded, and ends without cleaning up.
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, problem_of(args, list(argv), parse).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        problem = pipe.read()
    os.waitpid(process, 0)
    if problem:
        raise CommandLineError([problem])


def problem_of(
    args: argparse.Namespace,
    argv: list[str],
    parse: Parse,
) -> str:
    """Return the error of a small model with the flags that cure it, or an empty text.

    Args:
        args: completed arguments.
        argv: the words of the command line.
        parse: completes the arguments of other words.
    """
    gc.freeze()  # garbage of the process, such as groups with threads, is not collected in a fork
    signal.alarm(PATIENCE_SECONDS)  # ends the process, which then reports nothing
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no threads of those that were there
    error = error_of(args)
    if error is None:
        return ""
    cures = ", ".join(list(cures_of(argv, parse))[:NAMED]) or "no change of one flag"
    return (
        f"Megatron-Core cannot run this model: {type(error).__name__}: {error}\n"
        f"     What makes a small model of this kind run: {cures}"
    )


def error_of(args: argparse.Namespace) -> Exception | None:
    """Return the error of a small model, if it has one."""
    try:
        tried = small(args)
        with pretending(tried, stage=0), bounded_recomputation():
            run(tried)
    except Exception as error:  # of any kind: it would end the run too
        return error
    return None


def run(args: argparse.Namespace) -> None:
    """Build a model, and run a forward and a backward of one sample."""
    model = build_chunk(args, transformer_config(args), ROWS, torch.device("cpu"), None)
    length = args.seq_length
    positions = torch.arange(length)[None]
    tokens = positions % ROWS
    mask = None
    if args.create_attention_mask_in_dataloader:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    weights = torch.ones(1, length)
    model(tokens, positions, mask, labels=tokens, loss_mask=weights).sum().backward()


@contextmanager
def bounded_recomputation() -> Iterator[None]:
    """Raise an error where recomputation begins itself again without end.

    It does where a recomputed layer returns a weight, which then has the recomputation as its
    history.
    """
    backward = torch.autograd.backward
    depth = 0

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        if depth > MOST_NESTED:
            raise RecursionError("the backward of a recomputed layer begins itself again")
        try:
            backward(*args, **kwargs)
        finally:
            depth -= 1

    torch.autograd.backward = count
    try:
        yield
    finally:
        torch.autograd.backward = backward


def cures_of(argv: list[str], parse: Parse) -> Iterator[str]:
    """Yield the changes of single flags with which a small model runs."""
    flags = one_flag_each(argv)
    given = {words[0] for words in flags}
    tried = {}
    for flag in switches():
        if flag not in given:
            tried[f"with {flag}"] = [*argv, flag]
    for number, words in enumerate(flags):
        others = flags[:number] + flags[number + 1 :]
        tried[f"without {words[0]}"] = list(chain.from_iterable(others))
    for change, words in tried.items():
        try:
            args, _ = parse(words)
        except CommandLineError:
            continue
        if error_of(args) is None:
            yield change


def switches() -> Iterator[str]:
    """Yield the flags without a value that change a model."""
    groups = all_flags()
    for section in TOGGLES:
        for flag in groups[section]:
            if flag.kind != "value":
                yield flag.names[0]
