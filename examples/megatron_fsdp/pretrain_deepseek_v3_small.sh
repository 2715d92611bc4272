#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DeepSeek-V3 in small: latent attention, one dense layer and then experts with a shared one, routing in groups by sigmoid
# scores and a bias that balances the load, prediction of one more token. Eight ranks: TP 2 x PP 2 x EP 2.
#
#   bash examples/megatron_fsdp/pretrain_deepseek_v3_small.sh [more flags of pretrain_gpt.py]
RANKS=8
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1
)
MODEL=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 320
    --num-attention-heads 8
    --seq-length 128
    --multi-latent-attention
    --q-lora-rank 48
    --kv-lora-rank 32
    --qk-head-dim 16
    --qk-pos-emb-head-dim 8
    --v-head-dim 16
    --qk-layernorm
    --position-embedding-type rope
    --rotary-base 10000
    --rope-type yarn
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-layer-freq "([0]*1+[1]*3)"
    --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64
    --moe-router-topk 4
    --moe-router-num-groups 4
    --moe-router-group-topk 2
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1
)
source "$(dirname "${BASH_SOURCE[0]}")/small_run.sh"
run_small "$@"
