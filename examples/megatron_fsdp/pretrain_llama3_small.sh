#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 in small: grouped queries, rotary positions with base 500,000, an MLP 3.5 times as wide. Four ranks: two tensor-parallel, two data.
#
#   bash examples/megatron_fsdp/pretrain_llama3_small.sh [more flags of pretrain_gpt.py]
RANKS=4
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
)
MODEL=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 448
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2
    --seq-length 128
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
source "$(dirname "${BASH_SOURCE[0]}")/small_run.sh"
run_small "$@"
