# SPDX-License-Identifier: Apache-2.0
"""The command line: every known flag, what is refused and why, what follows from what, and what reaches the configs."""

import argparse
import json
import pickle
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.pretrain.arguments import CommandLineError, all_flags, build_parser, parse_arguments
from megatron.pretrain.arguments.config_flags import CONFIG_GROUPS, STATE_DTYPES
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.flags import frequency
from megatron.pretrain.arguments.not_built import NEEDS, NOT_BUILT, NOT_BUILT_VALUES

TABLE = json.loads((Path(__file__).parent / "data" / "flags.json").read_text())
SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2
    --lr 0.005 --train-iters 20"""
MOCK = SMALL + " --mock-data --vocab-size 100"
# This program differs on purpose: it repeats no iteration.
OWN_DEFAULTS = {"rerun_mode": "disabled"}


def parse(line: str, **machine: object) -> tuple[argparse.Namespace, list[str]]:
    settings = {
        "world_size": 1,
        "cuda": False,
        "transformer_engine": False,
        "fused_weight_gradient": False,
    } | machine
    settings.setdefault("environment", {})
    return parse_arguments(line.split(), **settings)


def problems(line: str, **machine: object) -> list[str]:
    with pytest.raises(CommandLineError) as caught:
        parse(line, **machine)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@pytest.fixture(scope="module")
def known() -> dict[str, argparse.Action]:
    return {name: action for action in build_parser()._actions for name in action.option_strings}


def destination(row: dict[str, str]) -> str:
    return row.get("dest", row["name"].removeprefix("--").replace("-", "_"))


def expected_default(row: dict[str, str]) -> object:
    text, dest = row["default"], destination(row)
    if dest in OWN_DEFAULTS:
        return OWN_DEFAULTS[dest]
    if row["kind"] in ("flag", "off", "bool"):
        return text == "on"
    if dest == "attention_backend":
        return AttnBackend[text]
    if dest.endswith("_dtype") and text in (*STATE_DTYPES, "auto"):
        return STATE_DTYPES.get(text)
    if text in ("–", "2³²"):
        return None if text == "–" else 2**32
    try:
        return json.loads(text.replace("'", '"'))
    except json.JSONDecodeError:
        return text


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_every_flag_of_the_table_is_known_with_its_destination_and_default(row, known):
    action = known[row["name"]]
    assert action.dest == destination(row)
    assert action.default == expected_default(row)
    assert type(action.default) is type(expected_default(row)) or isinstance(
        action.default, (int, float)
    )
    assert (action.nargs == 0) == (row["kind"] in ("flag", "off", "bool"))
    if action.nargs == 0:
        assert action.const == (row["kind"] != "off")


@pytest.mark.parametrize(
    "row", [r for r in TABLE if r["kind"].startswith("{")], ids=lambda row: row["name"]
)
def test_every_choice_of_the_table_is_understood(row, known):
    action = known[row["name"]]
    for word in row["kind"].strip("{} +").split(", "):
        value = action.type(word)
        assert action.choices is None or value in action.choices


def test_tables_of_refusals_name_known_destinations(known):
    destinations = {action.dest for action in known.values()}
    listed = {
        dest
        for rule in NEEDS
        for dest in (*rule.dests.split(), rule.attribute, rule.unless)
        if dest
    }
    assert set(NOT_BUILT) | set(NOT_BUILT_VALUES) | listed <= destinations
    assert not {dest for rule in NEEDS for dest in rule.dests.split()} & set(NOT_BUILT)


def other_value(action: argparse.Action) -> str | None:
    """Words for the flag that mean something else than its default."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return next(getattr(c, "name", str(c)) for c in action.choices if c != action.default)
    for text in ("7", "fp16", "bf16", "text"):
        try:
            value = action.type(text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
        if value != action.default:
            return " ".join([text] * (action.nargs if isinstance(action.nargs, int) else 1))
    return None


@pytest.fixture(scope="module")
def refused_together(known) -> list[str]:
    """The problems of a command line that gives every flag that is not built at another value than its default."""
    given = [
        (name, other_value(action)) for name, action in known.items() if action.dest in NOT_BUILT
    ]
    assert all(value is not None for _, value in given)
    return problems(MOCK + " " + " ".join(f"{name} {value}" for name, value in given))


@pytest.mark.parametrize("dest", sorted(NOT_BUILT))
def test_a_flag_that_is_not_built_is_refused_with_its_reason(dest, known, refused_together):
    name = next(name for name, action in known.items() if action.dest == dest)
    assert any(
        p.startswith((f"{name}:", f"{name} ")) and p.endswith(NOT_BUILT[dest])
        for p in refused_together
    )


@pytest.mark.parametrize(
    ("dest", "value"), [(d, v) for d, values in NOT_BUILT_VALUES.items() for v in values]
)
def test_a_value_that_is_not_built_is_refused_with_its_reason(dest, value, known):
    name = next(name for name, action in known.items() if action.dest == dest)
    word = getattr(value, "name", value)
    assert f"{name} {word}: {NOT_BUILT_VALUES[dest][value]}" in problems(f"{MOCK} {name} {word}")


def test_a_refused_flag_is_accepted_at_its_default():
    line = (
        "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --cp-comm-type p2p"
        " --fp8-recipe delayed"
    )
    args, _ = parse(
        f"{MOCK} {line} --rerun-mode disabled --main-grads-dtype fp32 --megatron-fsdp-version 1"
    )
    assert args.expert_tensor_parallel_size == 1


@pytest.mark.parametrize("rule", NEEDS, ids=lambda rule: rule.remedy.replace(" ", "-"))
def test_a_flag_that_would_do_nothing_is_refused(rule, known):
    for dest in rule.dests.split():
        name = next(name for name, action in known.items() if action.dest == dest)
        line = f"{SMALL} --mock-data {name} {other_value(known[name])}"
        if rule.attribute == "use_megatron_fsdp" and rule.values == (False,):
            line += " --use-megatron-fsdp"
        if rule.attribute == "multi_latent_attention" and rule.values == (False,):
            line += " --multi-latent-attention"
        if rule.attribute in ("ckpt_format", "use_rope_scaling"):
            line += " --use-megatron-fsdp"
        elif rule.attribute == "optimizer":
            line += " --optimizer " + ("sgd" if rule.values == ("adam",) else "adam")
        elif rule.attribute == "tokenizer_type":
            line += " --tokenizer-type ByteTokenizer"
        assert f"{name} {rule.remedy}" in problems(line)


def config_parts() -> list[tuple[str, str]]:
    """(field, flag) of every generated flag that holds a plain value and is built."""
    skipped = set(NOT_BUILT) | NOT_SEEN_ALONE | {"attention_backend", "transformer_impl"}
    found = []
    for source in CONFIG_GROUPS.values():
        for name, flag in zip(source.names, source.flags()):
            if flag.dest not in skipped:
                found.append((name, flag.names[0]))
    return found


NUMBERS = {
    "num_attention_heads": "8",
    "hidden_size": "128",
    "min_lr": "0.001",
    "decoupled_min_lr": "0.001",
    "num_query_groups": "2",
    "window_size": "(16,0)",
    "moe_layer_freq": "([0]*1+[1]*1)",
    "no_rope_freq": "([0]*1+[1]*1)",
    "moe_router_num_groups": "2",
    "moe_router_group_topk": "1",
    "num_moe_experts": "4",
    "recompute_modules": "mlp",
    "tensor_model_parallel_size": "2",
    "pipeline_model_parallel_size": "2",
    "context_parallel_size": "2",
    "expert_model_parallel_size": "2",
    "expert_tensor_parallel_size": "2",
    "num_distributed_optimizer_instances": "2",
    "num_layers_in_first_pipeline_stage": "1",
    "num_layers_in_last_pipeline_stage": "1",
    "moe_router_topk": "3",
}
LATENT = "--multi-latent-attention"
PIPELINE = "--pipeline-model-parallel-size 2"
PREDICTION = "--position-embedding-type rope"
EXPERTS = "--num-experts 4 --disable-bias-linear"
COMPANIONS = {
    "num_query_groups": "--group-query-attention",
    "overlap_param_gather": "--overlap-grad-reduce --use-distributed-optimizer",
    "sgd_momentum": "--optimizer sgd",
    "decoupled_min_lr": "--decoupled-lr 0.1",
    "recompute_granularity": "--recompute-method uniform --recompute-num-layers 1",
    "recompute_method": "--recompute-granularity full --recompute-num-layers 1",
    "recompute_num_layers": "--recompute-granularity full --recompute-method uniform",
    "recompute_modules": "--recompute-granularity selective",
    "rotary_interleaved": "--position-embedding-type rope",
    "no_rope_freq": "--position-embedding-type rope",
    "data_parallel_sharding_strategy": "--use-megatron-fsdp",
    "cross_entropy_fusion_impl": "--cross-entropy-loss-fusion",
    "moe_router_enable_expert_bias": "--moe-router-score-function sigmoid",
    "moe_pad_expert_input_to_capacity": "--moe-expert-capacity-factor 1.5",
    "moe_shared_expert_overlap": (
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"
    ),
    "moe_router_num_groups": "--moe-router-group-topk 1",
    "moe_router_group_topk": "--moe-router-num-groups 2",
    "init_method_std": "--embedding-init-method-std 0.5",
    "initial_loss_scale": "--fp16",
    "min_loss_scale": "--fp16",
    "loss_scale_window": "--fp16",
    "hysteresis": "--fp16",
    "sequence_parallel": "--tensor-model-parallel-size 2",
    "expert_model_parallel_size": EXPERTS,
    "expert_tensor_parallel_size": f"{EXPERTS} --expert-model-parallel-size 2",
    "apply_wd_to_qk_layernorm": "--qk-layernorm",
    "num_layers_in_first_pipeline_stage": PIPELINE,
    "num_layers_in_last_pipeline_stage": PIPELINE,
    "num_distributed_optimizer_instances": "--use-distributed-optimizer",
    "outer_dp_sharding_strategy": "--use-megatron-fsdp --num-distributed-optimizer-instances 2",
    "init_model_with_meta_device": "--use-megatron-fsdp",
    "bucket_size": "--overlap-grad-reduce",
    "pad_buckets_for_high_nccl_busbw": "--use-distributed-optimizer",
    "reduce_scatter_with_fp32_accumulation": "--use-distributed-optimizer",
    "mtp_num_layers": PREDICTION,
    "mtp_loss_scaling_factor": f"{PREDICTION} --mtp-num-layers 1",
    "moe_token_drop_policy": "--moe-expert-capacity-factor 1.5",
    "moe_shared_expert_gate": "--moe-shared-expert-intermediate-size 64",
    "moe_router_bias_update_rate": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    **dict.fromkeys(CONFIG_GROUPS["multi-latent attention"].names, LATENT),
}
# Where the machine decides, the value needs a GPU with Transformer Engine to arrive.
NEEDS_GPU = {
    "moe_grouped_gemm",
    "moe_router_fusion",
    "layernorm_zero_centered_gamma",
    "cross_entropy_fusion_impl",
}
# These have tests of their own: the first four go with pipelines or context parallelism only, and
# Megatron-Core refuses the last where its kernel is not installed.
NOT_SEEN_ALONE = {
    "align_param_gather",
    "overlap_p2p_comm",
    "pipeline_model_parallel_layout",
    "cp_comm_type",
    "moe_permute_fusion",
}


@pytest.mark.parametrize(("name", "flag"), config_parts(), ids=[name for name, _ in config_parts()])
def test_every_generated_flag_reaches_its_config(name, flag, known):
    action = known[flag]
    value = NUMBERS.get(name) or other_value(action)
    expected = action.const if action.nargs == 0 else action.type(value)
    if isinstance(action.nargs, str) and name not in (
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
    ):
        expected = [expected]
    line = f"{MOCK} {flag} {value} {COMPANIONS.get(name, '')}"
    if name.startswith("moe_"):
        line += " --num-experts 4"
    if "moe_" in name:
        line += " --disable-bias-linear"
    # Without a GPU the machine's rules switch fusions off, whether the flag was read or not.
    gpu = name in NEEDS_GPU or (action.nargs == 0 and action.const is False)
    args, _ = parse(line, world_size=8, cuda=gpu, transformer_engine=gpu, fused_weight_gradient=gpu)
    made = [transformer_config(args), optimizer_config(args), ddp_config(args)]
    holders = [config for config in made if hasattr(config, name)]
    assert holders
    for config in holders:
        assert getattr(config, name) == expected


def test_fields_with_other_names_are_filled_by_rule():
    args, _ = parse(
        f"{MOCK} --swiglu --disable-bias-linear --bf16 --position-embedding-type rope"
        " --num-experts 4"
    )
    config = transformer_config(args)
    assert config.activation_func is torch.nn.functional.silu and config.gated_linear_unit
    assert config.num_moe_experts == 4 and config.num_query_groups == 4
    assert config.persist_layer_norm is False and not config.deallocate_pipeline_outputs
    assert transformer_config(
        parse(MOCK, cuda=True)[0]
    ).deallocate_pipeline_outputs  # with NCCL only
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert optimizer_config(args).params_dtype == torch.bfloat16
    assert ddp_config(args).grad_reduce_in_fp32 and ddp_config(args).check_for_nan_in_grad


def test_number_of_buckets_becomes_a_bucket_size():
    args, _ = parse(f"{MOCK} --ddp-num-buckets 4 --overlap-grad-reduce")
    assert ddp_config(args, num_parameters=1000).bucket_size == 250
    with pytest.raises(ValueError, match="num_parameters"):
        ddp_config(args)


def test_gelu_keeps_its_numbers_where_the_fused_kernel_is_switched_off():
    x = torch.linspace(-3, 3, 101)
    without_flag = transformer_config(parse(MOCK)[0]).activation_func(x)
    exact = transformer_config(parse(f"{MOCK} --no-bias-gelu-fusion")[0]).activation_func(x)
    torch.testing.assert_close(without_flag, torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(exact, torch.nn.functional.gelu(x))
    assert not torch.equal(without_flag, exact)


GPT_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
    --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16 --data-path my_data --vocab-file vocab.json --merge-file merges.txt
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt
    --eval-iters 10 --tensorboard-dir logs"""


def test_the_175b_example_is_refused_for_known_reasons_only():
    found = problems(GPT_175B, world_size=128, cuda=True, transformer_engine=True)
    starts = [problem.split(":")[0] for problem in found]
    assert starts == [
        "--vocab-file vocab.json",
        "--merge-file merges.txt",
        "--rampup-batch-size counts samples",
        "--data-path",
    ]


FSDP_RUN = f"""{MOCK} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --no-gradient-accumulation-fusion --use-distributed-optimizer --ckpt-format fsdp_dtensor --calculate-per-token-loss
    --overlap-grad-reduce --overlap-param-gather --bf16 --grad-reduce-in-bf16 --use-mcore-models --swiglu
    --disable-bias-linear --group-query-attention --num-query-groups 2 --position-embedding-type rope
    --no-rope-fusion --normalization RMSNorm --untie-embeddings-and-output-weights --attention-backend flash
    --distributed-timeout-minutes 60 --manual-gc --manual-gc-interval 10 --sequence-parallel
    --use-checkpoint-opt_param-scheduler --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --lr-decay-style cosine --lr-warmup-fraction 0.1 --log-throughput --enable-experimental"""


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_the_published_fsdp_run_is_accepted(gpu):
    args, notes = parse(FSDP_RUN, world_size=4, cuda=gpu, transformer_engine=gpu)
    assert (
        args.data_parallel_sharding_strategy == "optim_grads_params"
        and args.ckpt_format == "fsdp_dtensor"
    )
    assert args.data_parallel_size == 4 and args.global_batch_size == 8
    assert (
        args.megatron_fsdp_grad_comm_dtype == torch.bfloat16
        and args.megatron_fsdp_main_params_dtype == torch.float32
    )
    assert (args.attention_backend is AttnBackend.flash) == gpu
    assert args.distributed_backend == ("nccl" if gpu else "gloo")
    assert ddp_config(args).use_megatron_fsdp and optimizer_config(args).use_distributed_optimizer
    assert any("--sequence-parallel: off" in note for note in notes)


def test_fsdp_alone_sets_what_it_needs_and_says_so():
    args, notes = parse(f"{MOCK} --use-megatron-fsdp")
    assert args.data_parallel_sharding_strategy == "optim_grads_params"
    assert args.use_distributed_optimizer and args.ckpt_format == "fsdp_dtensor"
    assert notes[0].startswith(
        "--use-megatron-fsdp sets data-parallel-sharding-strategy optim_grads_params"
    )
    assert parse(MOCK)[0].data_parallel_sharding_strategy == "no_shard"


SAMPLE_RUN = """--num-layers 3 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 0.005 --min-lr 0.0005
    --weight-decay 0.1 --train-iters 20 --save-interval 1 --clip-grad 1.0 --transformer-impl local
    --normalization RMSNorm --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 159
    --make-vocab-size-divisible-by 1 --ckpt-format torch_dist --seed 1234 --save ckpt
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1
    --lr-decay-style cosine --lr-warmup-iters 2 --hidden-dropout 0.0 --attention-dropout 0.0 --num-query-groups 2
    --group-query-attention --swiglu --disable-bias-linear --mock-data --untie-embeddings-and-output-weights --bf16
    --use-distributed-optimizer --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion"""


def test_flags_of_the_sample_checkpoints_give_their_model():
    args, _ = parse(SAMPLE_RUN, world_size=2)
    config = transformer_config(args)
    assert (config.ffn_hidden_size, config.num_query_groups, config.normalization) == (
        112,
        2,
        "RMSNorm",
    )
    assert args.lr_decay_iters == 20 and args.start_weight_decay == args.end_weight_decay == 0.1
    assert vars(pickle.loads(pickle.dumps(args))) == vars(args)


def test_all_conflicts_are_reported_at_once():
    found = problems(
        f"""{MOCK} --bf16 --fp16 --train-samples 100 --min-lr 1 --use-megatron-fsdp --use-torch-fsdp2
        --ckpt-format torch_dist --overlap-param-gather --optimizer sgd --global-batch-size 3
        --max-position-embeddings 8 --lr-warmup-fraction 0.5 --lr-warmup-samples 4 --save x --data-path a
        --ddp-average-in-collective --calculate-per-token-loss --profile --swiglu --squared-relu
        --deterministic-mode
        --cross-entropy-loss-fusion""",
        cuda=True,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    for words in (
        "--bf16 and --fp16 exclude",
        "--train-iters and --train-samples exclude",
        "--min-lr 1.0",
        (
            "--use-torch-fsdp2: not built: PyTorch's FSDP2 is not a choice here; use"
            " --use-megatron-fsdp"
        ),
        "--ckpt-format fsdp_dtensor only",
        "--overlap-param-gather needs --overlap-grad-reduce",
        "--optimizer sgd",
        "--global-batch-size 3 must be a multiple of 2",
        "--max-position-embeddings 8",
        "--lr-warmup-fraction and --lr-warmup-samples exclude",
        "--save needs --save-interval",
        "several data sources",
        "a.idx and a.bin not found",
        "--ddp-average-in-collective and --calculate-per-token-loss exclude",
        "--profile needs",
        "--swiglu and --squared-relu exclude",
        "--deterministic-mode excludes --cross-entropy-loss-fusion",
        "NCCL_ALGO",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ):
        assert any(words in problem for problem in found), (words, found)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
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
        ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
        ("--start-weight-decay 0.1", "need --weight-decay-incr-style"),
        ("--clip-grad -1", "--clip-grad must be at least 0"),
        ("--moe-router-topk 1", "without --num-experts"),
        ("--recompute-granularity full", "Megatron-Core refuses"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "exclude each other"),
        (
            "--bf16 --use-megatron-fsdp --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32",
            "contradicts",
        ),
        ("--decoupled-min-lr 0.1", "needs --decoupled-lr"),
        ("--tokenizer-type HuggingFaceTokenizer", "must be a local folder"),
        ("--apply-layernorm-1p", "needs Transformer Engine layers"),
        ("--moe-layer-freq __import__('os')", "list expression"),
        ("--moe-layer-freq [1]*99999999999", "list of zeros and ones"),
        ("--attention-backend quick", "choose from flash"),
        ("--split 1,1,1 stray", "--split: does not take stray"),
        (
            "--profile --use-pytorch-profiler --profile-step-start 12",
            "must be less than --profile-step-end",
        ),
        ("--seq", "--seq: unknown flag"),
        ("--lr-decay-stile linear", "did you mean --lr-decay-style?"),
        ("--global-batch-size x", "invalid int value"),
    ],
)
def test_one_conflict_names_the_fix(flags, problem):
    assert any(problem in found for found in problems(f"{MOCK} {flags}"))


DEEP = MOCK.replace("--num-layers 2", "--num-layers 8")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--tensor-model-parallel-size 3",
            "tensor 3 x pipeline 1 x context 1 parallelism needs a multiple of 3 ranks, not 8",
        ),
        (
            "--num-experts 6 --expert-model-parallel-size 3",
            "expert tensor 1 x expert 3 x pipeline 1 parallelism needs a multiple of 3 ranks",
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
        (
            (
                "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-experts 4"
                " --expert-model-parallel-size 2"
            ),
            (
                "--use-tp-pp-dp-mapping needs as many ranks for one copy of the experts (4) as of"
                " the rest (2)"
            ),
        ),
        ("--tensor-model-parallel-size 8", "--num-attention-heads 4 must be a multiple of 8"),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 99",
            "--ffn-hidden-size 99 must be a multiple of 2",
        ),
        (
            "--tensor-model-parallel-size 2 --padded-vocab-size 127",
            "--padded-vocab-size 127 must be a multiple of 2",
        ),
        (
            (
                "--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 96"
                " --group-query-attention --num-query-groups 6"
            ),
            (
                "--num-query-groups 6 must be a multiple of --tensor-model-parallel-size 4, or"
                " divide it"
            ),
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
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            (
                "--num-layers-per-virtual-pipeline-stage 3 must divide the 4 layers of a pipeline"
                " stage"
            ),
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
                "--num-virtual-stages-per-pipeline-rank 2"
            ),
            "exclude each other",
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
                " --num-virtual-stages-per-pipeline-rank 2"
            ),
            "--num-virtual-stages-per-pipeline-rank 2 must divide the 3 layers of a pipeline stage",
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4"
                " --num-layers-per-virtual-pipeline-stage 2"
            ),
            "use --num-virtual-stages-per-pipeline-rank",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
            "5 layers are left for 3 other pipeline stages",
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
                " --no-overlap-p2p-communication"
            ),
            "--no-overlap-p2p-communication does not go with virtual stages on two pipeline stages",
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
                " --global-batch-size 24"
            ),
            (
                "--global-batch-size 24 must be a multiple of 16: virtual stages need a multiple of"
                " 2 microbatches"
            ),
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
            "must match num_layers 8",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ex|tL",
            "Invalid layer character",
        ),
        (
            (
                "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttttL "
                "--decoder-last-pipeline-num-layers 4"
            ),
            "leave out --decoder-last-pipeline-num-layers",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --disable-bias-linear",
            "give --sequence-parallel",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
            "give --disable-bias-linear",
        ),
        (
            "--num-experts 3 --expert-model-parallel-size 2",
            "--num-experts 3 must be a multiple of 2",
        ),
        (
            "--expert-model-parallel-size 2",
            "without --num-experts these do nothing: --expert-model-parallel-size",
        ),
        (
            "--expert-tensor-parallel-size 2",
            "without --num-experts these do nothing: --expert-tensor-parallel-size",
        ),
        (
            "--num-experts 4 --moe-router-topk 5",
            "--moe-router-topk 5 must be at most --num-experts 4",
        ),
        ("--num-experts 4 --moe-router-topk 1", "needs --moe-router-pre-softmax"),
        ("--num-experts 4 --moe-router-num-groups 2", "need each other"),
        (
            "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
            "--num-experts 4 must be a multiple of 3",
        ),
        (
            "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 3",
            "must be at most --moe-router-num-groups 2",
        ),
        (
            (
                "--num-experts 4 --moe-router-topk 3 --moe-router-num-groups 2"
                " --moe-router-group-topk 1"
            ),
            "--moe-router-topk 3 must be between --moe-router-group-topk 1 and the 2 experts",
        ),
        (
            "--num-experts 4 --moe-router-enable-expert-bias",
            "needs --moe-router-score-function sigmoid",
        ),
        (
            (
                "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss"
                " --moe-aux-loss-coeff 1"
            ),
            "got 1 for 2",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1",
            "does nothing with",
        ),
        (
            (
                "--num-experts 4 --moe-router-load-balancing-type sinkhorn"
                " --moe-expert-capacity-factor 1"
            ),
            "--moe-expert-capacity-factor does not go with",
        ),
        (
            "--num-experts 4 --moe-layer-freq [0,1]",
            "--moe-layer-freq names 2 layers, --num-layers 8",
        ),
        ("--num-experts 4 --moe-shared-expert-gate", "needs --moe-shared-expert-intermediate-size"),
        (
            "--num-experts 4 --moe-pad-expert-input-to-capacity",
            "needs --moe-expert-capacity-factor",
        ),
        ("--multi-latent-attention --group-query-attention", "leave --group-query-attention out"),
        ("--multi-latent-attention --rope-type rope --mscale 2", "--mscale needs --rope-type yarn"),
        (
            "--multi-latent-attention --context-parallel-size 2 --window-size 4,0",
            "need Transformer Engine layers",
        ),
        (
            "--mtp-num-layers 1",
            "--mtp-num-layers needs --position-embedding-type rope or none, got learned_absolute",
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
                "--use-megatron-fsdp --data-parallel-sharding-strategy optim"
                " --outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2"
            ),
            "needs --data-parallel-sharding-strategy optim_grads_params, got optim",
        ),
        (
            "--use-megatron-fsdp --outer-dp-sharding-strategy optim",
            "give --num-distributed-optimizer-instances",
        ),
        (
            "--use-megatron-fsdp --create-all-gather-group --num-distributed-optimizer-instances 2",
            "leave one out",
        ),
        (
            (
                "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard"
                " --init-model-with-meta-device"
            ),
            (
                "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy"
                " no_shard"
            ),
        ),
        (
            "--use-megatron-fsdp --init-model-with-meta-device --pipeline-model-parallel-size 2",
            "leave it out, or give --untie-embeddings-and-output-weights",
        ),
        (
            (
                "--use-megatron-fsdp --init-model-with-meta-device --pipeline-model-parallel-size 2"
                " --mtp-num-layers 1 --position-embedding-type rope"
                " --untie-embeddings-and-output-weights"
            ),
            "leave it out, or leave out --mtp-num-layers",
        ),
        (
            f"{EXPERTS} --expert-tensor-parallel-size 2",
            (
                "--expert-tensor-parallel-size 2 beside --tensor-model-parallel-size 1 needs"
                " --expert-model-parallel-size"
            ),
        ),
        (
            (
                f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"
                " --expert-tensor-parallel-size 1"
            ),
            (
                "--expert-tensor-parallel-size 1 beside --tensor-model-parallel-size 2 needs"
                " --expert-model-parallel-size"
            ),
        ),
        (
            (
                f"{PREDICTION} --mtp-num-layers 1 --pipeline-model-parallel-size 4 --num-layers 4"
                " --pipeline-model-parallel-layout Ett|tt|m|L"
            ),
            "m (the layers that predict more tokens) must be in the last stage",
        ),
        (
            f"{LATENT} --kv-lora-rank 15 --tensor-model-parallel-size 2",
            "--kv-lora-rank and --qk-pos-emb-head-dim together, 79",
        ),
        (
            f"{LATENT} --q-lora-rank 15 --tensor-model-parallel-size 2",
            "--q-lora-rank 15 must be a multiple of 2",
        ),
        (f"{EXPERTS} --moe-layer-freq 0", "gives experts to no layer"),
        (f"{EXPERTS} --moe-layer-freq ([0]*8)", "gives experts to no layer"),
        ("--cp-comm-type a2a", "--cp-comm-type needs --context-parallel-size above 1"),
        ("--recompute-method uniform", "--recompute-method needs --recompute-granularity full"),
        ("--recompute-num-layers 1", "--recompute-num-layers needs --recompute-granularity full"),
        ("--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"),
        ("--no-align-grad-reduce", "--no-align-grad-reduce needs --overlap-grad-reduce"),
        ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm needs --qk-layernorm"),
        (
            (
                "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard"
                " --create-all-gather-group"
            ),
            (
                "--create-all-gather-group does nothing with --data-parallel-sharding-strategy"
                " no_shard"
            ),
        ),
        (
            (
                "--use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation"
                " --num-distributed-optimizer-instances 2"
            ),
            "leave one out",
        ),
    ],
)
def test_one_conflict_of_parallelism_names_the_fix(flags, problem):
    found = problems(f"{DEEP} {flags}", world_size=8)
    assert any(problem in text for text in found), found
    assert not any("Megatron-Core refuses" in text for text in found)


def test_sizes_that_are_no_size_are_named_once():
    assert problems(f"{MOCK} --tensor-model-parallel-size 0 --context-parallel-size -1") == [
        "--tensor-model-parallel-size must be at least 1, got 0",
        "--context-parallel-size must be at least 1, got -1",
    ]


def test_what_follows_from_the_axes():
    args, _ = parse(
        f"{DEEP} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size"
        " 2 --context-parallel-size 2 --num-experts 4 --disable-bias-linear"
        " --expert-model-parallel-size 2",
        world_size=16,
    )
    assert (args.data_parallel_size, args.global_batch_size, args.expert_tensor_parallel_size) == (
        2,
        4,
        2,
    )
    assert args.world_size == 16 and args.sequence_parallel
    config = transformer_config(args)
    assert (
        not config.overlap_p2p_comm
        and config.batch_p2p_comm
        and config.cp_comm_type == "all_gather"
    )
    on_gpu, _ = parse(
        f"{MOCK} --context-parallel-size 2 --cp-comm-type a2a",
        world_size=2,
        cuda=True,
        transformer_engine=True,
    )
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
def test_virtual_stages_and_what_only_they_can_do(flags, virtual):
    line = (
        f"{DEEP} --pipeline-model-parallel-size 2 --global-batch-size 8 --overlap-grad-reduce"
        " --overlap-param-gather"
    )
    args, _ = parse(f"{line} --use-distributed-optimizer {flags}", world_size=4)
    config = transformer_config(args)
    assert (
        args.virtual_pipeline_model_parallel_size
        == config.virtual_pipeline_model_parallel_size
        == virtual
    )
    interleaved = virtual is not None
    assert config.overlap_p2p_comm == ddp_config(args).align_param_gather == interleaved
    assert config.batch_p2p_comm == (not interleaved)
    assert (
        args.pipeline_model_parallel_layout is None
        or str(config.pipeline_model_parallel_layout) == flags.split()[1]
    )


def test_latent_attention_has_a_config_of_its_own():
    args, notes = parse(f"{MOCK} --multi-latent-attention --kv-channels 8 --rotary-base 500")
    config = transformer_config(args)
    assert isinstance(config, MLATransformerConfig) and (config.rope_type, config.rotary_base) == (
        "yarn",
        500,
    )
    assert (config.q_lora_rank, config.kv_lora_rank, config.rotary_scaling_factor) == (
        None,
        32,
        1.0,
    )
    assert any("--kv-channels does nothing" in note for note in notes)
    assert type(transformer_config(parse(MOCK)[0])) is not MLATransformerConfig


def test_a_growing_batch_makes_more_iterations_of_as_many_samples():
    line = MOCK.replace(
        "--train-iters 20", "--train-samples 100 --global-batch-size 8 --rampup-batch-size 4 2 12"
    )
    # Twice 4 samples, once 6; then 86 are left, ten times 8 of them.
    assert parse(line)[0].train_iters == 13
    assert parse(line.replace("samples 100", "samples 15"))[0].train_iters == 3
    assert parse(line)[0].rampup_batch_size == [4, 2, 12]
    for other, problem in (
        ("4 3 12", "increments of 3 must lead from 4 to --global-batch-size 8"),
        ("8 2 12", "increments of 2 must lead from 8"),
        ("3 1 12", "start and increment must be multiples of 2"),
        ("4 2 0", "each must be at least 1"),
    ):
        assert any(problem in found for found in problems(line.replace("4 2 12", other)))


def test_hardware_queues_are_told_about():
    tensor = f"{MOCK} --tensor-model-parallel-size 2"
    gpu = {"world_size": 2, "cuda": True, "transformer_engine": True}
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in note for note in parse(tensor, **gpu)[1])
    single = gpu | {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    for line, machine in ((tensor, single), (MOCK, gpu), (f"{tensor} --use-megatron-fsdp", gpu)):
        assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in parse(line, **machine)[1])
    assert "forbids: unset it" in problems(f"{tensor} --use-megatron-fsdp", **single)[0]
    assert not any("CONNECTIONS" in note for note in parse(tensor, world_size=2)[1])


def test_fused_weight_gradients_follow_the_kernel_and_the_layers():
    def fused(flags: str = "", kernel: bool = True) -> bool:
        args, _ = parse(
            f"{MOCK} {flags}", cuda=True, transformer_engine=True, fused_weight_gradient=kernel
        )
        return transformer_config(args).gradient_accumulation_fusion

    assert fused() and fused("--use-megatron-fsdp --transformer-impl local")
    assert (
        not fused(kernel=False)
        and not fused("--no-gradient-accumulation-fusion")
        and not fused("--use-megatron-fsdp")
    )
    assert not transformer_config(
        parse(MOCK, fused_weight_gradient=True)[0]
    ).gradient_accumulation_fusion


def test_kernels_for_experts_are_replaced_where_there_is_no_transformer_engine():
    args, notes = parse(
        f"{MOCK} --num-experts 4 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
    )
    config = transformer_config(args)
    assert not (config.moe_grouped_gemm or config.moe_permute_fusion or config.moe_router_fusion)
    assert any("moe-grouped-gemm, moe-permute-fusion, moe-router-fusion" in note for note in notes)


def test_required_flags_are_listed_together():
    found = problems("--mock-data")
    assert any(
        "--num-layers, --hidden-size, --num-attention-heads, --seq-length, --micro-batch-size" in p
        for p in found
    )
    assert "required but not given: --lr" in found and "NullTokenizer needs --vocab-size" in found


def test_a_prefix_is_checked_with_and_without_weights(tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").touch()
    good, bad = tmp_path / "a", tmp_path / "b"
    args, _ = parse(f"{SMALL} --data-path 0.3 {good} 0.7 {good}")
    assert (
        args.tokenizer_type == "ByteTokenizer"
        and args.split == "969,30,1"
        and args.dataloader_type == "single"
    )
    assert problems(f"{SMALL} --data-path {good} {bad}") == [
        f"--data-path: {bad}.idx and {bad}.bin not found"
    ]
    assert problems(f"{SMALL} --train-data-path {good} --split 1,1,1") == [
        "--split is for --data-path; separate files per split have none"
    ]


def test_sample_mode_derives_iterations_and_decay():
    line = MOCK.replace("--train-iters 20", "--train-samples 21 --lr-warmup-samples 4")
    args, _ = parse(line)
    assert (args.train_iters, args.lr_decay_samples, args.lr_decay_iters) == (
        10,
        21,
        None,
    )  # never more than asked for
    assert any(
        "less than one" in problem for problem in problems(line.replace("samples 21", "samples 1"))
    )


def test_without_transformer_engine_a_gpu_uses_local_layers_unless_it_was_asked_for():
    args, notes = parse(MOCK, cuda=True)
    assert (
        args.transformer_impl == "local"
        and args.distributed_backend == "nccl"
        and args.bias_dropout_fusion
    )
    assert notes == [
        "no Transformer Engine: transformer-impl local; off: persist-layer-norm",
        "no fused_weight_gradient_mlp_cuda: off: gradient-accumulation-fusion",
    ]
    assert (
        "not installed" in problems(f"{MOCK} --transformer-impl transformer_engine", cuda=True)[0]
    )
    assert (
        parse(f"{MOCK} --transformer-impl transformer_engine --distributed-backend nccl")[
            0
        ].transformer_impl
        == "local"
    )


def test_fp16_with_a_dynamic_scale_turns_the_nan_check_off():
    args, notes = parse(f"{MOCK} --fp16")
    assert not args.check_for_nan_in_loss_and_grad and any("NaN" in note for note in notes)
    assert parse(f"{MOCK} --fp16 --loss-scale 8")[0].check_for_nan_in_loss_and_grad


def test_evaluation_alone_needs_no_schedule():
    line = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size"
        " 2 --skip-train"
    )
    args, _ = parse(f"{line} --mock-data --vocab-size 9")
    assert args.no_load_optim and args.train_iters == 0 and args.lr is None


@pytest.mark.parametrize("spelling", ["opt_param-scheduler", "opt-param-scheduler"])
def test_both_spellings_of_the_scheduler_flags(spelling):
    assert parse(f"{MOCK} --override-{spelling}")[0].override_opt_param_scheduler
    assert parse(f"{MOCK} --use-checkpoint-{spelling}")[0].use_checkpoint_opt_param_scheduler


def test_help_is_printed_and_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--use-megatron-fsdp" in text and "mixture of experts" in text
    assert not [flag.names[0] for flags in all_flags().values() for flag in flags if not flag.help]


def test_frequency_reads_numbers_and_list_expressions():
    assert frequency("3") == 3
    assert frequency("([0]*3+[1]*2)") == [0, 0, 0, 1, 1]
