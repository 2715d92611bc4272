# SPDX-License-Identifier: Apache-2.0
"""Layers for models without Transformer Engine, for features that Megatron-Core's own layers lack.

Its plain norm rejects sequence parallelism, its plain attention rejects context parallelism and
heads of two widths, and its latent attention with plain layers loses gradients under tensor
parallelism. The layers here have the same results, parameter names and initial weights, so a
checkpoint is the same with either.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from megatron.mcore_adapter.fused_gradients import set_attributes

MASKED = -10000.0
"""Score of a masked key, as in Megatron-Core: a query whose keys are all masked averages them."""


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
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None
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


class LocalAttention(MegatronModule):
    """Softmax attention in plain PyTorch, for a ``core_attention`` of a layer spec.

    Under context parallelism over CP ranks Megatron-Core cuts the sequence into 2 * CP chunks and
    gives the queries, keys and values of chunks r and 2 * CP - 1 - r to rank r. Each rank gathers
    the keys and values of the whole sequence. Tensor parallelism divides the heads, which needs
    nothing here. With CP = 1 the numbers are those of Megatron-Core's DotProductAttention.

    Args:
        config: of the model.
        layer_number: from 1; query-key layer scaling divides the scores by it before they are
            rounded.
        attn_mask_type: causal, or another type with an explicit mask (or none at all).
        attention_type: "self".
        attention_dropout: default ``config.attention_dropout``.
        softmax_scale: the factor of the scores; default 1 / sqrt(width of a key).
        k_channels: width of a key's head, default ``config.kv_channels``.
        v_channels: ignored: the width of a value's head follows from the values.
        cp_comm_type: ignored: Transformer Engine's choice of communication.
        pg_collection: with the group ``cp``; default Megatron-Core's global groups.

    Raises:
        NotImplementedError: for options that it does not have, all in one message.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self._check(layer_number, attention_type)
        self.softmax_scale = (
            1 / math.sqrt(k_channels or config.kv_channels)
            if softmax_scale is None
            else softmax_scale
        )
        # Scores of deep layers are large: they are scaled down first, and scaled back in float32.
        self.score_scale = max(1, layer_number) if config.apply_query_key_layer_scaling else 1
        self.attention_dropout = nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def _check(self, layer_number: int, attention_type: str) -> None:
        config, problems = self.config, []
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            problems.append(f"a sliding window (window_size {config.window_size})")
        if config.softmax_type != "vanilla":
            problems.append(f"softmax_type {config.softmax_type!r}")
        if self.attn_mask_type in (AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right):
            problems.append(f"the mask type {self.attn_mask_type.name}")
        if attention_type != "self":
            problems.append(f"{attention_type} attention")
        _refuse(
            "the local attention",
            [f"{it}: leave it out, or use Transformer Engine's layers" for it in problems],
        )

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
        extras = {"an attention bias": attention_bias, "packed sequences": packed_seq_params}
        given = [
            f"{name}: use Transformer Engine's layers"
            for name, extra in extras.items()
            if extra is not None
        ]
        _refuse("the local attention", given)
        key, value = (
            gather_from_sequence_parallel_region(each, True, self.cp_group) for each in (key, value)
        )
        positions = self._positions(key.shape[0], key.device)
        mask = self._mask(attention_mask, query.shape[0], positions)
        return self._attend(query, key, value, mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with the keys and values of the whole sequence; shapes as in :meth:`forward`."""
        batch_and_heads = query.shape[1:3]
        heads_per_group = query.shape[2] // key.shape[2]
        key = key.repeat_interleave(heads_per_group, dim=2)
        value = value.repeat_interleave(heads_per_group, dim=2)
        # [batch * heads, sequence, width]
        query, key, value = (each.flatten(1, 2).transpose(0, 1) for each in (query, key, value))
        scale = self.softmax_scale / self.score_scale
        scores = torch.baddbmm(query.new_empty(()), query, key.transpose(1, 2), beta=0, alpha=scale)
        scores = scores.unflatten(0, batch_and_heads).float() * self.score_scale
        if mask is not None:
            scores = scores.masked_fill(mask, MASKED)
        probabilities = self._dropped(scores.softmax(dim=-1).to(query.dtype))
        context = torch.bmm(probabilities.flatten(0, 1), value)
        return context.unflatten(0, batch_and_heads).permute(2, 0, 1, 3).flatten(2)

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

    def _mask(self, given: Tensor | None, num_queries: int, positions: Tensor) -> Tensor | None:
        """Return the mask with its columns in the order of the gathered keys."""
        if given is not None:
            if given.shape[-1] != len(positions):
                raise ValueError(
                    f"expects an attention mask over all {len(positions)} keys but got the shape"
                    f" {tuple(given.shape)}"
                )
            return given if self.cp_group.size() == 1 else given[..., positions]
        if self.attn_mask_type is not AttnMaskType.causal:
            return None
        mine = positions.view(-1, num_queries)[self.cp_group.rank()]
        return positions > mine[:, None]

    def _dropped(self, probabilities: Tensor) -> Tensor:
        if self.config.sequence_parallel:  # the layers already run in a fork of the random state
            return self.attention_dropout(probabilities)
        # Heads of other tensor-parallel ranks must lose other values.
        with get_cuda_rng_tracker().fork():
            return self.attention_dropout(probabilities)


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
        names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _whole_latents(
        self, projection: nn.Module, inputs: object, output: tuple[Tensor, None]
    ) -> tuple[Tensor, None]:
        """Return latents and position keys in all columns, as if nothing divided the projection."""
        latents = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        if self.config.sequence_parallel:
            # The caller gathers the position keys again, and that gather sums their gradients.
            return scatter_to_sequence_parallel_region(latents, group=self.tp_group), None
        shared, positions = latents.split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        return torch.cat([shared, SumOfGradients.apply(positions, self.tp_group)], dim=-1), None


class SumOfGradients(torch.autograd.Function):
    """An identity whose gradient is summed over the ranks of a group."""

    # Megatron-Core's `copy_to_tensor_model_parallel_region` means this too, but reduces a copy of a
    # gradient that is not contiguous, and returns the gradient without the sum.

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return a view of ``tensor``."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient over the ranks of the group, in a copy."""
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise NotImplementedError(f"{what} does not know " + "; nor ".join(problems))
