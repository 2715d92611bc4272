# SPDX-License-Identifier: Apache-2.0
"""Warm gloo ranks for tests: started once for each world size, kept for the whole pytest run.

    def mean_over_ranks(value: float) -> float:          # at module level: ranks import it by name
        ...

    def test_mean_is_the_same_everywhere() -> None:
        assert run_ranks(4, mean_over_ranks, 1.0) == [1.0] * 4

Starting ranks takes seconds, a job on warm ones milliseconds. A group in which anything went wrong
is killed and a new one started for the next job, so a failed test never harms another.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import rank_process
from tests.support.fork_servers import FORKSERVER, INSTALLED, Packages, forks_from, stop_servers
from tests.support.processor_time import descendants, seconds_of
from tests.support.rank_process import Job, RankPlace, RankReport

MAX_WORLD_SIZE = 8
START_TIMEOUT = 120.0
"""Seconds a new group may take to answer; the first one imports torch and Megatron-Core."""
GRACE = 0.5
"""Seconds that other ranks have to report after a failure: often all fail, with telling stacks."""
STACK_TIMEOUT = 30.0
"""Seconds that ranks have to write their stacks, and that one that dies has to be gone."""
MAX_GROUPS = 200
"""Process groups that may pile up in a world before it is built anew.

Each has two threads and its sockets. What torch and `tests.support.model_parallel` remember of
meshes and layouts is lost then, which costs as much as ten jobs.
"""
SHOWN_LINES = 40
"""Lines of a rank's output that a failure shows."""
MAX_THREADS = 1000
"""Threads of a rank at which the next job gets new processes.

Gloo's threads stay behind when something in torch still refers to a destroyed group."""


ON_CPU = re.compile(r"tests\.(support\.)?(checkpoint|mcore_adapter|planning|pretrain)\b")
"""Modules whose functions run on ranks where `cpu.install()` has been called: nearly all call it.

It changes a process for good. Without this, each job that calls it would need new processes."""


Key = tuple[Packages, int, bool]


class RankFailure(AssertionError):  # noqa: N818 (the failure of a test, not an error)
    """A rank raised, died or took too long.

    The message names the ranks and shows their tracebacks or stacks.
    """


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    packages: Packages = INSTALLED,
    **kwargs: Any,
) -> list[Any]:
    """Call the function on `world_size` ranks of one gloo world; return results in rank order.

    The default process group exists already. `function` must be at module level; arguments and
    results travel by pickle, tensors by value (a DTensor does not travel: return its local tensor).
    `timeout` is in seconds. `packages` says which release of Megatron-Core ranks have, and whether
    Transformer Engine.

    Raises ValueError for a world size outside 1..8 or something that cannot be pickled, RankFailure
    (a test failure) when a rank raises, dies, or has not finished in time.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"expects a world size of 1 to {MAX_WORLD_SIZE} but got {world_size}")
    key = (packages, world_size, _is_on_cpu(function, args))
    return _run(pickled_call(function, args, kwargs), key, timeout)


def run_apart(
    function: Callable[..., Any], *args: Any, packages: Packages = INSTALLED, timeout: float = 120
) -> Any:
    """Call the function in a process without a world, which stays warm too, and return its result.

    It may fork others: it has one thread beside the main one, which waits for the next call.
    """
    return _run(pickled_call(function, args, {}), (packages, 0, False), timeout)[0]


def _is_on_cpu(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a function, or one that it is given to call, is of the modules `ON_CPU`."""
    functions = [function, *(each for each in args if callable(each))]
    return any(ON_CPU.match(getattr(each, "__module__", None) or "") for each in functions)


def _run(call: bytes, key: Key, timeout: float) -> list[Any]:
    """Run a call on the group of a key: packages, a world size, and whether it is on CPU ranks."""
    for other, idle in list(_groups.items()):
        if other == key:
            continue
        if other[0].release in (None, key[0].release):
            idle.pause()
        else:  # Memory is dear, and a group soon forked again.
            _groups.pop(other).kill()
    group = _groups.get(key)
    if group is None:
        group = _groups[key] = RankGroup(*key)
    group.resume()
    try:
        results = group.run(call, timeout)
    except (
        BaseException
    ):  # KeyboardInterrupt too: ranks in an unknown state are of no use to the next test
        del _groups[key]
        group.kill()
        raise
    if group.is_spent:
        del _groups[key]
        group.kill()
    return results


def start_server() -> None:
    """Let the server import what ranks need while the test process does something else.

    It takes seconds.
    """
    with forks_from(INSTALLED):
        pass


def shut_down() -> None:
    """Kill every rank. Called at exit; harmless when called twice."""
    while _groups:
        _groups.popitem()[1].kill()


@dataclass
class Counts:
    """Processes that were started for ranks, calls on ranks, and optimizer steps in these.

    `lost_seconds` is the processor time of children of ranks that were killed: no process waits
    for them, so none has their time.
    """

    processes: int = 0
    calls: int = 0
    steps: int = 0
    lost_seconds: float = 0.0


counts = Counts()
"""Of all groups since this process began."""


class RankGroup:
    """The warm ranks of one world size, or with 0 a process that has no world.

    After `run` has raised, only `kill` may be called.
    """

    def __init__(self, packages: Packages, world_size: int, on_cpu: bool) -> None:
        import torch.distributed as dist

        self._directory = tempfile.TemporaryDirectory(
            prefix="rank_pool_", ignore_cleanup_errors=True
        )
        self._stack_files = [
            Path(self._directory.name, f"rank_{rank}") for rank in range(world_size or 1)
        ]
        self._output_files = [path.with_suffix(".output") for path in self._stack_files]
        # Hosted here and not by rank 0: the system picks a free port, so two test runs never
        # collide.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._packages = packages
        self._on_cpu = on_cpu
        self._has_world = world_size > 0
        self._fresh_world = False
        self.is_spent = False
        self._paused = False
        try:
            with forks_from(packages):
                for rank in range(world_size or 1):
                    self._start_rank(rank, world_size)
            self._collect(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def _start_rank(self, rank: int, world_size: int) -> None:
        place = RankPlace(
            rank=rank,
            world_size=world_size,
            store_port=self._store.port,
            stack_file=str(self._stack_files[rank]),
            output_file=str(self._output_files[rank]),
            on_cpu=self._on_cpu,
        )
        here, there = multiprocessing.Pipe()
        process = FORKSERVER.Process(
            target=rank_process.serve, args=(place, there), name=f"rank {rank} of {world_size}"
        )
        process.start()
        counts.processes += 1
        there.close()  # so that `here` reads end-of-file when the rank dies
        self._connections.append(here)
        self._processes.append(process)

    def pause(self) -> None:
        """Stop the processes while another world works: gloo's polling threads take half the time.

        Only where the system ends ranks with the server that they were forked from; elsewhere
        nothing could end stopped ones.
        """
        if not self._paused and sys.platform == "linux":
            self._signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # one that died is found by the next job
                os.kill(process.pid or 0, number)

    def run(self, call: bytes, timeout: float) -> list[Any]:
        """Run a pickled (function, args, kwargs) on every rank; results in rank order.

        Raises RankFailure.
        """
        sys_path = self._packages.sys_path
        job = Job(call=call, sys_path=sys_path, fresh_world=self._fresh_world)
        for connection in self._connections:
            # A rank that died since the last job refuses; `_collect` finds and reports it.
            with contextlib.suppress(BrokenPipeError):
                connection.send(job)
        counts.calls += len(self._connections)
        reports = self._collect(timeout)
        counts.steps += sum(report.num_steps for report in reports)
        group_counts = {report.num_groups for report in reports}
        self._fresh_world = self._has_world and _is_worn(group_counts)
        has_threads = max(report.num_threads for report in reports) > MAX_THREADS
        self.is_spent = has_threads or any(report.changes for report in reports)
        return [pickle.loads(report.result or b"") for report in reports]

    def _collect(self, timeout: float) -> list[RankReport]:
        """Wait for a report of every rank; the first failure or death cuts the wait to GRACE."""
        reports: dict[int, RankReport] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting := [rank for rank in range(len(self._connections)) if rank not in reports]:
            ready = wait(
                [self._connections[rank] for rank in waiting], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for rank in waiting:
                if self._connections[rank] in ready:
                    reports[rank] = self._receive(rank)
                    if reports[rank].failure is not None and not failed:
                        failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        if failed or waiting:
            raise RankFailure(self._describe(reports, waiting, None if failed else timeout))
        return [reports[rank] for rank in sorted(reports)]

    def _receive(self, rank: int) -> RankReport:
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(STACK_TIMEOUT)
            return RankReport(failure=f"the process died with exit code {process.exitcode}\n")

    def _describe(
        self, reports: dict[int, RankReport], waiting: list[int], timeout: float | None
    ) -> str:
        """Describe failures as they came (the cause first), output, and stacks of running ranks."""
        world_size = len(self._processes)
        parts = []
        if timeout is not None:
            parts.append(f"{_name(waiting)} of {world_size} did not finish within {timeout:g} s")
        by_text: dict[str, list[int]] = {}
        for rank, report in reports.items():  # in order of arrival
            if report.failure is not None:
                by_text.setdefault(report.failure, []).append(rank)
        for text, ranks in by_text.items():
            parts.append(f"{_name(sorted(ranks))} of {world_size} failed:\n{text}")
        for text, ranks in self._printed(self._output_files).items():
            parts.append(f"{_name(ranks)} printed:\n{text}")
        dead = [
            rank for rank, process in enumerate(self._processes) if process.exitcode is not None
        ]
        files = [Path(f"{self._output_files[rank]}.before") for rank in dead]
        for text, ranks in self._printed(files).items():
            named = _name(dead[rank] for rank in ranks)
            parts.append(f"{named} had printed in the job before:\n{text}")
        stacks = self._dump_stacks(waiting)
        for rank in waiting:
            parts.append(f"rank {rank} was still running:\n{stacks[rank]}")
        return "\n".join(parts)

    def _printed(self, files: list[Path]) -> dict[str, list[int]]:
        """Return the last lines of files -> the indices of the files that have them."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, path in enumerate(files):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                ranks_by_text.setdefault("\n".join(lines[-SHOWN_LINES:]), []).append(rank)
        return ranks_by_text

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the Python stacks of running ranks, written by their signal handlers."""
        sizes: dict[Path, int] = {}
        for rank in ranks:
            path = self._stack_files[rank]
            if path.exists():  # else the handler is not there yet, and the signal would only kill
                sizes[path] = path.stat().st_size
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT
        while time.monotonic() < deadline and any(
            path.stat().st_size == size for path, size in sizes.items()
        ):
            time.sleep(0.02)
        while sizes and sizes != (sizes := {path: path.stat().st_size for path in sizes}):
            time.sleep(0.1)  # the rest of the stacks
        return {
            rank: (
                path.read_text()
                if (path := self._stack_files[rank]).exists()
                else "(not started yet)\n"
            )
            for rank in ranks
        }

    def kill(self) -> None:
        """End all ranks and their children at once, and wait until they are gone."""
        for process in self._processes:
            counts.lost_seconds += seconds_of(descendants(process.pid or 0))
            process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()


def _is_worn(group_counts: set[int]) -> bool:
    """Return whether the world must be built anew.

    Unequal counts matter: torch names a mesh's groups by the count on each rank, so ranks that
    differ would wait for one another for ever.
    """
    return len(group_counts) > 1 or not group_counts <= set(range(1, MAX_GROUPS + 1))


def pickled_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", function)
        raise ValueError(
            f"cannot send {name} and its arguments to the ranks: {error}. "
            "Put the function at the top level of its module and pass plain values or tensors"
        ) from error


def _name(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


_groups: dict[Key, RankGroup] = {}
# After multiprocessing's own registration, so it runs before that one joins the ranks.
atexit.register(stop_servers)
atexit.register(shut_down)
