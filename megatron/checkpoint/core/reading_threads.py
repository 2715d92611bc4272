# SPDX-License-Identifier: Apache-2.0
"""Threads that read files, or copy tensors, at the same time: neither holds Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST = 8
"""Threads of one rank: disks and memory are not faster with more."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def number_of_threads() -> int:
    """Return the number of threads of this rank that can work at the same time.

    The ranks of a node, which torchrun counts, share its processors.
    """
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:  # systems other than Linux
        processors = os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST, processors // ranks))


def in_threads(action: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call ``action`` for every item, and return the results in order.

    The first error, in the order of the items, is raised when all have ended.
    """
    num_threads = number_of_threads()
    if num_threads == 1:  # without the cost of a thread
        return [action(item) for item in items]
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(action, items))
