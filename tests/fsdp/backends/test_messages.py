# SPDX-License-Identifier: Apache-2.0
"""PeerMessages that nobody waits for: they arrive all the same, and their memory stays as long."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.backends import messages
from megatron.fsdp.backends.messages import PeerMessages
from megatron.fsdp.optimizer.matrix.exchange import Exchange
from megatron_fsdp import fully_shard_model
from tests.support.fsdp.reference import Ranks

WIDTH = 1024
"""Its square has 4 MiB in fp32: no socket takes as much, and a gather of it is messages."""


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def kept(group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of messages that nobody waits for."""
    tensors: list[Tensor] = []
    for waiting in messages.dropped.get(group, {}).values():
        for under_way in waiting:
            tensors += under_way.values()
    return tensors


# ---- a model that is dropped in the middle of a step


def drop_models(level: int, number: int) -> int:
    """Drop models with a reduction under way; return how many tensors are kept at the end."""
    for index in range(number):
        model = fully_shard_model(
            nn.Linear(WIDTH, WIDTH), zero_dp_strategy=level, sync_model_each_microbatch=False
        )
        output = model(torch.ones(1, WIDTH))
        if dist.get_rank() == 1:  # its messages come when those of rank 0 are dropped
            output.register_hook(lambda gradient: store().wait([f"dropped {index}"]))  # noqa: B023
        output.sum().backward()
        del model, output
        gc.collect()
        store().set(f"dropped {index}", "")
    number_kept = len(kept(dist.group.WORLD))
    model = fully_shard_model(nn.Linear(WIDTH, WIDTH), zero_dp_strategy=level)
    model(torch.ones(1, WIDTH)).sum().backward()
    assert kept(dist.group.WORLD) == []
    return number_kept


@pytest.mark.seldom("2")
@pytest.mark.parametrize("level", [2, 3])
def test_a_model_that_is_dropped_in_the_middle_of_a_step_harms_no_other(
    ranks: Ranks, level: int
) -> None:
    """Otherwise the next collective of the group waits for ever. What is kept does not add up."""
    (kept_of_one,) = set(ranks(2, drop_models, level, 1))
    (kept_of_several,) = set(ranks(2, drop_models, level, 4))
    assert kept_of_one == kept_of_several > 0


# ---- exchanges, whose peers vary


def exchange_in_a_ring(distance: int) -> tuple[Exchange, Tensor]:
    """Return an exchange with the ranks at a distance, and what this rank receives in it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD)
    received = torch.empty(WIDTH, WIDTH)
    exchange.receive(received, (rank - distance) % num_ranks)
    number = 10.0 * distance + rank
    exchange.send(torch.full((WIDTH, WIDTH), number), (rank + distance) % num_ranks)
    return exchange, received


def drop_exchanges() -> list[float]:
    """Drop an exchange, wait for one with other peers, and do so again the other way round."""
    numbers = []
    for dropped, waited in ((1, 2), (2, 1)):
        exchange_in_a_ring(dropped)[0].start()
        assert len(kept(dist.group.WORLD)) == 2
        exchange, received = exchange_in_a_ring(waited)
        exchange.start().wait()
        assert not messages.dropped
        (number,) = received.unique().tolist()
        numbers.append(number)
    return numbers


def test_an_exchange_that_is_dropped_harms_no_other(ranks: Ranks) -> None:
    assert ranks(3, drop_exchanges) == [[21.0, 12.0], [22.0, 10.0], [20.0, 11.0]]


# ---- collectives that fail


def fail(kind: str) -> None:
    """Let a collective of three ranks fail on rank 0, while another one has yet to send to it."""
    # Rank 0 waits for the rank that leaves before it waits for the late one.
    leaving, late, level = (2, 1, 3) if kind == "gather" else (1, 2, 2)
    rank = dist.get_rank()
    process_group = dist.new_group([0, 1, 2])
    mesh = DeviceMesh.from_group(process_group, "cpu", mesh_dim_names=("dp_shard",))
    model = fully_shard_model(
        nn.Linear(WIDTH, WIDTH),
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        zero_dp_strategy=level,
    )
    x = torch.ones(1, WIDTH)
    loss = model(x).sum() if kind == "reduction" else None
    dist.barrier()
    if rank == leaving:
        dist.destroy_process_group(process_group)
        del process_group, mesh, model, loss
        gc.collect()
        dist.barrier()
        return
    if rank == late:
        store().wait([kind])
    (group,) = model.groups
    with pytest.raises(RuntimeError, match="gloo"):
        model(x) if loss is None else loss.backward()
    if kind == "gather":
        group.reshard()
    else:
        group.gradients.drop()
    # The allocator gives out again what is freed: no message may change it, or be read from it.
    gc.collect()
    others = [torch.full((group.layout.numel,), 5.0) for _ in range(4)]
    store().set(kind, "")
    dist.barrier()
    assert all(other.eq(5.0).all() for other in others)
    tensors = kept(process_group)
    assert tensors or rank == late  # whose first message to the rank that left fails at once
    assert all(tensor.untyped_storage().nbytes() for tensor in tensors)
    with pytest.raises(RuntimeError, match="gloo"):  # as every later collective of the group
        model(x).sum().backward()
    del model, group, mesh, loss, tensors
    dist.destroy_process_group(process_group)
    del process_group
    gc.collect()
    assert not messages.dropped


@pytest.mark.parametrize("kind", ["gather", "reduction"])
def test_what_has_failed_uses_no_freed_memory_and_goes_with_its_group(
    ranks: Ranks, kind: str
) -> None:
    ranks(3, fail, kind)


# ---- Ctrl-C


def interrupt_and_wait_again() -> float:
    rank, group = dist.get_rank(), dist.group.WORLD
    under_way = PeerMessages(group, tag=7)
    received = torch.empty(2)
    works = [
        under_way.receive(received, 1 - rank),
        under_way.send(torch.full((2,), float(rank)), 1 - rank),
    ]
    wait = dist.Work.wait

    def interrupted_wait(work: dist.Work) -> None:
        wait(work)
        raise KeyboardInterrupt

    with patch.object(dist.Work, "wait", interrupted_wait), pytest.raises(KeyboardInterrupt):
        under_way.wait_for(works[0])
    under_way.wait()
    return received[0].item()


def test_a_wait_that_was_interrupted_goes_on(ranks: Ranks) -> None:
    """Gloo would wait for a second message where one work is waited for twice."""
    assert ranks(2, interrupt_and_wait_again) == [1.0, 0.0]
