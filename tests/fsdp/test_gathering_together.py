# SPDX-License-Identifier: Apache-2.0
"""Units of several parameter groups: those sharded over the same ranks are gathered in one launch.

See [Note: one launch for several gathers] in the engine's `collectives.py`.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import trace
from megatron.fsdp.engine.collectives import Communicator, Gather
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.observe import GATHER
from megatron.fsdp.engine.states import WeightState
from megatron.fsdp.trace.recorder import TraceEntry
from megatron_fsdp import fully_shard_model
from tests.fsdp.test_collectives_of_axes import ExpertBlock
from tests.fsdp.test_collectives_per_step import NUM_LAYERS, LanguageModel, both_counts
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.fsdp.side_by_side import plain_backward, shard, train_side_by_side


class AdaptedLayer(nn.Module):
    """A frozen linear layer in a dtype of its own, and two small trained ones beside it (LoRA)."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)
        y = nn.functional.linear(x, weight, bias)
        return x + torch.tanh(y + self.up(self.down(x)))


class AdaptedModel(LanguageModel):
    """A model whose layers have adapters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLayer(8, dtype) for _ in range(NUM_LAYERS))


@pytest.mark.always("2-*")
@pytest.mark.parametrize(
    ("num_microbatches", "dtype"), [(1, torch.float32), (2, torch.bfloat16)], ids=str
)
def test_partly_frozen_layers_have_fewer_collectives_than_in_fsdp2(
    ranks: Ranks, num_microbatches: int, dtype: torch.dtype
) -> None:
    """The frozen weight and the trained ones have buffers of their own; no launch of their own."""
    (ours, theirs), _ = ranks(2, both_counts, num_microbatches, AdaptedModel, dtype)
    gathers = 1 + 2 * NUM_LAYERS - 1
    assert ours == num_microbatches * (gathers + 1 + NUM_LAYERS)
    assert ours < theirs


# ---- numbers


def build_adapted(dtype: torch.dtype) -> nn.Module:
    """Build trained float64 weights around layers whose frozen weights have another dtype."""
    layers = [AdaptedLayer(WIDTH, dtype) for _ in range(3)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 3)).double()
    for layer in layers:
        layer.base.to(dtype)
    return model


def train_adapted(level: int, mesh: str, dtype: torch.dtype, **settings: Any) -> None:
    arguments = Meshes().arguments(mesh)
    device_mesh = arguments.pop("device_mesh")
    train_side_by_side(
        partial(build_adapted, dtype),
        plain_backward,
        level,
        mesh=device_mesh,
        fsdp_unit_modules=[AdaptedLayer],
        **arguments,
        **settings,
    )


@pytest.mark.always("1-flat-*", "3-outer2-*")
@pytest.mark.parametrize(
    ("level", "mesh", "dtype"),
    [
        (0, "flat", torch.float64),
        (1, "flat", torch.bfloat16),
        (2, "outer2", torch.bfloat16),
        (3, "flat", torch.float64),
        (3, "outer2", torch.bfloat16),
    ],
)
def test_partly_frozen_layers_train_as_without_sharding(
    ranks: Ranks, level: int, mesh: str, dtype: torch.dtype
) -> None:
    ranks(4 if mesh == "outer2" else 2, train_adapted, level, mesh, dtype)


@pytest.mark.always("hsdp_optim", "slots")
@pytest.mark.parametrize(
    ("mesh", "settings", "dtype"),
    [
        ("outer2", {"outer_dp_sharding_strategy": 1}, torch.bfloat16),
        ("outer2", {"outer_dp_sharding_strategy": 1}, torch.float64),
        ("gather_group", {}, torch.bfloat16),
        ("flat", {"fsdp_double_buffer": True}, torch.bfloat16),
        ("flat", {"overlap_param_gather": False}, torch.float64),
        ("flat", {"suggested_communication_unit_size": 2000}, torch.bfloat16),
    ],
    ids=["hsdp_optim", "hsdp_optim_alike", "gather_group", "slots", "no_overlap", "bytes_ahead"],
)
def test_partly_frozen_layers_train_with_other_settings(
    ranks: Ranks, mesh: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    ranks(4 if mesh == "outer2" else 2, train_adapted, 3, mesh, dtype, **settings)


# ---- launches


def gathers_of(step: Callable[[], object]) -> list[TraceEntry]:
    with trace.record() as recorder:
        step()
    return [entry for entry in recorder.entries if entry.track == GATHER]


def gathers_of_a_unit(level: int, mesh: str, **settings: Any) -> list[tuple[int, int, str]]:
    """Return ranks, bytes and dtype of the gathers of a unit in the forward of the second step."""
    arguments = Meshes().arguments(mesh)
    model, optimizer = shard(
        build_adapted(torch.bfloat16),
        level,
        arguments.pop("device_mesh"),
        fsdp_unit_modules=[AdaptedLayer],
        **arguments,
        **settings,
    )
    plain_backward(model, 0, dist.get_rank())
    optimizer.step()
    gathers = gathers_of(partial(plain_backward, model, 1, dist.get_rank()))
    in_forward = [each for each in gathers if each.phase == "forward" and each.unit == "2"]
    return [(len(each.ranks), each.num_bytes, each.dtype) for each in in_forward]


FROZEN_BYTES = (WIDTH * WIDTH + WIDTH) * 2
TRAINED_BYTES = 2 * 4 * WIDTH * 8


@pytest.mark.always("1-flat-*", "3-flat-*", "3-outer2-1-*")
@pytest.mark.parametrize(
    ("level", "mesh", "sharded", "expected"),
    [
        (0, "flat", 0, []),
        (1, "flat", 0, ["inner trained"]),  # frozen weights stay gathered
        (3, "flat", 0, ["inner both"]),
        (3, "outer2", 0, ["inner both"]),
        (3, "outer2", 1, ["outer trained", "inner both"]),  # frozen shards do not change
    ],
)
def test_the_groups_of_a_unit_that_are_due_are_gathered_in_one_launch(
    ranks: Ranks, level: int, mesh: str, sharded: int, expected: list[str]
) -> None:
    settings = {} if mesh == "flat" else {"outer_dp_sharding_strategy": sharded}
    num_ranks = 2 if mesh == "flat" else 4
    gathers = ranks(num_ranks, gathers_of_a_unit, level, mesh, **settings)[0]
    what = []
    for size, num_bytes, dtype in gathers:
        assert size == 2
        is_both = dtype == "bfloat16+float64"
        assert is_both or dtype == "float64"
        axis = "outer" if num_bytes < TRAINED_BYTES else "inner"
        least = TRAINED_BYTES // (2 if axis == "outer" else 1) + is_both * FROZEN_BYTES
        assert least <= num_bytes <= 2 * least  # padding
        what.append(f"{axis} {'both' if is_both else 'trained'}")
    assert what == expected


def gathers_of_experts() -> list[tuple[int, ...]]:
    """Return the ranks of each gather of a block of dense weights and an expert's."""
    model = fully_shard_model(
        nn.Sequential(ExpertBlock()),
        shard_mesh(),
        fsdp_unit_modules=[ExpertBlock],
        expt_device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep")),
    )
    x = torch.randn(2, WIDTH)
    gathers = gathers_of(lambda: model.module[0](x))
    return [entry.ranks for entry in gathers]


def test_groups_on_other_ranks_are_gathered_in_launches_of_their_own(ranks: Ranks) -> None:
    for rank, gathers in enumerate(ranks(4, gathers_of_experts)):
        assert gathers == [(0, 1, 2, 3), (rank % 2, rank % 2 + 2)]


@pytest.mark.always("wait")
@pytest.mark.parametrize("fails_at", ["launch", "wait"])
@on_ranks(2)
def test_a_failed_launch_leaves_all_groups_sharded(fails_at: str) -> None:
    """Let a launch of two groups fail: none of them may seem to be gathered."""
    model, _ = shard(build_adapted(torch.bfloat16), 3, fsdp_unit_modules=[AdaptedLayer])
    failed: list[Gather] = []

    def fail() -> None:
        raise RuntimeError("no connection")

    def fail_once(self: Communicator, gathers: Sequence[Gather]) -> Pending:
        if failed or len(gathers) == 1:
            return all_gather(self, gathers)
        failed.extend(gathers)
        if fails_at == "launch":
            fail()
        all_gather(self, gathers).wait()
        return Pending(fail)

    all_gather = Communicator.all_gather
    with patch.object(Communicator, "all_gather", fail_once), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of errors of hooks after an error
        with pytest.raises(RuntimeError, match="no connection"):
            plain_backward(model, 0, dist.get_rank())
        assert len(failed) == 2
        for gather in failed:
            (group,) = (each for each in model.groups if each.compute.flat is gather.full)
            assert group.state is WeightState.SHARDED
        plain_backward(model, 0, dist.get_rank())
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad.to_local().isfinite().all()


def test_a_launch_that_fails_does_so_for_every_group_that_waits_for_it() -> None:
    """The groups of a launch share what they wait for."""

    def fail() -> None:
        raise RuntimeError("connection reset")

    all_gather = Pending(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            all_gather.wait()


def test_a_launch_that_is_over_is_waited_for_once() -> None:
    waits: list[bool] = []
    all_gather = Pending(lambda: waits.append(torch.is_grad_enabled()))
    for _ in range(2):
        all_gather.wait()
    assert waits == [False]
