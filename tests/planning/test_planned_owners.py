# SPDX-License-Identifier: Apache-2.0
"""The plan of an update by owners of matrices is that of the update itself."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from megatron.fsdp.optimizer.matrix.exchange import Exchange
from megatron.fsdp.optimizer.matrix.owners import assign, cost_of
from megatron.planning.machine import MACHINES
from megatron.planning.matrix_owners import plan_owners
from megatron_fsdp import fully_shard
from tests.support.rank_pool import run_ranks

H100 = MACHINES["h100"]
Shapes = list[tuple[int, int]]


def llama_3_70b() -> Shapes:
    hidden, wide = 8192, 28672
    return [(hidden + 2048, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)] * 80


def deepseek_v3_experts() -> Shapes:
    """Return the matrices of the experts of one of 64 expert ranks."""
    return [(2 * 2048, 7168), (7168, 2048)] * (58 * 256 // 64)


def gpt_2() -> Shapes:
    return [(3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)] * 12


MODELS = {"llama_3_70b": llama_3_70b, "deepseek_v3_experts": deepseek_v3_experts, "gpt_2": gpt_2}


def counted_flops(shape: tuple[int, int]) -> int:
    """Return the FLOPs of the matrix products of five Newton-Schulz iterations, as torch counts."""
    x = torch.empty(min(shape), max(shape), device="meta")
    with FlopCounterMode(display=False) as counter:
        for _ in range(5):
            gram = x @ x.T
            x = (gram @ gram) @ x
    return counter.get_total_flops()


@pytest.mark.parametrize("num_ranks", [1, 7, 8, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_the_balance_of_owners_is_that_of_counted_work(model: str, num_ranks: int) -> None:
    shapes = MODELS[model]()
    flops_of = {shape: counted_flops(shape) for shape in set(shapes)}
    work, momentum = Counter[int](), Counter[int]()
    costs = [cost_of(shape, 4) for shape in shapes]
    for pairs in assign(costs, [range(num_ranks)] * len(costs))[0]:
        for index, rank in pairs:
            work[rank] += flops_of[shapes[index]]
            momentum[rank] += 4 * shapes[index][0] * shapes[index][1]
    plan = plan_owners(shapes, range(num_ranks), H100)
    whole = sum(map(flops_of.__getitem__, shapes))
    assert plan.most_flops == max(work.values())
    assert plan.imbalance == pytest.approx(max(work.values()) * num_ranks / whole)
    assert plan.momentum_bytes == max(momentum.values())
    loads = [work[rank] for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(flops_of.values())
    least = plan.most_flops / (H100.flops * H100.compute_efficiency)
    assert plan.seconds >= 0.999 * least


def step_of_owners(outer: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Step Muon, and return the bytes of this rank's momentum, and of what it has sent."""
    sent = 0
    send = Exchange.send

    def count(exchange: Exchange, tensor: torch.Tensor, rank: int) -> None:
        nonlocal sent
        sent += tensor.nbytes
        send(exchange, tensor, rank)

    module = nn.Sequential(*[nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(NUM_MATRICES)])
    muon = torch.optim.Muon(module.parameters())
    sizes = (outer, dist.get_world_size() // outer)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
    over = (mesh, "inner", "outer" if outer > 1 else None)
    fully_shard(module, muon, *over, fsdp_unit_modules=[nn.Linear], **settings)
    for parameter in muon.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with patch.object(Exchange, "send", count):
        muon.step()
    states = (muon.state[each]["momentum_buffer"] for each in muon.param_groups[0]["params"])
    return sum(state._local_tensor.nbytes for state in states), sent


WIDTH, NUM_MATRICES = 16, 8
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    # ranks, outer ranks, replicas of all weights
    "level3": (2, 1, 1, {}),
    "level0": (2, 1, 2, {"zero_dp_strategy": 0}),
    "hybrid": (4, 2, 2, {}),
    "hybrid_sharded": (4, 2, 1, {"outer_dp_sharding_strategy": 1}),
}


@pytest.mark.always("level3")
@pytest.mark.parametrize("case", CASES)
def test_momentum_and_messages_are_those_of_a_step(case: str) -> None:
    num_ranks, outer, num_replicas, settings = CASES[case]
    found = run_ranks(num_ranks, step_of_owners, outer, settings)
    shapes = [(2 * WIDTH, WIDTH)] * NUM_MATRICES
    plan = plan_owners(shapes, range(num_ranks), H100, num_replicas)
    assert plan.momentum_bytes == max(momentum for momentum, _ in found)
    # All rounds are full, so every rank is as busy as the busiest one.
    assert num_ranks * plan.message_bytes == sum(sent for _, sent in found)


def test_a_round_lasts_as_long_as_its_products_or_its_messages() -> None:
    shapes = [(4096, 4096)] * 64
    slow = replace(H100, inside=replace(H100.inside, bytes_per_second=1e9))
    of_messages = plan_owners(shapes, range(8), slow).seconds
    products = plan_owners(shapes, range(8), H100)
    assert products.seconds == pytest.approx(
        products.most_flops / (H100.flops * H100.compute_efficiency), rel=0.2
    )
    messages = products.message_bytes / (slow.inside.bytes_per_second * slow.link_efficiency)
    assert of_messages == pytest.approx(messages, rel=0.2)
    assert plan_owners([], range(8), H100).seconds == 0
