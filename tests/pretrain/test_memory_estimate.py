# SPDX-License-Identifier: Apache-2.0
"""The estimate of a rank's memory agrees with the bytes that a run has, part by part."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import Strategy
from megatron.fsdp.engine.buffer import FlatBuffer, Storage
from megatron.pretrain.memory_estimate import AxisSizes, MemoryPlan, estimate_memory
from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp.watched_memory import local_gradients, stored
from tests.support.rank_pool import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 64


def build() -> nn.Module:
    """Return a model whose parameters are large beside the padding between them."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 999)).to(BF16)


def most_local_bytes(model: MegatronFSDP) -> int:
    """Run a step of two microbatches; return the most bytes that wait for a reduction."""
    most = 0
    allocate = Storage.allocate

    def allocate_and_look(storage: Storage, buffer: FlatBuffer) -> None:
        nonlocal most
        allocate(storage, buffer)
        now = sum(stored(local_gradients(group)) for group in model.groups)
        now += sum(stored(group.gradients._inner_sum._total) for group in model.groups)
        most = max(most, now)

    with patch.object(Storage, "allocate", allocate_and_look):
        for is_last in (False, True):
            model.is_last_microbatch = is_last
            model(torch.randn(2, 8, WIDTH, dtype=BF16)).float().sum().backward()
    return most


def bytes_of_parts(
    level: int, main_grads: torch.dtype, outer: int, sharded: int, offload: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the estimated and the measured bytes of each part, after a backward and a step.

    What is offloaded counts as the host's alone.
    """
    policy = MixedPrecisionPolicy(FP32, main_grads, main_grads)
    inner = dist.get_world_size() // outer
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    model = fully_shard_model(
        build(),
        mesh,
        "inner",
        "outer" if outer > 1 else None,
        fsdp_unit_modules=[nn.TransformerEncoderLayer],
        zero_dp_strategy=level,
        outer_dp_sharding_strategy=sharded,
        mixed_precision_policy=policy,
        offload_policy="host" if offload else None,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(2):  # the first step makes tensors that the second one allocates again
        model.zero_grad()
        local = most_local_bytes(model)
    model.finish_grad_sync()
    gradients = sum(stored(group.gradients._grad_sum._total) for group in model.groups)
    gradients += sum(stored(group.gradients._optimizer_grad._total) for group in model.groups)
    optimizer.step()
    storages = {}
    for group in model.groups:
        main = () if offload else (group.main_shard,)
        for tensor in (group.compute.flat, group.compute_shard, *main):
            storages[tensor.untyped_storage()._cdata] = stored(tensor)
    moments = 0
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name].to_local()
            moments += moment.numel() * moment.element_size()
    plan = MemoryPlan(
        [nn.TransformerEncoderLayer],
        Strategy(level=level, outer=sharded),
        policy,
        AxisSizes(inner, outer),
        offloaded=float(offload),
    )
    estimate = estimate_memory(build(), plan)
    away = gradients + moments + sum(stored(group.main_shard) for group in model.groups)
    return {
        "weights": (estimate.weights, sum(storages.values())),
        "gradients": (estimate.gradients, 0 if offload else gradients),
        "optimizer state": (estimate.optimizer_state, 0 if offload else moments),
        "local gradients": (estimate.local_gradients, local),
        "host": (estimate.host, away if offload else 0),
    }


@pytest.mark.always("1-1-0-*-False", "3-4-1-*")
@pytest.mark.parametrize(
    ("level", "outer", "sharded", "main_grads", "offload"),
    [
        (0, 1, 0, FP32, False),
        (1, 1, 0, BF16, False),
        (2, 1, 0, FP32, False),
        (3, 1, 0, BF16, False),
        (0, 2, 0, BF16, False),
        (1, 2, 0, FP32, False),
        (3, 2, 0, FP32, False),
        (3, 4, 0, BF16, False),
        (3, 4, 1, FP32, False),
        (0, 1, 0, BF16, True),
        (1, 1, 0, FP32, True),
        (2, 1, 0, BF16, True),
        (3, 2, 0, FP32, True),
        (3, 4, 1, BF16, True),
    ],
)
def test_a_rank_s_memory_is_estimated_within_two_percent(
    level: int, outer: int, sharded: int, main_grads: torch.dtype, offload: bool
) -> None:
    """Of what is reduced at once the estimate counts two units, which need not meet."""
    for parts in run_ranks(4, bytes_of_parts, level, main_grads, outer, sharded, offload):
        local, measured_local = parts.pop("local gradients")
        for part, (estimate, measured) in parts.items():
            assert estimate == pytest.approx(measured, rel=0.02), part
        if not offload and (level, outer) in [(0, 1), (1, 1), (0, 2), (3, 4)]:
            assert local == pytest.approx(measured_local, rel=0.02)
        else:
            assert 0.5 * local <= measured_local <= 1.02 * local


def state_bytes_with_owners(level: int) -> tuple[int, int]:
    """Return the estimated and the measured bytes of state of this rank: Muon's and AdamW's."""
    model = build()
    matrices = [each for each in model[1:-1].parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if all(each is not one for one in matrices)]
    policy = MixedPrecisionPolicy(FP32, FP32, FP32)
    units = [nn.TransformerEncoderLayer]
    axes = AxisSizes(dist.get_world_size())
    owned = frozenset(matrices)
    plan = MemoryPlan(units, Strategy(level=level), policy, axes, matrices=owned)
    estimate = estimate_memory(model, plan).optimizer_state
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    settings = {"zero_dp_strategy": level, "mixed_precision_policy": policy}
    fully_shard(model, optimizers, fsdp_unit_modules=units, **settings)
    moments = 0
    for state in (*optimizers[0].state.values(), *optimizers[1].state.values()):
        moments += sum(each._local_tensor.nbytes for each in state.values() if each.ndim)
    return estimate, moments


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
def test_the_momentum_of_a_matrix_is_on_one_rank(level: int) -> None:
    """The estimate is that of the mean rank: owners have whole matrices."""
    estimates, measured = zip(*run_ranks(4, state_bytes_with_owners, level))
    assert sum(estimates) == pytest.approx(sum(measured), rel=0.02)
    assert max(measured) - min(measured) <= 4 * 4 * WIDTH * WIDTH  # bytes of the largest one


def test_tensors_on_the_host_take_their_own_bytes() -> None:
    settings = ([], Strategy(), MixedPrecisionPolicy(FP32, FP32, FP32), AxisSizes(3))
    model = nn.Linear(100, 300, bias=False)  # 40 KB for each of the four tensors of three ranks
    plan = MemoryPlan(*settings, offloaded=1.0)
    assert estimate_memory(model, plan).host == 4 * 40_000
