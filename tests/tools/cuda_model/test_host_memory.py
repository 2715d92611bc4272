# SPDX-License-Identifier: Apache-2.0
"""The model keeps CUDA's and torch's rules for memory of the host, which copies use on streams.

Each rule has a program that keeps it, with no report, and one that breaks it.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tools.cuda_model import cuda_model
from tools.cuda_model.graphs import CaptureError
from tools.cuda_model.reports import CAPTURE, EARLY_RELEASE, HOST_READ, HOST_WRITE, RACE


def kinds_of(program: Callable[[], object]) -> list[str]:
    with cuda_model(names_cuda=True) as model:
        program()
    return [report.kind for report in model.reports]


def pinned(numel: int = 4) -> torch.Tensor:
    return torch.zeros(numel, pin_memory=True)


def pageable(numel: int = 4) -> torch.Tensor:
    return torch.zeros(numel)


def on_device(numel: int = 4) -> torch.Tensor:
    return torch.ones(numel, device="cuda")


WAITS: dict[str, Callable[[], object]] = {
    "device": lambda: torch.cuda.synchronize(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
    "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "value": lambda: on_device().sum().item(),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "operator": lambda x: x + 1,
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "pin_memory": lambda x: x[:2].clone().pin_memory(),
    "part": lambda x: x[1:3].sum(),
    "launch": lambda x: on_device() * x[0],
    "copy": lambda x: pageable().copy_(x),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "operator": lambda x: x.add_(1),
    "list": lambda x: torch._foreach_zero_([x]),
    "part": lambda x: x[3:].zero_(),
    "copy": lambda x: x.copy_(pageable()),
}


# ---- copies to the host


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("make", [pinned, pageable])
def test_the_host_reads_a_copy_that_it_has_waited_for(
    name: str, make: Callable[[], torch.Tensor]
) -> None:
    def program(waits: bool) -> None:
        home = make()
        home.copy_(on_device(), non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        READS[name](home)
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [HOST_READ]


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for(name: str) -> None:
    def program() -> None:
        home = pinned()
        home.copy_(on_device(), non_blocking=True)
        WAITS[name]()
        home.add_(1)

    assert kinds_of(program) == []


def test_a_wait_of_another_stream_is_none_of_the_host() -> None:
    def program(waits_too: bool) -> None:
        home, side = pinned(), torch.cuda.Stream()
        home.copy_(on_device(), non_blocking=True)
        if waits_too:
            side.wait_stream(torch.cuda.current_stream())
        side.synchronize()
        home.sum()
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [HOST_READ]


def test_copies_that_are_not_asked_to_go_on_let_the_host_wait() -> None:
    def program() -> None:
        homes = [on_device().to("cpu"), on_device().cpu(), pinned().copy_(on_device())]
        for home in homes:
            home.add_(1)

    assert kinds_of(program) == []


def test_what_torch_makes_for_a_copy_that_goes_on_is_pinned_and_is_waited_for() -> None:
    def program(waits: bool) -> None:
        home = on_device().to("cpu", non_blocking=True)
        assert home.is_pinned()
        if waits:
            torch.cuda.synchronize()
        home.sum()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [HOST_READ]


def test_the_host_may_use_what_a_copy_does_not() -> None:
    def program() -> None:
        home = pinned()
        home[:2].copy_(on_device(2), non_blocking=True)
        home[2:].add_(1).sum()

    assert kinds_of(program) == []


# ---- copies to the device


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("to_device", [True, False])
def test_the_host_writes_to_what_no_copy_uses_any_more(name: str, to_device: bool) -> None:
    def program(waits: bool) -> None:
        home, there = pinned(), on_device()
        target, source = (there, home) if to_device else (home, there)
        target.copy_(source, non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        WRITES[name](home)
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [HOST_WRITE]


@pytest.mark.parametrize("way", ["to", "copy_"])
def test_what_is_pinned_is_read_after_the_call_and_what_is_not_during_it(way: str) -> None:
    def program(make: Callable[[], torch.Tensor]) -> None:
        home, there = make(), on_device()
        if way == "to":
            there = home.to("cuda", non_blocking=True)
        else:
            there.copy_(home, non_blocking=True)
        home.sum()  # reads need no wait
        home.add_(1)
        torch.cuda.synchronize()

    assert kinds_of(partial(program, pageable)) == []
    assert kinds_of(partial(program, pinned)) == [HOST_WRITE]
    assert kinds_of(partial(program, lambda: pageable().pin_memory())) == [HOST_WRITE]


def test_two_streams_do_not_copy_the_same_memory_of_the_host_without_an_order() -> None:
    def program(waits: bool) -> None:
        home, side = pinned(), torch.cuda.Stream()
        home.copy_(on_device(), non_blocking=True)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            home.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [RACE]


def test_values_that_kernels_are_launched_with_are_read_at_once() -> None:
    def program() -> None:
        factor, there = torch.tensor(2.0).pin_memory(), on_device()
        there.mul_(factor)
        factor.zero_()
        assert there.sum().item() == 8

    assert kinds_of(program) == []


# ---- memory that is freed


def test_pinned_memory_is_freed_while_copies_use_it_and_other_memory_is_not() -> None:
    def program(make: Callable[[], torch.Tensor], waits: bool) -> None:
        home = make()
        home.copy_(on_device(), non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        del home
        torch.cuda.synchronize()

    assert kinds_of(partial(program, pinned, False)) == []
    assert kinds_of(partial(program, pageable, True)) == []
    assert kinds_of(partial(program, pageable, False)) == [EARLY_RELEASE]


def test_memory_that_is_read_during_the_call_may_be_freed_after_it() -> None:
    assert kinds_of(lambda: pageable().to("cuda", non_blocking=True)) == []


def test_storage_of_the_host_that_is_resized_is_freed() -> None:
    def program(waits: bool) -> None:
        home = pageable()
        home.copy_(on_device(), non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        home.untyped_storage().resize_(0)

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [EARLY_RELEASE]


# ---- copies through memory of torch's own


def test_a_copy_to_memory_with_gaps_reads_its_own_too_early() -> None:
    def program(home: torch.Tensor, there: torch.Tensor) -> None:
        home.copy_(there, non_blocking=True)
        torch.cuda.synchronize()

    def gaps() -> torch.Tensor:
        return pinned(8).view(4, 2)[:, 1]

    assert kinds_of(lambda: program(gaps(), on_device())) == [HOST_READ]
    assert kinds_of(lambda: gaps().copy_(on_device())) == []
    # Both are transposed: one copy moves all bytes.
    assert kinds_of(lambda: program(pinned().view(2, 2).t(), on_device().view(2, 2).t())) == []
    assert kinds_of(lambda: program(pinned().view(2, 2).t(), on_device().view(2, 2))) == [HOST_READ]


def test_a_copy_from_memory_with_gaps_has_read_it_when_it_returns() -> None:
    def program(home: torch.Tensor) -> None:
        on_device().copy_(home, non_blocking=True)
        home.add_(1)
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(pinned(8).view(4, 2)[:, 1])) == []
    assert kinds_of(lambda: program(pinned(8)[:4])) == [HOST_WRITE]


# ---- pinned memory, and graphs


def test_tensors_say_whether_they_are_pinned() -> None:
    with cuda_model(names_cuda=True):
        x = pageable()
        home = x.pin_memory()
        assert home.is_pinned() and home[1:].is_pinned() and home.pin_memory() is home
        assert torch.empty(2, device="cpu", pin_memory=True).is_pinned()
        assert not x.is_pinned() and not torch.zeros_like(home).is_pinned()
        assert not on_device().is_pinned()
        with pytest.raises(RuntimeError, match="cannot pin"):
            on_device().pin_memory()


@pytest.mark.parametrize("make", [pinned, pageable])
def test_captured_copies_have_pinned_memory(make: Callable[[], torch.Tensor]) -> None:
    def program() -> None:
        home, there = make(), on_device()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            there.copy_(home, non_blocking=True)

    if make is pinned:
        assert kinds_of(program) == []
    else:
        with cuda_model(names_cuda=True) as model, pytest.raises(CaptureError, match="not pinned"):
            program()
        assert [report.kind for report in model.reports] == [CAPTURE]
