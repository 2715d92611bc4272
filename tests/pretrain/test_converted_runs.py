# SPDX-License-Identifier: Apache-2.0
"""Runs change between Megatron-Core's DDP and FSDP by a conversion, as if nothing had happened.

Megatron-Core writes its default, the optimizer's state in the buckets of each rank, and the loaders
are strict.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.commands.formats import open_checkpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run
from tests.support.pretrain.parity import (
    ALLTOALL,
    BIAS,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MTP,
    SHARED,
    UNTIED,
    Combination,
)
from tests.support.pretrain.training_runs import Record, assert_close, error_of, train
from tests.support.rank_pool import run_ranks

STEPS = 2
MIXED = f"{ALLTOALL} {SHARED} {BIAS} --moe-layer-freq ([0]*1+[1]*1)"


def layout(ranks: int, axes: str, model: str, layers: int = 2) -> Combination:
    return Combination(ranks, axes, 3, model, "--global-batch-size 4", layers=layers)


# What runs without FSDP, and what goes on with it.
CHANGES = {
    "tp2_pp2_qk_norm_biases": (
        layout(4, "tp2 pp2", f"{LLAMA} --qk-layernorm --add-qkv-bias"),
        layout(2, "dp", f"{LLAMA} --qk-layernorm --add-qkv-bias"),
    ),
    "tied_pp2_vpp2": (layout(2, "pp2 vpp2", GPT2, 4), layout(2, "tp2", GPT2, 4)),
    "layers_that_differ": (layout(4, "tp2 sp ep2 etp1", MIXED), layout(2, "ep2", MIXED)),
    "deepseek": (
        layout(4, "pp2 ep2", f"{DEEPSEEK} {MTP}", 4),
        layout(2, "ep2", f"{DEEPSEEK} {MTP}", 4),
    ),
    "experts_ep2": (layout(4, "ep2", ALLTOALL), layout(2, "ep2", ALLTOALL)),
    "experts_of_all_ranks": (
        layout(4, "ep2", f"{ALLTOALL} --bf16"),
        layout(2, "dp", f"{ALLTOALL} --bf16"),
    ),
    "deepseek_pp2": (
        layout(2, "pp2", f"{DEEPSEEK} {MTP}", 4),
        layout(2, "ep2", f"{DEEPSEEK} {MTP}", 4),
    ),
    "bf16": (layout(2, "tp2", f"{LLAMA} --bf16"), layout(2, "dp", f"{LLAMA} --bf16")),
}


def go_on(
    flags: str, ranks: int, source: Path | None, first: int, last: int, target: Path
) -> Record:
    """Train steps ``first`` to ``last``, from a checkpoint and to a checkpoint."""
    load = f"--load {source} --ckpt-step {first - 1} --no-load-rng" if source is not None else ""
    line = (
        f"{flags} --train-iters {3 * STEPS} --exit-interval {last} {load} --save {target}"
        f" --save-interval {STEPS}"
    )
    (record,) = run_ranks(ranks, train, line)[0]
    return record


def assert_same_state(directory: Path, expected: Path) -> None:
    """Compare tensors, param groups and schedule of two checkpoints to the bit."""
    mine, theirs = (open_checkpoint(path).state() for path in (directory, expected))
    assert samples.differing(mine.weights, theirs.weights) == []
    assert samples.differing(mine.buffers, theirs.buffers) == []
    assert mine.moments.keys() == theirs.moments.keys()
    for name, slots in theirs.moments.items():
        assert samples.differing(mine.moments[name], slots) == []
        assert mine.step_of(name) == theirs.step_of(name)
    groups = [
        [(group.fields, group.members) for group in state.groups or []] for state in (mine, theirs)
    ]
    assert groups[0] == groups[1] and mine.scheduler == theirs.scheduler
    assert mine.compute_dtype == theirs.compute_dtype and mine.notes == theirs.notes


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_fsdp_and_back(name: str, tmp_path: Path) -> None:
    before, after = CHANGES[name]
    without_fsdp = (
        f"{before.line} --use-distributed-optimizer --dist-ckpt-strictness raise_unexpected"
    )
    unbroken = go_on(without_fsdp, before.ranks, None, 1, 3 * STEPS, tmp_path / "unbroken")
    run(TO_FSDP, tmp_path / "unbroken" / f"iter_{STEPS:07d}", tmp_path / "there")
    second, third = (STEPS + 1, 2 * STEPS), (2 * STEPS + 1, 3 * STEPS)
    with_fsdp = go_on(after.ours, after.ranks, tmp_path / "there", *second, tmp_path / "fsdp")
    in_torch_dist = f"{after.ours} --ckpt-format torch_dist"
    source, target = tmp_path / "unbroken", tmp_path / "directly"
    directly = go_on(in_torch_dist, after.ranks, source, *second, target)
    assert directly.losses == with_fsdp.losses
    run(TO_TORCH_DIST, tmp_path / "fsdp", tmp_path / "back")
    assert_same_state(tmp_path / "directly", tmp_path / "back")
    without = go_on(without_fsdp, before.ranks, target, *third, tmp_path / "end")
    for record, steps in (
        (with_fsdp, slice(STEPS, 2 * STEPS)),
        (without, slice(2 * STEPS, 3 * STEPS)),
    ):
        tolerance = 2e-3 if "--bf16" in before.line else 1e-5
        for value in ("lm loss", "grad-norm"):
            assert_close(record.column(value), unbroken.column(value)[steps], tolerance)


def test_a_model_that_megatron_core_cannot_save_ends_the_run_on_all_ranks_alike(
    tmp_path: Path,
) -> None:
    tied = layout(
        2, "pp2", f"{LLAMA.replace(UNTIED, '')} {MTP}"
    )  # its last stage fails, the first one would wait
    line = (
        f"{tied.line} --use-distributed-optimizer --train-iters 1 --save {tmp_path}"
        " --save-interval 1"
    )
    assert "Megatron-Core cannot save or load this model in torch_dist" in error_of(line)
    assert list(tmp_path.glob("*iter_*")) == []
