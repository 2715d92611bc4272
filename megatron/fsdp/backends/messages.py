# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a group, which live until they have arrived."""

from __future__ import annotations

import sys
from collections import deque
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# [Note: messages that nobody waits for] A work of gloo owns the buffer of its message. If it is
# destroyed before the message is sent, the message is lost, and the peer waits for it forever, as
# does every later collective of the group. That happens to a model that is dropped in the middle of
# a step, and to a collective that has failed while other ranks are still alive. So works outlive a
# collective that nobody waits for, with the tensors that they read and write. The next collective
# of the group with the same tag waits for them first: so no more of them pile up than one model has
# under way, and ranks that run the same collectives cannot wait for one another. They are destroyed
# with the group.
UnderWay = dict[dist.Work, torch.Tensor]
dropped: WeakKeyDictionary[dist.ProcessGroup, dict[int, deque[UnderWay]]] = WeakKeyDictionary()
"""By group and by tag the messages that nobody waits for, in the order of their issue."""

# [Note: sizes in tags] Where a rank runs another collective than its peer, gloo would write a short
# message into a longer buffer, and end the process for a long one. With the size in the tag, such
# messages never match: both ranks wait for the timeout, whose error names what each has begun.
# Tags of collectives begin here, and leave room for the sizes; those of users' messages are small.
FIRST_TAG = 1 << 30
_SIZE_BITS = 28


class PeerMessages:
    """The messages of one collective of a group, which match those of others by tag and size.

    Args:
        group: the process group.
        tag: one of four numbers from ``FIRST_TAG`` on; see [Note: sizes in tags].
    """

    __slots__ = ("_group", "_tag", "_under_way")

    def __init__(self, group: dist.ProcessGroup, tag: int):
        self._group = group
        self._tag = tag
        self._under_way: UnderWay = {}
        if dropped:
            _wait_for_dropped(group, tag)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start to receive a contiguous tensor from a rank of the group."""
        tag = self._tag_of(tensor)
        work: dist.Work = self._group.recv([tensor], rank, tag)
        self._under_way[work] = tensor
        return work

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start to send a contiguous tensor, which must not change until it has arrived."""
        tag = self._tag_of(tensor)
        work: dist.Work = self._group.send([tensor], rank, tag)
        self._under_way[work] = tensor
        return work

    def _tag_of(self, tensor: torch.Tensor) -> int:
        return self._tag + 4 * (tensor.nbytes % (1 << _SIZE_BITS))

    def wait_for(self, work: dist.Work) -> None:
        """Wait for one message."""
        _wait_for(work, self._under_way)

    def wait(self) -> None:
        """Wait for all messages that nobody has waited for yet."""
        _wait_for_all(self._under_way)

    def __del__(self) -> None:
        if self._under_way and not sys.is_finalizing():
            by_tag = dropped.setdefault(self._group, {})
            by_tag.setdefault(self._tag, deque()).append(self._under_way)


def _wait_for(work: dist.Work, under_way: UnderWay) -> None:
    try:
        work.wait()
    except KeyboardInterrupt:
        # Python raises it when the wait is over. A second one would never end.
        if work.is_completed():
            del under_way[work]
        raise
    del under_way[work]


def _wait_for_all(under_way: UnderWay) -> None:
    for work in list(under_way):
        _wait_for(work, under_way)


def _wait_for_dropped(group: dist.ProcessGroup, tag: int) -> None:
    by_tag = dropped.get(group, {})
    waiting = by_tag.get(tag)
    while waiting:
        _wait_for_all(waiting[0])
        waiting.popleft()
    by_tag.pop(tag, None)
    if not by_tag:
        dropped.pop(group, None)
