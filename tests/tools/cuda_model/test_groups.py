# SPDX-License-Identifier: Apache-2.0
"""The model keeps the rules of backends of process groups, and of the priority of streams."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cuda_model.machine import bound_device
from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.reports import NCCL_RULE, POOL

CPU = torch.device("cpu")


def register() -> None:
    """Register a pool with a group that has gathered objects and nothing else."""
    group: Any = dist.new_group()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank(), group=group)
    backend = group._get_backend(CPU)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(8)
    backend.register_mem_pool(pool)
    backend.deregister_mem_pool(pool)
    del memory


def register_with_a_bound_device() -> None:
    """Register a pool with a group that has a communicator from the start."""
    with bound_device():
        register()


def kinds_of(program: Callable[[], None], **settings: Any) -> list[str]:
    with cuda_model(**settings) as model:
        program()
    return [report.kind for report in model.reports]


@pytest.mark.parametrize(
    ("program", "backend", "expected"),
    [
        (register, "nccl", []),
        (register, "cpu:gloo,cuda:nccl", [POOL]),
        (register_with_a_bound_device, "cpu:gloo,cuda:nccl", []),
    ],
    ids=["nccl", "gloo_too", "gloo_too_and_a_bound_device"],
)
def test_object_collectives_use_gloo_where_it_is_there(
    ranks: Ranks, program: Callable[[], None], backend: str, expected: list[str]
) -> None:
    for kinds in ranks(2, partial(kinds_of, program, backend=backend)):
        assert kinds == expected


# ---- programs that name the device and the backend


def reduce(backend: str, device: str) -> None:
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(2, device=device), group=group)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("nccl", "cuda", []), ("gloo", "cpu", []), ("nccl", "cpu", [NCCL_RULE])],
)
def test_nccl_moves_memory_of_the_device_only(
    ranks: Ranks, backend: str, device: str, expected: list[str]
) -> None:
    for kinds in ranks(2, partial(kinds_of, partial(reduce, backend, device), names_cuda=True)):
        assert kinds == expected


def reduce_with_priority(of_stream: int, of_group: bool, is_asynchronous: bool = False) -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=of_group)
    group = dist.new_group(backend="nccl", pg_options=options)
    operand = torch.ones(2, device="cuda")
    stream = torch.cuda.Stream(priority=of_stream)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work = dist.all_reduce(operand, group=group, async_op=is_asynchronous)
        if work is not None:
            work.wait()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (partial(reduce_with_priority, 0, False), []),
        (partial(reduce_with_priority, -1, True), []),
        (partial(reduce_with_priority, 0, True), [NCCL_RULE]),
        (partial(reduce_with_priority, 0, True, is_asynchronous=True), []),
    ],
    ids=["none", "both", "group_alone", "group_alone_and_its_own_stream"],
)
def test_a_collective_has_the_priority_of_the_stream_that_it_runs_on(
    ranks: Ranks, program: Callable[[], None], expected: list[str]
) -> None:
    for kinds in ranks(2, partial(kinds_of, program, names_cuda=True)):
        assert kinds == expected
