#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tuning of a mixture of experts, on two CPU ranks in a few minutes: each rank has half of the experts.
#
#   bash examples/finetune/experts.sh [more flags of pretrain_gpt.py, for the fine-tuning]
#
# The checkpoint does not say how experts were divided: it is written by ranks that have all of them, and read by ranks that
# have half. Losses do not depend on it either: with --expert-model-parallel-size 1 they are the same. The balancing loss is
# smaller than in pretraining, as the router has learned. The result is in checkpoints/experts.
source "$(dirname "${BASH_SOURCE[0]}")/base_run.sh"

BASE="${BASE:-checkpoints/experts_base}"
MODEL+=(
    --seq-length 128
    --num-experts 4
    --moe-ffn-hidden-size 64
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-token-dispatcher-type alltoall
)
TRAINING+=(--micro-batch-size 4 --global-batch-size 16)

pretrain_base --moe-aux-loss-coeff 1e-2
fine_tune pretrain_gpt.py --expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-3 --save checkpoints/experts \
    --overwrite "$@"
