# SPDX-License-Identifier: Apache-2.0
"""A deep model, and samples of the storage that is alive while it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.engine.buffer import FlatBuffer, Storage
from megatron.fsdp.engine.gradients import GroupGradients
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock, Stack
from tests.support.fsdp.reference import loss_of

NUM_BLOCKS = 6


class Deep(Stack):
    """A large embedding, six equal units, a norm and a large head; perhaps with recomputation."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, 301), nn.Linear(301, WIDTH))
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(NUM_BLOCKS))
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
    """Return the bytes of the storage of a tensor."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


@dataclass
class Sample:
    """The living units: with gathered weights, with local gradients, and their bytes.

    The root's unit, which small modules are merged into, is in use during the whole pass and is not
    listed.
    """

    gathered: list[str]
    with_gradients: list[str]
    gathered_bytes: int
    gradient_bytes: int
    bytes: int


def look_at(model: MegatronFSDP) -> Sample:
    def names(is_alive: Callable[[Any], int]) -> list[str]:
        return [unit.name for unit in model._units[1:] if any(map(is_alive, unit.groups))]

    tensors: list[Tensor | None] = []
    for group in model.groups:
        tensors += (group.compute.flat, group.compute_shard, group.main_shard)
        tensors += (
            local_gradients(group),
            group.gradients._grad_sum._total,
            group.gradients._inner_sum._total,
        )
        tensors += [parameter.grad for parameter in group.parameters]
    storages = {
        tensor.untyped_storage().data_ptr(): stored(tensor)
        for tensor in tensors
        if tensor is not None
    }
    groups_of_units = [*chain.from_iterable(unit.groups for unit in model._units[1:])]
    return Sample(
        names(lambda group: stored(group.compute.flat)),
        names(lambda group: stored(local_gradients(group))),
        sum(stored(group.compute.flat) for group in groups_of_units),
        sum(stored(local_gradients(group)) for group in groups_of_units),
        sum(storages.values()),
    )


def local_gradients(group: Any) -> Tensor | None:
    buffer = group.gradients._buffer
    return buffer.flat if buffer is not None else None


@contextmanager
def watching(model: MegatronFSDP) -> Iterator[list[Sample]]:
    """Take a sample after every change of storage, and before gradients are accumulated."""
    samples: list[Sample] = []
    originals = Storage.allocate, Storage.free
    accumulate = GroupGradients.accumulate

    def look_and_accumulate(gradients: GroupGradients, reduces_now: bool) -> None:
        samples.append(look_at(model))
        accumulate(gradients, reduces_now)

    def watched(change: Callable[..., None]) -> Callable[..., None]:
        def change_and_look(storage: Storage, buffer: FlatBuffer) -> None:
            change(storage, buffer)
            samples.append(look_at(model))

        return change_and_look

    Storage.allocate, Storage.free = map(watched, originals)
    GroupGradients.accumulate = look_and_accumulate
    try:
        yield samples
    finally:
        Storage.allocate, Storage.free = originals
        GroupGradients.accumulate = accumulate


def build_deep(level: int, recompute: str = "", **settings: Any) -> MegatronFSDP:
    return fully_shard_model(
        Deep(recompute),
        shard_mesh(),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        **settings,
    )


def train_deep(model: MegatronFSDP) -> None:
    """Run two microbatches: below level 2 whole gradients wait for the second one."""
    with model.no_sync():
        loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    model.zero_grad()


def peak_in_units(samples: list[Sample], what: str) -> int:
    """Return the most units alive at once."""
    return max(len(getattr(sample, what)) for sample in samples)


def peak_bytes() -> list[int]:
    """Return the peak at each level, in the steady state, with Adam's moments."""
    peaks = []
    for level in range(4):
        module = Deep()
        model, optimizer = fully_shard(
            module,
            torch.optim.Adam(module.parameters()),
            shard_mesh(),
            fsdp_unit_modules=[ResidualBlock],
            zero_dp_strategy=level,
        )
        train_deep(model)
        with watching(model) as samples:
            train_deep(model)
        peaks.append(max(sample.bytes for sample in samples) + bytes_of_moments(optimizer))
    return peaks


def bytes_of_moments(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the storages of Adam's moments, which live from its construction on."""
    moments: list[Tensor] = []
    for state in optimizer.state.values():
        moments += [state[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
    storages = {each.untyped_storage().data_ptr(): stored(each) for each in moments}
    return sum(storages.values())
