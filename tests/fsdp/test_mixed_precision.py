# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and collectives have the dtypes that were asked for."""

from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.reference import (
    LEVELS,
    Ranks,
    batch,
    compare_shards,
    loss_of,
    on_ranks,
    shown_gradients,
)
from tests.support.fsdp.watched_communication import watching_reductions


class Numbers(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def gradient_of_numbers(
    dtype: torch.dtype,
    policy: MixedPrecisionPolicy,
    level: int,
    inputs: list[list[float]],
    **settings: Any,
) -> Tensor:
    """Return the whole gradient after one backward for each of this rank's numbers in `inputs`."""
    model = fully_shard_model(
        Numbers(dtype),
        device_mesh=shard_mesh(),
        mixed_precision_policy=policy,
        zero_dp_strategy=level,
        **settings,
    )
    for value in inputs[dist.get_rank()]:
        model(torch.full((5,), value)).backward()
    return uneven_dtensor_to_full_tensor(next(model.parameters()).grad)


SMALL = 2.0**-9  # 1 + SMALL is 1 in bfloat16, whose next number is 1 + 2**-7


@pytest.mark.always("0", "3")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_gradients_travel_in_grad_comm_dtype(level: int) -> None:
    """Show that an addend is lost in a bf16 sum and kept in fp32; halving is exact in both."""
    inputs = [[1.0], [SMALL]]
    for comm, expected in (
        (torch.bfloat16, 0.5),
        (torch.float32, 0.5 + SMALL / 2),
        (None, 0.5 + SMALL / 2),
    ):
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, grad_comm_dtype=comm)
        for dtype in (torch.bfloat16, torch.float32):
            gradient = gradient_of_numbers(dtype, policy, level, inputs)
            assert gradient.dtype == torch.float32
            assert gradient.tolist() == [expected] * 5, (comm, dtype)


@pytest.mark.always("0-True", "3-False")
@pytest.mark.parametrize(
    ("level", "average_in_collective"),
    [(0, True), (1, False), (2, True), (3, False), (3, True)],
)
@on_ranks(2)
def test_fp16_gradients_do_not_overflow_where_their_mean_fits(
    level: int, average_in_collective: bool
) -> None:
    """Gloo divides a sum that may overflow, so it is not asked to average."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float16)
    inputs = [[60000.0], [60000.0]]
    settings = {"average_in_collective": average_in_collective}
    gradient = gradient_of_numbers(torch.float32, policy, level, inputs, **settings).tolist()
    assert gradient == [60000.0] * 5, gradient


def train_bf16(level: int, mesh: DeviceMesh) -> None:
    """Compare with an unsharded bf16 copy of fp32 weights, in every bit."""
    reference = models.build("several_units", torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    expected_optimizer = torch.optim.AdamW(masters, lr=0.02)
    module = models.build("several_units", torch.bfloat16)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.02),
        device_mesh=mesh,
        fsdp_unit_modules=[models.ResidualBlock],
        zero_dp_strategy=level,
        grad_reduce_in_fp32=True,
    )
    for step in range(4):
        summed = [torch.zeros_like(master) for master in masters]
        for rank in range(dist.get_world_size()):
            reference.zero_grad()
            loss_of(reference(batch(step, rank, 0).bfloat16())).backward()
            for total, parameter in zip(summed, reference.parameters()):
                total.add_(parameter.grad)
        for master, total in zip(masters, summed):
            master.grad = total / dist.get_world_size()
        loss_of(model(batch(step, dist.get_rank(), 0).bfloat16())).backward()
        names = [name for name, _ in reference.named_parameters()]
        compare_shards(
            model,
            shown_gradients(model),
            {name: master.grad for name, master in zip(names, masters)},
            f"gradient in step {step}",
            tolerance=0.0,
        )
        expected_optimizer.step()
        for master, parameter in zip(masters, reference.parameters()):
            parameter.data.copy_(master.data)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_bf16_model_with_fp32_main_weights_is_bitwise_the_unsharded_one() -> None:
    """A sum over two ranks has one order; a wrong bit would show in a later gradient."""
    mesh = shard_mesh()
    for level in LEVELS:
        train_bf16(level, mesh)


BF16_WITH_FP32 = MixedPrecisionPolicy(torch.float32, torch.float32)


BF16_WITH_BF16 = {"mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)}


@pytest.mark.seldom("outer2")
@pytest.mark.parametrize("mesh", ["flat", "outer2"])
@on_ranks(2)
def test_gradients_of_bf16_weights_accumulate_in_main_grads_dtype(mesh: str) -> None:
    arguments = Meshes().arguments(mesh)
    precisions: list[tuple[dict[str, Any], float]] = [
        ({"mixed_precision_policy": BF16_WITH_FP32}, 1 + 8 * SMALL),
        ({"grad_reduce_in_fp32": True}, 1 + 8 * SMALL),
        (BF16_WITH_BF16, 1.0),
    ]
    for level, (precision, expected), sync in product(LEVELS, precisions, ("auto", "no_sync", "")):
        model = fully_shard_model(
            Numbers(torch.bfloat16),
            **arguments,
            zero_dp_strategy=level,
            sync_model_each_microbatch=bool(sync),
            **precision,
        )
        with model.no_sync() if sync == "no_sync" else nullcontext():
            for number in (1.0, *[SMALL] * 7):
                model(torch.full((5,), number)).backward()
        model(torch.full((5,), SMALL)).backward()
        model.finish_grad_sync()
        found = uneven_dtensor_to_full_tensor(next(model.parameters()).grad)
        assert found.tolist() == [expected] * 5, (level, precision, sync)


def dtypes_that_travel(mesh: str) -> None:
    arguments = Meshes().arguments(mesh)
    for level in LEVELS:
        for comm in (torch.bfloat16, None):
            module = models.build("several_units", torch.float32)
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, grad_comm_dtype=comm)
            with watching_reductions() as dtypes:
                model = fully_shard_model(
                    module, **arguments, zero_dp_strategy=level, mixed_precision_policy=policy
                )
                loss_of(model(batch(0, dist.get_rank(), 0).float())).backward()
                model.finish_grad_sync()
            assert dtypes and set(dtypes) == {comm or torch.float32}


def test_gradients_travel_in_the_dtype_that_was_asked_for(ranks: Ranks) -> None:
    ranks(2, dtypes_that_travel, "flat")
    ranks(2, dtypes_that_travel, "outer2")


@on_ranks(2)
def test_finite_fp16_gradients_whose_sum_overflows_are_no_alarm() -> None:
    net = nn.Linear(64, 64).half()
    model = fully_shard_model(net, report_nan_in_param_grad=True, zero_dp_strategy=1)
    model(torch.full((4, 64), 40.0, dtype=torch.float16)).float().mul(20).sum().backward()
    assert all(
        torch.isfinite(parameter.grad._local_tensor).all().item()
        for parameter in model.parameters()
    )


class ReadsOfTheHost(TorchDispatchMode):
    """Counts values that the host reads one by one, for each of which it would wait for a GPU."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_the_check_of_gradients_reads_no_value_for_each_unit() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = fully_shard_model(net, fsdp_unit_modules=[nn.Linear], report_nan_in_param_grad=True)
    assert len(model.groups) == 3
    loss = model(torch.ones(2, 4)).sum()
    with ReadsOfTheHost() as reads, patch.object(model._gradients, "_report_nonfinite"):
        loss.backward()
    assert reads.number == 0
