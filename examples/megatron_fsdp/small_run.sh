# SPDX-License-Identifier: Apache-2.0
# Sourced by the small models beside it: training flags that they share, and the start on this machine's ranks.
#
#   RANKS      how many processes
#   PARALLEL   how they divide the model
#   MODEL      what it is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TRAINING=(
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.02
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters 100
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --log-interval 10
    --eval-iters 2
)

run_small() {
    # One thread for each rank: many ranks of many threads each would fight over the cores.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec torchrun --standalone --nproc_per_node "${NPROC_PER_NODE:-$RANKS}" pretrain_gpt.py \
        --use-megatron-fsdp "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "$@"
}
