# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that fail: they name the rank that has ended, or the first that differs."""

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.trace import failed_collectives
from megatron.fsdp.trace.failed_collectives import CollectiveError, Failures, LastCollectives
from megatron_fsdp import MegatronFSDP
from tests.support import rank_process
from tests.support.fsdp.models import BATCH, WIDTH, Stack
from tests.support.fsdp.recorded_steps import build_recorded, train_step
from tests.support.fsdp.reference import Ranks, loss_of
from tests.support.rank_pool import RankFailure

Trained = tuple[MegatronFSDP, torch.optim.Optimizer]


def train_in_a_new_world() -> Trained:
    """Train in a world that may break, whose collectives fail soon."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    rank_process._forget_meshes()
    options = {"rank": rank, "world_size": num_ranks, "timeout": timedelta(seconds=2)}
    dist.init_process_group("gloo", store=PrefixStore("new", store), **options)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp_shard",))
    model, optimizer = build_recorded(3, mesh)
    for _ in range(2):
        train_step(model, optimizer)
    return model, optimizer


# ---- ranks that differ


def skip_a_unit(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    def body(self: Stack, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](x))

    with patch.object(Stack, "body", body):
        train_step(model, optimizer)


def evaluate(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.randn(BATCH, WIDTH))


def clip(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def wait_for_all(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    dist.barrier()


def hang(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().wait(["over"], timedelta(seconds=60))


GATHER = "all_gather of 256 bytes float32 of unit 'root'"
ALONE = {
    # what rank 1 does alone -> its part of the message
    "skips": (skip_a_unit, "rank 1: all_gather of 256 bytes float32 of unit 'root', in backward"),
    "evaluates": (evaluate, f"rank 1: {GATHER}, without gradients"),
    "clips": (clip, "rank 1: all_reduce of 152 bytes float64"),
    "has_no_data": (wait_for_all, "rank 1: not started"),
    "hangs": (hang, "rank 1: not started"),
}


def do_something_alone(case: str) -> str:
    """Train on two ranks, of which one does something else; return the error of each."""
    model, optimizer = train_in_a_new_world()
    try:
        if dist.get_rank() == 1:
            ALONE[case][0](model, optimizer)
        for _ in range(2):
            train_step(model, optimizer)
    except CollectiveError as error:
        dist.distributed_c10d._get_default_store().set("over", "")
        return str(error)
    except RuntimeError as error:  # of torch, in the program
        return failed_collectives.explanation_of(error) or ""
    return ""


@pytest.mark.always("evaluates", "has_no_data")
@pytest.mark.parametrize("case", ALONE)
def test_ranks_that_differ_are_named_with_unit_and_collective(ranks: Ranks, case: str) -> None:
    first, second = ranks(2, do_something_alone, case, timeout=40)
    lines = first.splitlines()
    assert "in collective" in lines[0] and "of ranks 0-1:" in lines[0]
    assert lines[2].strip().startswith(ALONE[case][1])
    assert lines[-1].startswith("rank 0 failed in collective")
    assert re.search(r"rank 1 is now at \w+/\w+.py:\d+ in \w+", first)
    if case != "hangs":  # that rank has no error
        assert second.splitlines()[:5] == lines[:5]


# ---- ranks that have ended


def end_one_rank(error: Exception | None) -> str:
    """Train on two ranks, of which one ends as Python does at the end of a program."""
    model, optimizer = train_in_a_new_world()
    if dist.get_rank() == 1:
        with patch.object(sys, "last_value", error, create=True):
            failed_collectives._at_exit()
        dist.destroy_process_group()
        return ""
    with pytest.raises(CollectiveError) as caught:
        train_step(model, optimizer)
    assert len(model.state_dict()) == len(list(model.parameters()))  # of this rank, to be saved
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("sample 17 is empty\nmore"), "rank 1 has ended, with ValueError: sample 17"),
        (None, "rank 1 has ended"),
    ],
    ids=["raises", "exits"],
)
def test_a_rank_that_has_ended_is_named(ranks: Ranks, error: Exception | None, line: str) -> None:
    message, _ = ranks(2, end_one_rank, error, timeout=40)
    first, last = message.splitlines()
    assert first.startswith(line)
    assert re.match(f"rank 0 failed in collective \\d+: {GATHER}: .*gloo.* by peer", last)


def kill_one_rank() -> None:
    model, optimizer = train_in_a_new_world()
    if dist.get_rank() == 1:
        os._exit(3)
    train_step(model, optimizer)


@pytest.mark.exhaustive
def test_a_rank_that_was_killed_is_named(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=r"CollectiveError: rank 1 has ended: process \d+ is gone"
    ):
        ranks(2, kill_one_rank)


PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from megatron_fsdp import fully_shard_model
rank = int(os.environ["RANK"])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = fully_shard_model(torch.nn.Linear(4, 4), zero_dp_strategy=3)
if rank == 1:
    model(torch.ones(1, 4))
    raise ValueError("no such file")
model(torch.ones(1, 4)).sum().backward()
dist.all_reduce(torch.ones(1))  # torch's own error
"""


@pytest.mark.exhaustive
def test_a_program_ends_with_the_cause(tmp_path: Path) -> None:
    """Also where it has not asked this library, and the store is a file."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    processes = [
        subprocess.Popen(command, env=os.environ | {"RANK": rank}, stderr=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    printed = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert "rank 1 has ended, with ValueError: no such file" in printed[0]
    assert "rank 0" not in printed[1]


# ---- the store


def train_without_a_store() -> int:
    """Train while the store cannot be used; return the number of collectives remembered."""
    model, optimizer = train_in_a_new_world()
    assert failed_collectives._failures is not None
    with patch.object(failed_collectives._failures, "_store", None):
        for _ in range(3):
            train_step(model, optimizer)
    return len(failed_collectives.observe.failure_observer.remembered)


def test_collectives_that_succeed_send_nothing(ranks: Ranks) -> None:
    assert min(ranks(2, train_without_a_store)) > 30


def test_a_store_that_has_ended_is_told_of() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    failures = Failures(client, 0, 2, LastCollectives(0))
    failures.stop()
    del server
    assert "the store of the process group does not answer either" in failures.explain("0")


def test_ranks_that_have_begun_the_same_are_told_so() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = [Failures(server.clone(), rank, 2, LastCollectives(rank)) for rank in range(2)]
    for failures in both:
        failures.stop()
    server.set("failed", "1.0")
    both[1]._answer("1.0")
    with patch.object(failed_collectives, "PATIENCE_SECONDS", 0.1):
        text = both[0].explain("0")
    assert text.startswith("a collective failed, and all ranks have begun the same")


def test_a_rank_that_does_not_answer_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failures = Failures(server.clone(), 0, 2, LastCollectives(0))
    failures.stop()
    started = time.monotonic()
    with patch.object(failed_collectives, "PATIENCE_SECONDS", 0.1):
        text = failures.explain("0")
    assert text.startswith("no answer from rank 1")
    assert time.monotonic() - started < 5
    assert failures.explain("0") == text  # the next collective of the group fails too


def test_errors_of_collectives_are_told_from_others() -> None:
    gloo = RuntimeError("[/pytorch/third_party/gloo/pair.cc:1] Connection closed by peer")
    outer = CollectiveError("rank 1 has ended", "rank 0 failed")
    outer.__cause__ = gloo
    assert failed_collectives.is_of_collective(gloo)
    assert failed_collectives.is_of_collective(dist.DistBackendError("NCCL"))
    assert failed_collectives.is_of_collective(outer)
    assert not failed_collectives.is_of_collective(RuntimeError("out of memory"))
    assert failed_collectives.explanation_of(outer) == "rank 1 has ended"
    copied = pickle.loads(pickle.dumps(outer))
    assert str(copied) == "rank 1 has ended\nrank 0 failed" and copied.explanation


def test_a_failure_without_the_ranks_being_watched_has_no_explanation() -> None:
    with patch.object(failed_collectives, "_failures", None):
        assert failed_collectives.explanation_of(RuntimeError("/gloo/")) is None
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        failed_collectives._at_exit()
    assert not printed.getvalue()
