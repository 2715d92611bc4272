# SPDX-License-Identifier: Apache-2.0
"""Sections that all ranks leave when one fails, and the saves and loads that are such sections."""

from __future__ import annotations

import os
import pkgutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace import failed_collectives
from megatron.mcore_adapter.checkpoints import entered_together as sections
from megatron.mcore_adapter.checkpoints.checkpoint_format import attempt
from megatron.mcore_adapter.checkpoints.entered_together import entered_together
from tests.support.pretrain.saved_runs import GATED, SIX
from tests.support.pretrain.training_runs import refuse, train
from tests.support.rank_pool import RankFailure, run_ranks

DISTRIBUTED = f"{SIX} {GATED} --use-distributed-optimizer --train-iters 1 --save-interval 1"


# ---- sections


def gathers(failing: int, after: int) -> list[str]:
    """Gather objects on all ranks, of which one fails after some; return the problems."""
    gathered: list[Any] = [None] * dist.get_world_size()

    def gather() -> None:
        for number in range(4):
            if number == after and dist.get_rank() == failing:
                raise OSError(5, "a disk is broken")
            dist.all_gather_object(gathered, number)
            dist.barrier()
            dist.all_reduce(torch.ones(1))

    problems = attempt(gather)
    dist.all_gather_object(gathered, 0)  # the group can be used
    return problems


@pytest.mark.parametrize("after", [0, 2])
def test_all_ranks_leave_a_section_in_which_one_fails(after: int) -> None:
    problem = "rank 1: OSError: [Errno 5] a disk is broken"
    assert run_ranks(3, gathers, 1, after, timeout=20) == [[problem]] * 3


def nested_sections() -> list[str]:
    """Fail on one rank after a section inside of another, in which the other rank is."""

    def outer() -> None:
        assert attempt(lambda: None) == []
        if dist.get_rank() == 0:
            raise ValueError("wrong")
        for _ in range(2):
            attempt(dist.barrier)

    problems = attempt(outer)
    assert attempt(dist.barrier) == []
    return problems


def test_sections_inside_of_a_section_are_left_too() -> None:
    assert run_ranks(2, nested_sections, timeout=20) == [["rank 0: ValueError: wrong"]] * 2


def groups_of_two() -> list[str]:
    """Fail on one rank while others are in collectives of parts of the ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gathered: list[Any] = [None] * 2

    def gather() -> None:
        dist.all_gather_object(gathered, rank, group=pairs[rank // 2])
        if rank == 3:
            raise MemoryError("no memory")
        agree([], [pairs[rank // 2]])
        dist.barrier()

    return attempt(gather)


def test_ranks_of_other_groups_leave_too() -> None:
    assert run_ranks(4, groups_of_two, timeout=20) == [["rank 3: MemoryError: no memory"]] * 4


def keys_of_a_section() -> int:
    """Return how many keys of gates ten sections leave in the store."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(10):
        attempt(dist.barrier)
    dist.barrier()
    return store.num_keys() - before


def test_gates_are_removed() -> None:
    assert max(run_ranks(2, keys_of_a_section)) <= 4


def functions_after_a_section() -> bool:
    before = dist.barrier
    with entered_together():
        assert dist.barrier is not before
        with entered_together():
            dist.barrier()
    return dist.barrier is before


def test_outside_of_a_section_functions_are_those_of_torch() -> None:
    assert run_ranks(2, functions_after_a_section) == [True] * 2
    with entered_together():  # without ranks
        pass


# ---- saves and loads, of which a step fails on one rank

CORE = "megatron.core.dist_checkpointing"
PLACES = {
    # what fails while the disk is full -> the function, which some releases do not have
    "common.pt": f"{CORE}.strategies.common:TorchCommonSaveStrategy.save_common",
    "data": f"{CORE}.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
    ".metadata": f"{CORE}.strategies.filesystem_async:FileSystemWriterAsync.finish",
    "metadata.json": f"{CORE}.serialization:save_config",
    "preprocess": f"{CORE}.serialization:save_preprocess",
    "common state of a load": f"{CORE}.strategies.common:TorchCommonLoadStrategy.load_common",
}


def refuse_with_a_broken_disk(command_line: str, place: str, failing: int) -> str:
    """Job: the error of a run in which one step of a save or a load fails on one rank."""
    if dist.get_rank() != failing:
        return refuse(command_line)
    name = PLACES[place].replace(":", ".")
    with mock.patch(name, side_effect=OSError(28, "No space left on device")):
        return refuse(command_line)


def skip_without(place: str) -> None:
    try:
        pkgutil.resolve_name(PLACES[place])
    except (ImportError, AttributeError):
        pytest.skip(f"this release of Megatron-Core has no {PLACES[place]}")


@pytest.mark.always("common.pt-0", "data-1")
@pytest.mark.parametrize(
    ("place", "failing"),
    [("common.pt", 0), ("data", 1), (".metadata", 0), ("metadata.json", 0), ("preprocess", 1)],
)
def test_a_save_that_fails_on_one_rank_names_the_cause_on_all(
    place: str, failing: int, tmp_path: Path
) -> None:
    skip_without(place)
    line = f"{DISTRIBUTED} --save {tmp_path}"
    errors = run_ranks(2, refuse_with_a_broken_disk, line, place, failing, timeout=60)
    assert errors[0] == errors[1]
    assert f"rank {failing}: OSError: [Errno 28] No space left on device" in errors[0]
    assert not list(tmp_path.glob("*iter_*"))


def test_a_load_that_fails_on_one_rank_names_the_cause_on_all(tmp_path: Path) -> None:
    place = "common state of a load"
    skip_without(place)
    run_ranks(2, train, f"{DISTRIBUTED} --save {tmp_path}")
    line = f"{DISTRIBUTED} --train-iters 2 --load {tmp_path}"
    errors = run_ranks(2, refuse_with_a_broken_disk, line, place, 1, timeout=60)
    assert errors[1] == "OSError: [Errno 28] No space left on device"
    assert errors[0] == f"PeerError: rank 1: {errors[1]}"


def die_before_a_gate() -> None:
    failed_collectives.watch()
    with mock.patch.object(sections, "LOOK_SECONDS", 0.05), entered_together():
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()


def test_a_rank_that_dies_is_not_waited_for() -> None:
    message = r"CollectiveError: rank 1 has ended: process \d+ is gone"
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, die_before_a_gate, timeout=30)


@pytest.mark.exhaustive
def test_ranks_that_come_late_are_waited_for() -> None:
    assert run_ranks(2, come_late) == [[]] * 2


def come_late() -> list[str]:
    def gather() -> None:
        for number in range(4):
            time.sleep(0.6 * (number % 2 == dist.get_rank()))
            dist.barrier()

    return attempt(gather)
