# SPDX-License-Identifier: Apache-2.0
"""How tensors of Hugging Face models and of Megatron-Core's consist of each other."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, concatenate
from megatron.checkpoint.hugging_face.model_arguments import layers_with_experts

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rearrangement:
    """How one tensor of ours consists of theirs.

    Attributes:
        merge: theirs, in the order of the row's names -> ours.
        split: ours -> theirs.
        shapes: of ours -> of theirs.
    """

    merge: Callable[[Sequence[LazyTensor], argparse.Namespace], LazyTensor]
    split: Callable[[LazyTensor, argparse.Namespace], list[LazyTensor]]
    shapes: Callable[[Shape, argparse.Namespace], list[Shape]]


def _merge_heads(parts: Sequence[LazyTensor], args: argparse.Namespace) -> LazyTensor:
    """Megatron has the queries, the key and the value of a group of heads one after another, group after group."""
    widths = _group_widths(args)
    return concatenate(
        [
            part.rows(group * width, (group + 1) * width)
            for group in range(num_groups(args))
            for part, width in zip(parts, widths)
        ]
    )


def _split_heads(tensor: LazyTensor, args: argparse.Namespace) -> list[LazyTensor]:
    widths = _group_widths(args)
    found, first = [], 0
    for width in widths:
        starts = [group * sum(widths) + first for group in range(num_groups(args))]
        found.append(concatenate([tensor.rows(start, start + width) for start in starts]))
        first += width
    return found


def _head_shapes(shape: Shape, args: argparse.Namespace) -> list[Shape]:
    return [(num_groups(args) * width, *shape[1:]) for width in _group_widths(args)]


def num_groups(args: argparse.Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _group_widths(args: argparse.Namespace) -> tuple[int, int, int]:
    """Rows of a group's queries, key and value."""
    return (
        args.num_attention_heads // num_groups(args) * args.kv_channels,
        args.kv_channels,
        args.kv_channels,
    )


def _merge_fused_heads(parts: Sequence[LazyTensor], args: argparse.Namespace) -> LazyTensor:
    """GPT-2 has the queries of all heads, then their keys, then their values, as columns."""
    heads, width = args.num_attention_heads, args.kv_channels
    order = torch.arange(3 * heads * width).view(3, heads, width).transpose(0, 1).reshape(-1)
    return parts[0].map(
        parts[0].shape[::-1],
        lambda columns: columns.mT[order] if columns.dim() > 1 else columns[order],
    )


def _split_fused_heads(tensor: LazyTensor, args: argparse.Namespace) -> list[LazyTensor]:
    heads, width = args.num_attention_heads, args.kv_channels
    order = torch.arange(3 * heads * width).view(heads, 3, width).transpose(0, 1).reshape(-1)
    return [
        tensor.map(
            tensor.shape[::-1], lambda rows: rows[order].mT if rows.dim() > 1 else rows[order]
        )
    ]


SAME = Rearrangement(
    lambda parts, args: parts[0], lambda tensor, args: [tensor], lambda shape, args: [shape]
)
TRANSPOSED = Rearrangement(
    lambda parts, args: parts[0].map(parts[0].shape[::-1], lambda tensor: tensor.mT),
    lambda tensor, args: [tensor.map(tensor.shape[::-1], lambda each: each.mT)],
    lambda shape, args: [shape[::-1]],
)
HEADS = Rearrangement(_merge_heads, _split_heads, _head_shapes)
FUSED_HEADS = Rearrangement(
    _merge_fused_heads, _split_fused_heads, lambda shape, args: [shape[::-1]]
)
GATE_AND_UP = Rearrangement(
    lambda parts, args: concatenate(parts),
    lambda tensor, args: [
        tensor.rows(0, tensor.num_rows // 2),
        tensor.rows(tensor.num_rows // 2, tensor.num_rows),
    ],
    lambda shape, args: [(shape[0] // 2, *shape[1:])] * 2,
)
"""A gated MLP's first matrix: the gate's rows, then those that it multiplies."""
VOCABULARY = Rearrangement(
    lambda parts, args: _padded(parts[0], args.padded_vocab_size),
    lambda tensor, args: [tensor.rows(0, args.vocab_size)],
    lambda shape, args: [(args.vocab_size, *shape[1:])],
)
"""Megatron may have more rows than there are tokens. They are cut off, or made as zeros."""


def _padded(tensor: LazyTensor, num_rows: int) -> LazyTensor:
    if num_rows == tensor.num_rows:
        return tensor
    row, dtype = tensor.shape[1:], tensor.dtype
    padding = LazyTensor(
        (num_rows - tensor.num_rows, *row),
        dtype,
        lambda start, stop: torch.zeros(stop - start, *row, dtype=dtype),
    )
    return concatenate([tensor, padding])


# ---- rows of tables
# ----------------------------------------------------------------------------------------------------

Where = Callable[[argparse.Namespace, int], bool]


def everywhere(args: argparse.Namespace, layer: int) -> bool:
    return True


def untied(args: argparse.Namespace, layer: int) -> bool:
    return args.untie_embeddings_and_output_weights


def has_experts(args: argparse.Namespace, layer: int) -> bool:
    return bool(layers_with_experts(args)[layer])


def is_dense(args: argparse.Namespace, layer: int) -> bool:
    return not has_experts(args, layer)


def compresses_queries(args: argparse.Namespace, layer: int) -> bool:
    return args.q_lora_rank is not None


def keeps_queries(args: argparse.Namespace, layer: int) -> bool:
    return args.q_lora_rank is None


@dataclass(frozen=True)
class Row:
    """One tensor of ours and what it consists of.

    Attributes:
        ours: canonical name; in a layer without its path, ``{expert}`` is a number.
        theirs: names, separated by blanks.
        rearrangement: between them.
        where: the arguments and the number of the layer -> whether a model has it.
    """

    ours: str
    theirs: str
    rearrangement: Rearrangement = SAME
    where: Where = everywhere


@dataclass(frozen=True)
class Pairing:
    """A row for one model: full names.

    Attributes:
        is_copy: theirs are duplicates of what other files' readers look for elsewhere: written, but
            not read.
    """

    ours: str
    theirs: tuple[str, ...]
    rearrangement: Rearrangement
    is_copy: bool = False
