# SPDX-License-Identifier: Apache-2.0
"""The cost of the modules of a GPT model: seconds of their forward and backward, and activations.

[Note: activations] Bytes that a layer keeps for its backward are those of its matrix products,
norms and activation function, with an attention kernel that keeps no scores. For each token, in
elements of the compute dtype, with h the hidden size and f the width of the MLP:

    two norms          4 h             their inputs, and their results, which projections keep
    attention          q + k + v + o   the widths of queries, keys, values and the result
    MLP                3 f or 2 f      gated or not: what enters and leaves the activation function
    router             4 E             two fp32 tables over E experts
    experts            k (h + 3 f)     the tokens that the router sends to k experts of width f
    latent attention   2 r             the results of its down-projections, before and after a norm

For a layer with 4 h = f and no gate that is 16 elements, 32 bytes in bf16. Source: Korthikanti et
al., arXiv:2205.05198, equation 2, has 34: two masks of dropout come on top, and are left out here.
Tensor parallelism of t ranks divides all of them by t if it includes sequence parallelism (equation
4), and otherwise all but those of norms (equation 2). With full recomputation only the input of a
layer, h, is kept, and the rest exists during the backward of that layer. The output layer keeps two
inputs of its norm and projection, and the logits in the compute dtype and in fp32.

[Note: seconds] Matrix products take the FLOPs of ``pretrain/flops.py`` at the FLOP/s that the
machine reaches, and backward twice as long as forward. Communication inside of a layer does not
overlap: gathers and scatters of activations over tensor ranks, exchanges of tokens between expert
ranks, and of keys and values between context ranks. Recomputation repeats a forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.planning.machine import Cluster
from megatron.planning.skeleton import NO_COST, Cost
from megatron.pretrain.model.flops import (
    attention_multiply_adds,
    expert_multiply_adds,
    mlp_multiply_adds,
)

BYTES_OF_LOGITS = 4
"""The loss is computed in fp32."""


@dataclass(frozen=True)
class ModelRanks:
    """The ranks between which one layer is divided.

    Args:
        tensor: that divide its matrices.
        context: that divide its sequences.
        expert: that divide its experts.
        expert_tensor: that divide the matrices of one expert.
    """

    tensor: Sequence[int]
    context: Sequence[int]
    expert: Sequence[int]
    expert_tensor: Sequence[int]


class GptCosts:
    """The costs of the modules of a GPT model; see [Note: activations] and [Note: seconds].

    Args:
        args: the completed arguments, with ``padded_vocab_size``.
        machine: on which the model is trained.
        ranks: between which a layer is divided.
    """

    def __init__(self, args: argparse.Namespace, machine: Cluster, ranks: ModelRanks):
        self._args = args
        self._machine = machine
        self._ranks = ranks
        self._size = 2 if args.bf16 or args.fp16 else 4
        self._num_tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
        self._tensor = args.tensor_model_parallel_size
        self._sequence = self._tensor if args.sequence_parallel else 1

    def of(self, module: nn.Module) -> Cost:
        """Return the cost of a module of the model that has no unit inside."""
        if isinstance(module, TransformerLayer):
            return self.of_layer(isinstance(module.mlp, MoELayer))
        if isinstance(module, LanguageModelEmbedding) or not _is_output_layer(module):
            return NO_COST
        return self.of_output()

    def of_layer(self, has_experts: bool) -> Cost:
        """Return the cost of a transformer layer."""
        forward = self._seconds_of(self._multiply_adds(has_experts))
        communication = self._communication(has_experts)
        kept = self._layer_bytes(has_experts)
        backward = 2 * forward + communication
        forward += communication
        if self._args.recompute_granularity != "full":
            return Cost(forward, backward, kept)
        return Cost(forward, backward + forward, self._input_bytes, kept)

    def of_output(self) -> Cost:
        """Return the cost of the output layer, with the loss."""
        args = self._args
        forward = self._seconds_of(args.hidden_size * args.padded_vocab_size)
        logits = self._num_tokens * args.padded_vocab_size // self._tensor
        kept = 2 * self._input_bytes + logits * (self._size + BYTES_OF_LOGITS)
        return Cost(forward, 2 * forward, kept)

    # ---- computation

    def _multiply_adds(self, has_experts: bool) -> float:
        args = self._args
        own = (
            expert_multiply_adds(args)
            if has_experts
            else mlp_multiply_adds(args.hidden_size, args.ffn_hidden_size, is_gated=args.swiglu)
        )
        return attention_multiply_adds(args) + own

    def _seconds_of(self, multiply_adds: float) -> float:
        """Return the seconds of a forward with so many multiply-adds for each token."""
        flops = 2 * multiply_adds * self._num_tokens / self._tensor
        return flops / (self._machine.flops * self._machine.compute_efficiency)

    # ---- activations

    @property
    def _input_bytes(self) -> int:
        """Bytes of the input of a layer."""
        return self._num_tokens * self._args.hidden_size * self._size // self._sequence

    def _layer_bytes(self, has_experts: bool) -> int:
        """Return the bytes that a layer keeps without recomputation."""
        args = self._args
        divided = self._attention_width()
        if has_experts:
            routed = args.hidden_size + self._mlp_width(args.moe_ffn_hidden_size)
            divided += args.moe_router_topk * routed
            divided += self._mlp_width(args.moe_shared_expert_intermediate_size or 0)
            divided += 4 * args.num_experts // self._size * 2
        else:
            divided += self._mlp_width(args.ffn_hidden_size)
        inner = self._num_tokens * divided * self._size // self._tensor
        return int(4 * self._input_bytes + inner)

    def _mlp_width(self, width: int) -> int:
        return (3 if self._args.swiglu else 2) * width

    def _attention_width(self) -> int:
        args = self._args
        heads = args.num_attention_heads
        if not args.multi_latent_attention:
            groups = args.num_query_groups if args.group_query_attention else heads
            return int(2 * args.kv_channels * (heads + groups))
        query = args.qk_head_dim + args.qk_pos_emb_head_dim
        latent = 2 * (args.kv_lora_rank + (args.q_lora_rank or 0)) + args.qk_pos_emb_head_dim
        return int(heads * (2 * query + 2 * args.v_head_dim) + latent)

    # ---- communication inside of a layer

    def _communication(self, has_experts: bool) -> float:
        """Return the seconds of the communication of one forward."""
        args, machine, ranks = self._args, self._machine, self._ranks
        activation = self._num_tokens * args.hidden_size * self._size
        divided_parts = 1 if has_experts else 2
        seconds = divided_parts * machine.collective_seconds("all_reduce", activation, ranks.tensor)
        keys_and_values = self._keys_and_values() * args.context_parallel_size
        seconds += machine.collective_seconds("all_gather", keys_and_values, ranks.context)
        if has_experts:
            routed = activation * args.moe_router_topk // self._tensor
            seconds += 2 * machine.exchange_seconds(routed, ranks.expert)
            gathered = routed * len(ranks.expert_tensor)
            seconds += machine.collective_seconds("all_reduce", gathered, ranks.expert_tensor)
        return seconds

    def _keys_and_values(self) -> int:
        """Return the bytes of the keys and values of this rank's tokens."""
        args = self._args
        if args.multi_latent_attention:
            width = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
            width *= args.num_attention_heads
        else:
            groups = args.num_query_groups if args.group_query_attention else None
            width = 2 * args.kv_channels * (groups or args.num_attention_heads)
        return int(self._num_tokens * width * self._size // self._tensor)


def _is_output_layer(module: nn.Module) -> bool:
    return hasattr(module, "output_size") and hasattr(module, "gather_output")
