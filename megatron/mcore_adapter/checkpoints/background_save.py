# SPDX-License-Identifier: Apache-2.0
"""Saves in the background: training goes on while tensors are copied and written."""

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
from megatron.mcore_adapter.run.first_rank import Say
from megatron.mcore_adapter.run.run_state import Progress, TrainedParts

_WAITING_INTERVAL = 0.05
"""Seconds between two looks at the writers while nothing else is done."""


@dataclass
class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        problems: those of this rank's writer; None until it has ended.
        agreed: all writers have ended, or one has failed, and every rank knows it.
        failed: some rank's writer has failed, and every rank knows it.
    """

    root: str
    progress: Progress
    problems: list[str] | None = None
    agreed: bool = False
    failed: bool = False


class BackgroundSaves:
    """The saves of a run in the background, of which at most one is under way.

    :meth:`save` lets a thread copy the state into host memory, and then the ranks' writer processes
    write it; :meth:`finish_copying` waits for the copies before the optimizer's step. In every step
    the ranks sum :meth:`votes` in their one all-reduce, and tell the sums to :meth:`count`; a loop
    without such an all-reduce calls :meth:`vote`. When
    all writers have ended, :meth:`conclude` publishes the checkpoint on all ranks after one step.
    Constructor, :meth:`save`, :meth:`step_is_over`, :meth:`conclude` and :meth:`wait` are
    collectives.

    Args:
        args: arguments of the run. With ``use_persistent_ckpt_worker`` one writer process of each
            rank lives as long as this object; otherwise every save has its own.
        device: device of tensors for collectives.
        say: prints a line.
        published: called with the progress of a checkpoint that has been published.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        say: Say,
        published: Callable[[Progress], None],
    ):
        self._args, self._device, self._say = args, device, say
        self._published = published
        self._buffer = StagingBuffer()
        self._has_reserved = False
        self._store, self._world = _open_store(args)
        self._num_worlds = 0
        self._writer: WriterProcess | None = None
        self._ending: list[WriterProcess] = []
        self._pending: PendingSave | None = None
        self._num_writes: Callable[[], int] = lambda: 0  # of forwards, since a save began
        if args.use_persistent_ckpt_worker:  # its imports take seconds, until the first save
            self._writer = self._start_writer()

    def step_is_over(self, parts: TrainedParts, progress: Progress) -> None:
        """Do :meth:`conclude`; after the first step, reserve host memory for the first save.

        It is allocated in a thread while training goes on. The optimizer has its state then.
        """
        self.conclude()
        if self._has_reserved:
            return
        self._has_reserved = True
        with collector_paused(), suppress(RunError):  # what cannot be saved, a save reports
            content = checkpointing.collect(self._args, parts, progress)
            attempt(lambda: self._buffer.reserve(content))

    def save(self, parts: TrainedParts, progress: Progress, root: str) -> None:
        """Copy the state of the run, and let it be written under ``root``.

        Waits for the save before. Weights and optimizer state must keep their values until
        :meth:`finish_copying`.

        Raises:
            RunError: on every rank, if any rank could not write this or the save before.
        """
        self.wait()
        model = parts.model
        with collector_paused():  # training waits
            content = checkpointing.collect(self._args, parts, progress)
            target = checkpointing.prepare(root, progress.iteration)

            def begin() -> None:
                writer = self._writer = self._writer or self._start_writer()
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
                checkpointing.conclude(self._args, root, progress, problems, self._say)
        self._pending = PendingSave(root, replace(progress))
        self._say(f"writing the checkpoint of iteration {progress.iteration} in the background")

    def finish_copying(self) -> None:
        """Wait until the state is copied, so that the optimizer may change it.

        The save fails if a forward has written to weights meanwhile.
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
        """Size of the memory that is allocated on this rank."""
        return self._buffer.num_bytes

    def votes(self) -> list[float]:
        """Return 1 if this rank's writer has ended, and 1 if it has failed; else 0.

        The sums over all ranks are what :meth:`count` takes.
        """
        pending = self._pending
        if pending is None:
            return [0.0, 0.0]
        if pending.problems is None:
            assert self._writer is not None
            pending.problems = self._writer.poll()
        return [float(pending.problems is not None), float(bool(pending.problems))]

    def count(self, sums: Sequence[float]) -> None:
        """Take the sums of :meth:`votes` over all ranks."""
        if self._pending is not None:
            ended, failed = sums
            self._pending.failed = failed > 0
            self._pending.agreed = ended == dist.get_world_size() or failed > 0

    def vote(self) -> None:
        """Let the ranks agree on how the save under way stands; a collective if there is one."""
        if self._pending is not None:
            sums = torch.tensor(self.votes(), device=self._device)
            dist.all_reduce(sums)
            self.count(sums.tolist())

    def conclude(self) -> None:
        """Publish the checkpoint that is under way if the ranks have agreed that it is written.

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
        checkpointing.conclude(self._args, pending.root, pending.progress, problems, self._say)
        self._published(pending.progress)

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            RunError: as :meth:`conclude` does.
        """
        self.finish_copying()
        has_said = False
        while self._pending is not None:
            self.vote()
            self.conclude()
            if self._pending is not None:
                if not has_said:
                    iteration = self._pending.progress.iteration
                    self._say(
                        f"waiting for the checkpoint of iteration {iteration}, which is still being"
                        " written"
                    )
                    has_said = True
                time.sleep(_WAITING_INTERVAL)

    def end(self) -> None:
        """Let the writers end, after :meth:`wait`."""
        self._end_writer()
        for writer in self._ending:
            writer.wait()
        self._ending = []

    def close(self) -> None:
        """End what is left if the run ends by an error, and give the memory back."""
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
        """Let the writer end, if there is one; the one before it has had time to."""
        for earlier in self._ending:
            earlier.wait()
        self._ending = [] if self._writer is None else [self._writer]
        for writer in self._ending:
            writer.end()
        self._writer = None

    def _kill(self) -> None:
        with suppress(Exception):
            self._buffer.finish()
        if self._writer is not None:
            self._writer.kill()
        self._writer = None


def _open_store(args: argparse.Namespace) -> tuple[TCPStore | None, WriterWorld]:
    """Open the store in which writers meet, on the first rank, and tell all ranks; a collective.

    Raises:
        RunError: on every rank, if it cannot be opened.
    """
    # The first rank runs there. The system chooses a free port.
    host = os.environ.get("MASTER_ADDR", "localhost")
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    stores: list[TCPStore] = []

    def open_store() -> None:
        if dist.get_rank() == 0:
            stores.append(
                TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            )

    problems = attempt(open_store)
    if problems:
        raise RunError("--async-save has no store for its writers:\n" + "\n".join(problems))
    ports: list[Any] = [stores[0].port if stores else 0]
    dist.broadcast_object_list(ports)
    world = WriterWorld(dist.get_rank(), dist.get_world_size(), host, ports[0], "", timeout)
    return stores[0] if stores else None, world
