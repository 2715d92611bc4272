#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Mixtral in small: eight experts in every layer, two for each token, a balancing loss. Four ranks that hold two experts each.
#
#   bash examples/megatron_fsdp/pretrain_mixtral_small.sh [more flags of pretrain_gpt.py]
RANKS=4
PARALLEL=(
    --expert-model-parallel-size 4
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
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-ffn-hidden-size 448
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 2e-2
    --moe-token-dispatcher-type alltoall
)
source "$(dirname "${BASH_SOURCE[0]}")/small_run.sh"
run_small "$@"
