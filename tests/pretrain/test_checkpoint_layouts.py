# SPDX-License-Identifier: Apache-2.0
"""Checkpoints do not know the layout: a run resumes under any as if it had never stopped."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.checkpoint.core.key_rules import VOCABULARY
from tests.support.pretrain.parity import (
    ALLTOALL,
    GPT2,
    LLAMA,
    MLA,
    MTP,
    OPTIM_OUTSIDE,
    UNTIED,
    Combination,
)
from tests.support.pretrain.training_runs import (
    Record,
    State,
    assert_close,
    build,
    error_of,
    load_checkpoint,
    load_state,
    save_checkpoint,
    train,
)
from tests.support.rank_pool import run_ranks

STEPS = 2
"""Under every layout. The second one shows the optimizer's state, which the first has used."""
BATCH = "--global-batch-size 4"
"""One microbatch a step for each of four data ranks."""


def runs(model: str, *layouts: tuple, layers: int = 2) -> list[Combination]:
    """Each layout is: ranks, axes, level of sharding (3 unless told), flags."""
    rows = [(*layout, 3)[: max(3, len(layout))] for layout in layouts]
    return [
        Combination(ranks, axes, level, model, BATCH, " ".join(flags), layers)
        for ranks, axes, level, *flags in rows
    ]


# Every run takes over from the one before it. Each axis and each level is written by one run and
# read by another, and so are tied embeddings by stages that share them.
CHANGES = {
    "dense": runs(LLAMA, (2, "tp2"), (2, "pp2"), (4, "tp2 sp", 1), (2, "cp2", 0), (2, "tp2")),
    "tied": runs(GPT2, (2, "pp2 vpp2"), (2, "cp2", 1), (4, "pp2"), (2, "pp2 vpp2"), layers=4),
    "experts": runs(
        ALLTOALL,
        (4, "tp2 sp ep2 etp1"),
        (2, "pp2"),
        (4, "ep4"),
        (4, "inst2 ep2", 3, OPTIM_OUTSIDE),
        (1, "dp"),
    ),
    "replicas": runs(LLAMA, (2, "dp", 0), (4, "inst2", 3, OPTIM_OUTSIDE), (2, "dp", 2)),
    "tied_mtp": runs(f"{LLAMA.replace(UNTIED, '')} {MTP}", (2, "pp2"), (2, "dp"), (2, "pp2")),
    "mla": runs(MLA, (2, "tp2"), (2, "dp")),
}


def go_on(folder: Path, layout: Combination, first: int, last: int, num_runs: int) -> Record:
    """Train steps ``first`` to ``last`` under ``layout``, from a checkpoint and to a checkpoint."""
    line = f"{layout.ours} --train-iters {num_runs * STEPS} --exit-interval {last}"
    load = f"--load {folder} --ckpt-step {first - 1}" if first > 1 else ""
    (record,) = run_ranks(
        layout.ranks, train, f"{line} {load} --save {folder} --save-interval {STEPS}"
    )[0]
    return record


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_under_another_layout(name: str, tmp_path: Path) -> None:
    first, *others = CHANGES[name]
    unbroken = go_on(tmp_path, first, 1, len(CHANGES[name]) * STEPS, len(CHANGES[name]))
    for number, layout in enumerate(others, 1):
        print(layout.name)
        steps = slice(number * STEPS, (number + 1) * STEPS)
        resumed = go_on(tmp_path, layout, steps.start + 1, steps.stop, len(CHANGES[name]))
        for value in ("lm loss", "grad-norm"):
            assert_close(resumed.column(value), unbroken.column(value)[steps], 1e-5)


# 100 tokens: 104 rows, 112 with two tensor-parallel ranks
PADDED = f"{UNTIED} --make-vocab-size-divisible-by 8"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "target"), [("dp", "tp2"), ("tp2", "dp")])
def test_rows_beyond_the_vocabulary_are_neither_read_nor_changed(
    source: str, target: str, tmp_path: Path
) -> None:
    saved, loading = runs(PADDED, (2, source), (2, target))
    run_ranks(2, train, f"{saved.ours} --train-iters 2 --save {tmp_path} --save-interval 2")
    expected: State = run_ranks(2, load_state, f"{saved.ours} --train-iters 2 --load {tmp_path}")[0]
    fresh, state = (
        run_ranks(2, load_state, f"{loading.ours} --train-iters 2 {load}")[0]
        for load in ("", f"--load {tmp_path}")
    )
    kinds = [
        (each.weights, each.slots["exp_avg"], each.slots["exp_avg_sq"])
        for each in (state, expected, fresh)
    ]
    for values, in_file, before in zip(*kinds):
        assert values.keys() == in_file.keys()
        for name, value in values.items():
            both = min(len(value), len(in_file[name]))
            assert torch.equal(value[:both], in_file[name][:both]), name
            assert torch.equal(value[both:], before[name][both:]), name
            assert len(value) == len(in_file[name]) or name in VOCABULARY
    assert {len(state.weights[name]) for name in VOCABULARY} != {
        len(expected.weights[name]) for name in VOCABULARY
    }


@pytest.mark.always("layers")
@pytest.mark.parametrize(
    ("layout", "flags", "words"),
    [
        ("pp2", "--num-layers 4", ["not in the file", "decoder.layers.2."]),
        (
            "pp2",
            "--vocab-size 110",
            ["other shapes", "output_layer.weight: (104, 32) in the file, (112, 32) in the model"],
        ),
        ("ep2", "--num-experts 8", ["not in the file", "local_experts.4."]),
        ("ep2", "--num-experts 2", ["not in the model", "local_experts.2."]),
    ],
    ids=["layers", "vocabulary", "experts", "fewer_experts"],
)
def test_a_file_of_another_model_is_refused_on_every_rank_with_one_message(
    layout: str, flags: str, words: list[str], expert_run: Path
) -> None:
    (row,) = runs(f"{ALLTOALL} --make-vocab-size-divisible-by 8", (2, layout))
    error = error_of(f"{row.ours} --train-iters 1 {flags} --load {expert_run}")
    assert error.startswith("ValueError") and all(word in error for word in words)


@pytest.fixture(scope="module")
def expert_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a model with four experts on two data ranks."""
    folder = tmp_path_factory.mktemp("experts")
    (row,) = runs(f"{ALLTOALL} --make-vocab-size-divisible-by 8", (2, "dp"))
    run_ranks(2, train, f"{row.ours} --train-iters 1 --save {folder} --save-interval 1")
    return folder


def draw() -> list[float]:
    """Draw a number from every generator that a run saves."""
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    for name in sorted(get_cuda_rng_tracker().get_states()):
        with get_cuda_rng_tracker().fork(name):
            drawn.append(torch.rand(()).item())
    return drawn


def save_and_draw(line: str) -> list[float]:
    """Job: saves with generators that are elsewhere on every rank; what they give next."""
    run = build(line)
    load_checkpoint(run)
    for _ in range(1 + dist.get_rank()):
        draw()
    run.progress.iteration = 1
    save_checkpoint(run)
    return draw()


def load_and_draw(line: str) -> tuple[list[float], list[str]]:
    """Job: load; return numbers of all generators and the lines that the run has printed."""
    run = build(line)
    load_checkpoint(run)
    return draw(), run.report.record.lines


@pytest.mark.exhaustive
def test_every_rank_has_its_generators_back_unless_the_file_has_none_for_some(
    tmp_path: Path,
) -> None:
    saved, *others = runs(ALLTOALL, (4, "ep2"), (4, "tp2 sp ep2 etp1"), (4, "inst2"), (2, "ep2"))
    drawn = run_ranks(4, save_and_draw, f"{saved.ours} --save {tmp_path} --save-interval 1")
    assert len({tuple(numbers) for numbers in drawn}) == 4
    loaded = run_ranks(4, load_and_draw, f"{saved.ours} --load {tmp_path}")
    assert [numbers for numbers, _ in loaded] == drawn
    for other, begin_anew in zip(others, (True, False, True)):
        _, lines = run_ranks(other.ranks, load_and_draw, f"{other.ours} --load {tmp_path}")[0]
        assert any("no random state" in line for line in lines) == begin_anew
