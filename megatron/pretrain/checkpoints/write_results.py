# SPDX-License-Identifier: Apache-2.0
"""Saves of Megatron-Core's torch_dist without processes beside the rank.

Megatron-Core collects the results of a save in a queue that a process of its own holds
(``multiprocessing.Manager``). When the rank is killed, that process lives on for ever, and a job
that is restarted many times fills the memory of its machine. Release 0.16 also forks a process for
each file: a fork that is killed never answers, and the save waits for it until the watch ends the
job. A rank that waits for its own save needs neither: here its threads write, and the queue is in
the rank. Later releases write in threads too, but report the type of an error without its text.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

_WRITING = ("write_preloaded_data_multithread", "write_preloaded_data_multiproc")
"""The method that writes, of release 0.17 and newer, and of 0.16."""


@contextmanager
def written_by_threads() -> Iterator[None]:
    """Let threads write what Megatron-Core saves within the context, and wait for them."""
    results = filesystem_async._results_queue
    name = next(each for each in _WRITING if each in vars(FileSystemWriterAsync))
    writing = vars(FileSystemWriterAsync)[name]
    # Private, but all releases look for the queue there before they make one.
    filesystem_async._results_queue = queue.Queue()
    setattr(FileSystemWriterAsync, name, staticmethod(write_in_threads))
    try:
        yield
    finally:
        filesystem_async._results_queue = results
        setattr(FileSystemWriterAsync, name, writing)


def write_in_threads(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write files as Megatron-Core's method of these arguments does, without forks.

    Args:
        transforms: of the bytes.
        use_msc: write by the multi-storage client.
        rank: of this process.
        buckets: the content of each file.
        results: takes the results of all files by their numbers, or the first error.
    """

    def write(number: int) -> Any:
        answers: queue.Queue[Any] = queue.Queue()
        working: queue.Queue[int] = queue.Queue()
        working.put(number)  # the method takes it out at its end
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=number,
            write_bucket=buckets[number],
            results_queue=answers,
            count_queue=working,
            use_fsync=True,
            use_msc=use_msc,
        )
        return answers.get_nowait()[1]

    with ThreadPoolExecutor(max(len(buckets), 1)) as threads:
        written = list(threads.map(write, range(len(buckets))))
    errors = [each for each in written if isinstance(each, Exception)]
    results.put(errors[0] if errors else dict(enumerate(written)))
