# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter as sends and receives, against gloo's own."""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.collectives import Transport
from megatron.fsdp.engine.device import CpuStreams, Pending
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.rank_pool import RankFailure

MESSAGES = GlooMessages()
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
LARGE = 1 << 19
"""Elements of a buffer that no socket takes as a whole."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def buffer_of(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the values of a rank's buffer; every rank can compute those of all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def sum_in_rank_order(slices: list[Tensor]) -> Tensor:
    total = slices[0].clone()
    for addend in slices[1:]:
        total += addend
    return total


def expected_reduction(
    ranks: list[int], shard_size: int, dtype: torch.dtype, operation: Any, seed: int = 0
) -> Tensor:
    """Return this rank's slice of the buffers of `ranks`, added up in their order."""
    num_ranks = len(ranks)
    index = ranks.index(dist.get_rank())
    buffers = [buffer_of(rank, num_ranks * shard_size, dtype, seed) for rank in ranks]
    total = sum_in_rank_order([buffer.chunk(num_ranks)[index] for buffer in buffers])
    return total / num_ranks if operation == AVG else total


def launch(collective: Callable[..., Any], *args: Any) -> Pending:
    return CpuStreams().launch("any", partial(collective, *args))


def reductions_as_gloo(shard_size: int) -> None:
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for operation in (SUM, AVG):
            full = buffer_of(rank, num_ranks * shard_size, dtype)
            before = full.clone()
            shard, plain = full.new_empty(shard_size), full.new_empty(shard_size)
            launch(MESSAGES.reduce_scatter, full, shard, group, operation).wait()
            assert torch.equal(full, before)
            collectives._reduce_scatter_single(plain, full, op=operation)
            if num_ranks == 2:
                assert torch.equal(shard, plain)
            elif dtype in (torch.float32, torch.float64):
                torch.testing.assert_close(shard, plain)
            in_rank_order = expected_reduction(list(range(num_ranks)), shard_size, dtype, operation)
            assert torch.equal(shard, in_rank_order)


@pytest.mark.seldom("4")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_reduction_is_that_of_gloo_in_the_order_of_ranks(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks, reductions_as_gloo, 1003)


def gathers_as_gloo(shard_size: int) -> None:
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        shard = buffer_of(rank, shard_size, dtype)
        plain = shard.new_empty(num_ranks * shard_size)
        collectives._all_gather_single(plain, shard)
        apart, in_place = torch.zeros_like(plain), torch.zeros_like(plain)
        own = in_place.chunk(num_ranks)[rank] if shard_size else in_place
        own.copy_(shard)
        gathers = [
            launch(MESSAGES.all_gather, [apart], [shard], group),
            launch(MESSAGES.all_gather, [in_place], [own], group),
        ]
        for gather in reversed(gathers):
            gather.wait()
        assert torch.equal(apart, plain)
        assert torch.equal(in_place, plain)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_gather_is_that_of_gloo(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks, gathers_as_gloo, 1003)


def gathers_of_several(transport: type[Transport], sizes: list[int], is_in_place: bool) -> int:
    """Gather buffers of all dtypes and several sizes together; return how many messages I sent."""
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    fulls, shards, expected = [], [], []
    for number, (dtype, size) in enumerate(itertools.product(DTYPES, sizes)):
        whole = [buffer_of(other, size, dtype, number) for other in range(num_ranks)]
        full = torch.zeros(num_ranks * size, dtype=dtype)
        own = full[rank * size : (rank + 1) * size]
        shards.append(own.copy_(whole[rank]) if is_in_place and number == 1 else whole[rank])
        fulls.append(full)
        expected.append(torch.cat(whole))
    with watching_messages() as (sent, _):
        launch(transport().all_gather, fulls, shards, group).wait()
    for full, wanted in zip(fulls, expected, strict=True):
        assert torch.equal(full, wanted)
    return len(sent)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_several_buffers_are_gathered_together(ranks: Ranks, num_ranks: int) -> None:
    """As messages, and as one collective of the process group."""
    messages = len(DTYPES) * 3 * (num_ranks - 1)
    for is_in_place in (False, True):
        sent = ranks(num_ranks, gathers_of_several, GlooMessages, [3, 1003, 0], is_in_place)
        assert sent == [messages] * num_ranks
    assert set(ranks(num_ranks, gathers_of_several, Transport, [3, 1003, 0], False)) == {0}


def test_shards_without_elements(ranks: Ranks) -> None:
    ranks(3, reductions_as_gloo, 0)
    ranks(3, gathers_as_gloo, 0)


@on_ranks(2)
def test_one_rank_sends_nothing() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    full, shard = torch.arange(4.0), torch.empty(4)
    with watching_messages() as (sent, received):
        launch(GlooMessages().reduce_scatter, full, shard, group, SUM).wait()
        assert torch.equal(shard, full)
        launch(GlooMessages().all_gather, [full], [full], group).wait()
        launch(GlooMessages().all_gather, [shard], [full], group).wait()
    assert torch.equal(shard, full)
    assert not sent and not received


@on_ranks(2)
def test_a_gather_in_place_does_not_write_the_own_shard() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = torch.zeros(num_ranks * 500_000)
    own = full.chunk(num_ranks)[rank]
    gather = launch(GlooMessages().all_gather, [full], [own], dist.group.WORLD)
    own.fill_(7.0)
    gather.wait()
    assert own.eq(7.0).all()


@contextmanager
def watching_messages() -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Record the tensors that this rank sends and receives as messages."""
    sent: list[Tensor] = []
    received: list[Tensor] = []
    send, receive = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def watched_send(self: dist.ProcessGroup, tensors: list[Tensor], rank: int, tag: int) -> Any:
        assert rank != self.rank()
        sent.extend(tensors)
        return send(self, tensors, rank, tag)

    def watched_recv(self: dist.ProcessGroup, tensors: list[Tensor], rank: int, tag: int) -> Any:
        assert rank != self.rank()
        received.extend(tensors)
        return receive(self, tensors, rank, tag)

    with patch.multiple(dist.ProcessGroup, send=watched_send, recv=watched_recv):
        yield sent, received


def total_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_a_rank_sends_the_fewest_bytes(num_ranks: int) -> None:
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    full = torch.randn(num_ranks * LARGE)
    own, shard = full.chunk(num_ranks)[rank], torch.empty(LARGE)
    least = (num_ranks - 1) * shard.nbytes
    for sent_shard in (shard, own):
        with watching_messages() as (sent, received):
            launch(GlooMessages().all_gather, [full], [sent_shard], group).wait()
        assert total_bytes(sent) == total_bytes(received) == least
        in_full = full.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == in_full for part in received)
    with watching_messages() as (sent, received):
        launch(GlooMessages().reduce_scatter, full, shard, group, SUM).wait()
    assert total_bytes(sent) == total_bytes(received) == least
    temporary = [part for part in received if part.data_ptr() != shard.data_ptr()]
    assert total_bytes(temporary) == (num_ranks - 2) * shard.nbytes


def other_sizes(turn: int) -> str:
    """Gather a buffer of another size than the peer, as a rank does that skips a unit."""
    group, rank = dist.new_group([0, 1], timeout=timedelta(seconds=1)), dist.get_rank()
    numel = (8, 24)[rank ^ turn]
    full, shard = torch.zeros(2 * numel), torch.ones(numel)
    with pytest.raises(RuntimeError) as caught:
        launch(GlooMessages().all_gather, [full], [shard], group).wait()
    return str(caught.value)


@pytest.mark.always("0")
@pytest.mark.parametrize("turn", [0, 1])
def test_buffers_of_other_sizes_never_meet(ranks: Ranks, turn: int) -> None:
    """Gloo would end the process that gets too many bytes, and keep quiet about too few."""
    for message in ranks(2, other_sizes, turn):
        assert "Timed out" in message or "Connection closed" in message


@on_ranks(2)
def test_other_backends_keep_their_own_collectives() -> None:
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    group = dist.new_group(backend="fake")
    full, shard = torch.ones(2 * LARGE), torch.ones(LARGE)
    transport = GlooMessages()
    asked = dist.get_backend_config
    with (
        watching_messages() as (sent, received),
        patch.object(dist, "get_backend_config", side_effect=asked) as question,
    ):
        for _ in range(2):
            launch(transport.reduce_scatter, full, shard, group, SUM).wait()
            launch(transport.all_gather, [full], [shard], group).wait()
            launch(transport.all_gather, [full, full.double()], [shard, shard.double()], group)
        assert question.call_count == 1
    assert not sent and not received


def started_gather(
    group: dist.ProcessGroup,
    members: list[int],
    shard_size: int,
    dtype: torch.dtype,
    operation: Any,
    seed: int,
) -> tuple[Pending, Tensor, Tensor]:
    """Start a gather, in place if the operation is AVG; return its result and what it should be."""
    expected = torch.cat([buffer_of(rank, shard_size, dtype, seed) for rank in members])
    shard = buffer_of(dist.get_rank(), shard_size, dtype, seed)
    full = torch.zeros_like(expected)
    if operation == AVG:
        own = full.chunk(len(members))[members.index(dist.get_rank())]
        shard = own.copy_(shard)
    if seed % 2:
        return launch(MESSAGES.all_gather, [full], [shard], group), full, expected
    halves = [torch.zeros(2 * len(members)), full]  # beside a buffer of another size and dtype
    gather = launch(MESSAGES.all_gather, halves, [torch.ones(2), shard], group)
    return gather, full, expected


def started_reduction(
    group: dist.ProcessGroup,
    members: list[int],
    shard_size: int,
    dtype: torch.dtype,
    operation: Any,
    seed: int,
) -> tuple[Pending, Tensor, Tensor]:
    """Start a reduction; return its result and what it should be."""
    expected = expected_reduction(members, shard_size, dtype, operation, seed)
    full = buffer_of(dist.get_rank(), len(members) * shard_size, dtype, seed)
    shard = full.new_empty(shard_size)
    pending = launch(MESSAGES.reduce_scatter, full, shard, group, operation)
    return pending, shard, expected


@pytest.mark.always("1-3")
@pytest.mark.parametrize(("seed", "num_ranks"), [(0, 4), (1, 3)])
@on_ranks()
def test_ranks_wait_in_any_order(num_ranks: int, seed: int) -> None:
    """Start gathers and reductions on overlapping groups; every rank waits in its own order."""
    world, rank = list(range(dist.get_world_size())), dist.get_rank()
    same = random.Random(seed)
    own = random.Random(100 * seed + rank)
    members = [world, world[::2], world[1:], world]
    groups = [dist.group.WORLD, *map(dist.new_group, members[1:])]
    under_way: list[tuple[Pending, Tensor, Tensor]] = []
    for number in range(40):
        choice, shard_size = same.randrange(len(groups)), same.choice([1, 1000, 100_000])
        operation, dtype = same.choice([SUM, AVG]), same.choice(DTYPES)
        is_gather, is_blocking = same.random() < 0.5, same.random() < 0.2
        if rank in members[choice]:
            case = (groups[choice], members[choice], shard_size, dtype, operation, number)
            under_way.append(started_gather(*case) if is_gather else started_reduction(*case))
        if is_blocking:
            dist.all_reduce(torch.ones(1))  # while messages of other collectives are under way
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        while len(under_way) > 6 or (under_way and own.random() < 0.3):
            pending, result, expected = under_way.pop(own.randrange(len(under_way)))
            pending.wait()
            assert torch.equal(result, expected), number
    own.shuffle(under_way)
    for pending, result, expected in under_way:
        pending.wait()
        assert torch.equal(result, expected)


def wait_for_a_dead_rank() -> None:
    full, shard = torch.ones(1 << 20), torch.empty(1 << 19)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    launch(MESSAGES.reduce_scatter, full, shard, dist.group.WORLD, SUM).wait()


def test_waiting_for_a_rank_that_died_raises(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 2 failed[\s\S]*gloo_messages.py[\s\S]*peer"):
        ranks(2, wait_for_a_dead_rank)
