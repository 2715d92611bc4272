# SPDX-License-Identifier: Apache-2.0
"""Storage of flat buffers is freed only after its last reader."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.fsdp.engine.buffer import FlatBuffer, Storage
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import Pending
from megatron_fsdp import fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock
from tests.support.fsdp.reference import Ranks
from tests.support.fsdp.watched_memory import Deep, train_deep


def storages_of(operands: Iterable[Any]) -> set[int]:
    """Return the storages of tensors in nested sequences."""
    found = set()
    for each in operands if isinstance(operands, (tuple, list)) else ():
        if isinstance(each, Tensor):
            # The storage object itself: its address is 0 once it is freed.
            found.add(each.untyped_storage()._cdata)
        elif each is not None:
            found |= storages_of(each)
    return found


@contextmanager
def watching_order(seen: list[int]) -> Iterator[None]:
    """Fail where storage is freed that a collective still uses.

    `seen` records the number of collectives under way at every release.
    """
    users: dict[int, set[int]] = {}

    def watched(name: str) -> Callable[..., Pending]:
        original = getattr(Communicator, name)

        def call(self: Communicator, *operands: Any) -> Pending:
            pending = original(self, *operands)
            users[id(pending)] = storages_of(operands)
            kept.append(pending)  # so that no other takes its id
            return pending

        return call

    wait, free = Pending.wait, Storage.free
    kept: list[Pending] = []

    def watched_wait(self: Pending) -> None:
        wait(self)
        users.pop(id(self), None)

    def watched_free(storage: Storage, buffer: FlatBuffer) -> None:
        memory = buffer.flat.untyped_storage()._cdata
        assert not any(memory in storages for storages in users.values())
        seen.append(len(users))
        free(storage, buffer)

    names = (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "reduce_scatter_outer",
        "all_reduce_outer",
    )
    with (
        patch.multiple(Communicator, **{name: watched(name) for name in names}),
        patch.object(Pending, "wait", watched_wait),
        patch.object(Storage, "free", watched_free),
    ):
        yield


def watch_releases(level: int) -> list[int]:
    model = fully_shard_model(
        Deep(), shard_mesh(), fsdp_unit_modules=[ResidualBlock], zero_dp_strategy=level
    )
    seen: list[int] = []
    with watching_order(seen):
        for _ in range(2):
            train_deep(model)
        with torch.no_grad():
            model(torch.randn(BATCH, WIDTH))
    return seen


def test_storage_is_freed_only_after_its_last_reader_was_waited_for(ranks: Ranks) -> None:
    for level in (2, 3):
        for seen in ranks(2, watch_releases, level):
            assert len(seen) > 10
            assert level == 2 or max(seen) >= 1  # others are under way meanwhile
