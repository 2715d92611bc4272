# SPDX-License-Identifier: Apache-2.0
"""Accesses are to ranges of a block: those that are apart need no order, all others do.

Each rule has a program that keeps it, with no report, and one that breaks it.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.memory import MemoryBlock
from tools.cuda_model.reports import EARLY_RELEASE, HOST_READ, RACE

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def kinds_of(program: Callable[[], object]) -> list[str]:
    with cuda_model() as model:
        program()
        torch.cuda.synchronize()
    return [report.kind for report in model.reports]


PARTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "the next element": (lambda x: x[5:], False),
    "the last element": (lambda x: x[4:5], True),
    "all": (lambda x: x, True),
    "the elements before": (lambda x: x[:2], False),
    "none": (lambda x: x[3:3], False),
    "other elements as bytes": (lambda x: x[6:].view(torch.uint8), False),
    "the same elements as bytes": (lambda x: x.view(torch.uint8)[19:], True),
    # From the first to the last element, also where it has none of those between.
    "a column": (lambda x: x.view(4, 2)[:, 1], True),
    "a column of other rows": (lambda x: x.view(4, 2)[3:, 1], False),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("write_is_first", [True, False])
def test_parts_that_are_apart_need_no_order(name: str, write_is_first: bool) -> None:
    part, is_reported = PARTS[name]

    def program() -> None:
        x, side = torch.zeros(8), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        if write_is_first:
            x[2:5].add_(1)
        with torch.cuda.stream(side):
            part(x).sum()
        if not write_is_first:
            x[2:5].add_(1)

    assert kinds_of(program) == [RACE] * is_reported


def test_every_part_of_a_block_is_waited_for_before_another_one_gets_its_memory() -> None:
    def program(waits: bool) -> None:
        x, side = torch.zeros(8), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        x[:2].add_(1)
        with torch.cuda.stream(side):
            x[4:].add_(1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        del x
        torch.empty(8)

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [EARLY_RELEASE]


def test_the_host_reads_a_part_while_another_one_is_written() -> None:
    def program(part: slice) -> None:
        x = torch.zeros(8)
        torch.cuda.synchronize()
        x[4:].add_(1)
        x[part].numpy()

    assert kinds_of(lambda: program(slice(0, 4))) == []
    assert kinds_of(lambda: program(slice(0, 5))) == [HOST_READ]


def test_parts_that_one_kernel_has_written_are_one_again() -> None:
    def ranges_of(x: torch.Tensor) -> int:
        block = model.detector.blocks.known(x)
        assert isinstance(block, MemoryBlock)
        return len(list(block.ranges))

    with cuda_model() as model:
        x = torch.zeros(8)
        for part in x.split(2):
            part.add_(1)
        assert ranges_of(x) == 4
        x[:6].zero_()
        assert ranges_of(x) == 2
        x.sum()
        assert ranges_of(x) == 2
        x.add_(1)
        assert ranges_of(x) == 1


# ---- collectives in place


def reported_in_place(of_output: bool) -> dict[str, list[str]]:
    """Return what is reported of uses of memory while a collective runs on it in place."""
    rank, kinds = dist.get_rank(), {}
    for name, use, is_own in (
        ("read own", torch.sum, True),
        ("write own", torch.zero_, True),
        ("read other", torch.sum, False),
        ("write other", torch.zero_, False),
    ):
        with cuda_model() as model:
            x = torch.ones(8)
            slices = x.view(2, 4)
            if of_output:
                work = gather(x, slices[rank], async_op=True)
            else:
                work = scatter(slices[rank], x, async_op=True)
            use(slices[rank if is_own else 1 - rank])
            work.wait()
        kinds[name] = [report.kind for report in model.reports]
    return kinds


def test_a_gather_in_place_does_not_write_the_own_slice(ranks: Ranks) -> None:
    for kinds in ranks(2, reported_in_place, True):
        assert kinds.pop("read own") == []
        assert all(each == [RACE] for each in kinds.values()) and len(kinds) == 3


def test_a_reduction_in_place_writes_the_own_slice_only(ranks: Ranks) -> None:
    for kinds in ranks(2, reported_in_place, False):
        assert kinds.pop("read other") == []
        assert all(each == [RACE] for each in kinds.values()) and len(kinds) == 3
