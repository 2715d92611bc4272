#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train Llama 3 8B with Megatron-FSDP on one node of 8 GPUs: from the beginning, or from a Hugging Face model.
#
#   DATA_PATH=data/mine_text_document TOKENIZER=/models/Meta-Llama-3-8B \
#       bash examples/megatron_fsdp/pretrain_llama3_8b.sh [more flags of pretrain_gpt.py, which win]
#   DATA_PATH=data/mine_text_document HF_MODEL=/models/Meta-Llama-3-8B \
#       bash examples/megatron_fsdp/pretrain_llama3_8b.sh --lr 1e-5 --min-lr 1e-6 --train-iters 1000
#
# HF_MODEL is a local folder with config.json and safetensors; its tokenizer is used unless TOKENIZER names another. It is
# converted once, into CONVERTED. Started again, a run goes on from its last checkpoint. Llama 3.1 and later also need
# --use-rope-scaling. The data are made with tools/preprocess_data.py and the same tokenizer.
#
# What has been checked: every flag is parsed by the program's own parser as on 8 GPUs, and the script is run on CPU ranks
# with a smaller model. Nothing here has been run on a GPU: sizes and settings are reasoned, not measured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RANKS="${NPROC_PER_NODE:-8}"
CHECKPOINTS="${CHECKPOINTS:-checkpoints/llama3_8b}"
CONVERTED="${CONVERTED:-checkpoints/llama3_8b_converted}"
TENSORBOARD="${TENSORBOARD:-tensorboard/llama3_8b}"
TOKENIZER="${TOKENIZER:-${HF_MODEL:-}}"

# 14 bytes a parameter (bf16 weights, fp32 main weights, two fp32 moments) over 8 GPUs are 14 GB each, gradients 2 to 4 GB
# more.
PARALLEL=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor
    --init-model-with-meta-device
    --calculate-per-token-loss
    --grad-reduce-in-bf16
    --overlap-grad-reduce
    --overlap-param-gather
    --no-gradient-accumulation-fusion
)
MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.02
    --padded-vocab-size 128256
)
TRAINING=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 100000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.02
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --manual-gc
    --manual-gc-interval 100
)
OUTPUT=(
    --save "$CHECKPOINTS"
    --save-interval 500
    --log-interval 10
    --log-throughput
    --eval-interval 500
    --eval-iters 8
    --tensorboard-dir "$TENSORBOARD"
)
if [[ -n "${DATA_PATH:-}" ]]; then
    # shellcheck disable=SC2206  # several prefixes, or weights and prefixes, are words
    DATA=(--data-path $DATA_PATH --tokenizer-type HuggingFaceTokenizer)
    DATA+=(--tokenizer-model "${TOKENIZER:?must be the folder of the tokenizer}")
else
    echo "DATA_PATH is not set: synthetic tokens, with which only speed means something"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255)
fi

# One queue for all kernels would keep communication from overlapping with compute.
unset CUDA_DEVICE_MAX_CONNECTIONS
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
TRACKER=latest_checkpointed_iteration.txt
START=(--load "$CHECKPOINTS")
if [[ -n "${HF_MODEL:-}" && ! -f "$CHECKPOINTS/$TRACKER" ]]; then
    if [[ ! -f "$CONVERTED/$TRACKER" ]]; then
        torchrun --standalone --nproc_per_node "$RANKS" tools/checkpoint/checkpoint_inspector.py \
            convert-from-hf "$HF_MODEL" "$CONVERTED"
    fi
    START=(--load "$CONVERTED" --finetune)
fi
exec torchrun --standalone --nproc_per_node "$RANKS" pretrain_gpt.py \
    "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "${START[@]}" "$@"
