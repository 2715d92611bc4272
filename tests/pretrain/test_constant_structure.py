# SPDX-License-Identifier: Apache-2.0
"""--ckpt-assume-constant-structure: saves use the plan of the first one, and write the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from megatron.checkpoint.dcp import save_planner as dcp_saving
from megatron.checkpoint.dcp.save_planner import EvenPlanner, PlanReuse
from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.mcore_adapter.checkpoints.torch_dist_saving import SaveStrategies, structure_of
from tests.support.pretrain.saved_runs import FSDP, GATED, SIX, assert_equal, keys, read
from tests.support.pretrain.training_runs import pretrain, trained
from tests.support.rank_pool import run_ranks

CONSTANT = "--ckpt-assume-constant-structure"


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[str]]:
    """Count the calls of a function."""
    original, calls = getattr(owner, name), []

    def count(*positional: Any, **keywords: Any) -> Any:
        calls.append(name)
        return original(*positional, **keywords)

    with patch.object(owner, name, count):
        yield calls


def train_and_count(command_line: str) -> tuple[int, int]:
    """Job: the number of plans that this rank has made for all ranks in a run, in each format."""
    with (
        counted(dcp_saving, "create_default_global_save_plan") as even,
        counted(MCoreSavePlanner, "create_global_plan") as others,
    ):
        pretrain(command_line)
    return len(even), len(others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["fsdp_dtensor", "torch_dist"])
def test_saves_with_fsdp_are_planned_once_and_are_the_same(form: str, tmp_path: Path) -> None:
    line = f"{SIX} {GATED} {FSDP} --bf16 --train-iters 3 --save-interval 1 --ckpt-format {form}"
    assert run_ranks(2, train_and_count, f"{line} --save {tmp_path}/anew")[0] == (3, 0)
    once = run_ranks(2, train_and_count, f"{line} {CONSTANT} --save {tmp_path}/once")
    assert once == [(1, 0), (0, 0)]
    for iteration in (1, 2, 3):
        assert keys(tmp_path / "once", iteration) == keys(tmp_path / "anew", iteration)
        assert_equal(read(tmp_path / "once", iteration), read(tmp_path / "anew", iteration))


@pytest.mark.exhaustive
def test_saves_without_fsdp_are_planned_twice_and_are_the_same(tmp_path: Path) -> None:
    line = f"{SIX} {GATED} --use-distributed-optimizer --train-iters 4 --save-interval 1"
    assert run_ranks(2, train_and_count, f"{line} --save {tmp_path}/anew")[0] == (0, 4)
    few = run_ranks(2, train_and_count, f"{line} {CONSTANT} --save {tmp_path}/few")
    assert few == [(0, 2), (0, 0)]  # the second plan is compared with the first
    for iteration in (1, 2, 3, 4):
        assert keys(tmp_path / "few", iteration) == keys(tmp_path / "anew", iteration)
    resume = (
        f"{SIX} {GATED} --use-distributed-optimizer --train-iters 6 --ckpt-step 4"
        " --override-opt-param-scheduler"
    )
    records = []
    for name in ("few", "anew"):
        records += trained(f"{resume} --load {tmp_path}/{name}")
    assert len(records[0].steps) == 2 and records[0].steps == records[1].steps


def save_changing(folder: str) -> list[int]:
    """Job: saves with a kept plan, whose structure changes on one rank and then on both.

    Returns:
        The number of plans that this rank has made for all ranks, after each save.
    """
    rank, reuse, numbers = dist.get_rank(), PlanReuse(), []
    with counted(dcp_saving, "create_default_global_save_plan") as calls:
        for number, change in enumerate(("", "", "first", "", "both", "")):
            content: dict[str, Any] = {"same": torch.full((4, 3), float(number))}
            content[f"own {rank}"] = torch.full((2,), float(10 * number + rank))
            if change == "both" or (change == "first" and rank == 0):
                content["new"] = torch.ones(5) * number
            path = Path(folder, str(number))
            path.mkdir(exist_ok=True)
            planner = EvenPlanner(reuse=reuse)
            dcp.save(content, storage_writer=SigningWriter(path), planner=planner)
            loaded = {name: torch.zeros_like(value) for name, value in content.items()}
            dcp.load(loaded, checkpoint_id=path)
            assert all(torch.equal(loaded[name], value) for name, value in content.items())
            numbers.append(len(calls))
    return numbers


def test_another_structure_on_any_rank_is_planned_anew(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_changing, str(tmp_path))
    assert first == [1, 1, 2, 3, 4, 5] and second == [0] * 6


def refuse_foreign_plan(folder: str) -> str:
    """Job: the error where the first rank has lost the plan that the others refer to."""
    reuse = PlanReuse()
    message = ""
    for number in range(2):
        if number and not dist.get_rank():
            reuse.forget()
        path = Path(folder, str(number))
        path.mkdir(exist_ok=True)
        try:
            planner = EvenPlanner(reuse=reuse)
            dcp.save({"a": torch.ones(3)}, storage_writer=SigningWriter(path), planner=planner)
        except BaseException as error:
            message = str(error)
    return message


def test_a_plan_that_the_first_rank_has_lost_is_no_plan(tmp_path: Path) -> None:
    for message in run_ranks(2, refuse_foreign_plan, str(tmp_path)):
        assert "rank 1 refers to the plan of another save" in message


@pytest.mark.parametrize("changed", ["key", "shape", "dtype", "object"])
def test_a_structure_is_what_is_saved_where(changed: str) -> None:
    def content(key: str = "a", rows: int = 2, dtype: Any = torch.float32, name: str = "o") -> Any:
        tensor = ShardedTensor.from_rank_offsets(key, torch.zeros(rows, 3, dtype=dtype), (0, 0, 2))
        return {"model": {"a": tensor}, "state": [ShardedObject(name, [1], (1,), (0,))], "n": 1}

    others = {
        "key": content(key="b"),
        "shape": content(rows=3),
        "dtype": content(dtype=torch.bfloat16),
        "object": content(name="p"),
    }
    assert structure_of(content()) == structure_of(content())
    assert structure_of(content()) != structure_of(others[changed])


def strategies_of(flags: dict[str, bool]) -> list[bool]:
    """Job: True for each save that has the strategy of the one before."""
    args = SimpleNamespace(ckpt_fully_parallel_save=False, **flags)
    strategies, found, before = SaveStrategies(), [], None
    for rows in (2, 2, 2 + dist.get_rank(), 2 + dist.get_rank()):
        tensor = ShardedTensor.from_rank_offsets("a", torch.zeros(rows))
        strategy = strategies.strategy(args, {"a": tensor})
        found.append(strategy is before)
        before = strategy
    strategies.forget()
    found.append(strategies.strategy(args, {"a": tensor}) is before)
    return found


def test_a_strategy_is_kept_while_no_rank_has_another_structure() -> None:
    kept = run_ranks(2, strategies_of, {"ckpt_assume_constant_structure": True})
    assert kept == [[False, True, False, True, False]] * 2
    never = run_ranks(1, strategies_of, {"ckpt_assume_constant_structure": False})
    assert never == [[False] * 5]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"{FSDP} --data-parallel-sharding-strategy no_shard",
        f"{FSDP} --data-parallel-sharding-strategy no_shard --ckpt-format torch_dist",
    ],
    ids=["without fsdp", "fsdp_dtensor", "torch_dist with fsdp"],
)
def test_without_shared_work_the_first_rank_writes_what_all_have(
    flags: str, tmp_path: Path
) -> None:
    line = f"{SIX} {GATED} {flags} --train-iters 1 --save-interval 1"
    run_ranks(2, train_and_count, f"{line} --save {tmp_path}/shared")
    run_ranks(2, train_and_count, f"{line} --no-ckpt-fully-parallel-save --save {tmp_path}/first")

    def sizes(name: str) -> list[int]:
        totals = [0, 0]
        for path in (tmp_path / name / "iter_0000001").glob("*.distcp"):
            totals[int(path.name[2])] += path.stat().st_size
        return totals

    shared, first = sizes("shared"), sizes("first")
    assert min(shared) > 0.25 * sum(shared)
    assert not first[1] and first[0] > 0.9 * sum(shared)
