# SPDX-License-Identifier: Apache-2.0
"""Bytes that one step sends and copies, pages that it touches anew, and what outlives it."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch

from benchmarks.comparison.measures import count_step
from megatron.fsdp import trace
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.observe import GATHER
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd

NUM_LAYERS = 6
WIDTH = 64


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layer(width) for _ in range(NUM_LAYERS)]
    return nn.Sequential(nn.Linear(width, width), *layers, nn.LayerNorm(width)).to(dtype)


def sharded(
    level: int, width: int = WIDTH, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = build(width, dtype)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return fully_shard(
        module,
        optimizer,
        shard_mesh(),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=level,
        **settings,
    )


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: int = 1,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], None]:
    x = torch.randn(3, width, dtype=dtype)

    def step() -> None:
        for number in range(microbatches):
            is_last = number == microbatches - 1
            with nullcontext() if is_last else model.no_sync():
                model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def bytes_of_a_step(level: int, microbatches: int) -> tuple[float, float, int]:
    """Return the bytes that a step sends and copies, and those of all all-gathers."""
    model, optimizer = sharded(level)
    step = step_of(model, optimizer, microbatches)
    for _ in range(2):
        step()
    counts = count_step(step)
    with trace.record() as recorder:
        step()
    assert counts["collectives"] == len(recorder.collectives)
    gathered = sum(entry.num_bytes for entry in recorder.collectives if entry.track == GATHER)
    return counts["wire MB"] * 1e6, counts["copied MB"] * 1e6, gathered


@pytest.mark.always("1-3-*", "2-1-*", "2-3-*")
@pytest.mark.parametrize(
    ("world_size", "level", "microbatches"),
    [
        *((1, level, microbatches) for level, microbatches in ((0, 4), (3, 1))),
        *((2, level, microbatches) for level, microbatches in ((0, 1), (1, 4), (2, 4), (3, 4))),
        *((4, level, microbatches) for level, microbatches in ((1, 1), (3, 1))),
    ],
)
def test_a_step_sends_and_copies_little_more_than_it_must(
    ranks: Ranks, world_size: int, level: int, microbatches: int
) -> None:
    weights, layer = num_bytes(build()), num_bytes(Layer(WIDTH))
    # At level 3 the last layer and what is beside the layers stay gathered for backward.
    freed = (NUM_LAYERS - 1) * layer
    gathers = (0, weights, weights, microbatches * (weights + freed))[level]
    reductions = microbatches if level >= 2 else 1
    share = (world_size - 1) / world_size
    # An all-reduce sends as much as a reduce-scatter and an all-gather.
    sent = share * (gathers + reductions * weights * (2 if level == 0 else 1))
    # Gradients are copied once, and added after that: into the gradient shard if it is the whole
    # gradient, otherwise into buffers, which reductions free.
    copied = weights * (1 if world_size == 1 else reductions)
    for wire_bytes, copied_bytes, gathered in ranks(
        world_size, bytes_of_a_step, level, microbatches
    ):
        assert sent <= wire_bytes <= 1.05 * sent
        # An all-gather copies the shard of its own rank to its place, if it is not there.
        own = gathered / world_size if level == 3 else 0
        assert copied <= copied_bytes <= 1.05 * copied + own


def page_faults(step: Callable[[], None]) -> int:
    """Return how many pages two steps touch anew, after two others."""
    for _ in range(2):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def return_freed_memory_beyond(num_bytes: int) -> None:
    """Make glibc return freed memory of more than so many bytes to the system, always.

    By default the bound grows with what was freed before, so what is counted would depend on the
    tests that ran in this process. See ``mallopt(3)``.
    """
    trim_threshold, mmap_threshold = -1, -3
    for option in (trim_threshold, mmap_threshold):
        assert ctypes.CDLL(None).mallopt(option, num_bytes)


def page_faults_of_both() -> tuple[int, int]:
    return_freed_memory_beyond(128 << 10)  # the initial bound
    try:
        return page_faults_of_ours(), page_faults_of_torch()
    finally:
        return_freed_memory_beyond(32 << 20)  # the largest that it grows to


WIDE = 256
"""Makes a layer of 2 MB."""


def page_faults_of_ours() -> int:
    return page_faults(step_of(*sharded(3, WIDE, fsdp_double_buffer=True), width=WIDE))


def page_faults_of_torch() -> int:
    module = build(WIDE)
    for layer in module[1:-1]:
        fully_shard_by_torch(layer, mesh=shard_mesh())
    fully_shard_by_torch(module, mesh=shard_mesh())
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return page_faults(step_of(module, optimizer, width=WIDE))


@pytest.mark.exhaustive
def test_with_memory_slots_a_step_touches_at_most_a_third_of_the_new_pages_of_fsdp2(
    ranks: Ranks,
) -> None:
    for ours, those_of_torch in ranks(2, page_faults_of_both):
        assert ours <= those_of_torch / 3


def tensors_alive() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]


def bytes_beside(others: list[torch.Tensor]) -> int:
    """Return the bytes of the storages of all tensors that are alive, but for those of others."""
    storages = {}
    for each in tensors_alive():
        if each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for each in others:
        if each.device.type == "cpu":
            storages.pop(each.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def bytes_that_outlive_a_step(level: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of all new tensors after a step, and after a backward that follows.

    Those of before are held: what other jobs have left may be freed meanwhile.
    """
    before = tensors_alive()
    model, optimizer = sharded(level, dtype=dtype)
    step = step_of(model, optimizer, dtype=dtype)
    for _ in range(2):
        step()
    after = bytes_beside(before)
    model(torch.randn(3, WIDTH, dtype=dtype)).sum().backward()
    return after, bytes_beside(before)


@pytest.mark.always("bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_and_optimizer_state_outlive_a_step_and_nothing_else(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    shard = num_bytes(build()) / 2  # fp32
    for after_step, after_backward in ranks(2, bytes_that_outlive_a_step, 3, dtype):
        assert 3 * shard <= after_step <= 1.05 * 3 * shard
        assert 4 * shard <= after_backward <= 1.05 * 4 * shard


def halve_and_accumulate(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a backward that were halved, and those of another added to them."""
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    model(x).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@on_ranks(2)
def test_gradients_accumulate_onto_those_that_the_user_has_changed() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(TanhLayer(), TanhLayer()).bfloat16()
    for precision in (MixedPrecisionPolicy(), MixedPrecisionPolicy(None)):
        torch.manual_seed(0)
        module = nn.Sequential(TanhLayer(), TanhLayer()).bfloat16()
        model, _ = shard_with_sgd(
            module, fsdp_unit_modules=[TanhLayer], mixed_precision_policy=precision
        )
        plain.zero_grad()
        for ours, expected in zip(halve_and_accumulate(model), halve_and_accumulate(plain)):
            torch.testing.assert_close(full_tensor(ours).bfloat16(), expected)
