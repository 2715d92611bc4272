# SPDX-License-Identifier: Apache-2.0
"""Sections that all ranks leave when one fails, whatever collectives they wait in.

[Note: gates] Megatron-Core and torch communicate between steps that can fail on one rank alone: the
first rank writes ``common.pt``, the disk is full, and it leaves, while all others wait for it in
their next collective. Inside of a section, every collective has a gate before it, in the store of
the process group. A rank passes when all ranks of the group have come, and then all of them enter;
if a rank has failed, no rank enters, and each raises its error. So no rank is left behind in a
collective, and the groups can be used afterwards.

A gate costs the store two short calls a rank. Collectives of tensors over a part of the ranks have
none: a load has thousands, one after the other, without a step between that can fail.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron.fsdp.trace import failed_collectives
from megatron.mcore_adapter.run.errors import RunError

OF_OBJECTS = (
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    "barrier",
)
OF_TENSORS = ("all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter")
OPEN = "open"
"""The state of a gate at which all ranks have come; otherwise it is the problem of a rank."""
LONGEST_PAUSE = 0.05
"""Seconds between two looks at a gate; the first ones follow sooner."""
LOOK_SECONDS = 1.0
"""Seconds between two looks for ranks that have died."""


class PeerError(RunError):
    """An error of another rank, by which this one leaves a section."""


class _Gates:
    """The gates of this process: the sections that are under way, and the collectives in them."""

    def __init__(self) -> None:
        self._sections: list[str] = []  # names of those under way, outermost first
        self._num_sections = [0]  # begun so far at each depth, within the one around them
        self._num_passed: Counter[str] = Counter()  # gates of a group since the outermost began
        self._last: dict[str, str] = {}  # by the group, its gate before, which nobody needs now

    @contextmanager
    def section(self) -> Iterator[None]:
        """Begin a section, whose name is "7" or, inside of it, "7.0"."""
        # Ranks may leave a section before others have begun the next one inside of it, so numbers
        # inside begin anew.
        name = ".".join(map(str, self._num_sections))
        self._num_sections[-1] += 1
        self._num_sections.append(0)
        self._sections.append(name)
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
            _store().set(f"{name}/failed", problem)
            raise
        finally:
            self._sections.pop()
            self._num_sections.pop()
            if not self._sections:
                self._num_passed.clear()

    def enter(self, name: str, group: dist.ProcessGroup) -> None:
        """Wait until all ranks of a group are about to enter a collective.

        Raises:
            PeerError: a rank has left a section in which this one is.
            CollectiveError: a rank has ended.
            DistError: a rank has not come in time.
        """
        store = _store()
        passed = f"{self._sections[-1]}/{group.group_name}"
        key = f"{passed}/{self._num_passed[passed]}"
        self._num_passed[passed] += 1
        before, self._last[group.group_name] = self._last.get(group.group_name), key
        if store.add(key, 1) == group.size():
            store.compare_set(f"{key}/state", "", OPEN)
            if before is not None:
                store.delete_key(before)
                store.delete_key(f"{before}/state")
        timeout = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        pause, begun = 0.0005, time.monotonic()
        looked = begun
        while not store.check([f"{key}/state"]):
            for section in self._sections:
                if store.check([f"{section}/failed"]):
                    # Unless it has just been opened: others may be in the collective already.
                    store.compare_set(f"{key}/state", "", store.get(f"{section}/failed").decode())
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                failed_collectives.refuse_ended(dist.get_process_group_ranks(group), name)
            if now - begun > timeout.total_seconds():
                raise dist.DistError(f"timed out while ranks of {group.group_name} begin a {name}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        state = store.get(f"{key}/state").decode()
        if state != OPEN:
            raise PeerError(state)


_gates = _Gates()


@contextmanager
def entered_together() -> Iterator[None]:
    """Let no rank wait in a collective of this section for one that has failed in it.

    Entering is no collective, but all ranks must enter the same sections in the same order.

    Raises:
        PeerError: on the ranks that have not failed, with the error of the first that has.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    with ExitStack() as stack:
        for name in (*OF_OBJECTS, *OF_TENSORS):
            collective = getattr(dist, name)
            if not hasattr(collective, "has_gate"):  # as inside of another section
                stack.callback(setattr, dist, name, collective)
                setattr(dist, name, _gated(collective, name))
        stack.enter_context(_gates.section())
        yield


@cache
def _gated(collective: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of torch.distributed with a gate before it."""
    signature = inspect.signature(collective)

    @wraps(collective)
    def enter(*args: Any, **kwargs: Any) -> Any:
        group = signature.bind(*args, **kwargs).arguments.get("group")
        world = dist.group.WORLD
        if world is not None and (name in OF_OBJECTS or group in (None, world)):
            _gates.enter(name, world if group is None else group)
        return collective(*args, **kwargs)

    vars(enter)["has_gate"] = True
    return enter


def _store() -> Store:
    return PrefixStore("gates", dist.distributed_c10d._get_default_store())
