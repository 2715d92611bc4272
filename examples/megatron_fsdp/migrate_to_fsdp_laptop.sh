#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From tensor x pipeline parallelism to FSDP and on to Hugging Face, in small: four CPU ranks, no GPU, a minute or two.
# docs/coming_from_megatron_lm.md goes through it step by step.
#
#   bash examples/megatron_fsdp/migrate_to_fsdp_laptop.sh [more flags of pretrain_gpt.py, for both runs]
#
# Results are in checkpoints/migration (CHECKPOINTS names another folder), which must hold none yet: 3d, fsdp_start, fsdp, hf.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CHECKPOINTS="${CHECKPOINTS:-checkpoints/migration}"
TOOL=tools/checkpoint/checkpoint_inspector.py
# The vocabulary is padded alike in both runs: without the first flag the padding follows tensor parallelism, and the loss
# follows the padding.
MODEL=(
    --padded-vocab-size 512
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 64
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
# The schedule is that of 40 iterations from the beginning, of which the first run does 20.
TRAINING=(
    --micro-batch-size 2
    --global-batch-size 8
    --train-iters 40
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-iters 4
    --log-interval 5
    --eval-iters 0
    --save-interval 20
)

[[ ! -e "$CHECKPOINTS/3d" ]] || { echo "$CHECKPOINTS has results already: remove it, or set CHECKPOINTS" >&2; exit 1; }
# One thread for each rank: many ranks of many threads each would fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "--- train with TP 2 x PP 2"
torchrun --standalone --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --use-distributed-optimizer --dump-param-to-param-group-map "$CHECKPOINTS/map" \
    "${MODEL[@]}" "${TRAINING[@]}" --exit-interval 20 --save "$CHECKPOINTS/3d" "$@"

echo "--- convert, and check the result"
python "$TOOL" print-torch-dcp-in-json "$CHECKPOINTS/map"
torchrun --standalone --nproc_per_node 2 "$TOOL" convert-torch-dist-to-fsdp-dtensor --swiglu \
    "$CHECKPOINTS/3d" "$CHECKPOINTS/fsdp_start" \
    --param-to-param-group-map-json "$CHECKPOINTS/map/param_to_param_group_map.json"
python "$TOOL" verify "$CHECKPOINTS/fsdp_start"
python "$TOOL" diff "$CHECKPOINTS/3d" "$CHECKPOINTS/fsdp_start"

echo "--- go on with FSDP"
torchrun --standalone --nproc_per_node 2 pretrain_gpt.py --use-megatron-fsdp \
    "${MODEL[@]}" "${TRAINING[@]}" --load "$CHECKPOINTS/fsdp_start" --save "$CHECKPOINTS/fsdp" "$@"

echo "--- write a Hugging Face model"
python "$TOOL" convert-to-hf "$CHECKPOINTS/fsdp" "$CHECKPOINTS/hf"
python "$TOOL" verify "$CHECKPOINTS/hf"
