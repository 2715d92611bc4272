# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-Core's own data parallelism in torch_dist."""

import itertools
from pathlib import Path

import pytest

from tests.pretrain.saved_runs import DROPOUT, GATED, SIX, saved_at
from tests.pretrain.training_runs import refuse, train
from tests.rank_pool import run_ranks
from tests.selection import mostly_in_full

LAYOUTS = {
    "whole": "",
    "dp_reshardable": "--use-distributed-optimizer",
    "fully_reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
}


@pytest.mark.parametrize(
    ("precision", "layout"),
    mostly_in_full(
        [*itertools.product(("fp32", "bf16"), LAYOUTS)],
        [("bf16", "whole"), ("bf16", "dp_reshardable"), ("fp32", "fully_reshardable")],
    ),
)
def test_without_fsdp_a_run_resumes_bitwise(precision: str, layout: str, tmp_path: Path) -> None:
    flags = LAYOUTS[layout]
    line = f"{DROPOUT} {GATED} {flags} --train-iters 4" + (" --bf16" if precision == "bf16" else "")
    unbroken, resumed = run_ranks(
        2,
        train,
        f"{line} --save {tmp_path} --save-interval 2",
        f"{line} --load {tmp_path} --ckpt-step 2",
    )[0]
    assert resumed.losses == unbroken.losses[2:]
    assert resumed.column("grad-norm") == unbroken.column("grad-norm")[2:]
    assert resumed.flops == unbroken.flops > 0
    saved_at(tmp_path, 2, 4)


def test_without_fsdp_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    line = f"{SIX} {GATED}"
    run_ranks(2, train, f"{line} --train-iters 1 --save {tmp_path} --save-interval 1")
    for flags, words in (("--hidden-size 64", "mismatch"), ("--num-layers 3", "mismatch")):
        refusals = run_ranks(2, refuse, f"{line} {flags} --load {tmp_path}")
        assert refusals[0] == refusals[1]
        assert (
            refusals[0].startswith("ValueError")
            and str(tmp_path) in refusals[0]
            and words in refusals[0]
        )
