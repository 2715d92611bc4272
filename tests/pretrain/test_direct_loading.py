# SPDX-License-Identifier: Apache-2.0
"""Runs with FSDP load torch_dist and Hugging Face without a conversion, and save torch_dist."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_arguments import model_flags
from tests.pretrain.checkpoints.test_background_save import train_with_warm_writers
from tests.support.checkpoint.changed_checkpoints import rewritten
from tests.support.checkpoint.command_runs import TO_FSDP, run
from tests.support.checkpoint.hugging_face_models import SHORT_RUN, save_model
from tests.support.pretrain.saved_runs import DROPOUT, FSDP, GATED, LINE, SIX, assert_same_state
from tests.support.pretrain.training_runs import (
    Record,
    assert_close,
    build,
    error_of,
    load_checkpoint,
    load_state,
    train,
    trained,
)
from tests.support.rank_pool import run_ranks

WITHOUT = f"{SIX} {GATED} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


@pytest.fixture(scope="module")
def torch_dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps without FSDP in bf16."""
    folder = tmp_path_factory.mktemp("torch_dist")
    line = f"{WITHOUT} --bf16 --exit-interval 2 --save {folder} --save-interval 2"
    run_ranks(2, train, line)
    return folder


@pytest.mark.exhaustive
def test_a_run_with_fsdp_saves_what_runs_with_and_without_it_load(tmp_path: Path) -> None:
    line = f"{DROPOUT} {GATED}"
    save = f"--ckpt-format torch_dist --save {tmp_path} --save-interval 3"
    (whole,) = trained(f"{line} {FSDP} {save}")
    load = f"--load {tmp_path} --ckpt-step 3"
    strictly = "--use-distributed-optimizer --dist-ckpt-strictness raise_all"
    with_fsdp, without = trained(f"{line} {FSDP} {load}", f"{line} {strictly} {load}")
    assert with_fsdp.losses == whole.losses[3:]
    assert f"{tmp_path}/iter_0000003 is in the format torch_dist: converted in memory" in (
        with_fsdp.lines
    )
    for name in ("lm loss", "grad-norm"):  # with the same dropout
        assert_close(without.column(name), whole.column(name)[3:], 1e-5)


@pytest.mark.exhaustive
def test_a_run_with_fsdp_saves_the_same_torch_dist_files_in_the_background(tmp_path: Path) -> None:
    line = f"{SIX} {GATED} {FSDP} --bf16 --ckpt-format torch_dist --train-iters 3"
    line += " --save-interval 2"
    run_ranks(2, train, f"{line} --save {tmp_path}/blocking")
    run_ranks(2, train_with_warm_writers, f"{line} --save {tmp_path}/background --async-save")
    blocking, background = (tmp_path / name / "iter_0000002" for name in ("blocking", "background"))
    names = sorted(path.name for path in blocking.iterdir())
    assert names == sorted(path.name for path in background.iterdir())
    for name in names:
        if name.endswith(".distcp"):
            assert (background / name).read_bytes() == (blocking / name).read_bytes()


@pytest.mark.exhaustive
def test_main_weights_that_contradict_the_model_are_found_on_all_ranks(
    torch_dist: Path, tmp_path: Path
) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"][1] += 1

    source = rewritten(torch_dist / "iter_0000002", tmp_path / "spoiled", change)
    run(TO_FSDP, source, tmp_path / "converted")
    line = f"{LINE} --bf16 --no-load-rng"
    expected = run_ranks(2, load_state, f"{line} --load {tmp_path}/converted")[0]
    state = run_ranks(2, load_state, f"{line} --load {tmp_path}/spoiled")[0]
    assert_same_state(state, expected)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert state.slots["step"][name] == 0 and not state.slots["exp_avg"][name].any()


def elements_read(line: str) -> tuple[int, int]:
    """Job: return how many elements this rank reads for a load, and how many the file has."""
    loading = build(line)
    read = StoredCheckpoint.read_chunk
    sizes: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        chunk = read(*args)
        sizes.append(chunk.numel())
        return chunk

    with patch.object(StoredCheckpoint, "read_chunk", counted):
        load_checkpoint(loading)
    stored = StoredCheckpoint(Path(loading.args.load) / "iter_0000002", verify=False)
    return sum(sizes), sum(torch.Size(stored.shape(key)).numel() for key in stored.tensors)


def test_a_rank_reads_its_rows_and_its_share_of_the_comparisons(torch_dist: Path) -> None:
    # Of the weight, the main weight and two moments, all but the weight are read by their owner.
    # Weight and main weight are compared: on each of two ranks 3/2 + 2/2 tensors of four.
    for read, stored in run_ranks(2, elements_read, f"{LINE} --bf16 --load {torch_dist}"):
        assert read < 0.7 * stored


def test_only_weights_of_a_pretrained_checkpoint_are_loaded(torch_dist: Path) -> None:
    line = f"{LINE} --bf16 --train-iters 1"
    (record,) = trained(f"{line} --pretrained-checkpoint {torch_dist}")
    assert f"loaded the weights of {torch_dist}/iter_0000002" in record.lines
    assert [step["iteration"] for step in record.steps] == [1]


MODEL = f"{SHORT_RUN} --use-checkpoint-args"


@pytest.mark.exhaustive
def test_a_hugging_face_model_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    run_ranks(1, save_model, "llama", tmp_path / "model")
    (plain,) = trained(f"{MODEL} {FSDP} --load {tmp_path}/model")
    assert f"loaded the weights of {tmp_path}/model" in plain.lines
    padded: Record
    (padded,) = trained(
        f"{MODEL} {FSDP} --pretrained-checkpoint {tmp_path}/model --padded-vocab-size 64"
    )
    assert "note: its vocabulary of 40 rows is padded with zeros to 64" in padded.lines
    assert padded.losses[0] > plain.losses[0]  # rows of padding take part in it
    flags = shlex.join(model_flags(hugging_face.read(tmp_path / "model").args))
    other = MODEL.replace("--use-checkpoint-args", f"{flags} --rotary-base 500")
    error = error_of(f"{other} {FSDP} --load {tmp_path}/model")
    assert "--rotary-base: 10000 in the file, 500 in this run" in error
    error = error_of(f"{MODEL} --use-distributed-optimizer --load {tmp_path}/model")
    assert "is in the format hugging_face, but this run reads torch_dist" in error


@pytest.mark.exhaustive
def test_damaged_files_and_other_models_are_refused(torch_dist: Path, tmp_path: Path) -> None:
    line = f"{LINE} --bf16 --load {torch_dist}"
    error = error_of(f"{line} --rotary-base 500")
    assert "--rotary-base: 10000 in the file, 500 in this run" in error
    assert "not in the file: model.module.decoder.layers.2" in error_of(f"{line} --num-layers 3")
    file = min((torch_dist / "iter_0000002").glob("*.distcp"))
    kept = file.read_bytes()
    content = bytearray(kept)
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    try:
        assert "is damaged, nothing of it was loaded" in error_of(line)
    finally:
        file.write_bytes(kept)
