# SPDX-License-Identifier: Apache-2.0
"""The lease of a URL that a run saves at: two runs at once would mix their checkpoints.

Stores have no locks. Therefore an object at the URL names the run that saves there, its holder, and
a thread of the holder writes a new counter into it every :data:`RENEWAL_SECONDS`. Another run takes
the lease if the process that it names has died on this machine, or if nothing has changed for
:data:`RENEWALS_UNTIL_STALE` of these times. No clocks of two machines are compared.

[Note: a lease is no lock] fsspec cannot write an object on condition that nobody else has written
it, so two runs may write it one after the other. The last one has it. The other one finds that out
when it reads the object again: shortly after its start, at every renewal, and before it writes and
publishes a checkpoint. A holder that has not renewed its lease for so long that another run has
taken it (it was suspended, the store was out of reach, native code kept the interpreter's lock) can
do harm from when it goes on until its next look.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.checkpoint.store.lease_object import LeasedStore
from megatron.checkpoint.store.url_staging import url_of
from megatron.pretrain.checkpoints.save_lock import described, in_use, job_of_this_run, now
from megatron.pretrain.errors import RunError
from megatron.pretrain.watch.peers import this_machine

RENEWAL_SECONDS = 20.0
"""Time between two renewals."""
RENEWALS_UNTIL_STALE = 3
"""A lease that has not changed for so many renewals has no holder any more."""
SETTLING_SECONDS = 1.0
"""Time after which a run that has written its lease looks whether it has it."""

_TORN_SECONDS = 0.3
"""Time after which an object that cannot be parsed is damaged, and not just being written: some
stores overwrite in place."""
_LOOKS_WHILE_TORN = 3
_LOOKS_PER_RENEWAL = 20
_RETRIES_PER_RENEWAL = 4
_WHERE = "at one URL"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended."""


@dataclass(frozen=True)
class LeaseHolder:
    """The content of the object.

    Attributes:
        run: identifier of the run, and of no other one.
        host: name of the host of its first rank.
        machine: identifies that machine since its last start, and the processes seen there.
        process: number of the first rank's process there.
        process_start: since when that number is of this process, in ticks of that machine; empty
            if unknown.
        job: of a batch system; may be empty.
        since: time of its start, for people.
        counter: of renewals.
    """

    run: str
    host: str
    machine: str
    process: int
    process_start: str
    job: str
    since: str
    counter: int

    @classmethod
    def of_this_run(cls) -> LeaseHolder:
        """Return the content for a new run of this process."""
        return cls(
            run=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            process=os.getpid(),
            process_start=_state_and_start(os.getpid())[1],
            job=job_of_this_run(),
            since=now(),
            counter=0,
        )

    @classmethod
    def parsed(cls, content: bytes | None) -> LeaseHolder | None:
        """Return the content of an object; None if it is no lease."""
        try:
            found = json.loads(content or b"")
            texts = {name: str(found[name]) for name in ("run", "host", "machine")}
            texts |= {name: str(found[name]) for name in ("process_start", "job", "since")}
            return cls(**texts, process=int(found["process"]), counter=int(found["counter"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def to_bytes(self) -> bytes:
        """Return what is written into the object."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return described(self.process, self.host, self.since, self.job)

    @property
    def is_dead(self) -> bool:
        """True if its process was one of this machine and has ended; False if that is unknown."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # it is another user's
        state, start = _state_and_start(self.process)
        is_other = bool(start and self.process_start) and start != self.process_start
        return is_other or state in ("Z", "X")


def _machine() -> str:
    """Return a name for the processes that are seen from here, until the machine starts again.

    Containers on several machines may have one host name and the same process numbers, and those on
    one machine may see no process of each other.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{this_machine()} {boot}"


def _state_and_start(process: int) -> tuple[str, str]:
    """Return the letter for the state of a process and its start; empty where nothing tells them.

    The start is in ticks since that of the machine, so that no correction of a clock changes it.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2]
        return fields.split()[0], fields.split()[19]
    except (OSError, IndexError):
        return "", ""


class SaveLease:
    """The lease of a URL: :meth:`take`, :meth:`check` before a save, :meth:`release`.

    Args:
        url: at which checkpoints are saved.
        staged: the local directory in which they are staged.
        say: prints a line; called from a thread too.
    """

    def __init__(self, url: str, staged: Path, say: Callable[[str], None]):
        self._url, self._staged, self._say = url, staged, say
        self._own = LeaseHolder.of_this_run()
        self._written = 0.0  # by _CLOCK
        self._lost_to = ""
        self._has_warned = False
        self._is_over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="save lease", daemon=True)

    def take(self) -> None:
        """Wait until no other run has the lease, take it, and begin to renew it.

        Raises:
            RunError: another run has it, or has written it at the same moment.
            OSError: if the URL cannot be reached.
        """
        self._wait_for_its_end()
        self._write()
        # Until all have written that have seen no lease: see [Note: a lease is no lock].
        time.sleep(SETTLING_SECONDS)
        self._renew()
        if self._lost_to:
            raise in_use(self._url, self._lost_to, _WHERE)
        self._thread.start()

    def check(self) -> None:
        """Renew the lease, and look whether it is still this run's.

        A store that cannot be reached is told of; the save that follows meets it too.

        Raises:
            RunError: another run has it.
        """
        self._try_to_renew()
        if self._lost_to:
            raise RunError(
                f"this run has lost its lease of --save {self._url}, and saves nothing there any"
                f" more: {self._lost_to} has taken it, as a run may that sees no renewal for"
                f" {_patience():.0f} s; end one of the two, or choose another --save"
            )

    def release(self) -> None:
        """Remove the lease if it is this run's."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(RENEWAL_SECONDS)  # it may wait for the store
        with suppress(OSError):  # others find out that it is not renewed
            found = LeaseHolder.parsed(self._object().read_lease())
            if found is not None and found.run == self._own.run:
                self._object().remove_lease()

    def _wait_for_its_end(self) -> None:
        """Return when there is no lease, or its holder is dead."""
        found = self._object().read_lease()
        begin, is_told = time.monotonic(), False
        while found is not None:
            holder = LeaseHolder.parsed(found)
            if holder is not None and holder.is_dead:
                return
            if not is_told:
                is_told = True
                whose = "that cannot be read" if holder is None else f"of {holder}"
                self._say(
                    f"--save {self._url} has a lease {whose}: waiting {_patience():.0f} s to see"
                    " whether it is renewed"
                )
            time.sleep(RENEWAL_SECONDS / _LOOKS_PER_RENEWAL)
            is_stale = time.monotonic() - begin > _patience()
            try:
                latest = self._object().read_lease()
            except OSError:
                if is_stale:  # the last look must succeed
                    raise
                continue
            if latest is not None and latest != found:
                # In a store that overwrites in place it may be read while it is written.
                raise in_use(
                    self._url, str(LeaseHolder.parsed(latest) or holder or "another run"), _WHERE
                )
            if is_stale:
                return
            found = latest

    def _keep(self) -> None:
        """Renew the lease until it is released or lost; the thread."""
        pause = RENEWAL_SECONDS
        while not self._is_over.wait(pause) and not self._lost_to:
            is_renewed = self._try_to_renew()
            pause = RENEWAL_SECONDS if is_renewed else RENEWAL_SECONDS / _RETRIES_PER_RENEWAL

    def _try_to_renew(self) -> bool:
        """Renew the lease and return True; if the store cannot be reached, warn once."""
        try:
            self._renew()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._say(
                    f"the lease of --save {self._url} cannot be renewed, which is tried again;"
                    f" another run may take it after {_patience():.0f} s: {error}"
                )
            return False
        return True

    def _renew(self) -> None:
        """Write a new counter, or note who has taken the lease."""
        with self._one_at_a_time:
            if self._is_over.is_set() or self._lost_to:
                return
            content, other = self._read_whole()
            if other is not None and other.run != self._own.run:
                self._lost_to = str(other)
            elif content is None and _time() - self._written > _patience():
                self._lost_to = "another run, which has ended,"
            else:  # also if it was removed by hand, or a full disk has torn it
                self._write()
            if self._lost_to and self._thread.is_alive():
                self._say(
                    f"this run has lost its lease of --save {self._url} to {self._lost_to}: its"
                    " next save fails"
                )

    def _read_whole(self) -> tuple[bytes | None, LeaseHolder | None]:
        """Return the object and whom it names, if need be when another run has written it."""
        for _ in range(_LOOKS_WHILE_TORN):
            content = self._object().read_lease()
            holder = LeaseHolder.parsed(content)
            if content is None or holder is not None:
                break
            time.sleep(_TORN_SECONDS / _LOOKS_WHILE_TORN)
        return content, holder

    def _write(self) -> None:
        begin = _time()
        self._own = replace(self._own, counter=self._own.counter + 1)
        self._object().write_lease(self._own.to_bytes())
        self._written = begin

    def _object(self) -> LeasedStore:
        try:
            return LeasedStore(self._url, self._staged)
        except ValueError as error:  # a file system that connects when it is made
            raise OSError(str(error)) from error


def _patience() -> float:
    """Return the seconds after which a lease that has not changed has no holder any more."""
    return RENEWALS_UNTIL_STALE * RENEWAL_SECONDS


def _time() -> float:
    return time.clock_gettime(_CLOCK)


# ---- the leases of this process

_held: dict[str, SaveLease] = {}
"""URL -> the lease that this process has."""


@contextmanager
def leased(root: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Have the lease of the URL that is staged in a directory, as long as the context lasts.

    Raises:
        RunError: another run saves there; the message names it.
        OSError: if the URL cannot be reached.
    """
    staged = url_of(root)
    assert staged is not None  # whoever calls this has looked
    lease = SaveLease(*staged, say)
    try:
        lease.take()
        _held[staged[0]] = lease
        yield
    finally:
        if _held.get(staged[0]) is lease:
            del _held[staged[0]]
        lease.release()


def check(root: str | Path) -> None:
    """Look whether this run still has the lease of the URL that is staged in a directory.

    Called on the rank that has it. Nothing is checked of a URL that needs none.

    Raises:
        RunError: another run has taken it; the message names it.
    """
    staged = url_of(Path(root).absolute())
    lease = None if staged is None else _held.get(staged[0])
    if lease is not None:
        lease.check()
