#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen3 in small: normalised queries and keys, heads wider than hidden size / heads, tied embeddings. Four ranks: two pipeline stages, two data.
#
#   bash examples/megatron_fsdp/pretrain_qwen3_small.sh [more flags of pretrain_gpt.py]
RANKS=4
PARALLEL=(
    --pipeline-model-parallel-size 2
)
MODEL=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 8
    --kv-channels 32
    --group-query-attention
    --num-query-groups 4
    --qk-layernorm
    --seq-length 128
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
)
source "$(dirname "${BASH_SOURCE[0]}")/small_run.sh"
run_small "$@"
