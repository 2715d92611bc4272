# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs with --optimizer muon: for Adam, for Megatron-Core's own runs, and back."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretrain.test_copies_during_a_step import train_with_late_copies
from tests.support import emerging_optimizers_wheel
from tests.support.checkpoint import command_runs
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST
from tests.support.pretrain.parity import LLAMA, MOE, Combination
from tests.support.pretrain.saved_runs import read, whole
from tests.support.pretrain.training_runs import (
    Record,
    State,
    assert_close,
    load_state,
    train,
    write_counting_corpus,
)
from tests.support.rank_pool import run_ranks

MODULE = "megatron.core.optimizer.muon"
BATCH = "--global-batch-size 4"
"""Two microbatches on two data ranks, four without."""


@pytest.fixture(autouse=True)
def muon() -> None:
    emerging_optimizers_wheel.require()
    write_counting_corpus()


def with_muon(job: Any, *arguments: Any) -> Any:
    """Job: another one, where the package is there."""
    emerging_optimizers_wheel.install()
    if MODULE in sys.modules and not sys.modules[MODULE].HAVE_EMERGING_OPTIMIZERS:
        del sys.modules[MODULE]
    import_module(MODULE)
    return job(*arguments)


def run(ranks: int, line: str, last: int, target: Path, source: Path | None = None) -> Record:
    """Train until iteration ``last`` of six, from a checkpoint and to a checkpoint."""
    load = f"--load {source} --no-load-rng" if source is not None else ""
    line = f"{line} {BATCH} --train-iters 6 --exit-interval {last} {load} --save {target}"
    records: list[list[Record]] = run_ranks(ranks, with_muon, train, line)
    return records[0][0]


def loaded(ranks: int, line: str, source: Path) -> State:
    line = f"{line} {BATCH} --load {source}"
    states: list[State] = run_ranks(ranks, with_muon, load_state, line)
    return states[0]


def moments_in(folder: Path, iteration: int, slot: str) -> dict[str, torch.Tensor]:
    """Return a slot of the optimizer in a file by the plain names of parameters."""
    return whole(read(folder, iteration), "optimizer.state.module.module.", f".{slot}")


def weights_in(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    return whole(read(folder, iteration), "model.module.")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected and expected.keys() <= found.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


ADAM = Combination(2, "", 3, LLAMA)
MUON = Combination(2, "", 1, LLAMA, "--optimizer muon")


@pytest.mark.exhaustive
def test_muon_takes_the_momentum_of_adam_and_adam_that_of_muon(tmp_path: Path) -> None:
    adam, muon = tmp_path / "adam", tmp_path / "muon"
    run(2, ADAM.ours, 2, adam)
    state = loaded(2, f"{MUON.ours} --train-iters 6 --no-load-rng", adam)
    matrices = state.slots["momentum_buffer"].keys()
    assert len(matrices) == 8 and all(".linear_" in name for name in matrices)
    for slot in ("exp_avg", "exp_avg_sq"):
        stored = moments_in(adam, 2, slot)
        others = {name: value for name, value in stored.items() if name not in matrices}
        assert state.slots[slot].keys() == others.keys()
        assert_same(state.slots[slot], others)
    first = moments_in(adam, 2, "exp_avg")
    assert_same(state.slots["momentum_buffer"], {name: first[name] for name in matrices})
    assert set(map(float, state.slots["step"].values())) == {2.0}

    lines = run(2, MUON.ours, 4, muon, adam).lines
    assert any(line.startswith("note: Adam's first moment is loaded as Muon's") for line in lines)
    state = loaded(2, f"{ADAM.ours} --train-iters 6 --no-load-rng", muon)
    momentum = moments_in(muon, 4, "momentum_buffer")
    assert momentum.keys() == matrices
    assert_same(state.slots["exp_avg"], momentum)
    squares = {name: value.square() for name, value in momentum.items()}
    assert_same(state.slots["exp_avg_sq"], squares)
    for slot in ("exp_avg", "exp_avg_sq"):
        assert_same(state.slots[slot], moments_in(muon, 4, slot))
    assert set(map(float, state.slots["step"].values())) == {4.0}
    line = f"{ADAM.ours} --weight-decay 0 --override-opt-param-scheduler"
    record = run(2, line, 5, tmp_path / "again", muon)
    before, after = weights_in(muon, 4), weights_in(tmp_path / "again", 5)
    bound = 3.3 * record.column("learning-rate")[0]
    largest = [float((after[name] - before[name]).abs().max()) for name in matrices]
    assert 0 < max(largest) <= bound
    assert any(line.startswith("note: Muon's momentum is loaded") for line in record.lines)


MODE = "--optimizer muon --muon-tp-mode duplicated"
"""By default each slice of tensor parallelism is orthogonalized by itself."""

FP32 = "--muon-fp32-matmul-prec highest"
"""bfloat16 shows the order in which layouts add up gradients, in Megatron-Core's own runs too."""

CHANGES = {
    "tp2": (
        Combination(2, "tp2", 3, f"{LLAMA} {FP32}"),
        Combination(2, "", 3, f"{LLAMA} {FP32}"),
    ),
    "experts": (Combination(2, "ep2", 3, MOE), Combination(2, "ep2", 1, MOE)),
    "bf16": (Combination(2, "", 3, f"{LLAMA} --bf16"), Combination(2, "tp2", 1, f"{LLAMA} --bf16")),
    "embedding_alone": (
        Combination(2, "", 3, f"{LLAMA} {FP32}"),
        Combination(2, "pp2", 1, f"{LLAMA} {FP32} --pipeline-model-parallel-layout E|ttL"),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGES)
def test_runs_of_megatron_core_go_on_with_fsdp_and_back(name: str, tmp_path: Path) -> None:
    core, fsdp = (f"{each} {MODE}" for each in (CHANGES[name][0].line, CHANGES[name][1].ours))
    source = tmp_path / "unbroken" / "iter_0000002"
    unbroken = run(2, f"{core} --save-interval 2", 6, source.parent)
    command_runs.run(TO_FSDP, source, tmp_path / "there")
    there = run(2, fsdp, 4, tmp_path / "fsdp", tmp_path / "there")
    from_second = f"{fsdp} --ckpt-format torch_dist --ckpt-step 2"
    directly = run(2, from_second, 4, tmp_path / "directly", source.parent)
    assert there.losses == directly.losses
    command_runs.run(TO_TORCH_DIST, tmp_path / "fsdp", tmp_path / "back")
    assert_same(read(tmp_path / "back", 4), read(tmp_path / "directly", 4))
    strict = f"{core} --dist-ckpt-strictness raise_unexpected"
    back = run(2, strict, 6, tmp_path / "end", tmp_path / "back")
    close = 2e-3 if name == "bf16" else 1e-5
    for column in ("lm loss", "grad-norm"):
        found = there.column(column) + back.column(column)
        assert_close(found, unbroken.column(column)[2:], close)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["fsdp_dtensor", "torch_dist"])
def test_a_save_during_the_next_step_is_that_of_a_blocking_save(form: str, tmp_path: Path) -> None:
    # The step after the save takes the momentum back to the owners, and changes it.
    line = f"{MUON.ours} --ckpt-format {form} --train-iters 6 --save-interval 2 --exit-interval 5"
    blocking = f"{line} --save {tmp_path / 'blocking'}"
    late = f"{line} --async-save --use-persistent-ckpt-worker --save {tmp_path / 'late'}"
    (expected,) = run_ranks(2, with_muon, train, blocking)[0]
    record, num_waited = run_ranks(2, with_muon, train_with_late_copies, late, timeout=300)[0]
    assert record.losses == expected.losses and num_waited == 2
    for iteration in (2, 4):
        found, wanted = (read(tmp_path / each, iteration) for each in ("late", "blocking"))
        assert sum("momentum_buffer" in key for key in wanted) > 0
        assert_same(found, wanted)
