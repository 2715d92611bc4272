# SPDX-License-Identifier: Apache-2.0
"""--hybrid-layer-pattern trains a HybridModel, where Megatron-Core has one, as DDP does."""

import argparse
from itertools import product
from pathlib import Path

import pytest

from megatron.pretrain.model.flops import training_flops
from tests.support.megatron_release import RELEASES, require
from tests.support.pretrain.arguments.command_lines import EXPERTS, MOCK, parse
from tests.support.pretrain.parity import LEVELS, LLAMA, MOE
from tests.support.pretrain.release_runs import Convert, Task, Train, do_on, train_on
from tests.support.pretrain.training_runs import SMALL, assert_same_run

SIZES = SMALL.replace("--num-layers 2", "")
RUN = f"{SIZES} --train-iters 3 --log-params-norm --hybrid-layer-pattern"
DENSE, SPARSE = f"{RUN} *-*- {LLAMA}", f"{RUN} *-*E {MOE}"
FSDP = "--use-megatron-fsdp"
TWO_STEPS = "--exit-interval 2 --save-interval 2"
NEWEST = RELEASES[-1]


@pytest.mark.exhaustive
def test_attention_mlp_and_experts_train_and_resume_like_ddp(tmp_path: Path) -> None:
    saved = f"--save {tmp_path} {TWO_STEPS}"
    modes = ["", FSDP, f"{FSDP} {saved}", f"{FSDP} --load {tmp_path}"]
    ddp, fsdp, _, resumed = train_on(NEWEST, 2, *(f"{SPARSE} {mode}" for mode in modes))
    assert_same_run(fsdp, ddp, loss=1e-6, norm=1e-5)
    balance = "load_balancing_loss"
    assert fsdp.steps[0][balance] == pytest.approx(ddp.steps[0][balance], rel=1e-6)
    assert resumed.steps == fsdp.steps[2:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("release", "levels"), [(RELEASES[1], LEVELS[3:]), (NEWEST, LEVELS)])
def test_every_level_trains_attention_and_mlp_like_ddp(
    release: str, levels: tuple[str, ...]
) -> None:
    modes = [f"{FSDP} --data-parallel-sharding-strategy {level}" for level in levels]
    modes.append(f"{FSDP} --init-model-with-meta-device --recompute-granularity full")
    modes[-1] += " --recompute-method uniform --recompute-num-layers 1"
    lines = [f"{DENSE} {mode}" for mode in ("", *modes)]
    ddp, *others = train_on(release, 2, *lines)
    for record in others:
        assert_same_run(record, ddp, loss=1e-6, norm=1e-5)


@pytest.mark.exhaustive
def test_other_axes_train_like_ddp() -> None:
    layouts = (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
        "--context-parallel-size 2",
    )
    lines = (f"{SPARSE} {layout} {mode}" for layout, mode in product(layouts, ("", FSDP)))
    records = train_on(NEWEST, 4, *lines)
    for ddp, fsdp in zip(records[::2], records[1::2], strict=True):
        assert_same_run(fsdp, ddp, loss=1e-5, norm=1e-5)


@pytest.mark.exhaustive
def test_checkpoints_load_at_another_level_and_by_their_own_arguments(tmp_path: Path) -> None:
    load = f"{FSDP} --load {tmp_path}"
    own = f"{SPARSE.replace('*-*E', '*-')} {load} --use-checkpoint-args"
    lines = [f"{SPARSE} {FSDP}", f"{SPARSE} {FSDP} {TWO_STEPS} --save {tmp_path}", own]
    lines += [f"{SPARSE} {load} --data-parallel-sharding-strategy {level}" for level in LEVELS[:3]]
    whole, _, *others = train_on(NEWEST, 2, *lines)
    for record in others:
        assert record.losses == pytest.approx(whole.losses[2:], rel=1e-6)


@pytest.mark.exhaustive
def test_ddp_resumes_from_torch_dist_and_nothing_converts_a_hybrid_model(tmp_path: Path) -> None:
    require(NEWEST)
    theirs, ours = tmp_path / "torch_dist", tmp_path / "fsdp_dtensor"
    lines = [DENSE, f"{DENSE} {TWO_STEPS} --save {theirs}", f"{DENSE} --load {theirs}"]
    lines += [f"{DENSE} {FSDP} {TWO_STEPS} --save {ours}", f"{DENSE} {FSDP} --load {theirs}"]
    conversions = [
        ("convert-torch-dist-to-fsdp-dtensor", theirs),
        ("convert-fsdp-dtensor-to-torch-dist", ours),
        ("convert-to-hf", ours),
    ]
    tasks: list[Task] = [Train(2, line) for line in lines]
    for command, source in conversions:
        tasks.append(Convert(command, source / "iter_0000002", tmp_path / command))
    whole, _, resumed, _, *refused = do_on(NEWEST, tasks)
    assert not isinstance(whole, str) and not isinstance(resumed, str)
    assert resumed.steps == whole.steps[2:]
    assert [each for each in refused if not isinstance(each, str)] == []
    assert all("decoder.final_norm.weight" in str(each) for each in refused)


def flops(args: argparse.Namespace, **values: object) -> float:
    """Return the operations of a sequence with some arguments replaced."""
    return training_flops(argparse.Namespace(**vars(args) | {"padded_vocab_size": 100} | values), 1)


def test_operations_are_counted_by_letters() -> None:
    for flags, pattern in (("", "*-*-"), (EXPERTS, "*E*E")):
        args, _ = parse(f"{MOCK} {flags}")
        values = {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}
        assert flops(args, hybrid_layer_pattern=pattern, **values) == flops(args)
    # Megatron-LM's formula for a Mamba layer: 128 wide, 8 groups of 128 states, 2 heads of 64.
    mamba = 2 * 64 * (2 * 128 + 2 * 8 * 128 + 2) + 7 * 128 * 128 + 2 * 128 * 64
    args, _ = parse(MOCK)
    without = flops(args, hybrid_layer_pattern="*", num_layers=1)
    with_mamba = flops(args, hybrid_layer_pattern="*M", num_layers=2)
    assert with_mamba - without == 3 * mamba * args.seq_length
