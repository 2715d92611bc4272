# SPDX-License-Identifier: Apache-2.0
"""Rules for model parallelism: conflicts name the fix, and axes imply settings."""

import pytest

from megatron.pretrain.arguments.configs import ddp_config, transformer_config
from tests.support.pretrain.arguments.command_lines import (
    DEEP,
    EXPERTS,
    MOCK,
    parse,
    problems,
    rows_not_refused,
)

PIPELINE = "--pipeline-model-parallel-size 2"
FSDP = "--use-megatron-fsdp"
CONFLICTS = {
    "": [
        (
            "--tensor-model-parallel-size 3",
            "tensor 3 x pipeline 1 x context 1 parallelism needs a multiple of 3 ranks, not 8",
        ),
        (
            "--num-experts 6 --expert-model-parallel-size 3",
            "expert tensor 1 x expert 3 x pipeline 1 parallelism needs a multiple of 3 ranks",
        ),
        (
            f"{FSDP} --megatron-fsdp-version 2 --use-distributed-optimizer",
            "--use-distributed-optimizer with --megatron-fsdp-version 2: hooks do what it is for",
        ),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
            "must divide the 8 data x context ranks",
        ),
        (
            (
                "--use-distributed-optimizer --num-distributed-optimizer-instances 4 --num-experts"
                " 8 --expert-model-parallel-size 4"
            ),
            "must divide the 2 expert data ranks",
        ),
        ("--tensor-model-parallel-size 8", "num_attention_heads (4) must be a multiple of"),
        (
            (
                "--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 96"
                " --group-query-attention --num-query-groups 6"
            ),
            "num_query_groups (6) must be a multiple or divisor of tensor_model_parallel_size (4)",
        ),
        ("--context-parallel-size 4 --seq-length 36", "--seq-length 36 must be a multiple of 8"),
        (
            (
                "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel"
                " --seq-length 36"
            ),
            (
                "--seq-length 36 must be a multiple of 8: --sequence-parallel divides it over 4"
                " tensor-parallel ranks after 2"
            ),
        ),
        ("--pipeline-model-parallel-size 8 --num-layers 9", "--num-layers 9 must be a multiple of"),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "needs --pipeline-model-parallel-size of at least 2",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
            "number of layers at middle stage: 5 must be divisible",
        ),
        (
            "--num-experts 3 --expert-model-parallel-size 2",
            "--num-experts 3 must be a multiple of 2",
        ),
        (
            "--expert-model-parallel-size 2",
            "num_moe_experts must be non None to use expert-parallel",
        ),
        (
            (
                "--mtp-num-layers 1 --position-embedding-type rope --recompute-granularity full"
                " --recompute-method uniform --recompute-num-layers 2"
            ),
            "needs --recompute-num-layers 1",
        ),
        (
            (
                "--position-embedding-type rope --mtp-num-layers 1 --pipeline-model-parallel-size"
                " 4 --num-layers 4 --pipeline-model-parallel-layout Ett|tt|m|L"
            ),
            "m (the layers that predict more tokens) must be in the last stage",
        ),
        ("--cp-comm-type a2a", "--cp-comm-type needs --context-parallel-size above 1"),
        (
            (
                "--use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation"
                " --num-distributed-optimizer-instances 2"
            ),
            "leave one out",
        ),
    ],
    "--tensor-model-parallel-size 2": [
        ("--ffn-hidden-size 99", "--ffn-hidden-size 99 must be a multiple of 2"),
        ("--padded-vocab-size 127", "--padded-vocab-size 127 must be a multiple of 2"),
    ],
    PIPELINE: [
        (
            "--use-tp-pp-dp-mapping --num-experts 4 --expert-model-parallel-size 2",
            (
                "--use-tp-pp-dp-mapping needs as many ranks for one copy of the experts (4) as of"
                " the rest (2)"
            ),
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            (
                "--num-layers-per-virtual-pipeline-stage 3 must divide the 4 layers of a pipeline"
                " stage"
            ),
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            "exclude each other",
        ),
        (
            "--decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
            "number of layers at first stage: 3must be divisible by virtual",
        ),
        (
            "--decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 2",
            "use --num-virtual-stages-per-pipeline-rank",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "--no-overlap-p2p-communication does not go with virtual stages on two pipeline stages",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24",
            (
                "--global-batch-size 24 must be a multiple of 16: virtual stages need a multiple"
                " of 2 microbatches"
            ),
        ),
        ("--pipeline-model-parallel-layout Et|tL", "must match num_layers 8"),
        ("--pipeline-model-parallel-layout Ex|tL", "Invalid layer character"),
        (
            "--pipeline-model-parallel-layout Etttt|ttttL --decoder-last-pipeline-num-layers 4",
            "cannot be set with other pipeline layout arguments",
        ),
    ],
    "--num-experts 4": [
        ("--tensor-model-parallel-size 2 --disable-bias-linear", "give --sequence-parallel"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "Bias in Moe is only supported when ETP==1",
        ),
        ("--moe-router-topk 5", "--moe-router-topk 5 must be at most --num-experts 4"),
        ("--moe-router-topk 1", "use --moe-router-pre-softmax when topk is 1"),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 1",
            "num_moe_experts (4) should be divisible by moe_router_num_groups (3)",
        ),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 3",
            "moe_router_group_topk (3) should be smaller than moe_router_num_groups (2)",
        ),
        (
            "--moe-router-topk 3 --moe-router-num-groups 2 --moe-router-group-topk 1",
            "--moe-router-topk 3 must be between --moe-router-group-topk 1 and the 2 experts",
        ),
        ("--moe-router-enable-expert-bias", "Expert bias for aux-loss-free routing only supports"),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1",
            "moe_aux_loss_coeff must be a list of the same length",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1",
            "moe_expert_capacity_factor only works with aux_loss",
        ),
        ("--moe-layer-freq [0,1]", "--moe-layer-freq names 2 layers, --num-layers 8"),
        (
            "--moe-pad-expert-input-to-capacity",
            "moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity",
        ),
    ],
    EXPERTS: [
        (
            "--expert-tensor-parallel-size 2",
            (
                "--expert-tensor-parallel-size 2 beside --tensor-model-parallel-size 1 needs"
                " --expert-model-parallel-size"
            ),
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            (
                "--expert-tensor-parallel-size 1 beside --tensor-model-parallel-size 2 needs"
                " --expert-model-parallel-size"
            ),
        ),
        ("--moe-layer-freq 0", "gives experts to no layer"),
        ("--moe-layer-freq ([0]*8)", "gives experts to no layer"),
    ],
    "--multi-latent-attention": [
        ("--group-query-attention", "leave --group-query-attention out"),
        ("--rope-type rope --mscale 2", "--mscale needs --rope-type yarn"),
        ("--context-parallel-size 2 --window-size 4,0", "need Transformer Engine layers"),
        (
            "--kv-lora-rank 15 --tensor-model-parallel-size 2",
            "--kv-lora-rank and --qk-pos-emb-head-dim together, 79",
        ),
        (
            "--q-lora-rank 15 --tensor-model-parallel-size 2",
            "--q-lora-rank 15 must be a multiple of 2",
        ),
    ],
    FSDP: [
        (
            "--overlap-moe-expert-parallel-comm --fsdp-double-buffer",
            "--overlap-moe-expert-parallel-comm and --fsdp-double-buffer exclude each other",
        ),
        (
            "--overlap-moe-expert-parallel-comm --mtp-num-layers 1",
            "--overlap-moe-expert-parallel-comm and --mtp-num-layers exclude each other",
        ),
        (
            "--delay-wgrad-compute --megatron-fsdp-enable-fine-grained-param-gather",
            (
                "--delay-wgrad-compute and --megatron-fsdp-enable-fine-grained-param-gather"
                " exclude each other"
            ),
        ),
        (
            (
                "--data-parallel-sharding-strategy optim --outer-dp-sharding-strategy optim"
                " --num-distributed-optimizer-instances 2"
            ),
            "needs --data-parallel-sharding-strategy optim_grads_params, got optim",
        ),
        ("--outer-dp-sharding-strategy optim", "give --num-distributed-optimizer-instances"),
        (
            "--num-experts 4 --expert-data-parallel-sharding-strategy optim",
            "is for experts that have a mesh of their own: give --expert-model-parallel-size",
        ),
        (
            (
                "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"
                " --expert-data-parallel-sharding-strategy optim"
                " --expert-outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2"
            ),
            "needs --expert-data-parallel-sharding-strategy optim_grads_params, got optim",
        ),
        ("--create-all-gather-group --num-distributed-optimizer-instances 2", "leave one out"),
        (
            "--data-parallel-sharding-strategy no_shard --init-model-with-meta-device",
            (
                "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy"
                " no_shard"
            ),
        ),
        (
            "--init-model-with-meta-device --pipeline-model-parallel-size 2",
            "leave it out, or give --untie-embeddings-and-output-weights",
        ),
        (
            (
                "--init-model-with-meta-device --pipeline-model-parallel-size 2 --mtp-num-layers 1"
                " --position-embedding-type rope --untie-embeddings-and-output-weights"
            ),
            "leave it out, or leave out --mtp-num-layers",
        ),
    ],
}
"""Flags of a group -> further flags, and a part of what is said of them."""


def test_one_conflict_of_parallelism_names_the_fix() -> None:
    others = {}
    for flags, rows in CONFLICTS.items():
        others |= rows_not_refused(f"{DEEP} {flags}", rows, world_size=8)
    assert not others


def test_sizes_that_are_no_size_are_named_once() -> None:
    assert problems(f"{MOCK} --tensor-model-parallel-size 0 --context-parallel-size -1") == [
        "--tensor-model-parallel-size must be at least 1, got 0",
        "--context-parallel-size must be at least 1, got -1",
    ]


def test_what_follows_from_the_axes() -> None:
    axes = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
    experts = f"{EXPERTS} --expert-model-parallel-size 2"
    args, _ = parse(f"{DEEP} {axes} {PIPELINE} {experts}", world_size=16)
    assert (args.data_parallel_size, args.global_batch_size) == (2, 4)
    assert args.expert_tensor_parallel_size == 2
    assert args.world_size == 16 and args.sequence_parallel
    config = transformer_config(args)
    assert not config.overlap_p2p_comm
    assert config.batch_p2p_comm
    assert config.cp_comm_type == "all_gather"
    line = f"{MOCK} --context-parallel-size 2 --cp-comm-type a2a"
    on_gpu, _ = parse(line, world_size=2, cuda=True, transformer_engine=True)
    assert transformer_config(on_gpu).cp_comm_type == "a2a"


@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 2", 2),
        ("--pipeline-model-parallel-layout Et|ttt|tt|ttL", 2),
        ("--pipeline-model-parallel-layout Et|tttttttL", None),
    ],
)
def test_virtual_stages_and_what_only_they_can_do(flags: str, virtual: int | None) -> None:
    line = (
        f"{DEEP} --pipeline-model-parallel-size 2 --global-batch-size 8 --overlap-grad-reduce"
        " --overlap-param-gather"
    )
    args, _ = parse(f"{line} --use-distributed-optimizer {flags}", world_size=4)
    config = transformer_config(args)
    assert args.virtual_pipeline_model_parallel_size == virtual
    assert config.virtual_pipeline_model_parallel_size == virtual
    interleaved = virtual is not None
    assert config.overlap_p2p_comm == ddp_config(args).align_param_gather == interleaved
    assert config.batch_p2p_comm == (not interleaved)
    if args.pipeline_model_parallel_layout is not None:
        assert str(config.pipeline_model_parallel_layout) == flags.split()[1]
