# SPDX-License-Identifier: Apache-2.0
"""Explanations of collectives that fail: the rank that has ended, or the first that differs.

[Note: explanations] A collective that fails names no rank: all ranks see a closed connection or a
timeout, whoever caused it. So every process remembers its last collectives, which sends nothing.
Only when one has failed, the ranks exchange them through the store:

    a rank whose collective fails    asks all others, and publishes its last collectives
    any other rank                   has a thread, which reads the store once a second while no
                                     collective has begun for some seconds, and answers
    a rank that ends                 has published its end, with the first line of its error
    a rank that was killed           its process is gone, for those on the same machine

The first rank that has asked compares the answers, and all ranks raise what it has found. Nothing
here is a collective.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.observe import Group, Observer, Operands
from megatron.fsdp.trace.divergence import (
    PublishedCollective,
    Ranks,
    first_difference,
    named_ranks,
)

NUM_REMEMBERED = 200  # the last collectives of a rank
QUIET_SECONDS = 2.0  # without a new collective, after which a rank reads the store
POLL_SECONDS = 1.0  # between two reads of the store
PATIENCE_SECONDS = 5.0  # that a failed rank waits for the answers of the others
SHOWN_RANKS = 8  # whose places in the program a message shows

_FSDP = os.path.join("megatron", "fsdp", "")
# Beginnings of the names of files that are not the user's: torch, Python, and "<string>".
_OF_PYTHON = (os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"], "<")


class CollectiveError(RuntimeError):
    """A collective that failed, with its explanation; the cause is torch's error.

    Args:
        explanation: which rank has ended or differs, the same text on all ranks.
        failed: describes the collective of this rank.
    """

    def __init__(self, explanation: str, failed: str):
        super().__init__(explanation, failed)  # a pickle has these arguments
        self.explanation = explanation

    def __str__(self) -> str:
        return "\n".join(self.args)


class Remembered(NamedTuple):
    """A collective that this rank has begun."""

    name: str
    unit: str
    num_bytes: int
    dtype: torch.dtype | None
    phase: str
    ranks: Ranks
    group: str  # name of the group, which differs between groups of the same ranks
    number: int  # among the collectives of these ranks, from 0
    begin: float  # seconds since the epoch

    def __str__(self) -> str:
        text = self.name
        if self.num_bytes:
            text += f" of {self.num_bytes} bytes"
            if self.dtype is not None:
                text += f" {str(self.dtype).removeprefix('torch.')}"
        if self.unit:
            text += f" of unit {self.unit!r}{self.phase}"
        return text


class LastCollectives(Observer):
    """The last collectives of this rank, with the numbers that all ranks have in common."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.remembered: deque[Remembered] = deque(maxlen=NUM_REMEMBERED)
        self.num_begun = 0
        self._numbers: Counter[Ranks] = Counter()
        # Weak: a process group that is destroyed must be freed.
        self._known = weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Ranks, str]]()

    def begin_collective(
        self,
        kind: str,
        name: str,
        operands: Operands,
        group: Group,
    ) -> Remembered:
        """Remember a collective; it costs microseconds.

        Args:
            kind: of the collective; one of :data:`observe.OTHER` belongs to no unit.
            name: the operation, such as ``all_gather``.
            operands: the tensors that are sent.
            group: the process group; None for the one of all ranks.
        """
        if group is None:
            group = dist.group.WORLD
            assert group is not None
        known = self._known.get(group)
        if known is None:
            known = (tuple(dist.get_process_group_ranks(group)), group.group_name)
            self._known[group] = known
        ranks, group_name = known
        phase = ""
        if in_backward():
            phase = ", in backward"
        elif not torch.is_grad_enabled():
            phase = ", without gradients"
        num_bytes = 0
        for operand in operands:
            num_bytes += operand.nbytes
        begun = Remembered(
            name,
            unit="" if kind == observe.OTHER else observe.unit_of_last_work,
            num_bytes=num_bytes,
            dtype=operands[0].dtype if operands else None,
            phase=phase,
            ranks=ranks,
            group=group_name,
            number=self._numbers[ranks],
            begin=time.time(),
        )
        self._numbers[ranks] += 1
        self.num_begun += 1
        self.remembered.append(begun)
        return begun

    def fail_collective(self, begun: Remembered, error: Exception) -> None:
        """Raise an error that names the rank which has ended or differs.

        Raises:
            CollectiveError: if ``error`` is of a collective, and the ranks can be asked.
        """
        if is_of_collective(error) and _failures is not None:
            text = str(error).splitlines()[0]
            failed = f"rank {self.rank} failed in collective {begun.number}: {begun}: {text}"
            raise CollectiveError(_failures.explain(begun.group), failed) from error

    def published(self) -> list[PublishedCollective]:
        """Return the last collectives as other ranks see them."""
        published = []
        for seen in list(self.remembered):  # another thread may add one
            collective = PublishedCollective(seen.ranks, seen.number, seen.begin, what=str(seen))
            published.append(collective)
        return published


class Answer(NamedTuple):
    """The answer of a rank to one whose collective has failed."""

    place: str  # position of the main thread in the program
    collectives: list[PublishedCollective]


class Failures:
    """The exchange of answers and explanations through the store of the process group.

    Args:
        store: a connection that nothing else uses.
        rank: this rank.
        num_ranks: number of ranks of the program.
        last: the last collectives of this rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        last: LastCollectives,
    ):
        self._store = store
        self.rank = rank
        self._num_ranks = num_ranks
        self._last = last
        self.pid = os.getpid()
        self._answered: set[str] = set()  # the failures that this rank has answered
        self._failure = ""  # the last one that this rank has explained
        self._explained: dict[str, str] = {}  # explanations, by the name of the group that failed
        self._first = ""  # the machine and the process of rank 0, once it is known
        self._is_over = threading.Event()
        store.set(f"process/{rank}", f"{_this_machine()} {self.pid}")
        self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that answers."""
        self._is_over.set()
        self._thread.join(POLL_SECONDS)

    def note_end(self, error: BaseException | None) -> None:
        """Publish that this rank ends, and with which error."""
        text = ""
        if error is not None:
            text = first_line(error)
        with suppress(RuntimeError):  # the store has ended with the process that has it
            self._store.set(f"ended/{self.rank}", text)

    def explain(self, group: str) -> str:
        """Return the explanation of a failure, the same text on each rank that has one.

        Args:
            group: name of the process group whose collective has failed; its next ones fail too.
        """
        if group not in self._explained:
            try:
                self._explained[group] = self._explanation()
            except RuntimeError as error:
                self._explained[group] = (
                    "a collective failed, and the store of the process group does not answer"
                    f" either: rank 0, or torchrun, has probably ended ({first_line(error)})"
                )
        return self._explained[group]

    def _explanation(self) -> str:
        # The first rank of a failure names it; all others join, unless they have explained it.
        name = f"{self.rank}.{len(self._explained)}"
        self._failure = self._store.compare_set("failed", self._failure, name).decode()
        self._answer(self._failure)
        answers = PrefixStore(self._failure, self._store)
        if self._failure != name:
            for _ in _pauses(2 * PATIENCE_SECONDS):
                if answers.check(["explanation"]):
                    return str(answers.get("explanation").decode())
        explanation = self._compare(answers)
        answers.set("explanation", explanation)
        return explanation

    def _look(self) -> None:
        num_begun = -1
        since = 0.0
        with suppress(RuntimeError):  # as in `note_end`
            while not self._is_over.wait(POLL_SECONDS):
                if self._last.num_begun != num_begun:
                    num_begun = self._last.num_begun
                    since = time.monotonic()
                    continue
                if time.monotonic() - since <= QUIET_SECONDS or not dist.is_initialized():
                    continue
                if self._first_has_ended():
                    return
                if self._store.check(["failed"]):
                    self._answer(self._store.get("failed").decode())

    def _first_has_ended(self) -> bool:
        """Return True if rank 0, which may have the store, has run on this machine and is gone."""
        # If the store has ended, torch logs long messages about every request.
        if not self._first and self._store.check(["process/0"]):
            self._first = self._store.get("process/0").decode()
        return bool(self._first) and _is_gone(self._first)

    def _answer(self, failure: str) -> None:
        if failure not in self._answered:
            self._answered.add(failure)
            answer = Answer(_place_in_program(), self._last.published())
            self._store.set(f"{failure}/{self.rank}", json.dumps(answer))

    def _compare(self, store: Store) -> str:
        """Wait for answers, and return the explanation that follows from them."""
        answers: dict[int, Answer] = {}
        missing = list(range(self._num_ranks))
        for _ in _pauses(PATIENCE_SECONDS):
            for rank in missing:
                if store.check([str(rank)]):
                    place, rows = json.loads(store.get(str(rank)))
                    answers[rank] = Answer(place, [])
                    for ranks, *others in rows:
                        collective = PublishedCollective(tuple(ranks), *others)
                        answers[rank].collectives.append(collective)
            missing = [rank for rank in missing if rank not in answers]
            ended = self.ends_of(missing)
            if ended:
                return ended
            if not missing:
                break
        lines = []
        if missing:
            lines.append(f"no answer from {named_ranks(missing)}")
        sequences = {rank: answer.collectives for rank, answer in answers.items()}
        difference = first_difference(sequences)
        if difference is not None:
            lines.append(difference)
        elif not missing:
            lines.append(
                "a collective failed, and all ranks have begun the same: the network between their"
                " hosts has failed, or the timeout of the process group is too short"
            )
        for rank in sorted(answers)[:SHOWN_RANKS]:
            lines.append(f"  rank {rank} is now at {answers[rank].place}")
        return "\n".join(lines)

    def ends_of(self, ranks: Iterable[int]) -> str:
        """Return a line for each of the first ranks that have ended; empty if none is known to."""
        lines = []
        for rank in ranks:
            line = self._end_of(rank)
            if line is not None:
                lines.append(line)
        return "\n".join(lines[:SHOWN_RANKS])

    def _end_of(self, rank: int) -> str | None:
        if self._store.check([f"ended/{rank}"]):
            error = self._store.get(f"ended/{rank}").decode()
            if error:
                return f"rank {rank} has ended, with {error}"
            return f"rank {rank} has ended"
        if not self._store.check([f"process/{rank}"]):
            return None
        process = self._store.get(f"process/{rank}").decode()
        if not _is_gone(process):
            return None
        _, _, pid = process.rpartition(" ")
        return (
            f"rank {rank} has ended: process {pid} is gone, without an error of Python"
            " (os._exit, a signal, or the kernel for lack of memory: see `dmesg -T`)"
        )


# ---- of this process

_failures: Failures | None = None
_worlds: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups of all ranks, watched already
_num_worlds = 0


def watch() -> None:
    """Remember the collectives of this process from now on, and explain those that fail."""
    global _failures, _num_worlds
    world = dist.group.WORLD
    if world is None or world in _worlds:
        return
    if _failures is None:
        atexit.register(_at_exit)
    else:
        _failures.stop()
    _worlds.add(world)
    _num_worlds += 1
    _failures = None
    observe.failure_observer = None
    store = dist.distributed_c10d._get_default_store()
    if world.size() == 1 or not isinstance(_underlying(store), (TCPStore, FileStore)):
        return
    connection = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    own_store = PrefixStore(f"fsdp_failures/{_num_worlds}", connection)
    last = LastCollectives(world.rank())
    _failures = Failures(own_store, world.rank(), world.size(), last)
    observe.failure_observer = last


def explanation_of(error: BaseException) -> str | None:
    """Return the explanation of a collective that failed, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CollectiveError):
            return cause.explanation
        cause = cause.__cause__
    if _failures is None:
        return None
    return _failures.explain("")


def refuse_ended(ranks: Iterable[int], what: str) -> None:
    """Raise an error if a rank has ended for which this one waits outside of torch.

    Args:
        ranks: those for which this rank waits.
        what: the operation that they begin together, for the message.
    """
    if _failures is None:
        return
    ended = _failures.ends_of(ranks)
    if ended:
        raise CollectiveError(ended, f"rank {_failures.rank} waited for it before a {what}")


def is_of_collective(error: BaseException | None) -> bool:
    """Return True for an error of torch.distributed, which other ranks have probably caused."""
    while error is not None:
        if isinstance(error, (dist.DistError, CollectiveError)):
            return True
        # gloo raises RuntimeError, with the file of its own source where it happened.
        if isinstance(error, RuntimeError) and "/gloo/" in str(error):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0]}"


def _at_exit() -> None:
    # Python has set `sys.last_value` if the program ends with an error, and has printed it.
    if _failures is None or os.getpid() != _failures.pid:
        return
    _failures.stop()
    error = getattr(sys, "last_value", None)
    if error is not None and is_of_collective(error):
        if not isinstance(error, CollectiveError):  # of the program, or of torch
            text = f"a collective failed on rank {_failures.rank}: {explanation_of(error)}"
            print(text, file=sys.stderr, flush=True)
    else:
        _failures.note_end(error)


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _this_machine() -> str:
    """Return a name for the processes that this process sees by their numbers."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _is_gone(process: str) -> bool:
    """Return True for a process, given as its machine and number, that has run on this machine."""
    machine, _, pid = process.rpartition(" ")
    return machine == _this_machine() and not _runs(int(pid))


def _runs(pid: int) -> bool:
    with suppress(OSError):  # not on Linux, or gone
        # "17 (python) Z ...": a zombie has ended, and its parent has not waited for it.
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _pauses(seconds: float) -> Iterator[None]:
    """Yield at once, and after each of the pauses in which the given time passes."""
    pause = 0.02
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, POLL_SECONDS)
        yield


def _place_in_program() -> str:
    """Return the innermost line of the main thread outside of torch and of this library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = []
    ended_with = getattr(sys, "last_traceback", None)
    if ended_with is not None:  # the program ends
        places = list(traceback.walk_tb(ended_with))[::-1]
    elif frame is not None:
        places = list(traceback.walk_stack(frame))
    if not places:
        return "an unknown place"
    innermost, line = places[0]
    for user_frame, user_line in places:
        if _is_of_user(user_frame.f_code.co_filename):
            innermost = user_frame
            line = user_line
            break
    parts = innermost.f_code.co_filename.split(os.sep)[-2:]
    return f"{os.sep.join(parts)}:{line} in {innermost.f_code.co_name}"


def _is_of_user(filename: str) -> bool:
    if _FSDP in filename or "megatron_fsdp" in filename or "site-packages" in filename:
        return False
    return not filename.startswith(_OF_PYTHON)
