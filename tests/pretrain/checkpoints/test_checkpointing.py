# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a resumed run is the run that never stopped; refused loads change nothing."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend

from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.mcore_adapter.checkpoints import checkpointing, fsdp_dtensor_format
from tests.support.pretrain.saved_runs import (
    DROPOUT,
    FSDP,
    GATED,
    LINE,
    SIX,
    assert_equal,
    assert_same_state,
    expected_keys,
    keys,
    saved_at,
)
from tests.support.pretrain.training_runs import (
    Record,
    State,
    assert_close,
    build,
    error_of,
    lines_of_load,
    load_checkpoint,
    load_state,
    refuse,
    state_of,
    train,
    trained,
)
from tests.support.rank_pool import run_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped(
    strategy: str, tmp_path: Path
) -> None:
    line = f"{DROPOUT} {GATED} {FSDP} --bf16 --data-parallel-sharding-strategy {strategy}"
    line = line.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 2")
    saved = f"{line} --save {tmp_path} --save-interval 2"
    unbroken, stopped, resumed = trained(
        line, f"{saved} --exit-interval 3", f"{saved} --load {tmp_path}"
    )
    assert stopped.iteration == 3 and resumed.iteration == 6
    assert stopped.losses + resumed.losses == unbroken.losses
    for name in ("grad-norm", "learning-rate"):
        assert stopped.column(name) + resumed.column(name) == unbroken.column(name)
    parts = [each.evaluations["validation"] for each in (stopped, resumed)]
    assert parts[0] + parts[1] == unbroken.evaluations["validation"]
    assert resumed.flops == unbroken.flops > 0
    saved_at(tmp_path, 2, 3, 4, 6)


def test_a_run_resumes_at_another_strategy(fp32: tuple[Path, Record]) -> None:
    folder, unbroken = fp32
    lines = [
        f"{LINE} --load {folder} --ckpt-step 3 --data-parallel-sharding-strategy {name}"
        for name in ("optim", "no_shard")
    ]
    for resumed in trained(*lines):
        assert_close(resumed.losses, unbroken.losses[3:], 1e-6)


@pytest.mark.exhaustive
def test_an_fp16_run_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    line = (
        f"{LINE} --fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2"
        " --train-iters 8"
    )
    unbroken, resumed = trained(
        f"{line} --save {tmp_path} --save-interval 5", f"{line} --load {tmp_path} --ckpt-step 5"
    )
    assert resumed.column("loss-scale") == unbroken.column("loss-scale")[5:]
    assert resumed.losses == unbroken.losses[5:]


@pytest.mark.exhaustive
def test_the_optimizer_or_the_random_state_can_be_left_out_of_a_load(
    fp32: tuple[Path, Record], fp32_state: State
) -> None:
    folder, full = fp32[0], fp32_state
    fresh, no_optim, finetune = (
        run_ranks(2, load_state, f"{LINE} {flags}")[0]
        for flags in (
            "",
            f"--load {folder} --no-load-optim",
            f"--load {folder} --finetune",
        )
    )
    for state in (no_optim, finetune):
        assert_equal(state.weights, full.weights)
        assert_equal(state.slots["exp_avg"], fresh.slots["exp_avg"])
        assert {float(step) for step in state.slots["step"].values()} == {0.0}
    assert no_optim.args["iteration"] == 6
    assert finetune.args == {"iteration": 0, "consumed_train_samples": 0}
    assert not any(value.any() for value in fresh.slots["exp_avg"].values())
    assert any(value.any() for value in full.slots["exp_avg"].values())


@pytest.mark.exhaustive
def test_without_the_random_state_dropout_goes_another_way(tmp_path: Path) -> None:
    line = f"{DROPOUT} {GATED} {FSDP} --train-iters 3"
    first, same, other = trained(
        f"{line} --save {tmp_path} --save-interval 2",
        f"{line} --load {tmp_path} --ckpt-step 2",
        f"{line} --load {tmp_path} --ckpt-step 2 --no-load-rng",
    )
    assert same.losses == first.losses[2:] != other.losses
    assert_close(other.losses, first.losses[2:], 0.1)


@pytest.mark.exhaustive
def test_what_was_not_saved_is_missed_by_name_and_can_be_done_without(tmp_path: Path) -> None:
    line = f"{LINE} --train-iters 2"
    run_ranks(2, train, f"{line} --save {tmp_path} --save-interval 2 --no-save-optim --no-save-rng")
    found = keys(tmp_path, 2)
    assert found == {
        key
        for key in expected_keys("module.module")
        if not key.startswith(("optimizer", "opt_param", "rng"))
    }
    error = error_of(f"{line} --load {tmp_path}")
    assert "ValueError" in error and "opt_param_scheduler" in error
    assert "--no-load-rng" in error and "--no-load-optim" in error
    resumed = trained(f"{line} --train-iters 3 --load {tmp_path} --no-load-optim --no-load-rng")[0]
    assert [step["iteration"] for step in resumed.steps] == [3]


@pytest.mark.exhaustive
def test_a_pretrained_checkpoint_gives_the_weights_where_there_is_no_checkpoint_yet(
    fp32: tuple[Path, Record], fp32_state: State, tmp_path: Path
) -> None:
    folder, expected = fp32[0], fp32_state
    state = run_ranks(
        2, load_state, f"{LINE} --load {tmp_path / 'none'} --pretrained-checkpoint {folder}"
    )[0]
    assert_equal(state.weights, expected.weights)
    assert state.args["iteration"] == 0
    assert not any(value.any() for value in state.slots["exp_avg"].values())
    own = run_ranks(
        2, load_state, f"{LINE} --load {folder} --pretrained-checkpoint {tmp_path / 'none'}"
    )[0]
    assert_same_state(own, expected)


def test_a_run_starts_from_scratch_without_a_checkpoint_unless_told_to_stop(tmp_path: Path) -> None:
    line = f"{LINE} --train-iters 1 --load {tmp_path}"
    assert trained(line)[0].iteration == 1
    error = error_of(f"{line} --exit-on-missing-checkpoint")
    assert error.startswith("ValueError: --exit-on-missing-checkpoint") and str(tmp_path) in error


def test_no_run_begins_from_scratch_beside_checkpoints_or_from_a_file(
    fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    folder, _ = fp32
    file = tmp_path / "file"
    file.touch()
    without_tracker = tmp_path / "without_tracker"
    (without_tracker / "iter_0000002").mkdir(parents=True)
    for load, words in (
        (folder / "iter_0000003", "is itself the directory of one checkpoint"),
        (without_tracker / "iter_0000002", "has no .metadata: it is no complete checkpoint"),
    ):
        root = without_tracker if load.parent == without_tracker else load
        assert error_of(f"{LINE} --load {root}").startswith(f"ValueError: {load} {words}")
    for flags, words in (
        ("", f"--load {file}: {file} is a file, not a directory"),
        ("--use-checkpoint-args", f"--use-checkpoint-args: {file} is a file; a directory with"),
    ):
        error = error_of(f"{LINE} --load {file} {flags}")
        assert "has 1 problem" in error and words in error
    unfinished = tmp_path / "unfinished"
    (unfinished / ".writing_iter_0000002").mkdir(parents=True)
    run = run_ranks(1, train, f"{LINE} --train-iters 1 --load {unfinished}")[0][0]
    assert run.iteration == 1


@pytest.mark.exhaustive
def test_weights_that_are_not_there_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    for flags in (f"--pretrained-checkpoint {tmp_path}", f"--load {tmp_path} --finetune"):
        error = error_of(f"{LINE} {flags}")
        assert error.startswith("ValueError") and str(tmp_path) in error


def train_with_members_pickled_by_getattr(line: str) -> None:
    """Job: a run under a Python that pickles members of enumerations as 3.11.2 does."""
    with patch.object(
        AttnBackend, "__reduce_ex__", lambda self, protocol: (getattr, (AttnBackend, self.name))
    ):
        train(line)


@pytest.mark.exhaustive
def test_a_checkpoint_of_an_early_python_3_11_loads(tmp_path: Path) -> None:
    line = f"{SIX} --train-iters 2 --lr-decay-iters 6"
    run_ranks(
        2,
        train_with_members_pickled_by_getattr,
        f"{line} --save {tmp_path} --save-interval 1 --exit-interval 1",
    )
    assert trained(f"{line} --load {tmp_path}")[0].column("iteration") == [2]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(fp32: tuple[Path, Record]) -> None:
    folder, _ = fp32
    error = error_of(f"{LINE} --load {folder} --ckpt-step 4")
    assert "iter_0000004" in error and "iter_0000003, iter_0000006" in error


@pytest.mark.exhaustive
def test_old_checkpoints_are_dropped_but_for_multiples_and_the_newest(tmp_path: Path) -> None:
    run_ranks(
        2,
        train,
        f"{LINE} --train-iters 5 --save {tmp_path} --save-interval 1 --save-retain-interval 2",
    )
    saved_at(tmp_path, 2, 4, 5)


@pytest.mark.exhaustive
def test_a_partial_load_takes_what_there_is_and_a_strict_one_says_what_is_missing(
    fp32: tuple[Path, Record], fp32_state: State
) -> None:
    folder, expected = fp32[0], fp32_state
    line = f"{LINE} --num-layers 3"
    error = error_of(f"{line} --load {folder}")
    assert "not in the file" in error and "decoder.layers.2." in error
    fresh = run_ranks(2, load_state, line)[0]
    state = run_ranks(2, load_state, f"{line} --load {folder} --no-strict-fsdp-dtensor-load")[0]
    third = {name: value for name, value in fresh.weights.items() if ".layers.2." in name}
    assert len(third) == 6
    assert_equal(state.weights, expected.weights | third)
    moments = {
        name: value for name, value in fresh.slots["exp_avg"].items() if ".layers.2." in name
    }
    assert_equal(state.slots["exp_avg"], expected.slots["exp_avg"] | moments)
    assert state.args == expected.args
    fewer = error_of(f"{LINE} --num-layers 1 --load {folder}")
    assert "not in the model" in fewer and "decoder.layers.1." in fewer


def lines_of_load_of_stranger(command_line: str) -> list[str] | str:
    """Job: return what a load prints, or its error, where keys have another prefix."""
    with patch.object(fsdp_dtensor_format, "MODEL_PREFIX", "stranger."):
        return lines_of_load(command_line)


@pytest.mark.exhaustive
def test_a_partial_load_counts_and_names_what_it_leaves_out(fp32: tuple[Path, Record]) -> None:
    folder, _ = fp32
    load = f"--load {folder} --no-load-optim --no-load-rng"
    line = f"{LINE} {load} --dist-ckpt-strictness log_all"
    (absent,) = run_ranks(2, lines_of_load, f"{line} --num-layers 3")[0]
    assert "7 entries are not in the file" in absent and "decoder.layers.2." in absent
    (unused,) = run_ranks(2, lines_of_load, f"{line} --num-layers 1")[0]
    assert "7 entries of the file are not in the model" in unused and "layers.1." in unused
    assert run_ranks(2, lines_of_load, line)[0] == []
    error = error_of(line, job=lines_of_load_of_stranger)
    assert "has no weight of this model" in error and "stranger." in error


def failing_save(command_line: str, failing_rank: int) -> str:
    """Job: a run whose second save fails on one rank; the error."""
    form = checkpointing.FORMATS[True, "fsdp_dtensor"]
    original = form.write

    def write(args: Any, content: dict[str, Any], target: Path) -> list[str]:
        if content["iteration"] == 2 and dist.get_rank() == failing_rank:
            with patch.object(SigningWriter, "write_data", side_effect=OSError("disk full")):
                return original(args, content, target)
        return original(args, content, target)

    with patch.object(form, "write", write):
        return refuse(command_line)


@pytest.mark.always("0")
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before_it(
    failing_rank: int, tmp_path: Path
) -> None:
    line = f"{LINE} --train-iters 3 --save {tmp_path} --save-interval 1"
    error = error_of(line, failing_rank, job=failing_save)
    assert "iteration 2 was not written" in error and "disk full" in error
    saved_at(tmp_path, 1)
    assert trained(f"{line} --load {tmp_path}")[0].iteration == 3
    saved_at(tmp_path, 1, 2, 3)


def refused_load(command_line: str) -> tuple[str, bool]:
    """Job: the error of a load, and whether it has changed anything of weights or optimizer."""
    run = build(command_line)
    before = state_of(run)
    try:
        load_checkpoint(run)
    except ValueError as error:
        after = state_of(run)
        same = all(
            torch.equal(after.weights[name], value) for name, value in before.weights.items()
        )
        for slot, values in before.slots.items():
            same &= all(
                torch.equal(after.slots[slot][name], value) for name, value in values.items()
            )
        return str(error), same and after.groups == before.groups
    raise AssertionError("the load was not refused")


@pytest.mark.always("hidden_size", "untied_unchecked")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hidden-size 64", "linear_fc1.weight_w: (64, 32) in the file, (128, 64) in the model"),
        ("--num-layers 3", "decoder.layers.2."),
        ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights: False"),
        (
            "--untie-embeddings-and-output-weights --no-check-checkpoint-args",
            "output_layer.weight",
        ),
    ],
    ids=["hidden_size", "layers", "untied", "untied_unchecked"],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_overwritten(
    flags: str, words: str, fp32: tuple[Path, Record]
) -> None:
    folder, _ = fp32
    for message, untouched in run_ranks(2, refused_load, f"{LINE} {flags} --load {folder}"):
        assert str(folder / "iter_0000006") in message and words in message
        assert untouched


@pytest.mark.exhaustive
def test_a_schedule_that_contradicts_the_checkpoint_is_refused_with_the_flags_that_settle_it(
    fp32: tuple[Path, Record],
) -> None:
    folder, unbroken = fp32
    line = f"{LINE} --load {folder} --ckpt-step 3"
    error = error_of(f"{line} --lr 1e-3")
    assert error.startswith("ValueError") and "0.001" in error and "0.005" in error
    assert "--override-opt-param-scheduler" in error
    assert "--use-checkpoint-opt-param-scheduler" in error
    kept, overridden = trained(
        f"{line} --lr 1e-3 --use-checkpoint-opt-param-scheduler",
        f"{line} --lr 1e-3 --override-opt-param-scheduler",
    )
    assert kept.column("learning-rate") == unbroken.column("learning-rate")[3:]
    assert max(overridden.column("learning-rate")) < 1e-3


@pytest.mark.exhaustive
def test_without_fsdp_a_run_refuses_the_format_of_fsdp(fp32: tuple[Path, Record]) -> None:
    error = error_of(f"{SIX} {GATED} --load {fp32[0]}")
    assert error.startswith("ValueError")
    assert "in the format fsdp_dtensor, but this run reads torch_dist" in error
