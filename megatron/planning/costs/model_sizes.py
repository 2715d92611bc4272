# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model and of the mesh that trains it, as far as costs depend on them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron.pretrain.model.flops import layers_with_experts


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer.

    Args:
        number: of experts of a layer.
        top_k: experts that the router chooses for a token.
        width: of an expert.
        shared_width: of the experts that all tokens share; 0: none.
    """

    number: int
    top_k: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class LatentSizes:
    """The widths of multi-latent attention.

    Args:
        query_rank: of the queries' latent; 0: queries have none.
        key_rank: of the latent of keys and values.
        head: of a query and key without rotary positions.
        rotary: of their part with rotary positions.
        value: of a value.
    """

    query_rank: int
    key_rank: int
    head: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a GPT model.

    Args:
        layers: number of layers.
        dense_layers: those without experts.
        hidden: width of a token.
        ffn: width of a dense MLP.
        heads: of queries.
        key_heads: of keys and values.
        head: width of a head.
        vocabulary: rows of the embedding.
        sequence: tokens of a sequence.
        is_gated: the MLP has a third matrix.
        is_rms: norms are RMSNorm, otherwise LayerNorm.
        is_rotary: positions are rotary.
        is_tied: the output layer is the embedding.
        experts: of a layer; None: every layer is dense.
        latent: of attention; None: it is grouped-query attention.
        window: tokens that a query of half of the layers sees; 0: all layers see everything.
        has_query_norm: queries and keys are normalized.
        predicted_tokens: layers that predict further tokens.
    """

    layers: int
    dense_layers: int
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    sequence: int
    is_gated: bool
    is_rms: bool = True
    is_rotary: bool = True
    is_tied: bool = False
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    window: int = 0
    has_query_norm: bool = False
    predicted_tokens: int = 0

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        if self.latent is not None:
            return self.heads * (self.latent.head + self.latent.rotary)
        return self.heads * self.head

    @property
    def key_width(self) -> int:
        """Width of all keys of a token."""
        if self.latent is not None:
            return self.query_width
        return self.key_heads * self.head

    @property
    def value_width(self) -> int:
        """Width of all values of a token."""
        if self.latent is not None:
            return self.heads * self.latent.value
        return self.key_heads * self.head

    @property
    def output_width(self) -> int:
        """Width of the result of attention, before its projection."""
        if self.latent is not None:
            return self.heads * self.latent.value
        return self.heads * self.head

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of attention in a layer."""
        output = self.output_width * self.hidden
        latent = self.latent
        if latent is None:
            width = self.query_width + self.key_width + self.value_width
            return self.hidden * width + output
        down = latent.query_rank + latent.key_rank + latent.rotary
        query_in = latent.query_rank or self.hidden
        up_width = self.heads * (latent.head + latent.value)
        up = query_in * self.query_width
        up += latent.key_rank * up_width
        return self.hidden * down + up + output

    @property
    def num_matrices(self) -> int:
        """Number of matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def dense_weights(self) -> int:
        """Elements of the MLP of a dense layer."""
        return self.num_matrices * self.hidden * self.ffn

    @property
    def one_expert(self) -> int:
        """Elements of one expert."""
        assert self.experts is not None
        return self.num_matrices * self.hidden * self.experts.width

    @property
    def shared_weights(self) -> int:
        """Elements of the shared expert and the router of a layer."""
        assert self.experts is not None
        shared = self.num_matrices * self.hidden * self.experts.shared_width
        router = self.hidden * self.experts.number
        return shared + router

    @property
    def vocabulary_weights(self) -> int:
        """Elements of the embedding, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward for a token, with half of the scores, as MFU counts."""
        seen = self.sequence / 2
        width = self.query_width + self.output_width
        layers = self.layers + self.predicted_tokens
        of_scores = layers * width * seen
        if self.window:  # half of the layers see no more than that
            narrow = min(seen, self.window)
            of_scores = layers * width * (seen + narrow) / 2
        weights = layers * self.attention_weights
        weights += self.dense_layers * self.dense_weights
        if self.experts is not None:
            of_one = self.shared_weights + self.experts.top_k * self.one_expert
            weights += (layers - self.dense_layers) * of_one
        else:
            weights += self.predicted_tokens * self.dense_weights
        weights += (1 + self.predicted_tokens) * self.vocabulary_weights
        return float(6 * (weights + of_scores))


@dataclass(frozen=True)
class RunLayout:
    """The layout of a run.

    Args:
        gpus: number of GPUs.
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        virtual: virtual stages of each.
        context: context-parallel ranks.
        expert: expert-parallel ranks.
        expert_tensor: tensor-parallel ranks of an expert.
        level: the ZeRO level.
        copies: of the shards, in hybrid sharding.
        micro_batch: sequences of a microbatch.
        global_batch: sequences of a step.
        is_sequence_parallel: tensor ranks divide norms and residuals too.
        is_fsdp: units are gathered and reduced one by one; otherwise buckets of DDP.
    """

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    level: int = 3
    copies: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    is_sequence_parallel: bool = True
    is_fsdp: bool = True

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return max(1, self.global_batch // (self.micro_batch * self.data))

    @property
    def tensor_ranks(self) -> range:
        """Ranks that divide the matrices of the first one."""
        return range(self.tensor)

    @property
    def context_ranks(self) -> range:
        """Ranks that divide the sequences of the first one."""
        return range(0, self.tensor * self.context, self.tensor)

    @property
    def sharding_ranks(self) -> range:
        """Ranks that shard the dense weights of the first one, and reduce their gradients."""
        return range(0, self.gpus // self.pipeline, self.tensor)

    @property
    def expert_ranks(self) -> range:
        """Ranks that divide the experts of the first one."""
        return range(0, self.expert_tensor * self.expert, self.expert_tensor)

    @property
    def expert_sharding_ranks(self) -> range:
        """Ranks that shard the experts of the first one."""
        return range(0, self.gpus // self.pipeline, self.expert_tensor * self.expert)


def sizes_of_arguments(args: argparse.Namespace) -> ModelSizes:
    """Return the sizes of the model of completed arguments, with ``padded_vocab_size``."""
    has_experts = layers_with_experts(args)
    experts = latent = None
    if args.num_experts:
        experts = ExpertSizes(
            number=args.num_experts,
            top_k=args.moe_router_topk,
            width=args.moe_ffn_hidden_size,
            shared_width=args.moe_shared_expert_intermediate_size or 0,
        )
    if args.multi_latent_attention:
        latent = LatentSizes(
            query_rank=args.q_lora_rank or 0,
            key_rank=args.kv_lora_rank,
            head=args.qk_head_dim,
            rotary=args.qk_pos_emb_head_dim,
            value=args.v_head_dim,
        )
    groups = args.num_attention_heads
    if args.group_query_attention:
        groups = args.num_query_groups
    return ModelSizes(
        layers=args.num_layers,
        dense_layers=args.num_layers - sum(has_experts),
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        key_heads=groups,
        head=args.kv_channels,
        vocabulary=args.padded_vocab_size,
        sequence=args.seq_length,
        is_gated=args.swiglu,
        is_rms=args.normalization == "RMSNorm",
        is_rotary=args.position_embedding_type == "rope",
        is_tied=not args.untie_embeddings_and_output_weights,
        experts=experts,
        latent=latent,
        has_query_norm=args.qk_layernorm,
        predicted_tokens=args.mtp_num_layers or 0,
    )


def mesh_of_arguments(args: argparse.Namespace) -> RunLayout:
    """Return the layout of completed arguments."""
    levels = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    return RunLayout(
        gpus=args.world_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        level=levels.index(args.data_parallel_sharding_strategy),
        copies=args.num_distributed_optimizer_instances,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        is_sequence_parallel=args.sequence_parallel,
    )
