# SPDX-License-Identifier: Apache-2.0
"""Gradients, weights and outputs are those of the unsharded model, whatever the model, the strategy and the schedule."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron.fsdp.dtensor.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.fsdp import models
from tests.fsdp.models import MODELS
from tests.fsdp.reference import Case, Meshes, batch, compare, compare_pieces, loss_of, shard_mesh

Ranks = Callable[..., list[Any]]
LEVELS = (0, 1, 2, 3)
LEVELS_OF_WORLD = {1: (0, 3), 2: LEVELS, 3: (3,), 4: (1,)}
"""What every model runs at: every level in one world, and every world.

Two of them run at every level of every world."""


def compare_all(cases: list[Case]) -> None:
    meshes = Meshes()
    for case in cases:
        try:
            compare(case, meshes)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


def at_levels(case: Case, levels: tuple[int, ...] = LEVELS) -> list[Case]:
    return [
        replace(case, settings={"zero_dp_strategy": level, **case.settings}) for level in levels
    ]


@pytest.mark.parametrize("world_size", LEVELS_OF_WORLD)
@pytest.mark.parametrize("model", MODELS)
def test_training_matches_the_unsharded_model(ranks: Ranks, model: str, world_size: int) -> None:
    everywhere = model in ("several_units", "nested_units")
    ranks(
        world_size,
        compare_all,
        at_levels(Case(model=model), LEVELS if everywhere else LEVELS_OF_WORLD[world_size]),
    )


SETTINGS: dict[str, Case] = {
    "microbatches": Case(model="several_units", microbatches=3),
    "no_sync": Case(model="unused_parameters", microbatches=3, sync="no_sync"),
    "finish_grad_sync": Case(model="unit_unused_in_some_steps", microbatches=2, sync="manual"),
    "reduced_by_the_step": Case(model="frozen_in_part", microbatches=2, sync="step"),
    "without_overlap": Case(
        model="nested_units",
        microbatches=2,
        settings={"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "gather_overlap_only": Case(
        model="frozen_in_part",
        sync="no_sync",
        microbatches=2,
        settings={"overlap_grad_reduce": False},
    ),
    "reduce_overlap_only": Case(
        model="parallel_branches", settings={"overlap_param_gather": False}
    ),
    "per_token_loss": Case(
        model="tied_across_units", microbatches=2, settings={"calculate_per_token_loss": True}
    ),
    "average_in_collective": Case(
        model="scalars", microbatches=2, settings={"average_in_collective": True}
    ),
    "disable_bucketing": Case(
        model="unit_called_twice", microbatches=2, settings={"disable_bucketing": True}
    ),
    "two_forwards_before_backward": Case(
        model="tied_weight_as_argument", forwards=2, microbatches=2
    ),
    "two_checkpointed_forwards": Case(
        model="checkpoint_reentrant", forwards=2, sync="no_sync", microbatches=2
    ),
    "without_evaluation": Case(model="unit_unused_in_some_steps", evaluate=False, steps=4),
    "explicit_dtypes": Case(
        model="several_units",
        settings={
            "mixed_precision_policy": MixedPrecisionPolicy(None, torch.float64, torch.float64)
        },
    ),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_do_not_change_the_numbers(ranks: Ranks, settings: str, world_size: int) -> None:
    ranks(world_size, compare_all, at_levels(SETTINGS[settings]))


class Numbers(nn.Module):
    """Its gradient is its input."""

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
    mode: str,
    **settings: Any,
) -> Tensor:
    """The whole gradient after one backward for each number that this rank has in `inputs`."""
    model = fully_shard_model(
        Numbers(dtype),
        device_mesh=shard_mesh(),
        mixed_precision_policy=policy,
        zero_dp_strategy=level,
        sync_model_each_microbatch=mode != "manual",
        **settings,
    )
    mine = inputs[dist.get_rank()]
    for number, value in enumerate(mine):
        with model.no_sync() if mode == "no_sync" and number < len(mine) - 1 else nullcontext():
            model(torch.full((5,), value)).backward()
    model.finish_grad_sync()
    return uneven_dtensor_to_full_tensor(next(model.parameters()).grad)


SMALL = 2.0**-9  # 1 + SMALL is 1 in bfloat16, whose next number is 1 + 2**-7


@pytest.mark.parametrize("mode", ["auto", "no_sync", "manual"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_accumulate_in_main_grads_dtype(ranks: Ranks, level: int, mode: str) -> None:
    inputs = [[1.0] + [SMALL] * 8] * 2
    fp32 = MixedPrecisionPolicy(torch.float32, torch.float32)
    for gradient in ranks(2, gradient_of_numbers, torch.bfloat16, fp32, level, inputs, mode):
        assert gradient.tolist() == [1 + 8 * SMALL] * 5
    bf16 = MixedPrecisionPolicy(torch.float32, torch.bfloat16)
    for gradient in ranks(2, gradient_of_numbers, torch.bfloat16, bf16, level, inputs, mode):
        assert gradient.tolist() == [1.0] * 5


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_travel_in_grad_comm_dtype(ranks: Ranks, level: int) -> None:
    """What one rank adds is lost in a bf16 sum and kept in an fp32 one; the division by two is exact in both."""
    inputs = [[1.0], [SMALL]]
    for comm, expected in (
        (torch.bfloat16, 0.5),
        (torch.float32, 0.5 + SMALL / 2),
        (None, 0.5 + SMALL / 2),
    ):
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm)
        for dtype in (torch.bfloat16, torch.float32):
            for gradient in ranks(2, gradient_of_numbers, dtype, policy, level, inputs, "auto"):
                assert gradient.dtype == torch.float32
                assert gradient.tolist() == [expected] * 5


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_gradients_do_not_overflow_where_their_mean_fits(ranks: Ranks, level: int) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float16)
    for gradient in ranks(
        2, gradient_of_numbers, torch.float32, policy, level, [[60000.0], [60000.0]], "auto"
    ):
        assert gradient.tolist() == [60000.0] * 5


def train_bf16(level: int, mesh: DeviceMesh) -> None:
    """Compare with an unsharded bf16 copy of fp32 weights; reductions in fp32 add up the same numbers."""
    reference = models.build("several_units", torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    expected_optimizer = torch.optim.AdamW(masters, lr=0.02)
    module = models.build("several_units", torch.bfloat16)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.02),
        device_mesh=mesh,
        fsdp_unit_modules=[models.Block],
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
        for master, parameter, total in zip(masters, reference.parameters(), summed):
            master.grad = total / dist.get_world_size()
        loss_of(model(batch(step, dist.get_rank(), 0).bfloat16())).backward()
        names = [name for name, _ in reference.named_parameters()]
        compare_pieces(
            model,
            {key: parameter.grad for key, parameter in model.named_parameters()},
            {name: master.grad for name, master in zip(names, masters)},
            f"gradient in step {step}",
            tolerance=0.0,
        )
        expected_optimizer.step()
        for master, parameter in zip(masters, reference.parameters()):
            parameter.data.copy_(master.data)
        optimizer.step()
        optimizer.zero_grad()


def train_bf16_at_all_levels() -> None:
    mesh = shard_mesh()
    for level in LEVELS:
        train_bf16(level, mesh)


def test_bf16_model_with_fp32_main_weights_is_bitwise_the_unsharded_one(ranks: Ranks) -> None:
    """On two ranks, where a sum has one order; any weight that differed in a bit would show in a later gradient."""
    ranks(2, train_bf16_at_all_levels)
