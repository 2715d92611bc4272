# SPDX-License-Identifier: Apache-2.0
"""Keys and values of an fsdp_dtensor checkpoint, as torch alone reads them."""

from pathlib import Path

import pytest
import torch

from tests.support.pretrain.saved_runs import (
    LINE,
    assert_equal,
    assert_same_state,
    expected_keys,
    keys,
    read,
    whole,
)
from tests.support.pretrain.training_runs import Record, State, load_state, train
from tests.support.rank_pool import run_ranks


def test_the_keys_are_those_of_the_format(fp32: tuple[Path, Record], tmp_path: Path) -> None:
    assert keys(fp32[0], 3) == expected_keys("module.module")
    run_ranks(2, train, f"{LINE} --bf16 --train-iters 1 --save {tmp_path} --save-interval 1")
    assert keys(tmp_path, 1) == expected_keys("module.module.module")
    tensors = read(tmp_path, 1)
    assert {tensor.dtype for key, tensor in tensors.items() if not key.startswith("rng_state")} == {
        torch.float32
    }
    assert sorted(path.name for path in (tmp_path / "iter_0000001").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]


def test_the_gate_is_the_first_half_and_the_rest_is_plain(
    fp32: tuple[Path, Record], fp32_state: State
) -> None:
    state, tensors = fp32_state, read(fp32[0], 6)
    assert_equal(state.weights, whole(tensors, "model.module."))
    for slot in ("exp_avg", "exp_avg_sq"):
        assert_equal(
            state.slots[slot], whole(tensors, "optimizer.state.module.module.", f".{slot}")
        )
    assert {float(value) for value in state.slots["step"].values()} == {6.0}
    assert state.args == {"iteration": 6, "consumed_train_samples": 48}


@pytest.mark.exhaustive
def test_a_file_of_another_wrapper_depth_loads(
    fp32: tuple[Path, Record], fp32_state: State, tmp_path: Path
) -> None:
    folder, _ = fp32
    assert_same_state(run_ranks(2, load_state, f"{LINE} --bf16 --load {folder}")[0], fp32_state)
    run_ranks(
        2,
        train,
        f"{LINE} --bf16 --train-iters 6 --load {folder} --save {tmp_path} --save-interval 1"
        " --ckpt-step 3 --exit-interval 4",
    )
    written = run_ranks(2, load_state, f"{LINE} --bf16 --load {tmp_path}")[0]
    assert_same_state(run_ranks(2, load_state, f"{LINE} --load {tmp_path}")[0], written)
