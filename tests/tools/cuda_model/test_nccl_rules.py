# SPDX-License-Identifier: Apache-2.0
"""The model keeps the rules of NCCL, and of torch's process groups on it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.reports import EARLY_RELEASE, NCCL_RULE, ORDER, RACE, UNAWAITED

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NOW, LATER = {"async_op": False}, {"async_op": True}


def reported(programs: list[Callable[[], object]]) -> list[list[str]]:
    kinds = []
    for program in programs:
        with cuda_model() as model:
            program()
        kinds.append([report.kind for report in model.reports])
    return kinds


def collectives_on_the_current_stream() -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    full = torch.empty(8)
    gather(full, x)
    assert full.tolist() == [2.0] * 8


def asynchronous_and_awaited() -> None:
    x = torch.ones(4)
    dist.all_reduce(x, **LATER).wait()
    assert x.tolist() == [2.0] * 4


def read_before_the_wait() -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, **LATER)
    x.sum()
    work.wait()


def freed_before_the_wait() -> None:
    x, result = torch.ones(8), torch.empty(4)
    work = scatter(result, x, **LATER)
    del x  # torch keeps it until somebody waits
    work.wait()


def functional_and_freed_before_the_wait() -> None:
    sums = DTensor.from_local(torch.ones(8), init_device_mesh("cpu", (2,)), [Partial()])
    shard = sums.redistribute(placements=[Shard(0)], async_op=True)
    del sums  # torch keeps it until somebody waits, so this gets other memory:
    torch.empty(8)
    assert shard.to_local().tolist() == [2.0] * 4


def never_awaited() -> None:
    dist.all_reduce(torch.ones(4), **LATER)
    torch.cuda.synchronize()


def waiting_for_a_later_one_of_the_group() -> None:
    x, y = torch.ones(4), torch.ones(4)
    first = dist.all_reduce(x, **LATER)
    dist.all_reduce(y, **LATER).wait()
    x.sum()
    first.wait()


def launched_on_another_stream_too_early() -> None:
    x, side = torch.ones(4), torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    torch.cuda.current_stream().wait_stream(side)


def on_two_streams(waits: bool) -> None:
    """Reduce a tensor twice over one communicator, whose kernels are in order, on two streams."""
    x, side = torch.ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    dist.all_reduce(x)
    torch.cuda.current_stream().wait_stream(side)


def one_communicator_on_two_streams() -> None:
    on_two_streams(waits=True)


def one_communicator_on_two_streams_that_nothing_orders() -> None:
    on_two_streams(waits=False)


def freed_while_another_stream_reduces() -> None:
    x, side = torch.ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    del x
    torch.empty(4)
    torch.cuda.synchronize()


def exchange(mine: torch.Tensor, theirs: torch.Tensor) -> list[dist.Work]:
    peer = 1 - dist.get_rank()
    sent, received = dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)
    return dist.batch_isend_irecv([received, sent])


def messages() -> None:
    mine, theirs = torch.ones(2), torch.empty(2)
    for work in exchange(mine, theirs):
        work.wait()
    assert theirs.tolist() == [1.0, 1.0]


def a_message_read_too_early() -> None:
    mine, theirs = torch.ones(2), torch.empty(2)
    works = exchange(mine, theirs)
    theirs.sum()
    for work in works:
        work.wait()


def objects_and_barriers() -> None:
    found: list[object] = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    dist.barrier()
    given = [dist.get_rank()]
    dist.broadcast_object_list(given)
    assert found == [0, 1] and given == [0]


PROGRAMS: dict[Callable[[], None], list[str]] = {
    collectives_on_the_current_stream: [],
    asynchronous_and_awaited: [],
    read_before_the_wait: [RACE],
    freed_before_the_wait: [],
    functional_and_freed_before_the_wait: [],
    never_awaited: [UNAWAITED],
    waiting_for_a_later_one_of_the_group: [],
    launched_on_another_stream_too_early: [RACE],
    one_communicator_on_two_streams: [],
    one_communicator_on_two_streams_that_nothing_orders: [RACE],
    freed_while_another_stream_reduces: [EARLY_RELEASE],
    messages: [],
    a_message_read_too_early: [RACE],
    objects_and_barriers: [],
}


def test_works_streams_and_memory(ranks: Ranks) -> None:
    for kinds in ranks(2, reported, list(PROGRAMS)):
        assert dict(zip(PROGRAMS, kinds)) == PROGRAMS


# ---- operands


def in_place() -> None:
    full = torch.ones(8)
    gather(full, full.view(2, 4)[dist.get_rank()])


def in_place_at_another_rank() -> None:
    full = torch.ones(8)
    gather(full, full.view(2, 4)[1 - dist.get_rank()])


def scattered_into_another_slice() -> None:
    full = torch.ones(8)
    scatter(full.view(2, 4)[1 - dist.get_rank()], full)


def not_contiguous() -> None:
    dist.all_reduce(torch.ones(4, 2).t())


def integers_of_two_bytes() -> None:
    with pytest.raises(RuntimeError):  # gloo's refusal
        dist.all_reduce(torch.ones(4, dtype=torch.int16))


def bits() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.BOR)


OPERANDS: dict[Callable[[], None], list[str]] = {
    in_place: [],
    in_place_at_another_rank: [NCCL_RULE],
    scattered_into_another_slice: [NCCL_RULE],
    not_contiguous: [NCCL_RULE],
    integers_of_two_bytes: [NCCL_RULE],
    bits: [NCCL_RULE],
}


def test_operands(ranks: Ranks) -> None:
    for kinds in ranks(2, reported, list(OPERANDS)):
        assert dict(zip(OPERANDS, kinds)) == OPERANDS


# ---- order


def different_dtypes() -> list[str]:
    with cuda_model() as model:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int32][dist.get_rank()]))
    return [f"{report.kind}: {report.text}" for report in model.reports]


def test_ranks_must_call_the_same_collectives(ranks: Ranks) -> None:
    first, _ = ranks(2, different_dtypes)
    (text,) = first
    assert text.startswith(ORDER) and "collective 1 over" in text
    assert "torch.float32[2]" in text and "on rank 1: allreduce(torch.int32[2])" in text
