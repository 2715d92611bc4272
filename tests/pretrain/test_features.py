# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's features with --use-megatron-fsdp, each beside the same run with Megatron-Core's own data parallelism."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch.distributed.checkpoint import FileSystemReader, load

from megatron.mcore_adapter import fused_gradients
from megatron.pretrain import loop
from tests.pretrain import training_runs
from tests.pretrain.parity import (
    ALLTOALL,
    BF16,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MOE,
    MTP,
    OPTIM_OUTSIDE,
    UNTIED,
    Combination,
)
from tests.pretrain.training_runs import (
    DATA,
    NO_DROPOUT,
    Record,
    assert_close,
    build,
    pretrain,
    refuse,
    tokenizer_of,
    train,
)
from tests.rank_pool import run_ranks

SHORT = "--train-iters 3"
EVALUATED = f"{SHORT} --eval-iters 1 --eval-interval 1 --overlap-grad-reduce"
FP16 = "--train-iters 6 --fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2"
PER_TOKEN = f"{SHORT} --calculate-per-token-loss"
TIED = LLAMA.replace(UNTIED, "")
ON_META = "--init-model-with-meta-device"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

FEATURES = {
    "evaluation_pp2": Combination(2, "pp2", 3, LLAMA, EVALUATED),
    "evaluation_vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, EVALUATED, layers=4),
    "fp16_tp2": Combination(2, "tp2", 3, LLAMA, FP16),
    "fp16_pp2": Combination(2, "pp2", 3, LLAMA, FP16),
    "decoupled_lr_pp2": Combination(
        2, "pp2", 3, LLAMA, f"{SHORT} --decoupled-lr 2e-2 --decoupled-min-lr 1e-3"
    ),
    "clip_grad_hybrid": Combination(
        4, "inst2", 3, LLAMA, f"{SHORT} --clip-grad 0.1", OPTIM_OUTSIDE
    ),
    "statistics_tp2_zero0": Combination(4, "tp2", 0, LLAMA, SHORT),
    "statistics_pp2_tied": Combination(2, "pp2", 3, TIED, SHORT),
    "statistics_ep2_zero0": Combination(2, "ep2", 0, MOE, SHORT),
    "per_token_loss_cp2": Combination(2, "cp2", 3, LLAMA, PER_TOKEN),
    "per_token_loss_tp2_sp": Combination(2, "tp2 sp", 3, LLAMA, PER_TOKEN),
}


def assert_same_run(fsdp: Record, ddp: Record, loss: float, norm: float) -> None:
    """All that a run reports."""
    assert [step["iteration"] for step in fsdp.steps] == [step["iteration"] for step in ddp.steps]
    for name in ("skipped", "loss-scale", "learning-rate"):
        assert fsdp.column(name) == ddp.column(name), name
    assert_close(fsdp.losses, ddp.losses, loss)
    assert_close(fsdp.column("params-norm"), ddp.column("params-norm"), loss)
    done = [number for number, skipped in enumerate(ddp.column("skipped")) if not skipped]
    assert_close(
        [fsdp.column("grad-norm")[n] for n in done],
        [ddp.column("grad-norm")[n] for n in done],
        norm,
    )
    assert fsdp.evaluations.keys() == ddp.evaluations.keys()
    for name, expected in ddp.evaluations.items():
        assert [iteration for iteration, _ in fsdp.evaluations[name]] == [
            iteration for iteration, _ in expected
        ]
        assert_close(
            [loss for _, loss in fsdp.evaluations[name]], [loss for _, loss in expected], loss
        )


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_numbers_of_ddp(feature):
    combination = FEATURES[feature]
    ddp, fsdp = run_ranks(combination.ranks, train, combination.reference, combination.ours)[0]
    low = FP16 in combination.flags
    assert_same_run(fsdp, ddp, loss=1e-2 if low else 1e-5, norm=1e-2 if low else 1e-5)
    if low:
        assert any(ddp.column("skipped")) and not all(ddp.column("skipped"))
    else:
        assert fsdp.column("num-zeros") == ddp.column("num-zeros")
    if EVALUATED in combination.flags:
        assert [len(losses) for losses in ddp.evaluations.values()] == [3, 1]


def test_a_growing_batch_is_the_same_batch():
    sizes = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
        " --micro-batch-size 1"
    )
    growing = (
        "--global-batch-size 8 --train-samples 32 --rampup-batch-size 2 2 16 --lr 5e-3"
        " --lr-decay-samples 64"
    )
    line = f"{sizes} {DATA} {NO_DROPOUT} {growing} --log-params-norm {LLAMA}"
    ddp, fsdp = run_ranks(2, train, line, f"{line} --use-megatron-fsdp")[0]
    assert_same_run(fsdp, ddp, loss=1e-5, norm=1e-5)
    assert len(fsdp.steps) > 32 // 8


@pytest.mark.parametrize(
    "flag", ["--megatron-fsdp-enable-fine-grained-param-gather", "--create-all-gather-group"]
)
def test_how_weights_are_gathered_does_not_change_a_number(flag):
    line = Combination(
        2, "dp", 3, LLAMA, f"{SHORT} --overlap-grad-reduce", fsdp="--overlap-param-gather"
    ).ours
    plain, other = run_ranks(2, train, line, f"{line} {flag}")[0]
    # Weights lie in other places, so sums over them have other roundings.
    assert_same_run(other, plain, loss=1e-6, norm=1e-6)


# ---- meta device
# -----------------------------------------------------------------------------------------------------

INITIALISED = {
    "mtp_tied": Combination(2, "dp", 3, f"{TIED} {MTP}"),
    "pp2_untied": Combination(2, "pp2", 3, LLAMA),
    "experts_and_latents_tp2_sp_ep2": Combination(
        2, "tp2 sp ep2 etp1", 3, f"{DEEPSEEK} --moe-shared-expert-gate", layers=4
    ),
}


@pytest.mark.parametrize(
    "on_cpu", ["", "--use-cpu-initialization"], ids=["gpu_initialization", "cpu_initialization"]
)
@pytest.mark.parametrize("model", INITIALISED)
def test_a_model_from_the_meta_device_trains_like_one_that_had_values_at_once(model, on_cpu):
    # With dropout, so that one number drawn too many or too few shows.
    line = INITIALISED[model].ours.replace(
        NO_DROPOUT, "--hidden-dropout 0.1 --attention-dropout 0.1"
    )
    line = f"{line} --train-iters 1 {on_cpu}"
    at_once, later = run_ranks(2, train, line, f"{line} {ON_META}")[0]
    assert later.losses == at_once.losses
    assert later.column("params-norm") == at_once.column("params-norm")


@pytest.mark.parametrize("model", [TIED, f"{LLAMA} {MTP}"], ids=["tied", "mtp"])
def test_an_embedding_of_two_stages_cannot_come_from_the_meta_device(model):
    # Its copy would be of other values, and nothing would say so.
    for error in run_ranks(2, refuse, f"{Combination(2, 'pp2', 3, model).ours} {ON_META}"):
        assert (
            error.startswith(("ValueError", "CommandLineError"))
            and "embedding that two pipeline stages share" in error
        )


# ---- gradients that layers write themselves
# --------------------------------------------------------------------------


def train_fused(command_line: str) -> tuple[Record, int]:
    """Job: a run with --gradient-accumulation-fusion, which the command line switches off without its kernel, and how
    often layers wrote a gradient.
    """
    products = []
    prepare, new_product = training_runs.prepare, fused_gradients._new_product

    def prepared(line: str) -> tuple[Any, torch.device]:
        args, device = prepare(line)
        args.gradient_accumulation_fusion = True
        return args, device

    def counted(*args: Any) -> torch.Tensor:
        products.append(1)
        return new_product(*args)

    with (
        patch.object(training_runs, "prepare", prepared),
        patch.object(layers, "_grad_accum_fusion_available", True),
        patch.object(fused_gradients, "_new_product", counted),
    ):
        return pretrain(command_line), len(products)


FUSED = {
    "mtp_tied": Combination(2, "dp", 3, f"{TIED} {MTP}", SHORT),
    "tp2_sp": Combination(2, "tp2 sp", 3, GPT2, SHORT),
    "pp2_tied": Combination(2, "pp2", 2, TIED, SHORT),
    "recomputed_zero1": Combination(
        2, "dp", 1, LLAMA, f"{SHORT} --overlap-grad-reduce {RECOMPUTED}"
    ),
    "bf16_tied": Combination(
        2, "dp", 3, TIED, f"{SHORT} {BF16}", "--accumulate-allreduce-grads-in-fp32"
    ),
}


@pytest.mark.parametrize("run", FUSED)
def test_fused_gradient_accumulation_gives_the_numbers_of_autograd(run):
    combination = FUSED[run]
    low = BF16 in combination.flags
    lines = combination.reference, combination.ours
    ddp, plain = run_ranks(2, train, *lines)[0]
    fused, products = run_ranks(2, train_fused, combination.ours)[0]
    assert products >= 3 * 2 * 4  # at least the linear layers of two layers, in every step
    assert_same_run(fused, plain, loss=1e-6, norm=1e-6)
    assert_same_run(fused, ddp, loss=1e-2 if low else 1e-5, norm=2e-2 if low else 1e-5)


# ---- gradients that are not numbers
# ----------------------------------------------------------------------------------


def train_spoiled(command_line: str, rank: int, value: float) -> Record | str:
    """Job: a run in whose first step `rank` alone gets a gradient with one element of `value`; its record, or its error."""
    step = loop.forward_backward
    spoiled = []

    def forward_backward(run: loop.TrainingRun, *args: Any, **kwargs: Any) -> Any:
        result = step(run, *args, **kwargs)
        if not spoiled and dist.get_rank() == rank:
            spoiled.append(next(p for p in run.model[0].parameters() if p.to_local().numel()))
            spoiled[0].grad.to_local().view(-1)[0] = value
        return result

    with patch.object(loop, "forward_backward", forward_backward):
        return pretrain(command_line)


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_an_overflow_on_one_rank_skips_the_step_everywhere(layout):
    # At this scale nothing overflows by itself.
    line = Combination(
        2, layout, 3, LLAMA, f"{SHORT} --fp16 --initial-loss-scale 1024 --hysteresis 1"
    ).ours
    records = run_ranks(2, train_spoiled, line.replace("--log-num-zeros-in-grad", ""), 0, math.inf)
    for record in records:
        assert record.column("skipped") == [True, False, False]
        assert record.column("loss-scale") == [512.0] * 3
    assert records[0].losses == records[1].losses


def spoil_a_weight(command_line: str, rank: int) -> str:
    """Job: the error of a step in which the gradient of one weight of `rank` is NaN; else nothing."""
    run = build(command_line)
    loop.connect(run)
    loop.init_num_microbatches_calculator(dist.get_rank(), None, 8, 1, run.args.data_parallel_size)
    data, _, _ = loop.build_datasets(run.args, tokenizer_of(run.args))
    if dist.get_rank() == rank:
        weight = next(
            each
            for each in run.model[0].module.sharded_params
            if each.name.endswith("linear_fc2.weight")
        )
        weight.compute.register_hook(lambda gradient: gradient * math.nan)
    with loop.batches(run, data, 0) as batches:
        try:
            loop.forward_backward(run, batches, loop.get_num_microbatches(), forward_only=False)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_gradient_that_is_not_a_number_names_parameter_and_rank():
    # Looked at when it is reduced: the rank is the one that owns this part of it.
    line = Combination(2, "dp", 3, LLAMA).ours
    for error in run_ranks(2, spoil_a_weight, line, 1):
        assert (
            error == "rank 0: NaN or Inf in the gradient of decoder.layers.0.mlp.linear_fc2.weight"
        )


def test_a_gradient_that_is_not_a_number_on_one_stage_ends_the_run():
    # Without an agreement the other stage would wait for this one in the next collective.
    for error in run_ranks(2, spoil_a_weight, Combination(2, "pp2", 3, LLAMA).ours, 1):
        assert (
            error == "rank 1: NaN or Inf in the gradient of decoder.layers.1.mlp.linear_fc2.weight"
        )


# ---- which group a parameter is in
# -----------------------------------------------------------------------------------


def dump_groups(command_line: str, directory: str) -> dict[str, int]:
    """Job: what --dump-param-to-param-group-map writes."""
    build(f"{command_line} --dump-param-to-param-group-map {directory}")
    names = FileSystemReader(directory).read_metadata().state_dict_metadata
    numbers = dict.fromkeys(names, -1)
    load(numbers, checkpoint_id=directory)
    return numbers


DUMPED = {
    "experts": Combination(2, "ep2", 3, ALLTOALL, "--decoupled-lr 2e-2"),
    "vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, "--decoupled-lr 2e-2", layers=4),
    "bf16": Combination(2, "dp", 1, GPT2, BF16),
}


@pytest.mark.parametrize("run", DUMPED)
def test_the_map_of_parameter_groups_is_that_of_ddp(run, tmp_path):
    combination = DUMPED[run]
    # Without FSDP, layers of virtual stages overwrite each other in the file.
    same_names = replace(combination, layout=combination.layout.replace("vpp2", ""))
    ddp = run_ranks(2, dump_groups, same_names.reference, str(tmp_path / "ddp"))[0]
    fsdp = run_ranks(2, dump_groups, combination.ours, str(tmp_path / "fsdp"))[0]
    assert fsdp == ddp
    assert len(set(ddp.values())) > 1
