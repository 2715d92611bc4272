# SPDX-License-Identifier: Apache-2.0
"""Records of the collectives, streams and dtypes that a model uses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.device import CpuStreams, Pending


@contextmanager
def watching_collectives() -> Iterator[list[tuple[str, Any, Any]]]:
    """Record name, group and operation of every gather and reduction."""
    calls: list[tuple[str, Any, Any]] = []
    gather, scatter = collectives._all_gather, collectives._reduce_scatter

    def watched_gather(fulls: Sequence[Tensor], shards: Sequence[Tensor], group: Any) -> Any:
        calls.append(("gather", group, None))
        return gather(fulls, shards, group)

    def watched_scatter(full: Tensor, shard: Tensor, group: Any, operation: Any) -> Any:
        calls.append(("reduce", group, operation))
        return scatter(full, shard, group, operation)

    with patch.multiple(collectives, _all_gather=watched_gather, _reduce_scatter=watched_scatter):
        yield calls


@contextmanager
def watching_dtypes() -> Iterator[list[torch.dtype]]:
    """Record the dtypes in which gradients travel."""
    dtypes: list[torch.dtype] = []
    scatter = collectives._reduce_scatter

    def watched(full: Tensor, *arguments: Any) -> Any:
        dtypes.append(full.dtype)
        return scatter(full, *arguments)

    with patch.object(collectives, "_reduce_scatter", watched):
        yield dtypes


@contextmanager
def watching_streams() -> Iterator[list[tuple[str, int]]]:
    """Record, in order, all launches and waits."""
    events: list[tuple[str, int]] = []
    launch, wait = CpuStreams.launch, Pending.wait
    streams: dict[int, str] = {}
    kept: list[Pending] = []

    def watched_launch(self: CpuStreams, stream: str, *collectives_: Any) -> Pending:
        pending = launch(self, stream, *collectives_)
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
    reduce_scatter, all_reduce = collectives._reduce_scatter, collectives._all_reduce

    def watched_reduce_scatter(full: Tensor, *arguments: Any) -> Any:
        dtypes.append(full.dtype)
        return reduce_scatter(full, *arguments)

    def watched_all_reduce(tensor: Tensor, *arguments: Any) -> Any:
        dtypes.append(tensor.dtype)
        return all_reduce(tensor, *arguments)

    with patch.multiple(
        collectives, _reduce_scatter=watched_reduce_scatter, _all_reduce=watched_all_reduce
    ):
        yield dtypes
