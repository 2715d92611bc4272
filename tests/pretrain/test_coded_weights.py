# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights in FP8: those of a plan are those that a run has, and gathers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.transformer_engine.core_gpt import make_gpt, make_sharded_gpt
from tests.support.transformer_engine.ranks import RunOnRanks

pytestmark = pytest.mark.exhaustive


def bytes_of(recipe: str | None, strategy: str) -> dict[str, tuple[float, float]]:
    """Return estimated and measured bytes: of weights and of the gathers of a forward."""
    model = make_sharded_gpt(recipe, strategy)
    from megatron.fsdp import Strategy, trace
    from megatron.fsdp.engine.observe import GATHER
    from megatron.mcore_adapter.coded_weights import code_bytes, coded_weights
    from megatron.mcore_adapter.data_parallel import default_unit_modules
    from megatron.mcore_adapter.releases.precision_fields import precision_policy
    from megatron.pretrain.memory_estimate import AxisSizes, MemoryPlan, estimate_memory

    storages = {}
    for group in model.module.groups:
        for tensor in (group.compute.flat, group.compute_shard, group.main_shard):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    tokens = torch.zeros(4, 32, dtype=torch.long)
    with torch.no_grad(), trace.record() as recording:
        model(tokens, torch.arange(32)[None], None, labels=tokens)
    gathers = [entry for entry in recording.collectives if entry.track == GATHER]
    args = argparse.Namespace(
        fp8="hybrid" if recipe else None, fp8_recipe=recipe, fp8_param_gather=True, num_layers=2
    )
    _, plain = make_gpt(None)
    coded = coded_weights(args, plain)
    plan = MemoryPlan(
        default_unit_modules(plain),
        Strategy(level=strategy),
        precision_policy(model.ddp_config),
        AxisSizes(dist.get_world_size()),
        coded=frozenset(coded.values()),
        code_bytes=code_bytes(args) or 1.0,
    )
    numel = sum(parameter.numel() for parameter in plain.parameters())
    expected = 2 * numel - sum(one.numel() for one in coded.values())
    found: dict[str, Any] = {
        "weights": (estimate_memory(plain, plan).weights, sum(storages.values()))
    }
    if strategy == "optim_grads_params":
        found["gathered"] = (expected, sum(entry.num_bytes for entry in gathers))
    found["per parameter"] = sum(storages.values()) / numel
    return found


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        (None, "optim_grads_params"),
        ("tensorwise", "optim_grads_params"),
        ("tensorwise", "optim"),
        ("delayed", "optim"),
        ("blockwise", "optim_grads_params"),
    ],
)
def test_bytes_of_a_plan_are_those_of_a_run(
    engine_ranks: RunOnRanks, recipe: str | None, strategy: str
) -> None:
    for parts in engine_ranks(bytes_of, recipe, strategy):
        parts.pop("per parameter")
        for part, (estimate, measured) in parts.items():
            assert estimate == pytest.approx(measured, rel=0.02), part
