# SPDX-License-Identifier: Apache-2.0
"""Sections that all ranks leave when one fails, whatever collectives they wait in.

[Note: gates] Megatron-Core and torch communicate between steps that can fail on one rank alone. For
example, the first rank cannot write ``common.pt`` to a full disk and raises, while all others wait
for it in their next collective. Inside of a section, every collective has a gate before it, in the
store of the process group. The ranks pass when all ranks of the group have reached it, and then all
of them enter the collective. If a rank has failed, no rank enters, and each raises the error of
that one. So no rank is left behind in a collective, and the groups can be used afterwards.

A gate costs each rank two short calls to the store. Collectives of tensors over a part of the ranks
have none: a load has thousands of them, one after the other, without a step between that can fail.
So ranks that agree on texts exchange these, not a tensor with their digest.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron.fsdp.engine import collectives
from megatron.fsdp.trace import failed_collectives
from megatron.mcore_adapter.run.errors import RunError

OF_OBJECTS = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "barrier",
)
"""Collectives of ``torch.distributed`` with a gate for any group."""
OF_TENSORS = ("all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter")
"""Collectives of ``torch.distributed`` with a gate for the group of all ranks."""
OPEN = "open"
"""The state of a gate that all ranks have reached; otherwise its state is the problem of a rank."""
LONGEST_PAUSE = 0.05
"""Seconds between two reads of a gate's state; the first pauses are shorter."""
LOOK_SECONDS = 1.0
"""Seconds between two checks for ranks that have died."""


class PeerError(RunError):
    """The error of another rank, with which this one leaves a section."""


class _Gates:
    """The gates of this process, and the sections that it is in."""

    def __init__(self) -> None:
        self._sections: list[str] = []  # names of the sections, outermost first
        # At each depth, how many sections have begun within the one around them.
        self._num_sections = [0]
        # Section and group -> how many gates this process has passed there.
        self._num_passed: Counter[str] = Counter()
        # Group -> key of its last gate, which is deleted at the next one.
        self._last: dict[str, str] = {}

    @contextmanager
    def section(self) -> Iterator[None]:
        """Begin a section, whose name is "7" or, inside of it, "7.0"."""
        # A rank that fails may leave a section while others still begin sections inside of it, so
        # numbers start at 0 in each section.
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
            PeerError: a rank has failed in a section that this rank is in.
            CollectiveError: the process of a rank has ended.
            DistError: a rank has not come within the timeout of the store.
        """
        store = _store()
        gates = f"{self._sections[-1]}/{group.group_name}"
        key = f"{gates}/{self._num_passed[gates]}"
        state_key = f"{key}/state"
        self._num_passed[gates] += 1
        before = self._last.get(group.group_name)
        self._last[group.group_name] = key
        if store.add(key, 1) == group.size():
            store.compare_set(state_key, "", OPEN)
            if before is not None:
                store.delete_key(before)
                store.delete_key(f"{before}/state")
        timeout = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        pause = 0.0005
        begun = time.monotonic()
        last_check = begun
        while not store.check([state_key]):
            for section in self._sections:
                if store.check([f"{section}/failed"]):
                    problem = store.get(f"{section}/failed").decode()
                    # Has no effect on an open gate: others may be in the collective already.
                    store.compare_set(state_key, "", problem)
            now = time.monotonic()
            if now - last_check > LOOK_SECONDS:
                last_check = now
                failed_collectives.refuse_ended(dist.get_process_group_ranks(group), name)
            if now - begun > timeout.total_seconds():
                raise dist.DistError(f"timed out while ranks of {group.group_name} begin a {name}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        state = store.get(state_key).decode()
        if state != OPEN:
            raise PeerError(state)


_gates = _Gates()


@contextmanager
def entered_together() -> Iterator[None]:
    """Ensure that no rank waits in a collective of the context for one that has failed in it.

    Entering the context is no collective, but all ranks must enter the same ones in the same order.

    Raises:
        PeerError: on the ranks that have not failed, with the error of the first one that has.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    with ExitStack() as stack:
        for name in (*OF_OBJECTS, *OF_TENSORS):
            collective = getattr(dist, name)
            if not hasattr(collective, "has_gate"):  # it has one inside of another section
                stack.callback(setattr, dist, name, collective)
                setattr(dist, name, _gated(collective, name))
        stack.callback(setattr, collectives, "have_equal", collectives.have_equal)
        collectives.have_equal = _never_equal
        stack.enter_context(_gates.section())
        yield


def _never_equal(texts: Sequence[str], group: dist.ProcessGroup | None) -> bool:
    """Return False, so that ranks exchange their texts, which has a gate."""
    return False


@cache
def _gated(collective: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of torch.distributed with a gate before it."""
    signature = inspect.signature(collective)

    @wraps(collective)
    def enter(*args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        if world is not None:
            group = signature.bind(*args, **kwargs).arguments.get("group")
            if group is None:
                group = world
            if name in OF_OBJECTS or group == world:
                _gates.enter(name, group)
        return collective(*args, **kwargs)

    vars(enter)["has_gate"] = True
    return enter


def _store() -> Store:
    return PrefixStore("gates", dist.distributed_c10d._get_default_store())
