# SPDX-License-Identifier: Apache-2.0
"""Clipping by torch's function and by the one of this package."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import clip_grad_norm_
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.reference import Ranks, on_ranks


def model_with_gradients(**settings: Any) -> MegatronFSDP:
    torch.manual_seed(0)
    layers = nn.Sequential(TanhLayer(), TanhLayer())
    model = fully_shard_model(layers, fsdp_unit_modules=[TanhLayer], **settings)
    model(torch.ones(2, 8)).sum().backward()
    return model


CLIPS = {"torch": nn.utils.clip_grad_norm_, "ours": clip_grad_norm_}


def clip_in_both_ways(order: float, mesh: str = "flat", **settings: Any) -> list[int]:
    """Return the number of collectives of torch's function and of ours; compare their results."""
    counts, results = [], []
    arguments = Meshes().arguments(mesh)
    for clip in CLIPS.values():
        torch.manual_seed(0)
        model = model_with_gradients(**arguments, **settings)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as watched:
            norm = clip(model.parameters(), 0.01, order)
        counts.append(watched.call_count)
        results.append([norm, *(each.grad.to_local() for each in model.parameters())])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)
    return counts


@pytest.mark.parametrize("order", [2.0, 1.0, torch.inf])
def test_clipping_costs_one_collective(ranks: Ranks, order: float) -> None:
    assert ranks(2, clip_in_both_ways, order) == [[1, 1], [1, 1]]


@pytest.mark.parametrize("outer", [0, 1], ids=["replicated", "sharded"])
def test_clipping_costs_one_collective_in_hybrid_sharding(ranks: Ranks, outer: int) -> None:
    settings = {"outer_dp_sharding_strategy": outer}
    assert ranks(4, clip_in_both_ways, 2.0, "outer2", **settings) == [[1, 1]] * 4


def norm_of_experts(level: int) -> list[float]:
    """Return the norm of two experts, each on two ranks, by both functions."""
    meshes = Meshes()
    expert = meshes.expert_places("ep2").rank
    norms = []
    for clip in CLIPS.values():
        module = nn.Linear(8, 8, bias=False)
        module.weight.allreduce = False  # an expert's
        model = fully_shard_model(module, **meshes.arguments("ep2"), zero_dp_strategy=level)
        model(torch.full((1, 8), 1.0 + expert)).sum().backward()
        norm = clip(model.parameters(), 1e9)
        norms.append(float(full_tensor(norm) if isinstance(norm, DTensor) else norm))
    return norms


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
def test_every_expert_counts_once_in_the_norm(ranks: Ranks, level: int) -> None:
    # Two ranks add up 1 or 2, divided by four data ranks, in each of the 64 elements.
    expected = (64 * (0.5**2 + 1.0**2)) ** 0.5
    for norms in ranks(4, norm_of_experts, level):
        assert norms == pytest.approx([expected, expected])


def clip_without_lists() -> None:
    refuse = AssertionError("numbers are copied from pageable memory")
    take = torch.Tensor.__getitem__

    def item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        if isinstance(index, list):
            raise refuse
        return take(tensor, index)

    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    module[1].weight.allreduce = False  # an expert's
    model = fully_shard_model(module, **Meshes().arguments("ep2"), zero_dp_strategy=3)
    model(torch.ones(1, 8)).sum().backward()
    with (
        patch.object(torch.Tensor, "__setitem__", side_effect=refuse),
        patch.object(torch.Tensor, "new_tensor", side_effect=refuse),
        patch.object(torch, "tensor", side_effect=refuse),
        patch.object(torch.Tensor, "__getitem__", item),
    ):
        for order in (2.0, torch.inf):
            clip_grad_norm_(model.parameters(), 0.01, order)


def test_clipping_copies_no_numbers_from_the_host(ranks: Ranks) -> None:
    ranks(4, clip_without_lists)


@on_ranks(2)
def test_wrong_clipping_is_refused() -> None:
    model = model_with_gradients()
    with pytest.raises(ValueError, match="norm_type expects a positive number"):
        clip_grad_norm_(model.parameters(), 1.0, 0.0)
    plain = nn.Linear(2, 2)
    assert clip_grad_norm_(plain.parameters(), 1.0) == 0
    plain(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TypeError, match="parameters of a sharded model"):
        clip_grad_norm_(plain.parameters(), 1.0)
    next(model.parameters()).grad.to_local().fill_(torch.nan)
    with pytest.raises(RuntimeError, match="of the gradients is nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
