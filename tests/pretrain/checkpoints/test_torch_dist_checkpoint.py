# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-Core's own data parallelism in torch_dist."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from torch.distributed.checkpoint import FileSystemReader

from tests.support.model_parallel import forget_groups
from tests.support.pairwise import each_value
from tests.support.pretrain.saved_runs import DROPOUT, GATED, SIX, assert_equal, read, saved_at
from tests.support.pretrain.training_runs import Record, error_of, lines_of_load, train, trained
from tests.support.rank_pool import run_ranks

LAYOUTS = {
    "whole": "",
    "dp_reshardable": "--use-distributed-optimizer",
    "fully_reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "layout"),
    each_value(always=[("fp32", "fully_reshardable")], precision=("fp32", "bf16"), layout=LAYOUTS),
)
def test_without_fsdp_a_run_resumes_bitwise(precision: str, layout: str, tmp_path: Path) -> None:
    flags = LAYOUTS[layout]
    line = f"{DROPOUT} {GATED} {flags} --train-iters 4" + (" --bf16" if precision == "bf16" else "")
    unbroken, resumed = trained(
        f"{line} --save {tmp_path} --save-interval 2", f"{line} --load {tmp_path} --ckpt-step 2"
    )
    assert resumed.losses == unbroken.losses[2:]
    assert resumed.column("grad-norm") == unbroken.column("grad-norm")[2:]
    assert resumed.flops == unbroken.flops > 0
    saved_at(tmp_path, 2, 4)


def train_over_gloo(command_line: str) -> list[Record]:
    """Job: train with gloo copies of the process groups."""
    forget_groups()
    return train(command_line)


@pytest.mark.exhaustive
def test_the_first_rank_alone_gathers_the_optimizer_to_write_it(tmp_path: Path) -> None:
    line = f"{SIX} {GATED} {LAYOUTS['fully_reshardable']}"
    gathered = "--distrib-optim-fully-reshardable-mem-efficient"
    writers = {}
    for name, flag in (("all", ""), ("first", gathered)):
        save = f"--train-iters 2 {flag} --save {tmp_path / name} --save-interval 2"
        run_ranks(2, train_over_gloo, f"{line} {save}")
        metadata = FileSystemReader(tmp_path / name / "iter_0000002").read_metadata()
        writers[name] = {
            info.relative_path[:4]
            for index, info in metadata.storage_data.items()
            if index.fqn.startswith("optimizer.")
        }
    assert writers == {"all": {"__0_", "__1_"}, "first": {"__0_"}}
    assert_equal(read(tmp_path / "first", 2), read(tmp_path / "all", 2))
    override = "--disable-gloo-process-groups --override-opt-param-scheduler"
    resume = f"{line} {override} --load {tmp_path}"
    resumed = [trained(f"{resume}/{name}")[0] for name in writers]
    assert len(resumed[0].steps) == 4 and resumed[0].steps == resumed[1].steps


OneStep = Callable[[str], Path]


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    """Train one step with some flags; return the folder of its checkpoint."""

    @functools.cache
    def save(flags: str) -> Path:
        folder = tmp_path_factory.mktemp("one_step")
        line = f"{SIX} {flags} --train-iters 1 --save {folder} --save-interval 1"
        run_ranks(2, train, line)
        return folder

    return save


def test_without_fsdp_a_checkpoint_of_another_model_is_refused(one_step: OneStep) -> None:
    folder = one_step(GATED)
    for flags in ("--hidden-size 64", "--num-layers 3"):
        error = error_of(f"{SIX} {GATED} {flags} --load {folder}")
        assert error.startswith("ValueError") and str(folder) in error and "mismatch" in error


@pytest.mark.exhaustive
@pytest.mark.parametrize("strictness", ["log_unexpected", "log_all"])
def test_a_lenient_load_counts_and_names_what_it_leaves_out(
    strictness: str, one_step: OneStep
) -> None:
    line = f"{SIX} --no-load-optim --no-load-rng --load {one_step('')}"
    line += " --no-check-checkpoint-args --dist-ckpt-strictness"
    run = f"{line} {strictness}"
    (unused,) = run_ranks(2, lines_of_load, f"{run} --disable-bias-linear")[0]
    assert "4 entries of the file are not in the model" in unused and "linear_qkv.bias" in unused
    (absent,) = run_ranks(2, lines_of_load, f"{run} --qk-layernorm")[0]
    assert "4 entries are not in the file" in absent and "q_layernorm.weight" in absent
    assert run_ranks(2, lines_of_load, run)[0] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "own", "remedy"),
    [
        ("whole", "dp_reshardable", "leave out --use-distributed-optimizer"),
        ("dp_reshardable", "whole", "give --use-distributed-optimizer"),
        ("fully_reshardable", "whole", "give --use-distributed-optimizer"),
    ],
)
def test_the_state_of_the_other_kind_of_optimizer_is_refused_with_the_way(
    saved: str, own: str, remedy: str, one_step: OneStep
) -> None:
    folder = one_step(f"{GATED} {LAYOUTS[saved]}".rstrip())
    load = f"{SIX} {GATED} {LAYOUTS[own]} --load {folder}"
    error = error_of(load)
    assert error.startswith("ValueError: ") and str(folder) in error
    assert remedy in error and "--no-load-optim" in error
    line = f"{load} --train-iters 2 --no-load-optim --override-opt-param-scheduler"
    weights = trained(line)[0]
    assert weights.column("iteration") == [2]


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


@pytest.mark.exhaustive
def test_ranks_read_parts_and_exchange_them(one_step: OneStep) -> None:
    load = f"--override-opt-param-scheduler --load {one_step(GATED)}"
    resume = f"{SIX} {GATED} --train-iters 3 {load}"
    alone = run_ranks(2, train, resume)
    shared = run_ranks(2, read_a_part, f"{resume} --ckpt-fully-parallel-load")
    for ([record], own, received), [expected] in zip(shared, alone):
        assert len(record.steps) == 2 and record.steps == expected.steps
        assert own > 0 and received > 0
