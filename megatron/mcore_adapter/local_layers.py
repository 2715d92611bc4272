# SPDX-License-Identifier: Apache-2.0
"""Layers for models without Transformer Engine, for features that Megatron-Core's own layers lack.

Its plain norm rejects sequence parallelism, its plain attention rejects context parallelism and
heads of two widths, and its latent attention with plain layers loses gradients under tensor
parallelism. The layers here have the same results, parameter names and initial weights, so a
checkpoint is the same with either.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from megatron.mcore_adapter.fused_gradients import set_attributes


class LocalNorm:
    """A factory of ``torch.nn.LayerNorm`` or ``torch.nn.RMSNorm`` over the last dimension.

    The parameters are of torch's default dtype. ``persist_layer_norm`` chooses a faster kernel of
    other norms, and changes nothing here.

    Raises:
        NotImplementedError: for another normalization, a zero-centred weight, or
            memory_efficient_layer_norm.
    """

    # It is a class, not a function, because layer specs take classes only.

    def __new__(  # type: ignore[misc]  # layer specs call this and use the result
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float | None = None,
    ) -> nn.Module:
        """Make the norm that ``config.normalization`` names."""
        norms: dict[str, type[nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
        problems = []
        if config.normalization not in norms:
            problems.append(f"normalization {config.normalization!r}: use {' or '.join(norms)}")
        if config.layernorm_zero_centered_gamma:
            problems.append(
                "a zero-centred weight (layernorm_zero_centered_gamma): use Transformer Engine's"
                " layers"
            )
        if config.memory_efficient_layer_norm:
            problems.append("memory_efficient_layer_norm: leave it out, results are the same")
        _refuse("the local norm", problems)
        if eps is None:
            eps = config.layernorm_epsilon
        norm = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            # By this Megatron-Core sums gradients of parts of the sequence over tensor ranks.
            set_attributes(parameter, sequence_parallel=config.sequence_parallel)
        return norm


class LocalAttention(DotProductAttention):
    """Megatron-Core's plain attention, for context parallelism and values of another width too.

    Under context parallelism over CP ranks Megatron-Core cuts the sequence into 2 * CP chunks and
    gives the queries, keys and values of chunks r and 2 * CP - 1 - r to rank r. Each rank gathers
    the keys and values of the whole sequence. Tensor parallelism divides the heads, which needs
    nothing here.

    Args:
        config: configuration of the model; other arguments are those of DotProductAttention, and:
        k_channels: width of a key's head, default ``config.kv_channels``.
        v_channels: ignored: the width of a value's head follows from the values.
        pg_collection: with the groups ``cp`` and ``tp``; default Megatron-Core's global groups.

    Raises:
        NotImplementedError: for options that it does not have, all in one message.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ):
        problems = []
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            problems.append(f"a sliding window (window_size {config.window_size})")
        if config.softmax_type != "vanilla":
            problems.append(f"softmax_type {config.softmax_type!r}")
        if attn_mask_type in (AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right):
            problems.append(f"the mask type {attn_mask_type.name}")
        if attention_type != "self":
            problems.append(f"{attention_type} attention")
        advice = "leave it out, or use Transformer Engine's layers"
        _refuse("the local attention", [f"{problem}: {advice}" for problem in problems])
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["cp", "tp"])
        config = copy(config)
        config.context_parallel_size = 1  # the base class refuses more
        config.masked_softmax_fusion = False  # its kernel knows no mask of a part of the queries
        config.kv_channels = k_channels or config.kv_channels  # they scale the scores
        arguments = (layer_number, attn_mask_type, attention_type, *args)
        super().__init__(config, *arguments, pg_collection=pg_collection, **kwargs)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Attend from the queries of this rank to all keys.

        Args:
            query: [sequence / CP, batch, heads / TP, key width].
            key: [sequence / CP, batch, groups / TP, key width]; the number of groups divides that
                of heads.
            value: [sequence / CP, batch, groups / TP, value width].
            attention_mask: bool, True where a key is hidden, broadcast to [batch, heads / TP,
                sequence / CP, sequence]: rows are this rank's queries, columns all keys in the
                order of the sequence. None: causal if that is the type that the layer was built
                with, else nothing is hidden.
            attn_mask_type: ignored, as in Megatron-Core's own attention.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [sequence / CP, batch, heads / TP * value width], in the dtype of the queries.

        Raises:
            NotImplementedError: for an attention bias or packed sequences.
            ValueError: for a mask of another width.
        """
        problems = []
        if attention_bias is not None:
            problems.append("an attention bias: use Transformer Engine's layers")
        if packed_seq_params is not None:
            problems.append("packed sequences: use Transformer Engine's layers")
        _refuse("the local attention", problems)
        key = gather_from_sequence_parallel_region(key, True, self.cp_group)
        value = gather_from_sequence_parallel_region(value, True, self.cp_group)
        positions = self._positions(key.shape[0], key.device)
        mask = self._mask(attention_mask, query.shape[0], positions)
        self.hidden_size_per_partition = query.shape[2] * value.shape[3]
        return super().forward(query, key, value, mask)

    def _positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the gathered keys in the sequence."""
        # Example of length 8 on 2 ranks, in chunks of 2: rank 0 has chunks 0 and 3, rank 1 chunks 1
        # and 2, so the positions are 0, 1, 6, 7, 2, 3, 4, 5.
        num_ranks = self.cp_group.size()
        chunks = torch.arange(length, device=device).chunk(2 * num_ranks)
        gathered = []
        for rank in range(num_ranks):
            gathered += [chunks[rank], chunks[2 * num_ranks - 1 - rank]]
        return torch.cat(gathered)

    def _mask(
        self,
        given: Tensor | None,
        num_queries: int,
        positions: Tensor,
    ) -> Tensor | None:
        """Return the mask with its columns in the order of the gathered keys."""
        if given is not None:
            if given.shape[-1] != len(positions):
                raise ValueError(
                    f"expects an attention mask over all {len(positions)} keys but got the shape"
                    f" {tuple(given.shape)}"
                )
            if self.cp_group.size() == 1:
                return given
            return given[..., positions]
        if self.attn_mask_type is not AttnMaskType.causal:
            return None
        mine = positions.view(-1, num_queries)[self.cp_group.rank()]
        return positions > mine[:, None]


class LocalLatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention, corrected for plain linear layers under tensor parallelism.

    The projection down to the latents is divided by columns, and its output is gathered. The
    backward of that gather returns to each rank the gradient of its own columns, which is correct
    only if all ranks computed the same gradient. For the part of the keys with positions they did
    not: each rank has the gradient from its own heads only, and these must be summed. The norm of
    the compressed queries has the opposite fault: its gradients are whole on each rank, but
    Megatron-Core sums them by name at the end of a step.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole_latents)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            for parameter in self.q_layernorm.parameters():
                set_attributes(parameter, average_gradients_across_tp_domain=True)

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """Return the parts by name, for which Megatron-Core 0.19 asks."""
        # Queries that are not compressed have no norm. The local specification of that release has
        # one all the same, which it refuses; without it, it requires Transformer Engine.
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _whole_latents(
        self,
        projection: nn.Module,
        inputs: object,
        output: tuple[Tensor, None],
    ) -> tuple[Tensor, None]:
        """Return latents and position keys in all columns, as if nothing divided the projection."""
        latents = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        if self.config.sequence_parallel:
            # The caller gathers the position keys again, and that gather sums their gradients.
            return scatter_to_sequence_parallel_region(latents, group=self.tp_group), None
        shared, positions = latents.split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        positions = copy_to_tensor_model_parallel_region(positions, group=self.tp_group)
        if positions.requires_grad:
            # The gradient is a part of that of all columns. Megatron-Core up to 0.18 sums a copy of
            # a gradient that is not contiguous, and returns the gradient without the sum.
            positions.register_hook(Tensor.contiguous)
        return torch.cat([shared, positions], dim=-1), None


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise NotImplementedError(f"{what} does not know " + "; nor ".join(problems))
