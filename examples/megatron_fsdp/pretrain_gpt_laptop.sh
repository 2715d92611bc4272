#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train a small GPT with Megatron-FSDP on two CPU ranks: all of the training program in two minutes, without a GPU.
#
#   bash examples/megatron_fsdp/pretrain_gpt_laptop.sh [more flags of pretrain_gpt.py]
#
# Flags given here come last and win: `--train-iters 20` makes it short.
# Results: checkpoints/pretrain (checkpoints at iterations 50 and 100) and tensorboard/pretrain (loss curves). Started again, it
# begins anew and moves them into checkpoints/pretrain/replaced_1; `--load checkpoints/pretrain` continues them instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PARALLEL=(
    --use-megatron-fsdp
)
MODEL=(
    --num-layers 4
    --hidden-size 256
    --num-attention-heads 4
    --seq-length 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
TRAINING=(
    --micro-batch-size 8
    --global-batch-size 16
    --train-iters 100
    --lr 3e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.08
    --weight-decay 0.1
)
OUTPUT=(
    --eval-interval 50
    --eval-iters 4
    --log-interval 10
    --save checkpoints/pretrain
    --overwrite
    --save-interval 50
    --tensorboard-dir tensorboard/pretrain
)

# One thread for each rank: two ranks of many threads each would fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --nproc_per_node "${NPROC_PER_NODE:-2}" pretrain_gpt.py \
    "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${OUTPUT[@]}" "$@"
