# SPDX-License-Identifier: Apache-2.0
# Sourced by the recipes beside it: a small model, and a short pretraining of it where there is no checkpoint to begin with.
#
#   BASE               the checkpoint to begin with
#   BASE_ITERS         iterations of the pretraining, 200 if not set
#   DATA_PATH          data of the fine-tuning; without it, Python's library, as in the pretraining
#   NPROC_PER_NODE     how many processes, 2 if not set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RANKS="${NPROC_PER_NODE:-2}"
MODEL=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
TRAINING=(
    --use-megatron-fsdp
    --eval-iters 0
    --log-interval 10
)
FINE_TUNING=(
    --train-iters 200
    --lr 2e-3
    --min-lr 1e-4
    --lr-decay-style cosine
)
if [[ -n "${DATA_PATH:-}" ]]; then
    FINE_TUNING+=(--train-data-path "$DATA_PATH" --dataloader-type cyclic)
fi
# One thread for each rank: two ranks of many threads each would fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Pretrain the model with these flags, unless there is a checkpoint already.
pretrain_base() {
    [[ ! -e "$BASE" ]] || return 0
    torchrun --standalone --nproc_per_node "$RANKS" pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" \
        --train-iters "${BASE_ITERS:-200}" --lr 3e-3 --save "$BASE" "$@"
}

# Go on from its weights, with a new optimizer and a new schedule, by this program and these flags.
fine_tune() {
    torchrun --standalone --nproc_per_node "$RANKS" "$1" "${MODEL[@]}" "${TRAINING[@]}" "${FINE_TUNING[@]}" \
        --finetune --load "$BASE" "${@:2}"
}
