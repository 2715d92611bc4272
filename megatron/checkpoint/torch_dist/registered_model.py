# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as the ranks of a run register them, under a supposed layout.

The order in which a model registers its parameters is the order in its optimizer's buffers, in
reverse. It depends on the layers that the model is made of (:class:`LayerImplementation`). The
shapes depend on the sizes of tensor parallelism (:class:`BucketLayout`), and which parameters a
buffer has depends on the model chunk of the pipeline (:class:`ModelChunk`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.checkpoint.core import key_rules
from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.lazy_tensor import Tensors
from megatron.checkpoint.core.spelling import (
    Spelling,
    expert_number,
    is_in_expert,
    layer_kinds,
    layer_number,
)
from megatron.checkpoint.torch_dist.optimizer_buffers import LayoutMismatchError, ParameterShard

_DOWN_PROJECTION = re.compile(r"\.self_attention\.linear_(q|kv)_down_proj\.")


@dataclass(frozen=True)
class LayerImplementation:
    """Properties of a model's layers that its optimizer's buffers depend on.

    Attributes:
        transformer_engine: the layers are Transformer Engine's, whose linear layers contain the
            norm before them.
        grouped_experts: all experts of a layer are one module.
        splits_down_projections: tensor parallelism splits the down projections of latent attention.
    """

    transformer_engine: bool
    grouped_experts: bool
    splits_down_projections: bool


@dataclass(frozen=True)
class BucketLayout:
    """One way in which a run can have laid out its optimizer's buffers over ranks.

    Attributes:
        tensor_parallel_size: number of ranks that share a parameter outside experts.
        expert_tensor_parallel_size: number of ranks that share a parameter of an expert.
        layers: the layers that the model is made of.
    """

    tensor_parallel_size: int
    expert_tensor_parallel_size: int
    layers: LayerImplementation

    def __str__(self) -> str:
        layers = "local layers"
        if self.layers.transformer_engine:
            layers = "Transformer Engine's layers"
        if self.layers.grouped_experts:
            layers += " with grouped experts"
        if not self.layers.splits_down_projections:
            layers += ", whole down projections"
        return (
            f"tensor parallelism of {self.tensor_parallel_size},"
            f" {self.expert_tensor_parallel_size} in experts, {layers}"
        )

    def split_dim(self, name: str) -> int | None:
        """Return the dim along which tensor parallelism splits a parameter; None for no split."""
        if self.layers.splits_down_projections and _DOWN_PROJECTION.search(name):
            return 0
        return key_rules.split_dim(name)

    def num_splits(self, name: str) -> int:
        """Return the number of tensor-parallel ranks that a parameter with a split dim is on."""
        if is_in_expert(name):
            return self.expert_tensor_parallel_size
        return self.tensor_parallel_size


@dataclass(frozen=True)
class ModelChunk:
    """The part of the model that one pipeline stage runs in one go.

    Stages have several chunks under interleaved (virtual) pipeline parallelism.

    Attributes:
        layers: numbers of its layers of the decoder.
        has_final_norm: it has the norm after the decoder.
        has_prediction: it has the layers of multi-token prediction.
        is_first: it is the first chunk of the model, with the embeddings.
        is_last: it is the last chunk of the model, with the output layer.
    """

    layers: range
    has_final_norm: bool
    has_prediction: bool
    is_first: bool
    is_last: bool


class RegisteredModel:
    """The parameters of a model in a layout, by canonical name, in the order of registration.

    Args:
        weights: canonical name -> the model's tensor.
        layout: the supposed layout.

    Attributes:
        layout: the supposed layout.
        embedding: names of the parameters before the decoder.
        decoder: names of the parameters of each layer.
        final_norm: names of the parameters of the norm after the decoder.
        prediction: names of the parameters of multi-token prediction.
        output: name of the output layer's weight; empty if it is that of the embedding.
        num_experts: number of experts of a layer.

    Raises:
        ValueError: for parameters whose position in the buffers is not known.
    """

    def __init__(self, weights: Tensors, layout: BucketLayout):
        self._weights = weights
        self.layout = layout
        self._shapes = {}
        for name, tensor in weights.items():
            self._shapes[name] = tensor.shape
        self.embedding: list[str] = []
        self.decoder: list[list[str]] = []
        self.final_norm: list[str] = []
        self.prediction: list[str] = []
        self.output: list[str] = []
        self.num_experts = 0
        unknown = []
        for name in _in_registration_order(weights, layout.layers):
            expert = expert_number(name)
            if expert is not None:
                self.num_experts = max(self.num_experts, expert + 1)
            names = self._list_for(name)
            if names is None:
                unknown.append(name)
            else:
                names.append(name)
        if unknown:
            raise ValueError(
                "where the optimizer's buckets have these is not known:"
                f" {', '.join(sorted(unknown))}"
            )

    def _list_for(self, name: str) -> list[str] | None:
        """Return the list that a parameter belongs to; None if it is not known."""
        layer = layer_number(name)
        if layer is not None:
            while len(self.decoder) <= layer:
                self.decoder.append([])
            return self.decoder[layer]
        if name.startswith("embedding."):
            return self.embedding
        if name.startswith("decoder.final_layernorm."):
            return self.final_norm
        if name.startswith("mtp."):
            return self.prediction
        return self.output if name == OUTPUT_LAYER else None

    def shards(self, chunk: ModelChunk, num_stages: int) -> list[ParameterShard]:
        """List the shards that each tensor-parallel rank has of a chunk, in registration order.

        A chunk that needs the word embeddings for its output or for multi-token prediction has a
        copy of them.

        Raises:
            LayoutMismatchError: for a parameter that the layout cannot split.
        """
        embedding = []
        if chunk.is_first:
            embedding = self.embedding
        elif chunk.has_prediction:
            embedding = [WORD_EMBEDDINGS]
        names = []
        for layer in chunk.layers:
            names += self.decoder[layer]
        if chunk.has_final_norm:
            names += self.final_norm
        if chunk.has_prediction:
            names += self.prediction
        if chunk.is_last:
            names += self.output
        is_shared = num_stages > 1 and bool(self.prediction or not self.output)
        shards = []
        for name in embedding:
            shards.append(self.shard(name, has_own_bucket=is_shared and name == WORD_EMBEDDINGS))
        shards += [self.shard(name) for name in names]
        has_no_copy_yet = not chunk.is_first and not chunk.has_prediction
        if chunk.is_last and has_no_copy_yet and not self.output:
            shards.append(self.shard(WORD_EMBEDDINGS, has_own_bucket=True))
        return shards

    def shard(self, name: str, has_own_bucket: bool = False) -> ParameterShard:
        """Describe the shard that each tensor-parallel rank has of a parameter.

        Raises:
            LayoutMismatchError: if the layout cannot split it.
        """
        shape = list(self._weights[name].shape)
        dim = self.layout.split_dim(name)
        if dim is not None:
            num_splits = self.layout.num_splits(name)
            if shape[dim] % num_splits:
                raise LayoutMismatchError(
                    f"{name} with the shape {tuple(shape)} cannot be divided by {num_splits}"
                )
            shape[dim] //= num_splits
        return ParameterShard(name, tuple(shape), has_own_bucket)

    def dtype(self, name: str) -> str:
        """Return the dtype of a parameter in the model as text, such as ``torch.bfloat16``."""
        return str(self._weights[name].dtype)

    def has_halves(self, name: str) -> bool:
        """Return True if dim 0 of a parameter is a gate, then the rows that it multiplies."""
        return key_rules.has_halves(name, self._shapes)


def _in_registration_order(weights: Tensors, layers: LayerImplementation) -> list[str]:
    names = [name for name in weights if not key_rules.is_buffer(name)]
    spelling = Spelling(
        transformer_engine=layers.transformer_engine,
        grouped_experts=layers.grouped_experts,
        stacked=True,
        layers=layer_kinds(names),
    )
    return sorted(names, key=lambda name: key_rules.registration_order(name, spelling))
