# SPDX-License-Identifier: Apache-2.0
"""What is gathered and accumulated at any time: the unit in use and a window of one unit; nothing afterwards.

Bytes are counted at every allocation and release of the engine's storages, embedding, final norm
and head included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import MegatronFSDP, fully_shard_model
from megatron.fsdp.engine import device
from megatron.fsdp.engine.gradients import GroupGradients
from tests.fsdp.models import BATCH, WIDTH, Block, Stack
from tests.fsdp.reference import loss_of, shard_mesh

Ranks = Callable[..., list[Any]]
NUM_BLOCKS = 6


class Deep(Stack):
    """A large embedding, six equal units, a final norm and a large head; with or without activation checkpointing."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, 301), nn.Linear(301, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 403))
        self.recompute = recompute

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
                if self.recompute
                else block(x)
            )
        return x


def stored(tensor: Tensor | None) -> int:
    """Bytes that the storage of a tensor holds now."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


@dataclass
class Sample:
    """What is alive: units with gathered weights, units with a buffer of local gradients, and all bytes of both kinds."""

    gathered: list[str]
    with_gradients: list[str]
    gathered_bytes: int
    gradient_bytes: int
    bytes: int


def look_at(model: MegatronFSDP) -> Sample:
    def names(is_alive: Callable[[Any], int]) -> list[str]:
        return [unit.name for unit in model._units if any(map(is_alive, unit.groups))]

    tensors = [
        tensor
        for group in model.groups
        for tensor in (
            *(group.compute.flat, group.compute_shard, group.main_shard, local_gradients(group)),
            *(group.gradients._grad_sum._total, group.gradients._inner_sum._total),
        )
    ]
    tensors += [parameter.grad for group in model.groups for parameter in group.parameters]
    storages = {
        tensor.untyped_storage().data_ptr(): stored(tensor)
        for tensor in tensors
        if tensor is not None
    }
    return Sample(
        names(lambda group: stored(group.compute.flat)),
        names(lambda group: stored(local_gradients(group))),
        sum(stored(group.compute.flat) for group in model.groups),
        sum(stored(local_gradients(group)) for group in model.groups),
        sum(storages.values()),
    )


def local_gradients(group: Any) -> Tensor | None:
    return group.gradients._local.flat if group.gradients._local is not None else None


@contextmanager
def watching(model: MegatronFSDP) -> Iterator[list[Sample]]:
    """A sample after every change of storage, and wherever autograd has left gradients on the parameters of a unit."""
    samples: list[Sample] = []
    originals = device.allocate, device.free
    accumulate = GroupGradients.accumulate

    def look_and_accumulate(gradients: GroupGradients) -> None:
        samples.append(look_at(model))
        accumulate(gradients)

    def watched(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def change_and_look(tensor: Tensor) -> None:
            change(tensor)
            samples.append(look_at(model))

        return change_and_look

    device.allocate, device.free = map(watched, originals)
    GroupGradients.accumulate = look_and_accumulate
    try:
        yield samples
    finally:
        device.allocate, device.free = originals
        GroupGradients.accumulate = accumulate


def build(level: int, recompute: str = "", **settings: Any) -> MegatronFSDP:
    return fully_shard_model(
        Deep(recompute), shard_mesh(), fsdp_unit_modules=[Block], zero_dp_strategy=level, **settings
    )


def train(model: MegatronFSDP) -> None:
    """Two microbatches: below level 2 whole gradients wait for the second one."""
    with model.no_sync():
        loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    model.zero_grad()


def peak_in_units(samples: list[Sample], what: str) -> int:
    """Units alive at once."""
    return max(len(getattr(sample, what)) for sample in samples)


def watch_level_3(recompute: str, overlap: bool) -> None:
    settings = {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    model = build(3, recompute, **settings)
    nothing = Sample([], [], 0, 0, 0)
    window = 1 if overlap else 0
    sizes = [sum(group.compute.flat.numel() * 4 for group in unit.groups) for unit in model._units]
    two_units = max(left + right for left, right in pairwise(size for size in sizes if size))
    for number in range(3):  # the first pass has no recorded order, the second one has
        assert look_at(model).gathered == nothing.gathered
        with watching(model) as samples, torch.no_grad():
            model(torch.randn(BATCH, WIDTH))
        assert 1 <= peak_in_units(samples, "gathered") <= 1 + window
        assert look_at(model).gathered == nothing.gathered

        with watching(model) as samples:
            output = model(torch.randn(BATCH, WIDTH))
        assert 1 <= peak_in_units(samples, "gathered") <= 1 + window
        assert look_at(model).gathered == nothing.gathered

        with watching(model) as samples:
            loss_of(output).backward()
        # A unit begins its backward before the one above it is freed, so two are alive even without
        # a window.
        assert 1 <= peak_in_units(samples, "gathered") <= 2
        assert max(sizes) <= max(sample.gathered_bytes for sample in samples) <= two_units
        # Buffers of gradients are made in the first backward, where nothing watches yet.
        assert (
            (max(sizes) if number else 0)
            <= max(sample.gradient_bytes for sample in samples)
            <= two_units
        )
        assert peak_in_units(samples, "with_gradients") <= 1 + window
        left = look_at(model)
        assert (left.gathered, left.with_gradients) == (nothing.gathered, nothing.with_gradients)
        assert all(
            parameter.grad is None for group in model.groups for parameter in group.parameters
        )
        model.zero_grad()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize(
    "recompute", ["", "reentrant", "non_reentrant"], ids=["plain", "reentrant", "non_reentrant"]
)
def test_level_3_gathers_one_unit_and_a_window(ranks: Ranks, recompute: str, overlap: bool) -> None:
    ranks(2, watch_level_3, recompute, overlap)


def watch_hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for outer in (0, 1):
        model = fully_shard_model(
            Deep(),
            mesh,
            "inner",
            "outer",
            fsdp_unit_modules=[Block],
            outer_dp_sharding_strategy=outer,
        )
        train(model)
        with watching(model) as samples:
            train(model)
        assert peak_in_units(samples, "gathered") == 2
        assert peak_in_units(samples, "with_gradients") in (1, 2)
        assert (look_at(model).gathered, look_at(model).with_gradients) == ([], [])
        assert all(
            group.gradients._inner_sum._total is None for group in model.groups
        )  # given back after the last microbatch


def test_hybrid_sharding_gathers_one_unit_and_a_window(ranks: Ranks) -> None:
    ranks(4, watch_hybrid)


def watch_level_2() -> None:
    model = build(2)
    for _ in range(2):
        with watching(model) as samples:
            train(model)
        assert peak_in_units(samples, "with_gradients") in (1, 2)
        assert look_at(model).with_gradients == []


def test_level_2_holds_the_gradients_of_one_unit_and_a_window(ranks: Ranks) -> None:
    ranks(2, watch_level_2)


def peak_bytes() -> list[int]:
    """At each level, in the steady state."""
    peaks = []
    for level in range(4):
        model = build(level)
        train(model)
        with watching(model) as samples:
            train(model)
        peaks.append(max(sample.bytes for sample in samples))
    return peaks


def test_every_level_peaks_below_the_one_before(ranks: Ranks) -> None:
    for peaks in ranks(4, peak_bytes):
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == 4, peaks


def step_after_step() -> list[int]:
    """Bytes alive between steps."""
    model = build(3)
    alive = []
    for _ in range(4):
        train(model)
        alive.append(look_at(model).bytes)
    return alive


def test_nothing_piles_up_over_steps(ranks: Ranks) -> None:
    for alive in ranks(2, step_after_step):
        assert len(set(alive[1:])) == 1
