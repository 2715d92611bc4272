# SPDX-License-Identifier: Apache-2.0
"""Flags of ``pretrain_gpt.py`` for published models, and the number of GPUs to plan for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A published model.

    Args:
        flags: of ``pretrain_gpt.py``.
        num_gpus: if no other number is given.
        source: of the sizes.
    """

    flags: str
    num_gpus: int
    source: str


_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16"
)

PRESETS = {
    "llama-3-70b": Preset(
        f"{_COMMON} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672"
        " --num-attention-heads 64 --group-query-attention --num-query-groups 8"
        " --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192"
        " --rotary-base 500000 --global-batch-size 2048",
        512,
        "The Llama 3 Herd of Models, arXiv:2407.21783, table 3; a batch of 16 million tokens",
    ),
    "deepseek-v3": Preset(
        f"{_COMMON} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432"
        " --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536"
        " --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
        " --qk-layernorm --num-experts 256 --moe-layer-freq [0]*3+[1]*58"
        " --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048"
        " --moe-router-topk 8 --moe-router-score-function sigmoid"
        " --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
        " --moe-router-num-groups 8 --moe-router-group-topk 4"
        " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"
        " --moe-token-dispatcher-type alltoall --moe-router-dtype fp32"
        " --vocab-size 129280 --seq-length 4096 --max-position-embeddings 4096"
        " --global-batch-size 15360",
        1024,
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2; without the layer that"
        " predicts a second token, and in bf16 where the report has fp8",
    ),
}
