# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model is converted, fine-tuned with FSDP and exported by command lines."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.checkpoint.command_runs import run_json
from tests.support.checkpoint.hugging_face_models import SHORT_RUN, save_model
from tests.support.pairwise import each_value
from tests.support.pretrain.training_runs import trained
from tests.support.rank_pool import run_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "to"),
    each_value(
        always=[("gpt2", "fsdp_dtensor"), ("qwen3_moe", "torch_dist")],
        family=("llama", "qwen3_moe", "gpt2"),
        to=("fsdp_dtensor", "torch_dist"),
    ),
)
def test_a_model_is_fine_tuned_and_exported_again(family: str, to: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    run_ranks(1, save_model, family, original)
    # Megatron-Core reads torch_dist files of its own kind of layers only; ours reads fsdp_dtensor
    # files of both kinds.
    kind = ("--transformer-impl", "local") if to == "torch_dist" else ()
    converted = run_json("convert-from-hf", original, tmp_path / "converted", "--format", to, *kind)
    flags = f"{shlex.join(converted['model_flags'])} {SHORT_RUN}"
    flags += (
        " --use-megatron-fsdp"
        if to == "fsdp_dtensor"
        else " --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    )
    for rate, name in (("0", "untouched"), ("1e-3", "tuned")):
        line = (
            f"{flags} --lr {rate} --min-lr {rate} --weight-decay 0 --train-iters 2 --load"
            f" {tmp_path}/converted --finetune"
        )
        (record,) = trained(f"{line} --save {tmp_path / name} --save-interval 2")
        assert record.iteration == 2
        if to == "fsdp_dtensor" and name == "tuned":
            (directly,) = trained(line.replace(f"{tmp_path}/converted --finetune", str(original)))
            assert directly.losses == record.losses
        exported = tmp_path / f"{name}_exported"
        run_json("convert-to-hf", tmp_path / name, exported, "--template", original)
        assert run_json("diff", original, exported, code=int(name == "tuned"))["same"] == (
            name == "untouched"
        )
        run_json("diff", tmp_path / name, exported)
    assert record.losses[1] != record.losses[0]
