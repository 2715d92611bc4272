# SPDX-License-Identifier: Apache-2.0
"""Rules of the command line: which flags conflict, and which settings follow from others."""

import pickle
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from tests.support.pretrain.arguments.command_lines import (
    MOCK,
    SMALL,
    parse,
    problems,
    rows_not_refused,
)

GPT_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 --global-batch-size
    1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style
    cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path my_data
    --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100
    --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
    --tensorboard-dir logs"""


def test_the_175b_example_is_refused_for_known_reasons_only() -> None:
    found = problems(GPT_175B, world_size=128, cuda=True, transformer_engine=True)
    starts = [problem.split(":")[0] for problem in found]
    assert starts == [
        "--rampup-batch-size 16 16 5859375",
        "--data-path",
        "--vocab-file vocab.json",
        "--merge-file merges.txt",
    ]


FSDP_RUN = f"""{MOCK} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --no-gradient-accumulation-fusion --use-distributed-optimizer --ckpt-format fsdp_dtensor
    --calculate-per-token-loss --overlap-grad-reduce --overlap-param-gather --bf16
    --grad-reduce-in-bf16 --use-mcore-models --swiglu --disable-bias-linear --group-query-attention
    --num-query-groups 2 --position-embedding-type rope --no-rope-fusion --normalization RMSNorm
    --untie-embeddings-and-output-weights --attention-backend flash --distributed-timeout-minutes 60
    --manual-gc --manual-gc-interval 10 --sequence-parallel --use-checkpoint-opt_param-scheduler
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --log-throughput --enable-experimental"""


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_the_published_fsdp_run_is_accepted(gpu: bool) -> None:
    args, notes = parse(FSDP_RUN, world_size=4, cuda=gpu, transformer_engine=gpu)
    assert args.data_parallel_sharding_strategy == "optim_grads_params"
    assert args.ckpt_format == "fsdp_dtensor"
    assert args.data_parallel_size == 4 and args.global_batch_size == 8
    assert args.megatron_fsdp_grad_comm_dtype == torch.bfloat16
    assert args.megatron_fsdp_main_params_dtype == torch.float32
    assert (args.attention_backend is AttnBackend.flash) == gpu
    assert args.distributed_backend == ("nccl" if gpu else "gloo")
    assert ddp_config(args).use_megatron_fsdp and optimizer_config(args).use_distributed_optimizer
    assert any("--sequence-parallel: off" in note for note in notes)


def test_fsdp_alone_sets_what_it_needs_and_says_so() -> None:
    args, notes = parse(f"{MOCK} --use-megatron-fsdp")
    assert args.data_parallel_sharding_strategy == "optim_grads_params"
    assert args.use_distributed_optimizer and args.ckpt_format == "fsdp_dtensor"
    assert notes[0].startswith(
        "--use-megatron-fsdp sets data-parallel-sharding-strategy optim_grads_params"
    )
    assert parse(MOCK)[0].data_parallel_sharding_strategy == "no_shard"


def test_user_buffers_are_registered_after_the_first_step_with_fsdp_only() -> None:
    flags = f"{MOCK} --use-nccl-ub"
    args, notes = parse(f"{flags} --use-megatron-fsdp", cuda=True)
    assert args.fsdp_manual_registration and args.fsdp_double_buffer
    assert "--use-nccl-ub sets fsdp-double-buffer, fsdp-manual-registration" in notes
    args, notes = parse(f"{flags} --use-megatron-fsdp --fsdp-manual-registration", cuda=True)
    assert args.fsdp_manual_registration and "--use-nccl-ub sets fsdp-double-buffer" in notes
    assert not parse(flags, cuda=True)[0].fsdp_manual_registration
    (problem,) = problems(f"{flags} --fsdp-manual-registration", cuda=True)
    assert problem == "--fsdp-manual-registration needs --use-megatron-fsdp"


SAMPLE_RUN = """--num-layers 3 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr
    0.005 --min-lr 0.0005 --weight-decay 0.1 --train-iters 20 --save-interval 1 --clip-grad 1.0
    --transformer-impl local --normalization RMSNorm --position-embedding-type rope --tokenizer-type
    NullTokenizer --vocab-size 159 --make-vocab-size-divisible-by 1 --ckpt-format torch_dist --seed
    1234 --save ckpt --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --expert-model-parallel-size 1 --lr-decay-style cosine --lr-warmup-iters 2 --hidden-dropout 0.0
    --attention-dropout 0.0 --num-query-groups 2 --group-query-attention --swiglu
    --disable-bias-linear --mock-data --untie-embeddings-and-output-weights --bf16
    --use-distributed-optimizer --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion"""


def test_flags_of_the_sample_checkpoints_give_their_model() -> None:
    args, _ = parse(SAMPLE_RUN, world_size=2)
    config = transformer_config(args)
    assert (config.ffn_hidden_size, config.num_query_groups) == (112, 2)
    assert config.normalization == "RMSNorm"
    assert args.lr_decay_iters == 20 and args.start_weight_decay == args.end_weight_decay == 0.1
    assert vars(pickle.loads(pickle.dumps(args))) == vars(args)


@pytest.mark.parametrize(
    "flag", ["--num-dataset-builder-threads", "--log-interval", "--save-retain-interval"]
)
def test_a_number_that_nothing_is_divided_by_hides_no_problem_of_sizes(flag: str) -> None:
    found = problems(f"{MOCK} --max-position-embeddings 8 {flag} 0")
    assert f"{flag} must be at least 1, got 0" in found
    assert "--max-position-embeddings 8 must be at least --seq-length 32" in found


def test_all_conflicts_are_reported_at_once() -> None:
    found = problems(
        f"""{MOCK} --bf16 --fp16 --train-samples 100 --min-lr 1 --use-megatron-fsdp
            --use-torch-fsdp2 --ckpt-format torch_dcp --overlap-param-gather --optimizer sgd
            --global-batch-size 3 --max-position-embeddings 8 --lr-warmup-fraction 0.5
            --lr-warmup-samples 4 --save x --data-path a --ddp-average-in-collective
            --calculate-per-token-loss --swiglu --squared-relu --deterministic-mode
            --cross-entropy-loss-fusion --profile --profile-ranks 9 --skip-train""",
        cuda=True,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    for words in (
        "--bf16 and --fp16 exclude",
        "--train-iters and --train-samples exclude",
        "--min-lr 1.0",
        "--use-torch-fsdp2: PyTorch's FSDP2 is not a choice here; use --use-megatron-fsdp",
        "--ckpt-format torch_dcp: not written or read here",
        "--overlap-param-gather needs --overlap-grad-reduce",
        "--optimizer sgd",
        "--global-batch-size 3 must be a multiple of 2",
        "--max-position-embeddings 8",
        "--lr-warmup-fraction and --lr-warmup-samples exclude",
        "several data sources",
        "a.idx and a.bin not found",
        "--ddp-average-in-collective and --calculate-per-token-loss exclude",
        "--profile-ranks 9: must be less than the number of ranks, 1",
        "--profile and --skip-train exclude each other",
        "--swiglu and --squared-relu exclude",
        "--deterministic-mode excludes --cross-entropy-loss-fusion",
        "NCCL_ALGO",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ):
        assert any(words in problem for problem in found), (words, found)


CONFLICTS = [
    ("--ckpt-format fsdp_dtensor", "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp"),
    ("--num-attention-heads 5", "must be a multiple of --num-attention-heads 5"),
    (
        "--group-query-attention --num-query-groups 3",
        "must be a multiple of --num-query-groups 3",
    ),
    (
        "--save x --save-interval 4 --save-retain-interval 6",
        "must be a multiple of --save-interval 4",
    ),
    ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
    ("--lr-decay-samples 5", "use --lr-decay-iters"),
    ("--lr-warmup-iters 20", "must be less than the decay length 20"),
    ("--clip-grad -1", "--clip-grad must be at least 0"),
    ("--moe-router-topk 1", "without --num-experts"),
    ("--recompute-granularity full", "Megatron-Core refuses"),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "exclude each other"),
    (
        "--bf16 --use-megatron-fsdp --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32",
        "contradicts",
    ),
    ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model, a local folder"),
    ("--apply-layernorm-1p", "needs Transformer Engine layers"),
    ("--moe-layer-freq __import__('os')", "list expression"),
    ("--moe-layer-freq [1]*99999999999", "list of zeros and ones"),
    ("--attention-backend quick", "choose from flash"),
    ("--split 1,1,1 stray", "--split: does not take stray"),
    (
        "--profile --profile-step-start 12",
        "must be less than --profile-step-end",
    ),
    (
        "--profile --profile-step-start 20 --profile-step-end 30",
        "--profile-step-start 20 must be less than --train-iters 20",
    ),
    ("--record-memory-history", "--record-memory-history needs "),
    ("--device-peak-tflops 0", "--device-peak-tflops must be above 0, got 0.0"),
    ("--seq", "--seq: unknown flag"),
    ("--lr-decay-stile linear", "did you mean --lr-decay-style?"),
    ("--global-batch-size x", "invalid int value"),
]
"""Flags, and a part of what is said of them."""


def test_one_conflict_names_the_fix() -> None:
    assert not rows_not_refused(MOCK, CONFLICTS)


def test_numbers_that_are_not_finite_or_out_of_range_are_refused_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = problems(
        f"""{MOCK} --lr inf --hidden-dropout nan --attention-dropout 1.5 --init-method-std -0.02
            --embedding-init-method-std nan --norm-epsilon -0.5 --moe-aux-loss-coeff 1 inf
            --num-experts 2 --moe-router-load-balancing-type aux_loss seq_aux_loss
            --tensorboard-dir {tmp_path}/file/logs"""
    )
    assert found == [
        "--lr must be a finite number, got inf",
        "--hidden-dropout must be a finite number, got nan",
        "--embedding-init-method-std must be a finite number, got nan",
        "--moe-aux-loss-coeff must be a finite number, got inf",
        "--attention-dropout must be from 0 to 1, got 1.5",
        "--init-method-std must be at least 0, got -0.02",
        "--norm-epsilon must be at least 0, got -0.5",
        f"--tensorboard-dir {tmp_path}/file/logs: {tmp_path}/file is a file, not a directory",
    ]
    parse(f"{MOCK} --hidden-dropout 1 --init-method-std 0 --tensorboard-dir {tmp_path}/new/logs")


def test_numbers_that_no_clock_and_no_float_holds_are_refused_together() -> None:
    found = problems(
        f"{MOCK} --lr 1e300 --softmax-scale=-1e39 --distributed-timeout-minutes 2000000000000"
    )
    assert found == [
        "--lr must be a number that fits in 32 bits, got 1e+300",
        "--softmax-scale must be a number that fits in 32 bits, got -1e+39",
        "--distributed-timeout-minutes must be at most 1000000000, got 2000000000000",
    ]
    parse(f"{MOCK} --clip-grad 3e38 --distributed-timeout-minutes 1000000000")
    units = f"{MOCK} --use-megatron-fsdp --suggested-communication-unit-size"
    assert problems(f"{units} {2**63}") == [
        f"--suggested-communication-unit-size must fit in 64 bits, got {2**63}"
    ]
    assert problems(f"{units} -1") == [
        "--suggested-communication-unit-size must be at least 1, got -1"
    ]


def test_numbers_with_which_a_run_fails_later_or_trains_nonsense_are_refused_together() -> None:
    found = problems(
        f"""{MOCK} --adam-beta1 1 --adam-beta2 -0.1 --rotary-percent 1.5 --rotary-base 0
            --position-embedding-type rope --fp16 --loss-scale -3 --load x --ckpt-step -1 --seed -1
            --split 1,-1"""
    )
    assert found[:8] == [
        "--adam-beta1 must be at least 0 and below 1, got 1.0",
        "--adam-beta2 must be at least 0 and below 1, got -0.1",
        "--rotary-percent must be above 0 and at most 1, got 1.5",
        "--rotary-base must be at least 1, got 0",
        "--loss-scale must be above 0, got -3.0",
        "--ckpt-step must be at least 0, got -1",
        "--seed must be at least 0, got -1",
        "--split expects up to three weights such as 969,30,1 (training, validation, test), but got"
        " 1,-1",
    ]
    dynamic = "--fp16 --hysteresis 0 --loss-scale-window 0 --initial-loss-scale 0"
    assert problems(f"{MOCK} {dynamic} --min-loss-scale 0") == [
        "--hysteresis must be at least 1, got 0",
        "--loss-scale-window must be above 0, got 0.0",
        "--initial-loss-scale must be above 0, got 0.0",
        "--min-loss-scale must be above 0, got 0.0",
    ]
    assert problems(f"{MOCK} --fp16 --initial-loss-scale 2 --min-loss-scale 4") == [
        "--min-loss-scale 4.0 must be at most --initial-loss-scale 2.0"
    ]
    momentum = problems(f"{MOCK} --optimizer sgd --sgd-momentum 1")
    assert "--sgd-momentum must be at least 0 and below 1, got 1.0" in momentum
    of_muon = problems(f"{MOCK} --optimizer muon --muon-momentum 1 --muon-num-ns-steps 0")
    assert of_muon == [
        "--muon-momentum must be at least 0 and below 1, got 1.0",
        "--muon-num-ns-steps must be at least 1, got 0",
    ]
    # NumPy takes seeds below 2^32; a pipeline stage adds 100 for each before it.
    assert problems(f"{MOCK} --seed 4294967000", world_size=4)[0].startswith(
        "--seed must be at mos"
    )
    parse(f"{MOCK} --seed 0 --adam-beta1 0 --rotary-percent 1 --split 1")


def test_weights_of_splits_that_are_no_shares_are_refused() -> None:
    splits = ("nan,1,1", "inf", "-1,1", "1e3,1,1", "1,1,1,1", "0,0", "1;1")
    assert not rows_not_refused(MOCK, [(f"--split={each}", "--split expects") for each in splits])


FILES = "--save --load --pretrained-checkpoint --data-cache-path --tensorboard-dir"


@pytest.mark.parametrize("below", ["", "/below"])
def test_files_in_the_place_of_directories_are_refused_together(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file{below}"
    line = f"{MOCK} {' '.join(f'{flag} {path}' for flag in FILES.split())}"
    found = problems(f"{line} --wandb-project x --wandb-save-dir {path}")
    for flag in (*FILES.split(), "--wandb-save-dir"):
        assert f"{flag} {path}: {tmp_path}/file is a file, not a directory" in found


def test_latent_attention_has_a_config_of_its_own() -> None:
    args, notes = parse(f"{MOCK} --multi-latent-attention --kv-channels 8 --rotary-base 500")
    config = transformer_config(args)
    assert isinstance(config, MLATransformerConfig)
    assert (config.rope_type, config.rotary_base) == ("yarn", 500)
    assert (config.q_lora_rank, config.kv_lora_rank) == (None, 32)
    assert config.rotary_scaling_factor == 1.0
    assert any("--kv-channels does nothing" in note for note in notes)
    assert type(transformer_config(parse(MOCK)[0])) is not MLATransformerConfig


def test_hardware_queues_are_told_about() -> None:
    tensor = f"{MOCK} --tensor-model-parallel-size 2"
    gpu = {"world_size": 2, "cuda": True, "transformer_engine": True}
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in note for note in parse(tensor, **gpu)[1])
    single = gpu | {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    for line, machine in ((tensor, single), (MOCK, gpu), (f"{tensor} --use-megatron-fsdp", gpu)):
        assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in parse(line, **machine)[1])
    assert "forbids: unset it" in problems(f"{tensor} --use-megatron-fsdp", **single)[0]
    assert not any("CONNECTIONS" in note for note in parse(tensor, world_size=2)[1])


def test_fused_weight_gradients_follow_the_kernel_and_the_layers() -> None:
    def fused(flags: str = "", kernel: bool = True) -> bool:
        args, _ = parse(
            f"{MOCK} {flags}", cuda=True, transformer_engine=True, fused_weight_gradient=kernel
        )
        return transformer_config(args).gradient_accumulation_fusion

    assert fused() and fused("--use-megatron-fsdp --transformer-impl local")
    assert not fused(kernel=False)
    assert not fused("--no-gradient-accumulation-fusion")
    assert not fused("--use-megatron-fsdp")
    args, _ = parse(MOCK, fused_weight_gradient=True)
    assert not transformer_config(args).gradient_accumulation_fusion


def test_kernels_for_experts_are_replaced_where_there_is_no_transformer_engine() -> None:
    args, notes = parse(
        f"{MOCK} --num-experts 4 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
    )
    config = transformer_config(args)
    assert not (config.moe_grouped_gemm or config.moe_permute_fusion or config.moe_router_fusion)
    assert any("moe-grouped-gemm, moe-permute-fusion, moe-router-fusion" in note for note in notes)


def test_a_prefix_is_checked_with_and_without_weights(tmp_path: Path) -> None:
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").touch()
    good, bad = tmp_path / "a", tmp_path / "b"
    args, _ = parse(f"{SMALL} --data-path 0.3 {good} 0.7 {good}")
    assert args.tokenizer_type == "ByteTokenizer"
    assert args.split == "969,30,1"
    assert args.dataloader_type == "single"
    assert problems(f"{SMALL} --data-path {good} {bad}") == [
        f"--data-path: {bad}.idx and {bad}.bin not found"
    ]
    assert problems(f"{SMALL} --train-data-path {good} --split 1,1,1") == [
        "--split is for --data-path; separate files per split have none"
    ]


def test_sample_mode_derives_iterations_and_decay() -> None:
    line = MOCK.replace("--train-iters 20", "--train-samples 21 --lr-warmup-samples 4")
    args, _ = parse(line)
    assert args.train_iters == 10  # never more than asked for
    assert (args.lr_decay_samples, args.lr_decay_iters) == (21, None)
    found = problems(line.replace("samples 21", "samples 1"))
    assert any("less than one" in problem for problem in found)


def test_without_transformer_engine_a_gpu_uses_local_layers_unless_it_was_asked_for() -> None:
    args, notes = parse(MOCK, cuda=True)
    assert args.transformer_impl == "local"
    assert args.distributed_backend == "nccl"
    assert args.bias_dropout_fusion
    assert notes == [
        "no Transformer Engine, results are the same: transformer-impl local; off:"
        " persist-layer-norm",
        "no fused_weight_gradient_mlp_cuda, results are the same: off:"
        " gradient-accumulation-fusion",
    ]
    asked = f"{MOCK} --transformer-impl transformer_engine"
    assert "not installed" in problems(asked, cuda=True)[0]
    assert parse(f"{asked} --distributed-backend nccl")[0].transformer_impl == "local"


def test_fp16_with_a_dynamic_scale_turns_the_nan_check_off() -> None:
    args, notes = parse(f"{MOCK} --fp16")
    assert not args.check_for_nan_in_loss_and_grad and any("NaN" in note for note in notes)
    assert parse(f"{MOCK} --fp16 --loss-scale 8")[0].check_for_nan_in_loss_and_grad


def test_evaluation_alone_needs_no_schedule() -> None:
    line = MOCK.replace("--lr 0.005 --train-iters 20", "--skip-train")
    args, _ = parse(line)
    assert args.no_load_optim and args.train_iters == 0 and args.lr is None


@pytest.mark.parametrize("flags", ["--attention-backend flash", "--use-flash-attn"])
def test_flash_attention_is_deterministic_where_transformer_engine_is_told_so(flags: str) -> None:
    gpu = {"cuda": True, "transformer_engine": True}
    line = f"{MOCK} --deterministic-mode {flags}"
    needed = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    args, _ = parse(line, **gpu, environment=needed)
    assert args.attention_backend.name == "flash" and args.deterministic_mode
    for value in ({}, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}):
        found = problems(line, **gpu, environment={"NCCL_ALGO": "Ring", **value})
        assert len(found) == 1 and "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in found[0]
