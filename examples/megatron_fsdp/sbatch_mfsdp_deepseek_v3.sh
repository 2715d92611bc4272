#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretrain DeepSeek-V3 (671 billion parameters, 37 billion of them used for a token, and a layer that predicts one more
# token) with Megatron-FSDP, under Slurm:
#
#   DATA_PATH=/data/tokens_text_document TOKENIZER=/models/DeepSeek-V3 \
#       sbatch [--nodes=N] examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh [more flags of pretrain_gpt.py, which win]
#
# Submit it from the root of this repository, once: before the time limit and when it is preempted the job saves, goes back
# into the queue, and continues from its checkpoint; so it does after the failure of a node. When a rank dies, torchrun
# starts all ranks again, MAX_RESTARTS times (3). With --dependency=singleton no two jobs of this name run at a time.
# scancel ends it.
#
# What has been checked: every flag is parsed by the program's own parser as on 64 nodes with GPUs, and the script is run on
# CPU ranks with a smaller model, where other commands play Slurm. Nothing here has been run on a GPU or under Slurm: sizes
# and settings are reasoned, not measured.
#
#SBATCH --job-name=mfsdp_deepseek_v3
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file, so the repository is where the job was submitted, unless REPOSITORY says otherwise.
cd "${REPOSITORY:-${SLURM_SUBMIT_DIR:-.}}"
[[ -f pretrain_gpt.py ]] || { echo "no pretrain_gpt.py in $PWD: submit from the repository, or set REPOSITORY" >&2; exit 1; }

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
CHECKPOINTS="${CHECKPOINTS:-checkpoints/deepseek_v3}"
TENSORBOARD="${TENSORBOARD:-tensorboard/deepseek_v3}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="${MASTER_PORT:-29500}"

# 14 bytes a parameter (bf16 weights, fp32 main weights, two fp32 moments) over 512 GPUs are 19 GB each, gradients 3 to 5 GB
# more. Each rank holds 4 of the 256 experts of a layer, so that a layer's weights gather to 0.8 GB, not 23.
PARALLEL=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor
    --init-model-with-meta-device
    --calculate-per-token-loss
    --grad-reduce-in-bf16
    --fsdp-double-buffer
    --overlap-grad-reduce
    --overlap-param-gather
    --no-gradient-accumulation-fusion
    --expert-model-parallel-size "${EXPERT_PARALLEL:-64}"
    --expert-tensor-parallel-size 1
    --distributed-timeout-minutes 30
)
# The buffers are registered with NCCL, which memory in segments that grow does not allow.
[[ "${PYTORCH_CUDA_ALLOC_CONF:-}" == *expandable_segments:True* ]] || PARALLEL+=(--use-nccl-ub)
MODEL=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 163840
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
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
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.006
    --padded-vocab-size 129280
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.3
)
EXPERTS=(
    --num-experts 256
    --moe-layer-freq "([0]*3+[1]*58)"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
TRAINING=(
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --micro-batch-size 1
    --global-batch-size 15360
    --train-iters 235000
    --lr 2.2e-4
    --min-lr 2.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --manual-gc
    --manual-gc-interval 100
)
OUTPUT=(
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval 500
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 4
    --tensorboard-dir "$TENSORBOARD"
)
if [[ -n "${DATA_PATH:-}" ]]; then
    # shellcheck disable=SC2206  # several prefixes, or weights and prefixes, are words
    DATA=(--data-path $DATA_PATH --tokenizer-type HuggingFaceTokenizer)
    DATA+=(--tokenizer-model "${TOKENIZER:?must be the folder of the tokenizer}")
    # All nodes must see the indices that the first rank makes of the data; homes may be their own.
    DATA+=(--data-cache-path "${DATA_CACHE:-$CHECKPOINTS/index_cache}")
else
    echo "DATA_PATH is not set: synthetic tokens, with which only speed means something"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 129279)
fi

# One queue for all kernels would keep communication from overlapping with compute.
unset CUDA_DEVICE_MAX_CONNECTIONS
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Time that torchrun gives its ranks to save after SIGTERM; without the variable, or in torch that does not know it, 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}"

preempted() {
    [[ "$(scontrol show job "$SLURM_JOB_ID")" == *PreemptTime=[0-9]* ]]
}
# USR1 comes 600 s before the end, which preemption advances; after preemption all torchruns have SIGTERM from Slurm already.
# A second one would end them before their ranks. SIGTERM to srun itself would kill all tasks.
END_IS_NEAR=
end_is_near() {
    END_IS_NEAR=1
    preempted || scancel --signal=TERM "$SLURM_JOB_ID" || true
}
trap end_is_near USR1

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS_PER_NODE" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" \
    pretrain_gpt.py "${PARALLEL[@]}" "${MODEL[@]}" "${EXPERTS[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@" &
CODE=0
wait $! || CODE=$?
# The signal has interrupted the wait; the ranks are saving.
if [[ -n $END_IS_NEAR ]]; then
    CODE=0
    wait $! || CODE=$?
fi
if [[ -n $END_IS_NEAR ]] || preempted; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
