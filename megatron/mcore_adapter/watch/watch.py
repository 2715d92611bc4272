# SPDX-License-Identifier: Apache-2.0
"""The watch over a run: heartbeats, signals, and the end of the run when a rank has failed.

A thread of every rank sends a heartbeat to the store every second. It is notified of signals at
once, even while the main thread waits in a collective that never ends. Only
:meth:`Watch.connect` is a collective.

[Note: ends of a run]
    a collective fails     the first rank that sees it asks the heartbeats who has failed (see
                           :mod:`~megatron.mcore_adapter.watch.peers`), and prints the one message.
                           Each rank writes torch's traceback to a file, and exits with 1
    a rank has an error    the first rank that has one prints it, the others print nothing
    SIGTERM                if a peer has failed, as above: torchrun sends it to the ranks that are
                           left. Otherwise the loop stops after its step, if it has installed a
                           handler (--exit-signal-handler), which it keeps until the program ends;
                           without a handler the process exits with 143
    SIGINT                 the loop stops after its step, without saving. Elsewhere
                           KeyboardInterrupt ends the program. A second SIGINT, or a main thread
                           that has not ended after some seconds, ends the process. Exit code 130
    NCCL, a stall          torch will abort the process when the timeout of the collective is over.
                           The message is printed before that. Not yet run on a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron.checkpoint.store import durable
from megatron.checkpoint.store.stores import is_staged
from megatron.fsdp.engine import observe
from megatron.fsdp.trace.failed_collectives import explanation_of, is_of_collective
from megatron.mcore_adapter.run.environment import complain, environment_rank
from megatron.mcore_adapter.watch import position
from megatron.mcore_adapter.watch.heartbeats import Heartbeats, StoreError
from megatron.mcore_adapter.watch.peers import (
    DEAD,
    LEFT,
    RUNNING,
    TERMINATED,
    WAITING,
    Peer,
    Verdict,
    judge,
    message,
)

INTERRUPT_SECONDS = 10.0
"""Time that the running step may take after SIGINT; a checkpoint is always finished."""
LEAVE_SECONDS = 5.0
"""Time that a rank has to see its own collective fail, after another rank has reported that."""
ERROR_SECONDS = 1.0
"""Time within which a collective fails on this rank after SIGTERM, if its peer is dead."""
ABORTING_BACKENDS = ("nccl",)
"""Backends whose timeouts end the process, so that the message must be printed before them."""

SIGINT_CODE = 128 + signal.SIGINT
"""Exit code of a process that SIGINT has ended, as shells report it."""
SIGTERM_CODE = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has ended."""


class Watch:
    """The watch of this rank, which runs inside of the ``with`` block.

    Args:
        args: arguments of the run: ``distributed_timeout_minutes``, ``distributed_backend`` and
            ``save``; see :func:`error_file`.
    """

    def __init__(self, args: argparse.Namespace):
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes).total_seconds()
        self._announces_stalls = args.distributed_backend in ABORTING_BACKENDS
        self._file = error_file(args.save)
        self._hearts = Heartbeats(self._file)
        # Signal -> times at which it has arrived, by the monotonic clock.
        self._signals: dict[int, list[float]] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self._signals[number] = []
        self._reported: float | None = None  # when this rank read the report of another one
        self._error: BaseException | None = None  # of a collective of the main thread
        self._has_announced_stall = False
        self._is_leaving = False  # the main thread ends the program
        self._is_over = False
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        for number, handler in ((signal.SIGTERM, _ignore), (signal.SIGINT, _interrupt)):
            handler_before = signal.signal(number, handler)
            self._restore.callback(_restore, number, handler_before)
        # Python writes the numbers of signals there at once, whatever the main thread does.
        self._wakeup_sender.setblocking(False)
        descriptor = self._wakeup_sender.fileno()
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, before)
        observe.add(position.last_work)
        self._restore.callback(observe.remove, position.last_work)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._wake()
        self._thread.join()
        self._restore.close()
        with contextlib.suppress(StoreError):
            self._hearts.send(LEFT)
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    def connect(self) -> None:
        """Begin to send heartbeats to the store of the process group; a collective."""
        self._hearts.connect()
        self._wake()

    def follow(self, iteration: Callable[[], int]) -> None:
        """Send the number of finished iterations, which ``iteration`` returns, in heartbeats."""
        self._hearts.iteration = iteration

    # ---- ends of a run, called on the main thread

    def report(self, text: str) -> bool:
        """Print an error of this rank, unless another rank has printed one.

        Returns:
            False if the ranks have no store to agree on this, and nothing was printed.
        """
        self._is_leaving = True
        try:
            is_first = self._hearts.claim()
        except StoreError:
            return False
        if is_first:
            self._print_report(text)
        else:
            self._hearts.wait_for_report()
        self._hearts.keep_store()
        return True

    def interrupted(self) -> int:
        """Print the line of an interrupted run, once for all ranks, and return the exit code."""
        text = "interrupted"
        iteration = self._hearts.iteration()
        if iteration:
            text += f" after iteration {iteration}"
        if not self.report(text) and environment_rank() == 0:
            self._print_report(text)
        return SIGINT_CODE

    def failed(self, error: Exception) -> None:
        """Report the error of a collective and end the process; does not return then.

        Any other error is printed by the caller. Only the other ranks are notified of it here.
        """
        if is_of_collective(error):
            self._error = error
            self._wake()
            self._thread.join()  # which ends the process
        self._is_leaving = True
        with contextlib.suppress(StoreError):
            if self._hearts.claim():
                self._hearts.note_report()

    # ---- the thread

    def _run(self) -> None:
        while not self._is_over:
            pause = self._hearts.period
            if any(self._signals.values()):
                pause /= 5
            ready, _, _ = select.select([self._wakeup_receiver], [], [], pause)
            if ready:
                for number in self._wakeup_receiver.recv(1024):
                    if number in self._signals:
                        self._signals[number].append(time.monotonic())
            if self._error is not None:
                self._report_error(self._error)
            if not (self._is_over or self._is_leaving):
                try:
                    self._check()
                except Exception:  # a defect of this thread must not end the run
                    _append(self._file, traceback.format_exc())

    def _wake(self) -> None:
        self._wakeup_sender.send(b"\0")

    def _check(self) -> None:
        """Send a heartbeat, and end the process if it must."""
        self._hearts.locate(position.current())
        with contextlib.suppress(StoreError):
            self._hearts.send(RUNNING)
            if self._reported is None and self._hearts.must_end():
                self._reported = time.monotonic()
        if self._reported is not None:
            since_report = time.monotonic() - self._reported
            if since_report > LEAVE_SECONDS:
                self._leave(1)
        if self._signals[signal.SIGINT]:
            self._check_interrupt(self._signals[signal.SIGINT])
        if self._signals[signal.SIGTERM]:
            first_time = self._signals[signal.SIGTERM][0]
            self._check_sigterm(time.monotonic() - first_time)
        with contextlib.suppress(StoreError):
            self._check_stall()

    def _check_interrupt(self, times: list[float]) -> None:
        """End the process at the second SIGINT, or some seconds after the first one."""
        since_first = time.monotonic() - times[0]
        is_late = since_first > INTERRUPT_SECONDS and position.phase != position.SAVING
        if len(times) > 1 or is_late:
            self.exit(self.interrupted())

    def _check_sigterm(self, seconds: float) -> None:
        """End the process after SIGTERM, unless the loop does; print a message if a peer is dead.

        Args:
            seconds: time since the signal.
        """
        if self._reported is not None:
            self._leave(SIGTERM_CODE)
        sees_all_processes = True
        with contextlib.suppress(StoreError):
            peers: list[Peer] = []
            if self._hearts.is_connected:
                peers = self._hearts.peers()
            verdict = judge(peers)
            if verdict.trouble in DEAD:
                if seconds > ERROR_SECONDS:
                    self._report(verdict, "")
                return
            sees_all_processes = all(peer.process for peer in peers)
        if signal.getsignal(signal.SIGTERM) is not _ignore:
            return  # the loop stops
        # Only its silence shows that a process on another machine has ended.
        if sees_all_processes or seconds > self._hearts.silence + self._hearts.period:
            self.exit(SIGTERM_CODE)

    def _check_stall(self) -> None:
        """Print the message shortly before torch aborts the process."""
        margin = min(30.0, self._timeout / 4)
        limit = self._timeout - margin
        is_stall = self._announces_stalls and self._hearts.age > limit
        if is_stall and not self._has_announced_stall and self._hearts.is_connected:
            self._has_announced_stall = True
            verdict = judge(self._hearts.gather())
            if verdict.trouble and self._hearts.claim():
                _append(self._file, position.stacks())
                complain(message(verdict, ""))
                self._hearts.note_report(ends_run=False)

    # ---- reports

    def _report_error(self, error: BaseException) -> NoReturn:
        """Report a collective that has failed, and end the process."""
        if self._signals[signal.SIGINT]:
            self.exit(self.interrupted())
        lines = traceback.format_exception(error)
        _append(self._file, "".join(lines))
        self._hearts.locate(position.of_error(error))
        text = _first_line_of_cause(error)
        try:
            self._hearts.send(WAITING)
            verdict = judge(self._hearts.gather())
            if self._signals[signal.SIGTERM] and verdict.trouble not in DEAD:
                self.exit(SIGTERM_CODE)  # others were sent it too, and have ended sooner
            explanation = None
            if verdict.trouble not in DEAD:
                explanation = explanation_of(error)
            self._report(verdict, text, explanation)
        except StoreError as store_error:
            self._report_alone(str(store_error), text)

    def _report(
        self,
        verdict: Verdict,
        text: str,
        explanation: str | None = None,
    ) -> NoReturn:
        """Print the message, unless another rank does, and end the process."""
        if self._hearts.claim():
            self._print_report(message(verdict, text, explanation))
        else:
            self._hearts.wait_for_report()
            self._hearts.note_report()  # if it was a stall, it ends the run now
        self._leave(1)

    def _report_alone(self, cause: str, text: str) -> NoReturn:
        """Print a message without the store, once for the ranks that share a folder for errors.

        Then end the process.

        Args:
            cause: why there is no store.
            text: first line of torch's error.
        """
        if environment_rank() > 1:
            time.sleep(LEAVE_SECONDS)
        files = []
        for rank in range(1, environment_rank()):
            files.append(self._file.with_name(f"rank{rank}.txt"))
        has_other_report = any(_is_new(file) for file in files)
        if self._reported is None and not has_other_report:
            beat = self._hearts.own(WAITING)
            lines = [
                f"error: {cause}",
                "rank 0, or the host of the store, has probably died: look at its log",
                f"rank {beat.rank} was in {beat.position}, in iteration {beat.iteration + 1}",
                f"error and stacks: {self._file}",
                f"error of torch: {text}",
            ]
            self._print_report("\n  ".join(lines))
        self.exit(1)

    def _print_report(self, text: str) -> None:
        """Print a report, and publish that it has been printed."""
        complain(text)
        self._hearts.note_report()

    def _leave(self, code: int) -> NoReturn:
        """End the process after a report; the stacks of its threads go to its file."""
        if self._error is None:
            _append(self._file, position.stacks())
        self.exit(code)

    def exit(self, code: int) -> NoReturn:
        """End the process at once, since destructors of process groups may wait for dead peers."""
        if code == SIGTERM_CODE:
            with contextlib.suppress(StoreError):
                self._hearts.send(TERMINATED)
        for child in multiprocessing.active_children():
            child.kill()
        if not self._is_leaving:
            self._hearts.keep_store()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def error_file(save: str | None) -> Path:
    """Return the path of this rank's file for errors.

    It is in ``errors`` in the directory of checkpoints; or in a temporary one without
    ``--save``, or if the checkpoints are at a URL. The file exists only after an error, and its
    modification time shows other ranks whether that was a moment ago.
    """
    name = f"rank{environment_rank()}.txt"
    if save and not is_staged(save):
        return Path(save, "errors", name)
    return Path(tempfile.gettempdir(), f"pretrain_gpt_errors_{os.getuid()}", name)


def _first_line_of_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    if not text:
        return type(error).__name__
    return text.splitlines()[0]


def _append(path: Path, text: str) -> None:
    """Append a text to a file, with the time; print it if that fails."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.file_at(path).open("a") as file:
            file.write(f"---- {when}, process {os.getpid()}\n{text}\n")
    except OSError as error:
        print(f"cannot write {path}: {error}\n{text}", file=sys.stderr, flush=True)


def _is_new(path: Path) -> bool:
    """Return True for a file that was changed a moment ago."""
    if not path.exists():
        return False
    age = time.time() - path.stat().st_mtime
    return age < 4 * LEAVE_SECONDS


def _restore(number: int, handler: Any) -> None:
    """Restore the earlier handler of a signal, unless the loop has installed its own meanwhile."""
    if signal.getsignal(number) in (_ignore, _interrupt):
        signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread of the watch receives the signal's number."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at the first SIGINT."""
    signal.signal(number, _ignore)  # the second one is for the watch
    raise KeyboardInterrupt
