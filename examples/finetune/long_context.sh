#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Four times the context, on two CPU ranks in a few minutes: each rank has half of every sequence (context parallelism).
#
#   bash examples/finetune/long_context.sh [more flags of pretrain_gpt.py, for the fine-tuning]
#
# The model is pretrained at 128 tokens. Rotary positions are then divided by four, so that 512 of them lie where it knows 128
# (--rotary-seq-len-interpolation-factor), and training goes on at that length. To a load this is another model, which
# --no-check-checkpoint-args takes. Losses do not depend on how sequences are divided: with --context-parallel-size 1 they
# are the same. The result is in checkpoints/long.
source "$(dirname "${BASH_SOURCE[0]}")/base_run.sh"

BASE="${BASE:-checkpoints/long_base}"

pretrain_base --seq-length 128 --micro-batch-size 4 --global-batch-size 16
fine_tune pretrain_gpt.py --seq-length 512 --context-parallel-size 2 \
    --rotary-seq-len-interpolation-factor 4 --no-check-checkpoint-args \
    --micro-batch-size 1 --global-batch-size 4 --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --save checkpoints/long --overwrite "$@"
