# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face models, and their tensors paired with those of Megatron-Core.

A family is a ``model_type`` as data, which works in both directions. It is a table of
:class:`TensorRow`, each of which pairs one tensor of ours, by its canonical name, with one or
several of theirs, and has a :class:`Rearrangement`; and rules of its settings
(:mod:`megatron.checkpoint.hugging_face.setting_rules`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape, concatenate, zeros
from megatron.checkpoint.core.spelling import INNER_LAYER
from megatron.checkpoint.hugging_face.model_arguments import (
    ARGUMENTS,
    completed,
    layers_with_experts,
    num_query_groups,
)
from megatron.checkpoint.hugging_face.setting_rules import (
    FP8_IN_BLOCKS,
    Config,
    SettingRule,
    in_words,
    only,
)


@dataclass(frozen=True)
class Rearrangement:
    """Functions between one tensor of ours and those of theirs that it consists of.

    Attributes:
        merge: theirs, in the order of the row's names -> ours.
        split: ours -> theirs.
        shapes: shape of ours -> shapes of theirs.
    """

    merge: Callable[[Sequence[LazyTensor], Namespace], LazyTensor]
    split: Callable[[LazyTensor, Namespace], list[LazyTensor]]
    shapes: Callable[[Shape, Namespace], list[Shape]]


# ---- heads of attention


def _group_widths(args: Namespace) -> tuple[int, int, int]:
    """Return the rows of one query group's queries, of its key and of its value.

    8 heads of 64 channels in 2 groups: 256 rows of queries (4 heads), 64 of the key, 64 of the
    value.
    """
    heads = args.num_attention_heads // num_query_groups(args)
    return heads * args.kv_channels, args.kv_channels, args.kv_channels


def _merge_heads(theirs: Sequence[LazyTensor], args: Namespace) -> LazyTensor:
    """Interleave queries, keys and values of all heads to those of group after group.

    With two groups: ``q0 q1``, ``k0 k1``, ``v0 v1`` become ``q0 k0 v0 q1 k1 v1``.
    """
    rows = []
    for group in range(num_query_groups(args)):
        for tensor, width in zip(theirs, _group_widths(args)):
            rows.append(tensor.rows(group * width, (group + 1) * width))
    return concatenate(rows)


def _split_heads(tensor: LazyTensor, args: Namespace) -> list[LazyTensor]:
    """Undo :func:`_merge_heads`.

    With groups of 256, 64 and 64 rows, the keys are rows 256 to 320, 640 to 704 and so on: 384 rows
    of a group apart.
    """
    widths = _group_widths(args)
    theirs = []
    first = 0  # row of the queries, the key or the value in a group
    for width in widths:
        starts = range(first, tensor.num_rows, sum(widths))
        parts = [tensor.rows(start, start + width) for start in starts]
        theirs.append(concatenate(parts))
        first += width
    return theirs


def _head_shapes(shape: Shape, args: Namespace) -> list[Shape]:
    num_groups = num_query_groups(args)
    shapes = []
    for width in _group_widths(args):
        shapes.append((num_groups * width, *shape[1:]))
    return shapes


def _merge_fused_heads(theirs: Sequence[LazyTensor], args: Namespace) -> LazyTensor:
    """Transpose GPT-2's fused matrix, and interleave it to queries, key and value of each head.

    Its columns are the queries of all heads, then their keys, then their values. With 2 heads of
    one channel: columns ``q0 q1 k0 k1 v0 v1`` become rows ``q0 k0 v0 q1 k1 v1``.
    """
    heads = args.num_attention_heads
    width = args.kv_channels
    columns = torch.arange(3 * heads * width)
    by_head = columns.view(3, heads, width).transpose(0, 1)
    order = by_head.reshape(-1)
    return _transposed(theirs[0], after=order)


def _split_fused_heads(tensor: LazyTensor, args: Namespace) -> list[LazyTensor]:
    """Undo :func:`_merge_fused_heads`."""
    heads = args.num_attention_heads
    width = args.kv_channels
    rows = torch.arange(3 * heads * width)
    by_part = rows.view(heads, 3, width).transpose(0, 1)
    order = by_part.reshape(-1)
    return [_transposed(tensor, before=order)]


def _transposed(
    tensor: LazyTensor,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> LazyTensor:
    """Transpose a matrix, with its rows in the order ``before`` it and the new rows ``after`` it.

    A vector, as of biases, stays.
    """

    def transpose(values: torch.Tensor) -> torch.Tensor:
        if before is not None:
            values = values[before]
        if values.dim() > 1:
            values = values.mT
        if after is not None:
            values = values[after]
        return values

    return tensor.map(tensor.shape[::-1], transpose)


# ---- other tensors


def _padded(tensor: LazyTensor, num_rows: int) -> LazyTensor:
    """Append rows of zeros."""
    if num_rows == tensor.num_rows:
        return tensor
    num_missing = num_rows - tensor.num_rows
    padding = zeros((num_missing, *tensor.shape[1:]), tensor.dtype)
    return concatenate([tensor, padding])


SAME = Rearrangement(
    merge=lambda theirs, args: theirs[0],
    split=lambda tensor, args: [tensor],
    shapes=lambda shape, args: [shape],
)
TRANSPOSED = Rearrangement(
    merge=lambda theirs, args: _transposed(theirs[0]),
    split=lambda tensor, args: [_transposed(tensor)],
    shapes=lambda shape, args: [shape[::-1]],
)
HEADS = Rearrangement(_merge_heads, _split_heads, _head_shapes)
FUSED_HEADS = Rearrangement(
    _merge_fused_heads,
    _split_fused_heads,
    shapes=lambda shape, args: [shape[::-1]],
)
GATE_AND_UP = Rearrangement(
    merge=lambda theirs, args: concatenate(theirs),
    split=lambda tensor, args: [
        tensor.rows(0, tensor.num_rows // 2),
        tensor.rows(tensor.num_rows // 2, tensor.num_rows),
    ],
    shapes=lambda shape, args: [(shape[0] // 2, *shape[1:])] * 2,
)
"""A gated MLP's first matrix: the rows of the gate, then those that it multiplies."""
VOCABULARY = Rearrangement(
    merge=lambda theirs, args: _padded(theirs[0], args.padded_vocab_size),
    split=lambda tensor, args: [tensor.rows(0, args.vocab_size)],
    shapes=lambda shape, args: [(args.vocab_size, *shape[1:])],
)
"""Megatron may have more rows than there are tokens. They are cut off, or added as zeros."""


# ---- rows of tables

Where = Callable[[Namespace, int], bool]
"""The arguments and the number of a layer -> whether the layer has a tensor."""


def everywhere(args: Namespace, layer: int) -> bool:
    """Return True for all layers of all models."""
    return True


def untied(args: Namespace, layer: int) -> bool:
    """Return True for an output layer with a weight of its own."""
    return bool(args.untie_embeddings_and_output_weights)


def has_experts(args: Namespace, layer: int) -> bool:
    """Return True if the layer's MLP is made of experts."""
    return bool(layers_with_experts(args)[layer])


def is_dense(args: Namespace, layer: int) -> bool:
    """Return True if the layer has one MLP for all tokens."""
    return not has_experts(args, layer)


def compresses_queries(args: Namespace, layer: int) -> bool:
    """Return True if latent attention projects queries down and up again."""
    return args.q_lora_rank is not None


def keeps_queries(args: Namespace, layer: int) -> bool:
    """Return True if latent attention projects queries once."""
    return args.q_lora_rank is None


@dataclass(frozen=True)
class TensorRow:
    """One tensor of ours and those of theirs that it consists of.

    Attributes:
        ours: canonical name; in a layer without its path, ``{expert}`` is a number.
        theirs: names, separated by blanks.
        rearrangement: between them.
        where: the layers that have it.
    """

    ours: str
    theirs: str
    rearrangement: Rearrangement = SAME
    where: Where = everywhere


@dataclass(frozen=True)
class Pairing:
    """A row for one model, with full names.

    Attributes:
        ours: canonical name.
        theirs: names in the model directory.
        rearrangement: between them.
        is_copy: theirs are duplicates, which some readers look for. They are written, but not read.
    """

    ours: str
    theirs: tuple[str, ...]
    rearrangement: Rearrangement
    is_copy: bool = False


# ---- families

_IGNORED = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "keys_to_ignore_at_inference",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_return_dict",
)
"""Settings that change nothing a model computes from given tokens."""

_COMMON = (
    only("is_encoder_decoder", False, write=False),
    only("is_decoder", False, True, write=False),
    only("add_cross_attention", False, write=False),
    only("tie_encoder_decoder", False, write=False),
    FP8_IN_BLOCKS,
)
"""Rules of all families."""

_PREDICTING_LAYER = (
    TensorRow("enorm.weight", "enorm.weight"),
    TensorRow("hnorm.weight", "hnorm.weight"),
    TensorRow("eh_proj.weight", "eh_proj.weight"),
    TensorRow("final_layernorm.weight", "shared_head.norm.weight"),
)
"""Rows of a layer that predicts further tokens, in addition to those of the layer inside it."""

_EMBEDDING_COPY = "embed_tokens.weight"
_OUTPUT_COPY = "shared_head.head.weight"


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        architecture: transformers' class of the language model.
        outside: rows outside layers.
        layer: rows of a layer.
        rules: settings.
        arguments: Megatron-LM's arguments that every model of the family has.
        training: arguments that a model of the family trains with unless the config has others.
            They are no part of the model.
        base: beginning of all names but the output layer's. A file of the model without its head
            leaves it out.
        layers: beginning of the names in a layer, before its number.
        predicts: layers that predict further tokens may follow the others.
        passed_over: endings of tensors that old files have and nothing needs.
        ignored: settings without meaning here, in addition to those of all families.
    """

    architecture: str
    outside: tuple[TensorRow, ...]
    layer: tuple[TensorRow, ...]
    rules: tuple[SettingRule, ...]
    arguments: dict[str, Any]
    training: dict[str, Any]
    base: str = "model."
    layers: str = "model.layers."
    predicts: bool = False
    passed_over: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored: tuple[str, ...] = ()

    def pairings(self, args: Namespace) -> Iterator[Pairing]:
        """Yield all tensors of the model of ``args``."""
        for row in self.outside:
            if row.where(args, 0):
                names = tuple(row.theirs.split())
                yield Pairing(row.ours, names, row.rearrangement)
        for number in range(args.num_layers):
            ours = f"decoder.layers.{number}."
            theirs = f"{self.layers}{number}."
            yield from _in_layer(self.layer, args, number, ours=ours, theirs=theirs)
        last = args.num_layers - 1  # predicting layers are made like it
        head = WORD_EMBEDDINGS
        if args.untie_embeddings_and_output_weights:
            head = OUTPUT_LAYER
        for number in range(args.mtp_num_layers or 0):
            # In a model of 61 layers, our mtp.layers.0 is their model.layers.61.
            ours = f"mtp.layers.{number}."
            theirs = f"{self.layers}{args.num_layers + number}."
            yield from _in_layer(_PREDICTING_LAYER, args, last, ours=ours, theirs=theirs)
            ours_inside = ours + INNER_LAYER
            yield from _in_layer(self.layer, args, last, ours=ours_inside, theirs=theirs)
            yield Pairing(WORD_EMBEDDINGS, (theirs + _EMBEDDING_COPY,), VOCABULARY, is_copy=True)
            yield Pairing(head, (theirs + _OUTPUT_COPY,), VOCABULARY, is_copy=True)

    def read_config(self, config: Config) -> tuple[Namespace, list[str]]:
        """Return the arguments that correspond to a config, and its problems.

        A setting that no rule reads has to be one of those without meaning.
        """
        values: dict[str, Any] = {}
        for argument in ARGUMENTS:
            values[argument.name] = argument.default
        values |= self.arguments | self.training
        problems: list[str] = []
        known = {*_IGNORED, *self.ignored}
        for rule in (*self.rules, *_COMMON):
            values |= rule.read(config, problems)
            known.update(rule.keys)
        for key in sorted(config.keys() - known):
            if config[key] is not None:
                problems.append(
                    f"{key} {in_words(config[key])}: unknown, and may change what the model"
                    " computes"
                )
        return Namespace(**values), problems

    def write_config(self, args: Namespace) -> tuple[Config, list[str]]:
        """Return the config of the model of ``args``, and why the family has no such model.

        An argument that no rule writes has to have its default, or the model would compute
        something else.
        """
        args = completed(args)
        required = dict(self.arguments)
        covered = {*required, "padded_vocab_size"}
        for rule in self.rules:
            covered.update(rule.names)
        for argument in ARGUMENTS:
            is_counted = argument.in_outputs and argument.counts(args)
            if is_counted and argument.name not in covered:
                required[argument.name] = argument.default
        problems = []
        for name, value in required.items():
            found = getattr(args, name, None)
            if found != value:
                problems.append(f"{name} is {found} instead of {value}")
        if getattr(args, "spec", None):
            problems.append(f"spec is {args.spec}: layers of a program's own")
        if problems:
            return {}, problems
        config: Config = {}
        for rule in self.rules:
            config |= rule.write(args, problems)
        return config, problems

    @property
    def keys(self) -> set[str]:
        """Keys of the config that its rules write, or that follow from those."""
        keys: set[str] = set()
        for rule in self.rules:
            keys.update(rule.keys)
        return keys


def _in_layer(
    rows: tuple[TensorRow, ...],
    args: Namespace,
    number: int,
    ours: str,
    theirs: str,
) -> Iterator[Pairing]:
    """Yield the tensors of layer ``number``; ``ours`` and ``theirs`` are beginnings of names."""
    for row in rows:
        if not row.where(args, number):
            continue
        num_experts = 1
        if "{expert}" in row.ours:
            num_experts = args.num_experts
        for expert in range(num_experts):
            our_name = ours + row.ours.format(expert=expert)
            in_layer = row.theirs.format(expert=expert).split()
            names = tuple(theirs + name for name in in_layer)
            yield Pairing(our_name, names, row.rearrangement)
