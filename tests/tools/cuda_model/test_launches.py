# SPDX-License-Identifier: Apache-2.0
"""The model finds launches that wait for each other, and those that a rank lacks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.cuda_model.machine import bound_device
from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.launches import Launch, dependencies
from tools.cuda_model.machine import CudaModel
from tools.cuda_model.reports import DEADLOCK, ORDER
from tools.cuda_model.streams import POOL_SIZE

Program = Callable[[CudaModel], None]


def wait(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None
        work.wait()


def sent() -> dist.Work | None:
    return dist.isend(torch.ones(2), 1 - dist.get_rank())


def received() -> dist.Work | None:
    return dist.irecv(torch.empty(2), 1 - dist.get_rank())


def reduced(group: dist.ProcessGroup | None = None) -> dist.Work | None:
    return dist.all_reduce(torch.ones(2), group=group, async_op=True)


def is_first() -> bool:
    return dist.get_rank() == 0


# ---- messages


def received_first_by_one_rank(model: CudaModel) -> None:
    wait(*([sent(), received()] if is_first() else [received(), sent()]))


def received_first_by_both(model: CudaModel) -> None:
    wait(received(), sent())


def sent_first_by_both(model: CudaModel) -> None:
    wait(sent(), received())


def messages_of_one_launch(model: CudaModel) -> None:
    peer = 1 - dist.get_rank()
    operations = [
        dist.P2POp(dist.irecv, torch.empty(2), peer),
        dist.P2POp(dist.isend, torch.ones(2), peer),
    ]
    wait(*dist.batch_isend_irecv(operations))


def message_beside_a_collective(model: CudaModel) -> None:
    """Receive a message that is sent after a collective, which runs beside it."""
    dist.all_reduce(torch.ones(2))  # there are communicators of both
    wait(sent() if is_first() else received())
    wait(*([received(), reduced()] if is_first() else [reduced(), sent()]))


def message_and_collective_on_one_communicator(model: CudaModel) -> None:
    with bound_device():
        message_beside_a_collective(model)


def communicators_made_in_another_order(model: CudaModel) -> None:
    wait(*([received(), reduced()] if is_first() else [reduced(), sent()]))


def beside_a_message_on_stream(number: int) -> None:
    """Reduce on a later stream of the program while rank 0 waits for a message."""
    dist.all_reduce(torch.ones(2))
    wait(sent() if is_first() else received())  # the communicator and its stream are made
    stream = [torch.cuda.Stream() for _ in range(number)][-1]
    works = [received()] if is_first() else []
    with torch.cuda.stream(stream):
        dist.all_reduce(torch.ones(2))
    works += [] if is_first() else [sent()]
    wait(*works)


def streams_that_differ(model: CudaModel) -> None:
    beside_a_message_on_stream(POOL_SIZE - 1)


def streams_that_are_one_in_torchs_pool(model: CudaModel) -> None:
    beside_a_message_on_stream(POOL_SIZE)


# ---- collectives


def groups_in_one_order(model: CudaModel) -> None:
    other = dist.new_group()
    wait(reduced(), reduced(other))


def groups_in_another_order(model: CudaModel) -> None:
    other = dist.new_group()
    wait(reduced(), reduced(other))
    first, second = (None, other) if is_first() else (other, None)
    wait(reduced(first), reduced(second))


def reduce_units(model: CudaModel, names: str) -> None:
    for name in names:
        with model.during(f"reduce of unit {name}"):
            wait(reduced())


def equal_units_in_one_order(model: CudaModel) -> None:
    reduce_units(model, "ab")


def equal_units_in_another_order(model: CudaModel) -> None:
    reduce_units(model, "ab" if is_first() else "ba")


# ---- a device that is bound to all ranks


def split_by_all_ranks(model: CudaModel) -> None:
    with bound_device():
        for rank in range(dist.get_world_size()):
            dist.new_group([rank])


def split_by_each_rank(model: CudaModel) -> None:
    with bound_device():
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def split_by_one_rank(model: CudaModel) -> None:
    with bound_device():
        if is_first():
            dist.new_group([0], use_local_synchronization=True)


def made_by_one_rank_without_a_device(model: CudaModel) -> None:
    if is_first():
        dist.new_group([0], use_local_synchronization=True)


PROGRAMS: dict[Program, list[str]] = {
    received_first_by_one_rank: [],
    received_first_by_both: [DEADLOCK],
    sent_first_by_both: [DEADLOCK],
    messages_of_one_launch: [],
    message_beside_a_collective: [],
    message_and_collective_on_one_communicator: [DEADLOCK],
    communicators_made_in_another_order: [DEADLOCK],
    streams_that_differ: [],
    streams_that_are_one_in_torchs_pool: [DEADLOCK],
    groups_in_one_order: [],
    groups_in_another_order: [DEADLOCK],
    equal_units_in_one_order: [],
    equal_units_in_another_order: [ORDER],
    split_by_all_ranks: [],
    split_by_each_rank: [],
    split_by_one_rank: [ORDER],
    made_by_one_rank_without_a_device: [],
}


def reported(programs: list[Program]) -> list[list[str]]:
    kinds = []
    for program in programs:
        with cuda_model() as model:
            program(model)
        kinds.append([report.kind for report in model.reports])
    return kinds


def test_two_ranks(ranks: Ranks) -> None:
    for kinds in ranks(2, reported, list(PROGRAMS)):
        assert dict(zip(PROGRAMS, kinds)) == PROGRAMS


# ---- three ranks


def waits_in_a_circle(model: CudaModel) -> None:
    """Reduce over three groups, of which each pair of ranks has one order."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    for group in groups:
        if dist.get_rank() in dist.get_process_group_ranks(group):
            wait(reduced(group))
    orders = [(0, 2), (1, 0), (2, 1)]
    wait(*[reduced(groups[number]) for number in orders[dist.get_rank()]])


def in_two_of_three(is_connected: bool) -> None:
    group = dist.new_group()
    if is_connected:
        dist.all_reduce(torch.ones(1), group=group)
    rank = dist.get_rank()
    if rank < 2:
        receives = dist.P2POp(dist.irecv, torch.empty(2), 1 - rank, group)
        sends = dist.P2POp(dist.isend, torch.ones(2), 1 - rank, group)
        wait(*dist.batch_isend_irecv([receives, sends]))


def messages_of_some_ranks(model: CudaModel) -> None:
    in_two_of_three(is_connected=True)


def some_ranks_make_a_communicator(model: CudaModel) -> None:
    in_two_of_three(is_connected=False)


OF_THREE: dict[Program, list[str]] = {
    waits_in_a_circle: [DEADLOCK],
    messages_of_some_ranks: [],
    some_ranks_make_a_communicator: [ORDER],
}


def test_three_ranks(ranks: Ranks) -> None:
    for kinds in ranks(3, reported, list(OF_THREE)):
        assert dict(zip(OF_THREE, kinds)) == OF_THREE


def texts() -> list[str]:
    with cuda_model() as model:
        groups_in_another_order(model)
    return [report.text for report in model.reports]


def test_a_deadlock_names_the_launches_and_their_places(ranks: Ranks) -> None:
    first, second = ranks(2, texts)
    assert first == second
    for part in ("rank 0: allreduce over", "rank 1: allreduce over", "in reduced: return dist.all"):
        assert part in first[0]


def test_a_message_that_nobody_receives_is_found() -> None:
    sends = Launch("send", keys=[("send", 0, 1, 1)], partners=[(1, ("receive", 0, 1, 1))])
    assert dependencies([[sends], []])[1] == [(0, 0, 1)]
