# SPDX-License-Identifier: Apache-2.0
"""Exchange: sends and receives between the ranks of a group that start together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fsdp.backends.messages import FIRST_TAG, PeerMessages
from megatron.fsdp.engine.device import Pending, Work
from megatron.fsdp.engine.observe import OTHER, observed

# The messages between two ranks match in the order of their issue, which is that of the matrices.
# No other messages have this tag.
_TAG = FIRST_TAG + 2  # after those of the transport over gloo

Message = tuple[torch.Tensor, int]  # a tensor, and the rank at the other end


class Exchange:
    """Sends and receives, in an order on which the two ranks of each message agree."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._sends: list[Message] = []
        self._receives: list[Message] = []
        self._after: list[Callable[[], object]] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor, which must not change until all messages have arrived."""
        self._sends.append((tensor, rank))

    def receive(
        self,
        tensor: torch.Tensor,
        rank: int,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Receive a contiguous tensor.

        Args:
            tensor: the memory to receive into.
            rank: the sender, numbered in the group.
            after: called when all messages of the exchange have arrived.
        """
        self._receives.append((tensor, rank))
        if after is not None:
            self._after.append(after)

    def start(self) -> Pending:
        """Start all messages; every rank of the group must do so, also without messages."""
        launch = observed(
            kind=OTHER,
            name="exchange",
            operands=(),
            group=self._group,
            collective=self._launch,
        )
        work = launch(True)

        def wait() -> None:
            assert work is not None
            work.wait()
            for after in self._after:
                after()

        return Pending(wait)

    def _launch(self, asynchronous: bool) -> Work:
        group = self._group
        tensors = [tensor for tensor, _ in self._receives + self._sends]
        if not any(tensor.is_cuda for tensor in tensors):
            messages = PeerMessages(group, _TAG)
            for tensor, rank in self._receives:
                messages.receive(tensor, rank)
            for tensor, rank in self._sends:
                messages.send(tensor, rank)
            return messages
        # NCCL runs the messages of one launch side by side, and those of two one after the other.
        device = tensors[0].device
        with _coalescing_manager(group, device, async_ops=True) as coalesced:
            for tensor, rank in self._receives:
                group.recv([tensor], rank, _TAG)
            for tensor, rank in self._sends:
                group.send([tensor], rank, _TAG)
            work: Work = coalesced
        return work
