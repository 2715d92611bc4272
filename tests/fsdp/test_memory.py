# SPDX-License-Identifier: Apache-2.0
"""No more is whole at a time than a unit and a window of prefetching, at every level."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock
from tests.support.fsdp.reference import Ranks, loss_of, on_ranks
from tests.support.fsdp.watched_memory import (
    Deep,
    Sample,
    build_deep,
    look_at,
    peak_bytes,
    peak_in_units,
    stored,
    train_deep,
    watching,
)


@pytest.mark.always("plain-overlap", "non_reentrant-overlap")
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize(
    "recompute", ["", "reentrant", "non_reentrant"], ids=["plain", "reentrant", "non_reentrant"]
)
@on_ranks(2)
def test_level_3_gathers_one_unit_and_a_window(recompute: str, overlap: bool) -> None:
    settings = {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    model = build_deep(3, recompute, **settings)
    nothing = Sample([], [], 0, 0, 0)
    window = 1 if overlap else 0
    sizes = [
        sum(group.compute.flat.numel() * 4 for group in unit.groups) for unit in model._units[1:]
    ]
    assert sum(group.compute.flat.numel() * 4 for group in model._units[0].groups) < max(sizes)
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
        # The last unit is not freed before its backward, once the order is known.
        assert look_at(model).gathered == (["head.1"] if overlap else [])

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
        for group in model.groups:
            assert all(parameter.grad is None for parameter in group.parameters)
        model.zero_grad()


@pytest.mark.exhaustive
@on_ranks(4)
def test_hybrid_sharding_gathers_one_unit_and_a_window() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for outer in (0, 1):
        model = fully_shard_model(
            Deep(),
            mesh,
            "inner",
            "outer",
            fsdp_unit_modules=[ResidualBlock],
            outer_dp_sharding_strategy=outer,
        )
        train_deep(model)
        with watching(model) as samples:
            train_deep(model)
        assert peak_in_units(samples, "gathered") == 2
        assert peak_in_units(samples, "with_gradients") in (1, 2)
        assert (look_at(model).gathered, look_at(model).with_gradients) == ([], [])
        assert all(
            stored(group.gradients._inner_sum._total) == 0 for group in model.groups
        )  # given back after the last microbatch


@on_ranks(2)
def test_level_2_keeps_the_gradients_of_one_unit_and_a_window() -> None:
    model = build_deep(2)
    for _ in range(2):
        with watching(model) as samples:
            train_deep(model)
        assert peak_in_units(samples, "with_gradients") in (1, 2)
        assert look_at(model).with_gradients == []


def test_every_level_peaks_below_the_one_before(ranks: Ranks) -> None:
    for peaks in ranks(4, peak_bytes):
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == 4, peaks


@on_ranks(2)
def test_nothing_piles_up_over_steps() -> None:
    model = build_deep(3)
    alive = []
    for _ in range(4):
        train_deep(model)
        alive.append(look_at(model).bytes)
    assert len(set(alive[1:])) == 1, alive


class Prompt(torch.nn.Module):
    """A module that returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight


class WithPrompt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.block = Prompt(), ResidualBlock()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block(x + self.prompt()), self.prompt.weight


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_hooks_do_not_pile_up_on_a_parameter_that_is_returned(level: int) -> None:
    """Train a parameter that a unit and the root return."""
    model = fully_shard_model(
        WithPrompt(), shard_mesh(), fsdp_unit_modules=[ResidualBlock], zero_dp_strategy=level
    )
    for _ in range(3):
        output, _ = model(torch.randn(BATCH, WIDTH))
        output.sum().backward()
    (compute,) = [each.compute for each in model.sharded_params if each.name == "prompt.weight"]
    assert not compute._backward_hooks


def gradients_without_units(level: int) -> tuple[int, int, int]:
    model = fully_shard_model(Deep(), shard_mesh(), zero_dp_strategy=level)
    with watching(model) as samples:
        train_deep(model)
    return (
        peak_in_units(samples, "with_gradients"),
        max(sample.bytes for sample in samples),
        len(model._units),
    )


@pytest.mark.exhaustive
def test_level_2_stays_below_level_1_with_units_and_without(ranks: Ranks) -> None:
    for (whole_buffers, bytes_1, num_units), (buffers, bytes_2, _) in zip(
        ranks(2, gradients_without_units, 1), ranks(2, gradients_without_units, 2)
    ):
        assert buffers <= 2 < whole_buffers < num_units
        assert bytes_2 < bytes_1


ENDS = {"embed.0", "embed.1", "head.1"}


@on_ranks(2)
def test_embedding_and_output_layer_are_freed_as_any_unit() -> None:
    model = fully_shard_model(Deep(), shard_mesh(), fsdp_unit_modules=[ResidualBlock])
    train_deep(model)
    with watching(model) as samples:
        output = model(torch.randn(BATCH, WIDTH))
    assert set().union(*(sample.gathered for sample in samples)) >= ENDS
    assert not any(
        ENDS & set(sample.gathered) for sample in samples if "blocks.3" in sample.gathered
    )
    assert look_at(model).gathered == ["head.1"]
    with watching(model) as samples:
        loss_of(output).backward()
    assert not any(
        ENDS & set(sample.gathered) for sample in samples if "blocks.3" in sample.gathered
    )
    assert look_at(model).gathered == []


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(level: int) -> None:
    model = build_deep(level, "", overlap_param_gather=True)
    loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    left = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model._schedule)]
    del model
    gc.collect()
    assert all(each() is None for each in left)
