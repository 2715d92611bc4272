# SPDX-License-Identifier: Apache-2.0
"""The writer process of a rank: it writes and signs checkpoints from host memory.

The writers of all ranks are a gloo world of their own, and run the same code as a blocking save:
torch.distributed.checkpoint's (or Megatron-Core's) planner and writer, then the manifest.

torch's ``async_save`` with a process is not used, for these reasons. torchrun sends SIGTERM to a
rank's whole process group, which kills that process too, so the last checkpoint of a job would be
lost. When another rank's process dies, it waits up to 30 minutes in a thread, and the program
cannot exit before. It receives tensors through /dev/shm, and needs gloo in the run's default group.
It can neither sign files nor write torch_dist. Megatron-Core's AsyncCallsQueue needs CUDA, blocks
training while it plans, and forks a process that has threads.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.checkpoints.saved_state import StateDict, pickle_enums_by_value
from megatron.mcore_adapter.checkpoints.staging import StagedContent, StagingBuffer
from megatron.mcore_adapter.run.model_parallel import initialize_model_parallel

GRACE_SECONDS = 10
"""Time after which an idle writer that was asked to end is killed."""


@dataclass(frozen=True)
class WriterWorld:
    """The world that the writers of all ranks form.

    Attributes:
        rank: rank of a writer, which is that of its rank in the run.
        world_size: number of writers.
        host: machine of the store in which they meet.
        port: port of that store.
        name: prefix of this world's keys in the store.
        timeout: of the store and of the writers' collectives.
    """

    rank: int
    world_size: int
    host: str
    port: int
    name: str
    timeout: timedelta


class WriterProcess:
    """The rank's handle of its writer process, which the constructor starts.

    Args:
        world: the world that it joins.
        buffer: memory from which it reads; the process inherits the descriptor.
    """

    def __init__(self, world: WriterWorld, buffer: StagingBuffer):
        self._rank = world.rank
        self._connection, connection_of_process = Pipe()
        descriptors = (connection_of_process.fileno(), buffer.file_descriptor)
        # Not multiprocessing's `spawn`, which would import the main program. SIGTERM is for the
        # ranks, which wait for their writers.
        code = (
            "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f" sys.path[:] = {sys.path!r};"
            " from megatron.mcore_adapter.run.logging_setup import set_up_logging;"
            " set_up_logging();"
            f" from {__name__} import serve; serve{descriptors}"
        )
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # torchrun signals the process group of a rank
        )
        connection_of_process.close()  # so that the connection breaks when the writer dies
        self._connection.send(world)

    def write(self, content: StagedContent, target: Path) -> None:
        """Begin to write content into a directory; :meth:`poll` reports a writer that has died."""
        with suppress(OSError):
            self._connection.send((content, target))

    def poll(self) -> list[str] | None:
        """Return the problems of a save that has ended, None while it is in progress."""
        code = self._process.poll()  # first: an answer may have been sent before the death
        try:
            if self._connection.poll():
                return self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
        if code is None:
            return None
        end = f"ended with {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        return [f"rank {self._rank}: the process that writes checkpoints {end}"]

    def kill(self) -> None:
        """Kill the writer and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def end(self) -> None:
        """Ask an idle writer to end, without waiting for it."""
        with suppress(OSError):
            self._connection.send(None)

    def wait(self) -> None:
        """Wait until a writer that was asked to end has done so, and kill it if it takes long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self.kill()


# ---- in the process


def serve(connection_descriptor: int, buffer_descriptor: int) -> None:
    """Write checkpoints until the rank asks this process to end, or ends itself.

    Args:
        connection_descriptor: connection to the rank, which sends a :class:`WriterWorld`, then a
            staged content and a directory for each save, and None at the end.
        buffer_descriptor: memory that holds the staged contents.
    """
    connection = Connection(connection_descriptor)
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    world: WriterWorld = received.get()
    try:
        store = TCPStore(world.host, world.port, is_master=False, timeout=world.timeout)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(world.name, store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=world.timeout,
        )
        cpu.install()
        buffer = StagingBuffer(buffer_descriptor)
        while (request := received.get()) is not None:
            content, target = request
            connection.send(_write(buffer.read(content), target))
        dist.destroy_process_group()
    except Exception as error:  # in most cases since another rank's writer has died
        connection.send([f"rank {world.rank}: {type(error).__name__}: {error}"])
        received.get()  # the rank ends this process when all ranks know


def _receive(connection: Connection, received: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        # The rank has ended in some way. 0 is the group of this process, with all its children.
        os.killpg(0, signal.SIGKILL)


def _write(content: StateDict, target: Path) -> list[str]:
    args = content["args"]
    pickle_enums_by_value(args)
    if args.ckpt_format == "torch_dist" and not parallel_state.model_parallel_is_initialized():
        initialize_model_parallel(args)  # ranks that have the same tensors share the work
    return checkpointing.write(args, content, target)
