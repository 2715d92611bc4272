# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-Core's own data parallelism in torch_dist."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from tests.pretrain.saved_runs import DROPOUT, GATED, SIX, saved_at
from tests.pretrain.training_runs import Record, refuse, train
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


def read_a_part(command_line: str) -> tuple[list[Record], int, int]:
    """Job: resume; return the run, the number of tensors that were read here, and of the others."""
    counts = [0, 0]
    defer = FullyParallelLoadStrategyWrapper._defer_loading_sharded_tensors

    def count(content: Any) -> Any:
        parts = defer(content)
        counts[0], counts[1] = (len(part) for part in parts[2:])
        return parts

    name = "_defer_loading_sharded_tensors"
    with patch.object(FullyParallelLoadStrategyWrapper, name, staticmethod(count)):
        return train(command_line), counts[0], counts[1]


def test_ranks_read_parts_and_exchange_them(tmp_path: Path) -> None:
    line = f"{SIX} {GATED}"
    run_ranks(2, train, f"{line} --train-iters 2 --save {tmp_path} --save-interval 2")
    resume = f"{line} --train-iters 4 --override-opt-param-scheduler --load {tmp_path}"
    alone = run_ranks(2, train, resume)
    shared = run_ranks(2, read_a_part, f"{resume} --ckpt-fully-parallel-load")
    for ([record], read, received), [expected] in zip(shared, alone):
        assert len(record.steps) == 2 and record.steps == expected.steps
        assert read > 0 and received > 0
