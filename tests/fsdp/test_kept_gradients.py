# SPDX-License-Identifier: Apache-2.0
"""Values of gradients that code keeps past ``zero_grad`` do not change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp import MegatronFSDP
from tests.fsdp.test_optimizer_gradients import clear_gradients
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd
from tests.support.fsdp.watched_memory import stored
from tests.support.pairwise import each_value

KINDS = {
    "local": lambda gradient: gradient.to_local(),
    "cloned": lambda gradient: gradient.clone(),
    "detached": lambda gradient: gradient.detach(),
    "array": lambda gradient: gradient.to_local().numpy(),
}


def values(kept: Any) -> Tensor:
    """Return a copy of the values of this rank."""
    if isinstance(kept, Tensor):
        return getattr(kept, "_local_tensor", kept).clone()
    return torch.from_numpy(kept).clone()


def built(mesh: str, **settings: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer, Tensor]:
    """Return a model, its optimizer and its input."""
    torch.manual_seed(0)
    dtype = settings.pop("dtype", torch.float32)
    module = torch.nn.Sequential(*[TanhLayer() for _ in range(3)]).to(dtype)
    model, optimizer = shard_with_sgd(
        module, fsdp_unit_modules=[TanhLayer], **Meshes().arguments(mesh), **settings
    )
    return model, optimizer, torch.ones(3, 8, dtype=dtype)


def keep_gradients(mesh: str, way: str, kind: str, **settings: Any) -> bool:
    """Keep the gradient of one parameter in each step; return True if none has changed."""
    model, optimizer, x = built(mesh, **settings)
    parameter = list(model.parameters())[2]
    kept, copies = [], []
    for _ in range(3):
        for _ in range(2):
            model(x).sum().backward()
        kept.append(KINDS[kind](parameter.grad))
        copies.append(values(kept[-1]))
        optimizer.step()
        clear_gradients(model, optimizer, way)
    assert not copies[0].numel() or not torch.equal(copies[0], copies[1])
    return all(torch.equal(values(each), copy) for each, copy in zip(kept, copies, strict=True))


SETTINGS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero1": {"zero_dp_strategy": 1},
    "zero0": {"zero_dp_strategy": 0},
    "slots": {"fsdp_double_buffer": True},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.always("optimizer-local-zero0", "model-array-*")
@pytest.mark.parametrize(
    ("way", "kind", "settings"),
    each_value(
        [
            ("optimizer", "local", "zero0"),
            ("model", "array", "zero3"),
            ("by_hand", "local", "zero1"),
        ],
        way=["optimizer", "model", "torch", "by_hand"],
        kind=KINDS,
        settings=SETTINGS,
    ),
)
def test_kept_gradients_do_not_change(ranks: Ranks, way: str, kind: str, settings: str) -> None:
    assert ranks(2, keep_gradients, "flat", way, kind, **SETTINGS[settings]) == [True] * 2


def test_kept_gradients_do_not_change_in_hybrid_sharding(ranks: Ranks) -> None:
    for outer in (0, 1):
        settings = {"outer_dp_sharding_strategy": outer}
        assert ranks(4, keep_gradients, "outer2", "optimizer", "local", **settings) == [True] * 4


@pytest.mark.always("optimizer", "by_hand")
@pytest.mark.parametrize("way", ["optimizer", "model", "torch", "by_hand"])
@on_ranks(2)
def test_a_kept_gradient_shows_the_values_of_the_next_step(way: str) -> None:
    """Keep the DTensor that a parameter shows: it has no values until it shows the next ones."""
    model, optimizer, x = built("flat")
    parameter = list(model.parameters())[2]
    model(x).sum().backward()
    kept = parameter.grad
    optimizer.step()
    clear_gradients(model, optimizer, way)
    if way in ("optimizer", "model"):  # otherwise the next backward notices
        assert kept.to_local().is_meta
        with pytest.raises(NotImplementedError, match="no data"):
            kept.to_local().tolist()
    model(2 * x).sum().backward()
    assert kept is parameter.grad and not kept.to_local().is_meta


@pytest.mark.always("0", "3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_gradient_shards_take_no_storage_after_kept_gradients_are_gone(level: int) -> None:
    """Look at gradient shards after a step in which nothing is kept any more."""
    model, optimizer, x = built("flat", zero_dp_strategy=level)
    kept = None
    for step in range(3):
        model(x).sum().backward()
        if step == 0:
            kept = [parameter.grad.to_local() for parameter in model.parameters()]
        elif step == 1:
            del kept
        optimizer.zero_grad()
    assert not any(stored(group.gradients._grad_sum._total) for group in model.groups)
