# SPDX-License-Identifier: Apache-2.0
"""Records of the collectives, streams and dtypes that a model uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.device import CpuStreams, Pending


@contextmanager
def watching_collectives() -> Iterator[list[tuple[str, Any, Any]]]:
    """Record name, group and operation of every gather and reduction."""
    calls: list[tuple[str, Any, Any]] = []
    gather, scatter = collectives._all_gather_single, collectives._reduce_scatter_single

    def watched_gather(full: Tensor, part: Tensor, group: Any, async_op: bool) -> Any:
        calls.append(("gather", group, None))
        return gather(full, part, group=group, async_op=async_op)

    def watched_scatter(part: Tensor, full: Tensor, op: Any, group: Any, async_op: bool) -> Any:
        calls.append(("reduce", group, op))
        return scatter(part, full, op=op, group=group, async_op=async_op)

    with patch.multiple(
        collectives, _all_gather_single=watched_gather, _reduce_scatter_single=watched_scatter
    ):
        yield calls


@contextmanager
def watching_dtypes() -> Iterator[list[torch.dtype]]:
    """Record the dtypes in which gradients travel."""
    dtypes: list[torch.dtype] = []
    scatter = collectives._reduce_scatter_single

    def watched(part: Tensor, full: Tensor, **options: Any) -> Any:
        dtypes.append(full.dtype)
        return scatter(part, full, **options)

    with patch.object(collectives, "_reduce_scatter_single", watched):
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
    reduce_scatter, all_reduce = collectives._reduce_scatter_single, dist.all_reduce

    def watched_reduce_scatter(output: Tensor, tensor: Tensor, **options: Any) -> Any:
        dtypes.append(tensor.dtype)
        return reduce_scatter(output, tensor, **options)

    def watched_all_reduce(tensor: Tensor, **options: Any) -> Any:
        dtypes.append(tensor.dtype)
        return all_reduce(tensor, **options)

    with (
        patch.object(collectives, "_reduce_scatter_single", watched_reduce_scatter),
        patch.object(dist, "all_reduce", watched_all_reduce),
    ):
        yield dtypes
