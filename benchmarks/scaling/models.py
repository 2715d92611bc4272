# SPDX-License-Identifier: Apache-2.0
"""Models of the page on scale: their flags of ``pretrain_gpt.py``, and the batch of their runs."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from functools import cached_property

from megatron.planning.costs.model_sizes import ModelSizes, sizes_of_arguments
from megatron.planning.presets import PRESETS
from megatron.planning.search import arguments_on

NEEDED = "--lr 1e-4 --train-iters 1000 --mock-data"
"""Flags that a run needs and that change no plan."""

_LLAMA = PRESETS["llama-3-70b"].flags

_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16"
)

_LLAMA_405B = (
    f"{_COMMON} --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248"
    " --num-attention-heads 128 --group-query-attention --num-query-groups 8"
    " --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192"
    " --rotary-base 500000 --global-batch-size 2048"
)

_MOE_2T = (
    f"{_COMMON} --num-layers 104 --hidden-size 12288 --ffn-hidden-size 49152"
    " --num-attention-heads 96 --group-query-attention --num-query-groups 8"
    " --num-experts 256 --moe-layer-freq [0]*4+[1]*100"
    " --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048"
    " --moe-router-topk 8 --moe-router-load-balancing-type aux_loss"
    " --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall --moe-router-dtype fp32"
    " --vocab-size 131072 --seq-length 8192 --max-position-embeddings 8192"
    " --global-batch-size 8192"
)


@dataclass(frozen=True)
class ModelOfScale:
    """A model of the page.

    Args:
        title: for readers.
        flags: of ``pretrain_gpt.py``, with the batch of its run.
        batch_source: of that batch.
    """

    title: str
    flags: str
    batch_source: str

    def arguments(self, flags: str, num_gpus: int) -> argparse.Namespace:
        """Return completed arguments on so many GPUs.

        Args:
            flags: beside those of the model, which they replace.
            num_gpus: of the run.
        """
        words = shlex.split(f"{self.flags} {NEEDED} {flags}")
        return arguments_on(words, num_gpus)

    @cached_property
    def _on_one(self) -> argparse.Namespace:
        """Arguments on one rank."""
        return self.arguments("--micro-batch-size 1", 1)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model."""
        return sizes_of_arguments(self._on_one)

    @property
    def batch(self) -> int:
        """Sequences of a step of the model's run."""
        return int(self._on_one.global_batch_size)

    @property
    def tokens(self) -> int:
        """Tokens of a step of the model's run."""
        return self.batch * self.sizes.sequence


MODELS = (
    ModelOfScale(
        "Llama 3 70B",
        _LLAMA,
        "table 3 of The Llama 3 Herd of Models, arXiv:2407.21783",
    ),
    ModelOfScale(
        "Llama 3 405B",
        _LLAMA_405B,
        "section 3.4.1 of the same report: 16 million tokens after 2.87 trillion tokens",
    ),
    ModelOfScale(
        "DeepSeek-V3",
        PRESETS["deepseek-v3"].flags,
        "section 4.2 of the DeepSeek-V3 Technical Report, arXiv:2412.19437",
    ),
    ModelOfScale(
        "MoE of 2T",
        _MOE_2T,
        "assumed, close to that of DeepSeek-V3 in tokens: nobody has published such a run",
    ),
)


def num_parameters(sizes: ModelSizes) -> int:
    """Return the elements of all matrices of a model; norms are left out."""
    of_dense = sizes.layers * sizes.attention_weights + sizes.dense_layers * sizes.dense_weights
    of_vocabulary = 2 * sizes.vocabulary_weights
    return of_dense + of_vocabulary + _layers_with_experts(sizes) * _of_experts(sizes, None)


def active_parameters(sizes: ModelSizes) -> int:
    """Return the elements of the matrices that a token meets; norms are left out."""
    experts = sizes.experts
    if experts is None:
        return num_parameters(sizes)
    of_dense = sizes.layers * sizes.attention_weights + sizes.dense_layers * sizes.dense_weights
    of_experts = _layers_with_experts(sizes) * _of_experts(sizes, experts.top_k)
    return of_dense + 2 * sizes.vocabulary_weights + of_experts


def _layers_with_experts(sizes: ModelSizes) -> int:
    return sizes.layers - sizes.dense_layers


def _of_experts(sizes: ModelSizes, number: int | None) -> int:
    """Return the elements of the experts of a layer, of its shared expert and its router.

    Args:
        sizes: of the model.
        number: of routed experts that count; None: all.
    """
    experts = sizes.experts
    if experts is None:
        return 0
    if number is None:
        number = experts.number
    return number * sizes.one_expert + sizes.shared_weights
