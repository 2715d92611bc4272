# SPDX-License-Identifier: Apache-2.0
"""Memory slots are registered with NCCL in windows, or locally where there are none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.backends import memory_slots, slot_memory
from megatron.fsdp.backends.slot_memory import NcclMemory
from megatron.fsdp.config import memory as memory_settings
from megatron.fsdp.config.memory import Memory, problems_of_nccl
from tests.fsdp.test_double_buffer import NUM_LAYERS, sharded_chain, train
from tests.support.fsdp.reference import Ranks
from tests.support.fsdp.wrong_calls import message_of


class PlainBackend:
    """A backend that keeps registered pools; it refuses windows, or everything."""

    mem_allocator = None

    def __init__(self, windows: Exception | None = None, local: Exception | None = None):
        self._errors = {True: windows, False: local}
        self.pools: list[tuple[Any, bool]] = []

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        if error := self._errors[symm]:
            raise error
        self.pools.append((pool, symm))

    def deregister_mem_pool(self, pool: Any) -> None:
        kept = [each for each in self.pools if each[0] is not pool]
        if len(kept) == len(self.pools):
            raise RuntimeError("the pool is not registered")
        self.pools = kept


def memory_over(backends: Sequence[PlainBackend], is_symmetric: bool = True) -> NcclMemory:
    groups = [mock.Mock(**{"_get_backend.return_value": each}) for each in backends]
    return NcclMemory(groups, torch.device("cpu"), is_symmetric)


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools be objects without memory, and ranks agree without messages."""
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: mock.Mock())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    monkeypatch.setattr(memory_slots, "agree", lambda problems, groups: list(problems))
    monkeypatch.setattr(slot_memory, "connect", lambda groups, device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def test_pools_are_registered_once_and_deregistered_with_the_model() -> None:
    backends = [PlainBackend(), PlainBackend()]
    memory = memory_over(backends)
    assert memory.allocate([]) == []
    assert [each.numel() for each in memory.allocate([8, 4])] == [8, 4]
    for _ in range(2):
        assert memory.register() == []
    assert [[symm for _, symm in each.pools] for each in backends] == [[True], [True]]
    del memory
    gc.collect()
    assert [each.pools for each in backends] == [[], []]


def test_torchs_cache_is_empty_when_slots_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a pool torch's allocator does not give back memory that it has cached."""
    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("cache"))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext(steps.append("pool")))
    memory_over([PlainBackend()]).allocate([8])
    assert steps == ["cache", "pool"]


def test_without_windows_slots_are_registered_locally_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = PlainBackend(windows=RuntimeError("no NVLink"))
    memory = memory_over([backend])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            memory.allocate([8])
            assert memory.register() == []
    assert [symm for _, symm in backend.pools] == [False, False]
    (message,) = caplog.messages
    assert "registered locally" in message and "no NVLink" in message


def test_local_registration_makes_no_windows() -> None:
    backend = PlainBackend()
    memory = memory_over([backend], is_symmetric=False)
    memory.allocate([8])
    assert memory.register() == []
    assert [symm for _, symm in backend.pools] == [False]


def test_a_refusal_is_told_as_one_and_leaves_nothing_registered() -> None:
    good, bad = PlainBackend(), PlainBackend()
    memory = memory_over([good, bad], is_symmetric=False)
    memory.allocate([8])
    assert memory.register() == []
    bad._errors[False] = RuntimeError("unhandled system error\nat some place")
    memory.allocate([8])
    (problem,) = memory.register()
    assert problem.startswith("NCCL cannot register the memory slots (unhandled system error)")
    memory.withdraw()
    assert not good.pools


def test_everything_is_deregistered_before_groups_are_destroyed() -> None:
    backend = PlainBackend()
    memory = memory_over([backend])
    memory.allocate([8])
    memory.register()
    slot_memory.deregister_all()
    assert not backend.pools


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_found_in_both_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "expandable_segments: True")
    (problem,) = problems_of_nccl(torch.device("cuda"))
    assert problem.endswith(f"remove expandable_segments from {name}")


def train_where_rank_1_is_refused() -> str:
    """Register slots where the backend of the second rank refuses; return the error."""
    refuses = RuntimeError("unhandled system error") if dist.get_rank() == 1 else None
    backend = PlainBackend(local=refuses)
    with (
        mock.patch.object(memory_settings, "problems_of_nccl", return_value=[]),
        mock.patch("megatron.fsdp.module.checks.problems_of_nccl", return_value=[]),
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *args: backend),
        mock.patch.object(torch.cuda, "MemPool"),
        mock.patch.object(torch.cuda, "use_mem_pool", lambda pool: nullcontext()),
    ):
        model, optimizer = sharded_chain(nccl_ub=True, disable_symmetric_registration=True)
        message = message_of(RuntimeError, train, model, optimizer, range(NUM_LAYERS))
        assert not backend.pools and not any(model.memory_slots.values())
    return message


def test_a_refusal_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    first, second = ranks(2, train_where_rank_1_is_refused)
    assert first == second and "NCCL cannot register the memory slots" in first


def test_windows_need_the_slots_of_all_ranks() -> None:
    with mock.patch.object(memory_settings, "problems_of_nccl", return_value=[]):
        policy = Memory(registers=True, allows_own_storage=True)
    fails = mock.Mock(side_effect=RuntimeError("no memory"))
    slots = memory_slots.MemorySlots("weights", False, policy, fails)
    slots.occupy(mock.Mock(num_bytes=8, is_allocated=False))
    problem = slots.assign()
    assert problem is not None and "nccl_ub registers windows" in problem
