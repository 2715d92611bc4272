# SPDX-License-Identifier: Apache-2.0
"""Tensors of Hugging Face models beside those of Megatron-Core's: names, and how to rearrange them.

A model family is a table of :class:`TensorRow`. Each pairs one tensor of ours, by its canonical
name, with one or several of theirs, and has a :class:`Rearrangement` for both directions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, concatenate
from megatron.checkpoint.hugging_face.model_arguments import layers_with_experts, num_query_groups

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rearrangement:
    """Functions between one tensor of ours and those of theirs that it consists of.

    Attributes:
        merge: theirs, in the order of the row's names -> ours.
        split: ours -> theirs.
        shapes: shape of ours -> shapes of theirs.
    """

    merge: Callable[[Sequence[LazyTensor], argparse.Namespace], LazyTensor]
    split: Callable[[LazyTensor, argparse.Namespace], list[LazyTensor]]
    shapes: Callable[[Shape, argparse.Namespace], list[Shape]]


# ---- attention


def _group_widths(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return the rows of one query group's queries, of its key and of its value.

    8 heads of 64 channels in 2 groups: 256 rows of queries (4 heads), 64 of the key, 64 of the
    value.
    """
    heads = args.num_attention_heads // num_query_groups(args)
    return heads * args.kv_channels, args.kv_channels, args.kv_channels


def _merge_heads(theirs: Sequence[LazyTensor], args: argparse.Namespace) -> LazyTensor:
    """Interleave queries, keys and values of all heads to those of group after group.

    With two groups: ``q0 q1``, ``k0 k1``, ``v0 v1`` become ``q0 k0 v0 q1 k1 v1``.
    """
    rows = []
    for group in range(num_query_groups(args)):
        for tensor, width in zip(theirs, _group_widths(args)):
            rows.append(tensor.rows(group * width, (group + 1) * width))
    return concatenate(rows)


def _split_heads(tensor: LazyTensor, args: argparse.Namespace) -> list[LazyTensor]:
    """Undo :func:`_merge_heads`.

    With groups of 256, 64 and 64 rows, the keys are rows 256 to 320, 640 to 704 and so on: 384 rows
    of a group apart.
    """
    widths = _group_widths(args)
    theirs = []
    first = 0  # row of the queries, the key or the value in a group
    for width in widths:
        starts = [group * sum(widths) + first for group in range(num_query_groups(args))]
        theirs.append(concatenate([tensor.rows(start, start + width) for start in starts]))
        first += width
    return theirs


def _head_shapes(shape: Shape, args: argparse.Namespace) -> list[Shape]:
    return [(num_query_groups(args) * width, *shape[1:]) for width in _group_widths(args)]


def _merge_fused_heads(theirs: Sequence[LazyTensor], args: argparse.Namespace) -> LazyTensor:
    """Transpose GPT-2's fused matrix, and interleave it to queries, key and value of each head.

    Its columns are the queries of all heads, then their keys, then their values. With 2 heads of
    one channel: columns ``q0 q1 k0 k1 v0 v1`` become rows ``q0 k0 v0 q1 k1 v1``.
    """
    heads, width = args.num_attention_heads, args.kv_channels
    order = torch.arange(3 * heads * width).view(3, heads, width).transpose(0, 1).reshape(-1)
    return _transposed(theirs[0], before=None, after=order)


def _split_fused_heads(tensor: LazyTensor, args: argparse.Namespace) -> list[LazyTensor]:
    """Undo :func:`_merge_fused_heads`."""
    heads, width = args.num_attention_heads, args.kv_channels
    order = torch.arange(3 * heads * width).view(heads, 3, width).transpose(0, 1).reshape(-1)
    return [_transposed(tensor, before=order, after=None)]


def _transposed(
    tensor: LazyTensor, before: torch.Tensor | None = None, after: torch.Tensor | None = None
) -> LazyTensor:
    """Transpose a matrix; a vector, as of biases, stays.

    Args:
        tensor: with one dim or two.
        before: order of its rows before they become columns.
        after: order of the new rows.
    """

    def transpose(values: torch.Tensor) -> torch.Tensor:
        if before is not None:
            values = values[before]
        if values.dim() > 1:
            values = values.mT
        return values if after is None else values[after]

    return tensor.map(tensor.shape[::-1], transpose)


# ---- other tensors


def _halves(tensor: LazyTensor) -> list[LazyTensor]:
    middle = tensor.num_rows // 2
    return [tensor.rows(0, middle), tensor.rows(middle, tensor.num_rows)]


def _padded(tensor: LazyTensor, num_rows: int) -> LazyTensor:
    """Append rows of zeros."""
    if num_rows == tensor.num_rows:
        return tensor
    row, dtype = tensor.shape[1:], tensor.dtype
    padding = LazyTensor(
        (num_rows - tensor.num_rows, *row),
        dtype,
        lambda start, stop: torch.zeros(stop - start, *row, dtype=dtype),
    )
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
    _merge_fused_heads, _split_fused_heads, shapes=lambda shape, args: [shape[::-1]]
)
GATE_AND_UP = Rearrangement(
    merge=lambda theirs, args: concatenate(theirs),
    split=lambda tensor, args: _halves(tensor),
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

Where = Callable[[argparse.Namespace, int], bool]
"""The arguments and the number of a layer -> whether the layer has a tensor."""


def everywhere(args: argparse.Namespace, layer: int) -> bool:
    """Return True: every layer of every model has the tensor."""
    return True


def untied(args: argparse.Namespace, layer: int) -> bool:
    """Return True if the output layer has a weight of its own."""
    return bool(args.untie_embeddings_and_output_weights)


def has_experts(args: argparse.Namespace, layer: int) -> bool:
    """Return True if the layer's MLP is made of experts."""
    return bool(layers_with_experts(args)[layer])


def is_dense(args: argparse.Namespace, layer: int) -> bool:
    """Return True if the layer has one MLP for all tokens."""
    return not has_experts(args, layer)


def compresses_queries(args: argparse.Namespace, layer: int) -> bool:
    """Return True if latent attention projects queries down and up again."""
    return args.q_lora_rank is not None


def keeps_queries(args: argparse.Namespace, layer: int) -> bool:
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
