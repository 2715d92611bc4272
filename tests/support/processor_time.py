# SPDX-License-Identifier: Apache-2.0
"""The processor time of processes."""

from collections.abc import Container, Iterable

import psutil


def seconds_of(processes: Iterable[psutil.Process], servers: Container[int] = ()) -> float:
    """Return the processor time of processes, and of those that they have waited for.

    Args:
        processes: one that has just ended counts nothing; its parent has its time.
        servers: ids of processes whose own time does not count.
    """
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.children_user + times.children_system
        if process.pid not in servers:
            total += times.user + times.system
    return total


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process and these have started, none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
