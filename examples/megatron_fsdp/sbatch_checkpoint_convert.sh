#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Convert a checkpoint on several nodes under Slurm, without GPUs. The ranks share the work, each in little memory.
#
#   sbatch [--nodes=N] examples/megatron_fsdp/sbatch_checkpoint_convert.sh INPUT OUTPUT [more options of the command]
#   COMMAND=convert-fsdp-dtensor-to-torch-dist sbatch examples/megatron_fsdp/sbatch_checkpoint_convert.sh INPUT OUTPUT
#
# INPUT and OUTPUT may be environment variables instead; then all words are options. COMMAND is any that has an input and
# an output: convert-torch-dist-to-fsdp-dtensor if not set, convert-to-hf, convert-from-hf, modify-state-dict and so on.
# A job that was preempted or killed goes on where it was when it is queued again, and OUTPUT appears when it is complete.
#
#SBATCH --job-name=checkpoint_convert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file, so the repository is where the job was submitted, unless REPOSITORY says otherwise.
cd "${REPOSITORY:-${SLURM_SUBMIT_DIR:-.}}"
TOOL=tools/checkpoint/checkpoint_inspector.py
[[ -f $TOOL ]] || { echo "$PWD has no $TOOL: submit from the repository, or set REPOSITORY" >&2; exit 1; }

if [[ -z "${INPUT:-}" || -z "${OUTPUT:-}" ]]; then
    [[ $# -ge 2 ]] || { echo "usage: sbatch ${BASH_SOURCE[0]##*/} INPUT OUTPUT [options]" >&2; exit 2; }
    INPUT="$1" OUTPUT="$2"
    shift 2
fi
RANKS_PER_NODE="${RANKS_PER_NODE:-8}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="${MASTER_PORT:-29501}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$RANKS_PER_NODE" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" \
    "$TOOL" "${COMMAND:-convert-torch-dist-to-fsdp-dtensor}" "$INPUT" "$OUTPUT" "$@"
