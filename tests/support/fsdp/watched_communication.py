# SPDX-License-Identifier: Apache-2.0
"""Records of the collectives, streams and dtypes that a model uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.fsdp.engine import collectives, observe
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import CpuStreams, Pending


@contextmanager
def watching_collectives() -> Iterator[list[tuple[str, Any, Any]]]:
    """Record name, group and operation of every gather and reduction."""
    calls: list[tuple[str, Any, Any]] = []
    observed, scatter = collectives.observed, Communicator._reduce_scatter_over

    def watched(kind: str, name: str, operands: Any, group: Any, collective: Any) -> Any:
        if kind == observe.GATHER:
            calls.append(("gather", group, None))
        return observed(kind, name, operands, group, collective)

    def watched_scatter(self: Communicator, full: Tensor, shard: Tensor, group: Any) -> Any:
        calls.append(("reduce", group, self._operation(full)))
        return scatter(self, full, shard, group)

    with (
        patch.object(collectives, "observed", watched),
        patch.object(Communicator, "_reduce_scatter_over", watched_scatter),
    ):
        yield calls


@contextmanager
def watching_dtypes() -> Iterator[list[torch.dtype]]:
    """Record the dtypes in which gradients travel."""
    dtypes: list[torch.dtype] = []
    scatter = Communicator._reduce_scatter_over

    def watched(self: Communicator, full: Tensor, *arguments: Any) -> Any:
        dtypes.append(full.dtype)
        return scatter(self, full, *arguments)

    with patch.object(Communicator, "_reduce_scatter_over", watched):
        yield dtypes


@contextmanager
def watching_streams() -> Iterator[list[tuple[str, int]]]:
    """Record, in order, all launches and waits."""
    events: list[tuple[str, int]] = []
    launch, wait = CpuStreams.launch, Pending.wait
    streams: dict[int, str] = {}
    kept: list[Pending] = []

    def watched_launch(
        self: CpuStreams, stream: str, *collectives_: Any, **settings: Any
    ) -> Pending:
        pending = launch(self, stream, *collectives_, **settings)
        kept.append(pending)
        streams[id(pending)] = stream
        events.append((stream, len(events)))
        return pending

    def watched_wait(self: Pending) -> None:
        if id(self) in streams:
            events.append(("waited for " + streams.pop(id(self)), len(events)))
        wait(self)

    with (
        patch.object(CpuStreams, "launch", watched_launch),
        patch.object(Pending, "wait", watched_wait),
    ):
        yield events


@contextmanager
def watching_reductions() -> Iterator[list[torch.dtype]]:
    """Record the dtype of everything that travels in a reduction."""
    dtypes: list[torch.dtype] = []
    scatter, reduce = Communicator._reduce_scatter_over, Communicator._all_reduce_over

    def watched_scatter(self: Communicator, full: Tensor, *arguments: Any) -> Any:
        dtypes.append(full.dtype)
        return scatter(self, full, *arguments)

    def watched_reduce(self: Communicator, tensor: Tensor, *arguments: Any) -> Any:
        dtypes.append(tensor.dtype)
        return reduce(self, tensor, *arguments)

    with (
        patch.object(Communicator, "_reduce_scatter_over", watched_scatter),
        patch.object(Communicator, "_all_reduce_over", watched_reduce),
    ):
        yield dtypes
