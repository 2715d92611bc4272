# SPDX-License-Identifier: Apache-2.0
"""With cuda_graph_mode, nothing that a captured graph would read or write ever moves."""

from typing import Any

import pytest
import torch

from tests.fsdp.test_kept_gradients import built
from tests.support.fsdp.reference import Ranks


def addresses_of_gradients(mesh: str, dtype: torch.dtype, **settings: Any) -> list[int]:
    """Return how many addresses each gradient has, and each sum behind them, in several steps."""
    model, optimizer, x = built(mesh, dtype=dtype, **settings)
    seen: list[set[int]] = [set() for _ in range(6 + 2 * 3)]
    others = []
    for _ in range(4):
        for _ in range(2):
            model(x).sum().backward()
            others += [torch.empty(4 * size) for size in range(1, 40)]
        tensors = [parameter.grad.to_local() for parameter in model.parameters()]
        for group in model.groups:
            tensors += [group.gradients._grad_sum.total, group.gradients._inner_sum.total]
        for addresses, tensor in zip(seen, tensors, strict=True):
            addresses.add(tensor.data_ptr())
        optimizer.step()
        optimizer.zero_grad()
        others += [torch.empty(4 * size) for size in range(1, 40)]
    return [len(addresses) for addresses in seen]


@pytest.mark.always("zero3", "hsdp_optim")
@pytest.mark.parametrize(
    ("mesh", "settings", "dtype"),
    [
        ("flat", {}, torch.bfloat16),
        ("flat", {"zero_dp_strategy": 1}, torch.float32),
        ("outer2", {}, torch.bfloat16),
        ("outer2", {"outer_dp_sharding_strategy": 1}, torch.float32),
    ],
    ids=["zero3", "zero1", "hsdp", "hsdp_optim"],
)
def test_gradients_stay_where_they_are(
    ranks: Ranks, mesh: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    world_size = 4 if mesh == "outer2" else 2
    for counts in ranks(
        world_size, addresses_of_gradients, mesh, dtype, cuda_graph_mode=True, **settings
    ):
        assert counts == [1] * len(counts)
    moving = ranks(world_size, addresses_of_gradients, mesh, dtype, **settings)
    assert all(max(counts) > 1 for counts in moving)
