# SPDX-License-Identifier: Apache-2.0
"""The model keeps the rules that torch documents for streams and for its caching allocator.

Each rule has a program that keeps it, with no report, and one that breaks it, with one report.
"""

from collections.abc import Callable
from threading import Thread

import pytest
import torch

from tools.cuda_model import cuda_model
from tools.cuda_model.detector import ReleasedMemoryError
from tools.cuda_model.reports import EARLY_RELEASE, HOST_READ, RACE, RELEASED, Finding

Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


def reports_of(program: Callable[[], object]) -> list[Finding]:
    with cuda_model() as model:
        program()
    return model.reports


def kinds_of(program: Callable[[], object]) -> list[str]:
    return [report.kind for report in reports_of(program)]


# ---- order of work


def write_on_another_stream(orders: Callable[[torch.cuda.Stream], object]) -> None:
    x, side = torch.zeros(4), torch.cuda.Stream()
    orders(side)
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)


ORDERS = {
    "wait_stream": lambda side: side.wait_stream(torch.cuda.current_stream()),
    "wait_event": lambda side: side.wait_event(torch.cuda.current_stream().record_event()),
    "event.wait": lambda side: torch.cuda.current_stream().record_event().wait(side),
    "synchronize": lambda side: torch.cuda.synchronize(),
    "stream.synchronize": lambda side: torch.cuda.current_stream().synchronize(),
    "event.synchronize": lambda side: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_orders_two_streams(name: str) -> None:
    assert kinds_of(lambda: write_on_another_stream(ORDERS[name])) == []


def test_an_event_that_was_never_recorded_orders_nothing() -> None:
    kinds = kinds_of(lambda: write_on_another_stream(lambda s: s.wait_event(torch.cuda.Event())))
    assert kinds == [RACE]


def test_an_event_orders_what_came_before_it_only() -> None:
    def program() -> None:
        x, side = torch.zeros(4), torch.cuda.Stream()
        before = torch.cuda.current_stream().record_event()
        x.add_(1)
        side.wait_event(before)
        with torch.cuda.stream(side):
            x.mul(2)
        torch.cuda.synchronize()

    assert kinds_of(program) == [RACE]


def test_a_report_names_both_accesses_with_stack_and_stream() -> None:
    (report,) = reports_of(lambda: write_on_another_stream(lambda side: None))
    text = str(report)
    assert text.startswith("race: ") and "a tensor (block" in text
    assert "aten.add_.Tensor" in text and "aten.zeros.default" in text
    assert "the default stream, writing to" in text and "stream 1 (" in text
    assert text.count("test_rules.py") >= 4 and "x.add_(1)" in text
    assert "/torch/" not in text and "operators.py" not in text


def test_work_of_threads_is_seen_on_their_own_current_streams() -> None:
    def program(waits: bool) -> None:
        x, side = torch.zeros(4), torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())

        def work() -> None:
            with torch.cuda.stream(side):
                x.add_(1)

        thread = Thread(target=work)
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() != side
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [RACE]


def test_two_reads_need_no_order() -> None:
    def program() -> None:
        x, side, y = doubled_on_another_stream()
        x * 3
        torch.cuda.current_stream().wait_stream(side)
        del y

    assert kinds_of(program) == []


def test_a_view_is_no_access_but_its_use_is_one() -> None:
    def views(writes: bool) -> None:
        x, side = torch.zeros(4), torch.cuda.Stream()
        with torch.cuda.stream(side):
            half = x.view(2, 2)[1].detach()
            if writes:
                half.zero_()

    assert kinds_of(lambda: views(False)) == []
    assert RACE in kinds_of(lambda: views(True))


def test_lists_of_tensors_and_gradients_are_seen() -> None:
    def foreach() -> None:
        xs, side = [torch.zeros(4), torch.zeros(2)], torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch._foreach_add_(xs, 1)
        torch.cuda.synchronize()

    def backward() -> None:
        y = torch.ones(4, requires_grad=True) * 2
        loss = (y * y).sum()
        y.untyped_storage().resize_(0)
        with pytest.raises(ReleasedMemoryError, match=r"aten\.mul\.Tensor"):
            loss.backward()

    assert kinds_of(foreach) == [RACE]  # one place
    assert kinds_of(backward) == [RELEASED]


# ---- the caching allocator


def doubled_on_another_stream() -> tuple[torch.Tensor, torch.cuda.Stream, torch.Tensor]:
    """Return a tensor, and another stream that waits for it and then computes a result of it."""
    x, side = torch.zeros(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x, side, x * 2


def use_on_another_stream(before_free: Callable[[torch.Tensor, torch.cuda.Stream], object]) -> None:
    x, side, result = doubled_on_another_stream()
    before_free(x, side)
    del x
    torch.empty(4)  # may get the memory of x
    torch.cuda.synchronize()
    del result


def test_freed_memory_serves_its_own_stream_at_once() -> None:
    assert kinds_of(lambda: use_on_another_stream(lambda x, side: None)) == [EARLY_RELEASE]
    safe = [
        lambda x, side: x.record_stream(side),
        lambda x, side: torch.cuda.current_stream().wait_stream(side),
        lambda x, side: side.synchronize(),
    ]
    for before_free in safe:
        assert kinds_of(lambda before_free=before_free: use_on_another_stream(before_free)) == []


def test_memory_that_is_freed_too_early_is_safe_until_its_stream_allocates() -> None:
    def program() -> None:
        x, side, result = doubled_on_another_stream()
        del x
        torch.cuda.current_stream().wait_stream(side)
        torch.empty(4)
        del result

    assert kinds_of(program) == []


def test_another_stream_may_still_use_what_memory_had_before() -> None:
    def program(waits: bool) -> None:
        x, side = torch.empty(4), torch.cuda.Stream()  # the current stream's: nothing is written
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(1)
        torch.cuda.synchronize()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False)) == [RACE]


def test_memory_belongs_to_the_stream_that_allocates_it() -> None:
    def program() -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.zeros(4)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(1)
        del x  # the side stream may use it at once, and has not waited for the addition
        with torch.cuda.stream(side):
            torch.empty(4)

    assert kinds_of(program) == [EARLY_RELEASE]


def test_storage_that_is_resized_is_freed_and_allocated() -> None:
    def free_while_used(waits: bool) -> None:
        x, side, result = doubled_on_another_stream()
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.untyped_storage().resize_(0)
        torch.empty(4)
        torch.cuda.synchronize()
        del result

    def allocate_elsewhere() -> None:
        x, side = torch.zeros(4), torch.cuda.Stream()
        x.untyped_storage().resize_(0)
        with torch.cuda.stream(side):
            x.untyped_storage().resize_(16)
        x.zero_()
        torch.cuda.synchronize()

    assert kinds_of(lambda: free_while_used(True)) == []
    assert kinds_of(lambda: free_while_used(False)) == [EARLY_RELEASE]
    assert kinds_of(allocate_elsewhere) == [RACE]


def test_released_memory_is_reported_and_not_read() -> None:
    def program() -> None:
        x = torch.zeros(4)
        view = x[2:]
        x.untyped_storage().resize_(0)
        with pytest.raises(ReleasedMemoryError, match=r"aten.add.Tensor uses a tensor"):
            view + 1

    assert kinds_of(program) == [RELEASED]


def test_memory_statistics_count_what_is_allocated() -> None:
    with cuda_model():
        before = torch.cuda.memory_allocated()
        x = torch.zeros(1000)
        assert torch.cuda.memory_allocated() == before + 4000
        del x
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() >= before + 4000
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == before


# ---- the host


def test_the_host_reads_what_it_has_waited_for() -> None:
    def numpy(waits: bool) -> None:
        x = torch.zeros(4).add_(1)
        if waits:
            torch.cuda.current_stream().synchronize()
        x.numpy()

    assert kinds_of(lambda: numpy(True)) == []
    assert kinds_of(lambda: numpy(False)) == [HOST_READ]


@pytest.mark.parametrize("read", ["item", "tolist", "cpu"])
def test_reads_of_values_wait_for_the_current_stream(read: str) -> None:
    def program(side_waits: bool) -> None:
        x, side = torch.zeros(1), torch.cuda.Stream()
        if side_waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            getattr(x, read)()
        x.numpy()

    assert kinds_of(lambda: program(True)) == []
    assert kinds_of(lambda: program(False))[0] == RACE


# ---- the end of the model


def test_everything_is_restored() -> None:
    names = [(torch.cuda, name) for name in dir(torch.cuda)]
    names += [(torch.Tensor, name) for name in ("cpu", "tolist", "numpy", "record_stream")]
    names += [(torch.UntypedStorage, "resize_")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(ZeroDivisionError), cuda_model() as model:
        torch.zeros(1 // 0)
    assert [getattr(owner, name) for owner, name in names] == before
    torch.zeros(1)
    assert model.detector.num_events == 0
