# SPDX-License-Identifier: Apache-2.0
"""Threads that read files at the same time."""

from __future__ import annotations

import threading

import pytest

from megatron.checkpoint.core import reading_threads
from megatron.checkpoint.core.reading_threads import MOST, in_threads, number_of_threads


@pytest.mark.parametrize(
    ("processors", "ranks", "expected"),
    [(1, "1", 1), (16, "8", 2), (16, "3", 5), (4, "8", 1), (200, "1", MOST)],
)
def test_ranks_of_a_node_share_its_processors(
    processors: int, ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(processors)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert number_of_threads() == expected
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    assert number_of_threads() == expected


@pytest.mark.parametrize("number", [1, 3])
def test_results_are_in_order_and_the_first_error_is_raised(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_threads, "number_of_threads", lambda: number)
    assert in_threads(str, iter(range(20))) == [str(each) for each in range(20)]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda each: 1 // each, [3, 2, 1, 0])


def test_threads_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_threads, "number_of_threads", lambda: 3)
    together = threading.Barrier(3)
    in_threads(lambda each: together.wait(timeout=120), range(3))
