# SPDX-License-Identifier: Apache-2.0
"""Saves in the background: training continues while tensors are copied and written."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.checkpoints.checkpoint_format import attempt, collector_paused
from megatron.mcore_adapter.checkpoints.checkpoint_writer import WriterProcess, WriterWorld
from megatron.mcore_adapter.checkpoints.forward_writes import is_buffer_of, num_writes_to_weights
from megatron.mcore_adapter.checkpoints.staging import StagingBuffer
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.first_rank import Log
from megatron.mcore_adapter.run.run_state import Progress, TrainedParts

_WAITING_INTERVAL = 0.05
"""Seconds between two polls of the writers while training waits for them."""


@dataclass
class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        root: directory of checkpoints in which it will be published.
        progress: progress of the run when the save began.
        problems: problems of this rank's writer, empty if it has succeeded; None until it has
            ended.
        agreed: True once every rank knows that all writers have ended, or that one has failed.
        failed: True once every rank knows that the writer of some rank has failed.
    """

    root: str
    progress: Progress
    problems: list[str] | None = None
    agreed: bool = False
    failed: bool = False


class BackgroundSaves:
    """The background saves of a run, of which at most one is in progress.

    :meth:`save` starts a thread that copies the state into host memory, from where the ranks'
    writer processes write it; :meth:`finish_copying` waits for the copies before the optimizer's
    step. In every step the ranks sum :meth:`votes` in their one all-reduce, and pass the sums to
    :meth:`count`; a loop without such an all-reduce calls :meth:`vote`. When all writers have
    ended, :meth:`conclude` publishes the checkpoint on all ranks after the same step. Constructor,
    :meth:`save`, :meth:`step_is_over`, :meth:`conclude` and :meth:`wait` are collectives.

    Args:
        args: arguments of the run. With ``use_persistent_ckpt_worker`` one writer process of each
            rank lives as long as this object; otherwise every save starts its own.
        device: device of tensors for collectives.
        log: prints a line on the first rank.
        published: called with the progress of a checkpoint after it has been published.

    Raises:
        RunError: on every rank, if the store for the writers cannot be opened.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        log: Log,
        published: Callable[[Progress], None],
    ):
        self._args = args
        self._device = device
        self._log = log
        self._published = published
        self._buffer = StagingBuffer()
        self._has_reserved = False
        self._store, self._world = _open_store(args)
        self._num_worlds = 0
        self._writer: WriterProcess | None = None
        self._ending: list[WriterProcess] = []
        self._pending: PendingSave | None = None
        # Returns how often forwards have written to weights since the save began.
        self._num_writes: Callable[[], int] = lambda: 0
        if args.use_persistent_ckpt_worker:  # its imports take seconds, during the first steps
            self._writer = self._start_writer()

    def step_is_over(self, parts: TrainedParts, progress: Progress) -> None:
        """Call :meth:`conclude`; after the first step, reserve host memory for the first save.

        A thread allocates it while training continues. Only after a step the optimizer has state.

        Raises:
            RunError: as :meth:`conclude` does.
        """
        self.conclude()
        if self._has_reserved:
            return
        self._has_reserved = True
        with collector_paused(), suppress(RunError):  # the first save reports what fails here
            content = checkpointing.collect(self._args, parts, progress)
            attempt(lambda: self._buffer.reserve(content))

    def save(
        self,
        parts: TrainedParts,
        progress: Progress,
        root: str,
    ) -> None:
        """Begin to copy the state of the run and to write it, after the save before has ended.

        Weights and optimizer state must keep their values until :meth:`finish_copying`.

        Args:
            parts: model, optimizer and schedule, whose tensors are copied.
            progress: progress at the step to save; copied.
            root: directory of checkpoints.

        Raises:
            RunError: on every rank, if any rank could not write this or the save before.
        """
        self.wait()
        model = parts.model
        with collector_paused():  # training waits for what follows
            content = checkpointing.collect(self._args, parts, progress)
            target = checkpointing.prepare(root, progress.iteration)

            def begin() -> None:
                if self._writer is None:
                    self._writer = self._start_writer()
                writer = self._writer
                self._buffer.stage(
                    content,
                    is_changing=is_buffer_of(model),
                    then=lambda staged: writer.write(staged, target),
                )

            is_fully_sharded = self._args.use_megatron_fsdp
            before = num_writes_to_weights(model, is_fully_sharded)
            self._num_writes = lambda: num_writes_to_weights(model, is_fully_sharded) - before
            problems = attempt(begin)
            if problems:
                self._kill()
                self._publish_or_discard(root, progress, problems)
        self._pending = PendingSave(root, replace(progress))
        self._log(f"writing the checkpoint of iteration {progress.iteration} in the background")

    def finish_copying(self) -> None:
        """Wait until the state is copied, so that the optimizer may change it.

        The save fails if a forward has written to weights in the meantime.
        """
        problem = ""
        try:
            if self._buffer.finish() and self._num_writes():
                problem = (
                    "a forward has written to weights while they were copied. Save the checkpoints"
                    " of such a model without --async-save"
                )
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and self._pending is not None:
            self._pending.problems = [f"rank {dist.get_rank()}: {problem}"]

    @property
    def num_staged_bytes(self) -> int:
        """Bytes of host memory that are allocated on this rank."""
        return self._buffer.num_bytes

    def votes(self) -> list[float]:
        """Return 1 or 0 for each: this rank's writer has ended; it has failed.

        The ranks sum both over all ranks, and pass the sums to :meth:`count`.
        """
        pending = self._pending
        if pending is None:
            return [0.0, 0.0]
        if pending.problems is None:
            assert self._writer is not None
            pending.problems = self._writer.poll()
        has_ended = pending.problems is not None
        has_failed = bool(pending.problems)
        return [float(has_ended), float(has_failed)]

    def count(self, sums: Sequence[float]) -> None:
        """Record the sums of :meth:`votes` over all ranks."""
        if self._pending is not None:
            ended, failed = sums
            self._pending.failed = failed > 0
            self._pending.agreed = ended == dist.get_world_size() or failed > 0

    def vote(self) -> None:
        """Agree with the other ranks on the state of the save; a collective if one is pending."""
        if self._pending is not None:
            sums = torch.tensor(self.votes(), device=self._device)
            dist.all_reduce(sums)
            self.count(sums.tolist())

    def conclude(self) -> None:
        """Publish the pending checkpoint if the ranks have agreed that it is written.

        Raises:
            RunError: on every rank, if any writer has failed. Nothing of the checkpoint remains.
        """
        pending = self._pending
        if pending is None or not pending.agreed:
            return
        self._pending = None
        problems: list[str] = []
        if pending.failed:
            self._kill()  # on every rank, before the files are removed
            problems = agree(pending.problems or [])
        elif not self._args.use_persistent_ckpt_worker:
            self._end_writer()
        self._publish_or_discard(pending.root, pending.progress, problems)
        self._published(pending.progress)

    def _publish_or_discard(
        self,
        root: str,
        progress: Progress,
        problems: list[str],
    ) -> None:
        checkpointing.conclude(
            args=self._args, root=root, progress=progress, problems=problems, log=self._log
        )

    def wait(self) -> None:
        """Wait until no save is pending.

        Raises:
            RunError: as :meth:`conclude` does.
        """
        self.finish_copying()
        is_announced = False
        while self._pending is not None:
            self.vote()
            self.conclude()
            if self._pending is None:
                break
            if not is_announced:
                iteration = self._pending.progress.iteration
                self._log(
                    f"waiting for the checkpoint of iteration {iteration}, which is still being"
                    " written"
                )
                is_announced = True
            time.sleep(_WAITING_INTERVAL)

    def end(self) -> None:
        """End the writers after :meth:`wait`, and wait for their ends."""
        self._end_writer()
        for writer in self._ending:
            writer.wait()
        self._ending = []

    def close(self) -> None:
        """Kill the writers that are left, as after an error of the run, and free the memory."""
        self._kill()
        for writer in self._ending:
            writer.kill()
        self._buffer.close()

    # ---- writers

    def _start_writer(self) -> WriterProcess:
        self._num_worlds += 1
        world = replace(self._world, name=f"writers_{self._num_worlds}")
        return WriterProcess(world, self._buffer)

    def _end_writer(self) -> None:
        """Ask the writer to end, if there is one, and wait for the one before it."""
        for earlier in self._ending:
            earlier.wait()
        self._ending = []
        if self._writer is not None:
            self._ending.append(self._writer)
            self._writer.end()
        self._writer = None

    def _kill(self) -> None:
        """Finish or give up the copies, and kill the writer."""
        with suppress(Exception):
            self._buffer.finish()
        if self._writer is not None:
            self._writer.kill()
        self._writer = None


def _open_store(args: argparse.Namespace) -> tuple[TCPStore | None, WriterWorld]:
    """Open the store in which writers meet on the first rank; a collective.

    Returns:
        The store, which the first rank must keep alive, None on other ranks; and the world of
        writers in it, without a name.

    Raises:
        RunError: on every rank, if it cannot be opened.
    """
    # The first rank runs on this host.
    host = os.environ.get("MASTER_ADDR", "localhost")
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store: TCPStore | None = None

    def open_store() -> None:
        nonlocal store
        if dist.get_rank() == 0:
            port = 0  # the system chooses a free one
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)

    problems = attempt(open_store)
    if problems:
        raise RunError("--async-save has no store for its writers:\n" + "\n".join(problems))
    ports: list[Any] = [0 if store is None else store.port]
    dist.broadcast_object_list(ports)
    world = WriterWorld(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        host=host,
        port=ports[0],
        name="",
        timeout=timeout,
    )
    return store, world
