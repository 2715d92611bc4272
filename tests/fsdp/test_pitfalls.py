# SPDX-License-Identifier: Apache-2.0
"""Mistakes that implementations of sharded data parallelism have shipped, one test each, in the order of the list.

Numbers 31 to 43 belong to checkpoints and are tested beside them.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, prod
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from megatron.fsdp.dtensor.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.fsdp.engine import collectives, device
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS, plan
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.reductions import Reductions
from tests.fsdp import models
from tests.fsdp.models import BATCH, WIDTH, Block
from tests.fsdp.random_models import Drawn, Layer
from tests.fsdp.reference import (
    Case,
    Meshes,
    batch,
    close,
    compare,
    compare_pieces,
    loss_of,
    optimizer_over,
    shard_mesh,
)
from tests.fsdp.test_errors import message_of
from tests.fsdp.test_memory import Deep, look_at, peak_bytes, peak_in_units, train, watching

Ranks = Callable[..., list[Any]]
LEVELS = (0, 1, 2, 3)
WITHOUT_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}
BF16_WITH_FP32 = MixedPrecisionPolicy(torch.float32, torch.float32)


def compare_all(cases: list[Case]) -> None:
    """Gradients, norms, weights and outputs with those of the unsharded model."""
    meshes = Meshes()
    for case in cases:
        try:
            compare(case, meshes)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


def gradients_of(model: str | Drawn, **options: Any) -> Case:
    """One step: what matters is in the gradients."""
    return Case(model=model, steps=1, evaluate=False, **options)


def with_settings(case: Case, *settings: dict[str, Any]) -> list[Case]:
    return [replace(case, settings={**case.settings, **each}) for each in settings]


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): uneven_dtensor_to_full_tensor(value)
        for name, value in state.items()
    }


# ---- gradients
# -----------------------------------------------------------------------------------------------------------


def test_01_hybrid_sharding_with_sharded_optimizer_state_gives_the_mean(ranks: Ranks) -> None:
    case = gradients_of(
        "several_units",
        mesh="outer2",
        clip=2.0,
        optimizer="sgd",
        settings={"outer_dp_sharding_strategy": 1},
    )
    ranks(
        4,
        compare_all,
        with_settings(
            case, {}, {"average_in_collective": True}, {"calculate_per_token_loss": True}
        ),
    )


def test_02_hybrid_sharding_at_level_1_without_overlap_reduces_over_the_outer_axis(
    ranks: Ranks,
) -> None:
    case = gradients_of(
        "several_units",
        mesh="outer2",
        microbatches=2,
        settings={"zero_dp_strategy": 1, **WITHOUT_OVERLAP},
    )
    ranks(4, compare_all, [replace(case, sync=sync) for sync in ("auto", "no_sync", "step")])


def test_03_a_shard_axis_of_one_rank_does_not_double_gradients_at_every_microbatch(
    ranks: Ranks,
) -> None:
    for world_size, mesh in ((1, "flat"), (2, "outer2")):
        for sync, overlap in (("auto", {}), ("manual", WITHOUT_OVERLAP)):
            case = gradients_of(
                "several_units", mesh=mesh, microbatches=3, sync=sync, settings=overlap
            )
            ranks(
                world_size,
                compare_all,
                with_settings(case, *({"zero_dp_strategy": level} for level in LEVELS)),
            )


def test_04_only_the_new_contribution_is_divided_at_each_microbatch(ranks: Ranks) -> None:
    case = gradients_of("several_units", microbatches=3)
    cases = [replace(case, sync=sync) for sync in ("auto", "manual")]
    ranks(
        2,
        compare_all,
        [
            each
            for one in cases
            for each in with_settings(one, *({"zero_dp_strategy": level} for level in LEVELS))
        ],
    )


def test_05_hybrid_sharding_keeps_the_gradients_of_every_microbatch(ranks: Ranks) -> None:
    case = gradients_of("several_units", mesh="outer2", microbatches=3)
    settings = [{"zero_dp_strategy": 1}, {"zero_dp_strategy": 2}, {"outer_dp_sharding_strategy": 1}]
    cases = [replace(case, sync=sync) for sync in ("auto", "no_sync", "manual")]
    ranks(4, compare_all, [each for one in cases for each in with_settings(one, *settings)])


def test_06_averaging_in_the_collective_remembers_the_expert_factor(ranks: Ranks) -> None:
    model = Drawn(layers=(Layer(hidden=7, num_experts=4), Layer(hidden=3)))
    case = gradients_of(
        model, mesh="ep2", microbatches=2, clip=2.0, settings={"average_in_collective": True}
    )
    ranks(4, compare_all, with_settings(case, {"zero_dp_strategy": 1}, {"zero_dp_strategy": 3}))


def test_07_level_1_with_frozen_parameters_and_without_overlap_trains(ranks: Ranks) -> None:
    case = Case(
        model="frozen_in_part", microbatches=2, settings={"zero_dp_strategy": 1, **WITHOUT_OVERLAP}
    )
    ranks(
        2,
        compare_all,
        [
            case,
            replace(case, sync="manual"),
            replace(case, model="frozen_at_the_bottom", sync="no_sync"),
        ],
    )


class Numbers(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, x: float) -> Tensor:
        return (self.weight * torch.full((5,), x, dtype=torch.bfloat16)).sum()


SMALL = 2.0**-9  # 1 + SMALL is 1 in bfloat16, whose next number is 1 + 2**-7


def accumulate_small_numbers(mesh: str) -> None:
    arguments = Meshes().arguments(mesh)
    for level in LEVELS:
        for keywords in ({"mixed_precision_policy": BF16_WITH_FP32}, {"grad_reduce_in_fp32": True}):
            for sync in (True, False):
                model = fully_shard_model(
                    Numbers(),
                    **arguments,
                    zero_dp_strategy=level,
                    sync_model_each_microbatch=sync,
                    **keywords,
                )
                for number in (1.0, *[SMALL] * 8):
                    model(number).backward()
                model.finish_grad_sync()
                assert (
                    uneven_dtensor_to_full_tensor(next(model.parameters()).grad).tolist()
                    == [1 + 8 * SMALL] * 5
                )


def test_08_gradients_of_bf16_weights_accumulate_in_fp32(ranks: Ranks) -> None:
    ranks(2, accumulate_small_numbers, "flat")
    ranks(2, accumulate_small_numbers, "outer2")


def gradients_of_nothing(level: int) -> list[int]:
    """Numbers of elements that this rank has of each gradient; all of them are there."""
    model = fully_shard_model(models.build("scalars"), shard_mesh(), zero_dp_strategy=level)
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    return [parameter.grad.to_local().numel() for parameter in model.parameters()]


def test_09_ranks_that_own_nothing_of_a_parameter_take_part_in_its_norm(ranks: Ranks) -> None:
    for level in (1, 2, 3):
        sizes = ranks(4, gradients_of_nothing, level)
        assert any(0 in each for each in sizes)
        assert len({len(each) for each in sizes}) == 1
    cases = [
        gradients_of("scalars", clip=order, settings={"zero_dp_strategy": level})
        for order, level in ((2.0, 1), (2.0, 3), (inf, 3))
    ]
    ranks(4, compare_all, cases)


def attributes_of_the_output_layer() -> None:
    module = models.build("tied_across_units")
    module.blocks[0].up.weight.shared = True
    model = fully_shard_model(module, shard_mesh(), fsdp_unit_modules=[Block])
    assert [
        name for name, parameter in model.named_parameters() if hasattr(parameter, "shared")
    ] == ["module.blocks.0.up.weight"]


def test_10_a_tied_weight_counts_once_in_the_norm_and_marks_of_copies_reach_the_optimizer(
    ranks: Ranks,
) -> None:
    """Which copies on other pipeline stages count is the adapter's decision, by Megatron-Core's attribute `shared`."""
    ranks(2, attributes_of_the_output_layer)
    case = Case(model="tied_across_units", clip=2.0)
    ranks(
        2,
        compare_all,
        [
            *with_settings(case, {"zero_dp_strategy": 0}, {}),
            replace(case, model="tied_weight_as_argument", clip=1.0),
        ],
    )


def order_of_communication(name: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    unshard, start = ParamGroup.unshard, Reductions.start

    def watched_unshard(self: ParamGroup) -> None:
        state = self.state
        unshard(self)
        if self.state is not state:
            calls.append(("gather", self.names[0]))

    def watched_start(self: Reductions, group: ParamGroup, *arguments: bool) -> None:
        calls.append(("reduce", group.names[0]))
        start(self, group, *arguments)

    module = models.build(name)
    with (
        patch.object(ParamGroup, "unshard", watched_unshard),
        patch.object(Reductions, "start", watched_start),
    ):
        model, optimizer = fully_shard(
            module, optimizer_over(module), shard_mesh(), fsdp_unit_modules=type(module).units
        )
        for step in range(3):
            loss_of(model(batch(step, dist.get_rank(), 0), step=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return calls


@pytest.mark.parametrize("name", ["parallel_branches", "tied_across_units", "unused_parameters"])
def test_11_collectives_have_one_order_on_all_ranks(ranks: Ranks, name: str) -> None:
    orders = ranks(4, order_of_communication, name)
    assert len(orders[0]) > 20
    assert all(order == orders[0] for order in orders)


# ---- weights and optimizer
# -----------------------------------------------------------------------------------------------


def look_at_a_fresh_optimizer(kind: str, level: int) -> None:
    module, reference = models.build("several_units"), models.build("several_units")
    settings = {"lr": 0.1, "weight_decay": 0.5}
    optimizer, expected = (
        getattr(torch.optim, kind)(each.parameters(), **settings) for each in (module, reference)
    )
    model, optimizer = fully_shard(
        module, optimizer, shard_mesh(), zero_dp_strategy=level, preserve_fp32_weights=False
    )
    torch_state_dict.get_optimizer_state_dict(
        model, optimizer
    )  # torch takes a step where it finds no state
    for slots in optimizer.state_dict()["state"].values():
        assert float(slots["step"]) == 0
        assert not slots["exp_avg"].to_local().any() and not slots["exp_avg_sq"].to_local().any()
    for name, value in whole(model.state_dict()).items():
        assert torch.equal(value, reference.get_parameter(name)), name
    x = batch(0, 0, 0)
    for each, each_optimizer in ((model, optimizer), (reference, expected)):
        loss_of(each(x)).backward()
        each_optimizer.step()
    for name, value in whole(model.state_dict()).items():
        close(value, reference.get_parameter(name).detach(), name)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_12_making_state_neither_counts_a_step_nor_decays_weights(ranks: Ranks, kind: str) -> None:
    for level in (0, 1, 3):
        ranks(2, look_at_a_fresh_optimizer, kind, level)


def train_with_two_groups(level: int) -> None:
    def groups_of(module: nn.Module) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in module.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
        return torch.optim.AdamW(
            [
                {"params": decayed, "lr": 0.05, "weight_decay": 0.3},
                {"params": others, "lr": 0.01, "weight_decay": 0.0},
            ]
        )

    module, reference = models.build("several_units"), models.build("several_units")
    model, optimizer = fully_shard(
        module, groups_of(module), shard_mesh(), zero_dp_strategy=level, preserve_fp32_weights=False
    )
    expected = groups_of(reference)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.05, 0.3),
        (0.01, 0.0),
    ]
    for step in range(2):
        for each, each_optimizer in ((model, optimizer), (reference, expected)):
            each_optimizer.zero_grad()
            loss_of(each(batch(step, 0, 0))).backward()
            each_optimizer.step()
    for name, value in whole(model.state_dict()).items():
        close(value, reference.get_parameter(name).detach(), name)


def test_13_param_groups_keep_their_learning_rates_and_weight_decays(ranks: Ranks) -> None:
    for level in (0, 1, 3):
        ranks(2, train_with_two_groups, level)


def outputs_are_those_of_the_main_weights(model: MegatronFSDP, name: str) -> None:
    """In every bit: of a module that is built from the main weights."""
    unsharded = models.build(name, torch.bfloat16)
    unsharded.load_state_dict(
        {key: value.bfloat16() for key, value in whole(model.state_dict()).items()}
    )
    x = batch(9, 0, 0).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), unsharded(x))


def bf16_model(level: int, **settings: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = models.build("several_units", torch.bfloat16)
    settings = {"fsdp_unit_modules": [Block], "mixed_precision_policy": BF16_WITH_FP32, **settings}
    return fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), zero_dp_strategy=level, **settings
    )


def train_bf16(level: int, mesh: str, **settings: Any) -> None:
    model, optimizer = bf16_model(level, **Meshes().arguments(mesh), **settings)
    for step in range(3):
        loss_of(model(batch(step, dist.get_rank(), 0).bfloat16())).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs_are_those_of_the_main_weights(model, "several_units")


def test_14_every_forward_uses_the_weights_of_the_last_step(ranks: Ranks) -> None:
    for level in LEVELS:
        ranks(2, train_bf16, level, "flat")
    ranks(4, train_bf16, 3, "outer2", outer_dp_sharding_strategy=1)


def load_weights(level: int, mesh: str, path: str, **settings: Any) -> None:
    arguments = Meshes().arguments(mesh)
    model, _ = bf16_model(level, **arguments, **settings)
    model(batch(0, 0, 0).bfloat16())  # what was gathered before must not stay
    other = models.build("several_units", torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    model.load_state_dict({key: value.float() for key, value in other.state_dict().items()})
    x = batch(9, 0, 0).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), other(x))

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    fresh, _ = bf16_model(level, **arguments, **settings)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=path)
    fresh.load_state_dict(state["model"])
    with torch.no_grad():
        assert torch.equal(fresh(x), other(x))


def test_15_loaded_weights_are_active_before_any_step(ranks: Ranks, tmp_path: Any) -> None:
    for level in LEVELS:
        ranks(2, load_weights, level, "flat", str(tmp_path / str(level)))
    ranks(4, load_weights, 3, "outer2", str(tmp_path / "hybrid"), outer_dp_sharding_strategy=1)


@contextmanager
def watching_reductions() -> Iterator[list[torch.dtype]]:
    """The dtype of everything that travels in a reduction."""
    dtypes: list[torch.dtype] = []
    reduce_scatter, all_reduce = collectives._reduce_scatter_single, dist.all_reduce

    def watched_reduce_scatter(output: Tensor, tensor: Tensor, **options: Any) -> Any:
        dtypes.append(tensor.dtype)
        return reduce_scatter(output, tensor, **options)

    def watched_all_reduce(tensor: Tensor, **options: Any) -> Any:
        dtypes.append(tensor.dtype)
        return all_reduce(tensor, **options)

    with (
        patch.object(collectives, "_reduce_scatter_single", watched_reduce_scatter),
        patch.object(dist, "all_reduce", watched_all_reduce),
    ):
        yield dtypes


def dtypes_that_travel(mesh: str) -> None:
    arguments = Meshes().arguments(mesh)
    for level in LEVELS:
        for comm in (torch.bfloat16, None):
            module = models.build("several_units", torch.float32)
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm)
            with watching_reductions() as dtypes:
                model = fully_shard_model(
                    module, **arguments, zero_dp_strategy=level, mixed_precision_policy=policy
                )
                loss_of(model(batch(0, dist.get_rank(), 0).float())).backward()
                model.finish_grad_sync()
            assert dtypes and set(dtypes) == {comm or torch.float32}


def test_16_gradients_travel_in_the_dtype_that_was_asked_for(ranks: Ranks) -> None:
    ranks(2, dtypes_that_travel, "flat")
    ranks(2, dtypes_that_travel, "outer2")


def settings_that_arrive() -> None:
    """Options that change no number, each where it acts."""
    other_group = dist.new_group(list(range(dist.get_world_size())))
    arrives: dict[str, tuple[Any, Callable[[MegatronFSDP], bool]]] = {
        "overlap_grad_reduce": (False, lambda model: not model._schedule._reductions._overlap),
        "overlap_param_gather": (False, lambda model: not model._schedule._prefetcher._is_enabled),
        "average_in_collective": (
            True,
            lambda model: model.groups[0]._communicator.average_in_collective,
        ),
        "calculate_per_token_loss": (
            True,
            lambda model: model.groups[0]._communicator.divisor == 1,
        ),
        "fsdp_group_ag": (
            other_group,
            lambda model: model.groups[0]._communicator.all_gather_group is other_group,
        ),
        "disable_bucketing": (True, lambda model: len(model._units) == 1),
        "enable_fine_grained_param_gather": (
            True,
            lambda model: "blocks.0.up" in [unit.name for unit in model._units],
        ),
        "sync_model_each_microbatch": (False, lambda model: not model._auto_sync),
        "report_nan_in_param_grad": (True, lambda model: model._report_nan),
        "check_for_nan_in_grad": (True, lambda model: model._report_nan),
        "preproc_state_dict_for_dcp_ckpt": (False, lambda model: not model.checkpoint_ready),
        "use_decoupled_grad": (True, lambda model: model._use_decoupled_grad),
        "zero_dp_strategy": ("optim", lambda model: model.strategy == 1),
    }
    mesh = shard_mesh()
    unchanged = fully_shard_model(models.build("several_units"), mesh, fsdp_unit_modules=[Block])
    for name, (value, has_arrived) in arrives.items():
        model = fully_shard_model(
            models.build("several_units"), mesh, fsdp_unit_modules=[Block], **{name: value}
        )
        assert has_arrived(model) and not has_arrived(unchanged), name


def test_17_every_option_of_the_public_function_is_passed_on(ranks: Ranks) -> None:
    """What each does is in `test_interface_walk`, which fails for an argument that has no test."""
    ranks(2, settings_that_arrive)


# ---- memory
# --------------------------------------------------------------------------------------------------------------


def watch_small_model() -> list[int]:
    """Units alive after every change of storage, in the first and in later passes."""
    model = fully_shard_model(Deep(), shard_mesh(), fsdp_unit_modules=[Block])
    peaks = []
    for _ in range(3):
        with watching(model) as samples:
            train(model)
        peaks.append(peak_in_units(samples, "gathered"))
    return peaks


def test_18_a_small_model_is_not_gathered_whole_by_prefetch(ranks: Ranks) -> None:
    for peaks in ranks(2, watch_small_model):
        assert max(peaks) <= 2 and min(peaks) >= 1


def gradients_without_units(level: int) -> tuple[int, int, int]:
    model = fully_shard_model(Deep(), shard_mesh(), zero_dp_strategy=level)
    with watching(model) as samples:
        train(model)
    return (
        peak_in_units(samples, "with_gradients"),
        max(sample.bytes for sample in samples),
        len(model._units),
    )


def test_19_level_2_stays_below_level_1_with_units_and_without(ranks: Ranks) -> None:
    for peaks in ranks(2, peak_bytes):
        assert peaks[3] < peaks[2] < peaks[1] < peaks[0]
    for (whole_buffers, bytes_1, num_units), (buffers, bytes_2, _) in zip(
        ranks(2, gradients_without_units, 1), ranks(2, gradients_without_units, 2)
    ):
        assert buffers <= 2 < whole_buffers < num_units
        assert bytes_2 < bytes_1


ENDS = {"embed.0", "embed.1", "head.0", "head.1"}


def watch_both_ends() -> None:
    model = fully_shard_model(Deep(), shard_mesh(), fsdp_unit_modules=[Block])
    with watching(model) as samples:
        output = model(torch.randn(BATCH, WIDTH))
    assert {name for sample in samples for name in sample.gathered} >= ENDS
    assert not any(
        ENDS & set(sample.gathered) for sample in samples if "blocks.3" in sample.gathered
    )
    assert look_at(model).gathered == []
    with watching(model) as samples:
        loss_of(output).backward()
    assert not any(
        ENDS & set(sample.gathered) for sample in samples if "blocks.3" in sample.gathered
    )
    assert look_at(model).gathered == []


def test_20_embedding_and_output_layer_are_freed_as_any_unit(ranks: Ranks) -> None:
    ranks(2, watch_both_ends)


def watch_reduction_inputs(level: int) -> int:
    model = fully_shard_model(
        Deep(), shard_mesh(), fsdp_unit_modules=[Block], zero_dp_strategy=level
    )
    train(model)
    with watching(model) as samples:
        loss_of(model(torch.randn(BATCH, WIDTH))).backward()
    assert look_at(model).with_gradients == []
    return peak_in_units(samples, "with_gradients")


def test_21_inputs_of_reductions_are_freed_during_backward(ranks: Ranks) -> None:
    for level in (2, 3):
        assert all(1 <= peak <= 2 for peak in ranks(2, watch_reduction_inputs, level))


GPT_OSS_ATTENTION = [
    (4096, 2880),
    (4096,),
    (512, 2880),
    (512,),
    (512, 2880),
    (512,),
    (2880, 4096),
    (2880,),
    (64,),
    (2880,),
    (2880,),
    (128, 2880),
    (128,),
]


def test_22_padding_is_small_and_rows_that_are_promised_whole_are_never_cut() -> None:
    for world_size in (2, 64, 256, 1024, 4096):
        layout = plan(GPT_OSS_ATTENTION, world_size)
        assert layout.padding <= 0.01 * sum(map(prod, GPT_OSS_ATTENTION))
    random = Random(0)
    modules = [[(1, 7), (6, 3)]] + [
        [
            tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
            for _ in range(random.randint(1, 5))
        ]
        for _ in range(300)
    ]
    for shapes in modules:
        for granularity in (ROWS, PREFER_ROWS):
            layout = plan(shapes, 2, granularity)
            promised = [index for index, slot in enumerate(layout.slots) if slot.by_rows]
            assert granularity is PREFER_ROWS or len(promised) == len(shapes)
            for index in promised:
                row = prod(shapes[index][1:])
                assert all(layout.owned(index, rank).numel % row == 0 for rank in range(2)), shapes


@contextmanager
def watching_order(seen: list[int]) -> Iterator[None]:
    """Fail where storage is freed that a collective still uses; `seen` has the number under way at every release."""
    users: dict[int, set[int]] = {}

    def watched(name: str) -> Callable[..., Pending]:
        original = getattr(Communicator, name)

        def call(self: Communicator, *tensors: Any) -> Pending:
            pending = original(self, *tensors)
            # The storage object itself: its address is 0 once it is freed.
            users[id(pending)] = {
                tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None
            }
            kept.append(pending)  # so that no other takes its id
            return pending

        return call

    wait, free = Pending.wait, device.free
    kept: list[Pending] = []

    def watched_wait(self: Pending) -> None:
        wait(self)
        users.pop(id(self), None)

    def watched_free(tensor: Tensor) -> None:
        assert not any(tensor.untyped_storage()._cdata in storages for storages in users.values())
        seen.append(len(users))
        free(tensor)

    names = (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "reduce_scatter_outer",
        "all_reduce_outer",
    )
    with patch.multiple(Communicator, **{name: watched(name) for name in names}):
        with (
            patch.object(Pending, "wait", watched_wait),
            patch.object(device, "free", watched_free),
        ):
            yield


def watch_releases(level: int) -> list[int]:
    model = fully_shard_model(
        Deep(), shard_mesh(), fsdp_unit_modules=[Block], zero_dp_strategy=level
    )
    seen: list[int] = []
    with watching_order(seen):
        for _ in range(2):
            train(model)
        with torch.no_grad():
            model(torch.randn(BATCH, WIDTH))
    return seen


def test_23_storage_is_freed_only_after_its_last_reader_was_waited_for(ranks: Ranks) -> None:
    for level in (2, 3):
        for seen in ranks(2, watch_releases, level):
            assert len(seen) > 10
            assert level == 2 or max(seen) >= 1  # others are under way meanwhile


# ---- lifecycle
# -----------------------------------------------------------------------------------------------------------


def test_24_units_return_any_nest_and_edit_their_inputs(ranks: Ranks) -> None:
    cases = [Case(model=name) for name in ("odd_outputs", "edits_in_place", "keyword_inputs")]
    ranks(
        2,
        compare_all,
        [
            *cases,
            Case(model=Drawn(layers=(Layer(hidden=3), Layer(hidden=8)), is_output_a_dict=True)),
        ],
    )


def test_25_parameters_may_be_unused_and_modules_called_twice(ranks: Ranks) -> None:
    ranks(
        2,
        compare_all,
        [
            Case(model=name)
            for name in ("unused_parameters", "unit_unused_in_some_steps", "unit_called_twice")
        ],
    )


def test_26_weights_may_be_tied_across_units_and_have_no_dims(ranks: Ranks) -> None:
    cases = [
        Case(model=name) for name in ("tied_across_units", "tied_weight_as_argument", "scalars")
    ]
    drawn = Drawn(
        layers=(Layer(hidden=3, scale="scalar"), Layer(hidden=3)), tied_layers=(0, 1), head="tied"
    )
    ranks(2, compare_all, [*cases, Case(model=drawn, clip=2.0)])


def test_27_level_3_works_without_unit_modules(ranks: Ranks) -> None:
    case = Case(model="no_units", microbatches=2)
    ranks(
        2,
        compare_all,
        with_settings(
            case,
            {"fsdp_unit_modules": None},
            {"fsdp_unit_modules": []},
            {"disable_bucketing": True},
        ),
    )


def watch_recomputation(reentrant: bool) -> None:
    model = fully_shard_model(
        Deep("reentrant" if reentrant else "non_reentrant"), shard_mesh(), fsdp_unit_modules=[Block]
    )
    for _ in range(2):
        output = model(torch.randn(BATCH, WIDTH))
        assert look_at(model).gathered == []
        with watching(model) as samples:
            loss_of(output).backward()
        assert 1 <= peak_in_units(samples, "gathered") <= 2
        assert look_at(model).gathered == []


def test_28_recomputation_leaves_nothing_gathered_and_frees_nothing_too_early(ranks: Ranks) -> None:
    for reentrant in (True, False):
        ranks(2, watch_recomputation, reentrant)
    names = [
        f"checkpoint_{where}{kind}"
        for where in ("", "inside_")
        for kind in ("reentrant", "non_reentrant")
    ]
    ranks(2, compare_all, [gradients_of(name, microbatches=2) for name in names])


def train_a_stage() -> None:
    """Two pipeline stages with other modules on two ranks each; activations and their gradients travel between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage, place = mesh.get_local_rank("stage"), mesh.get_local_rank("dp")
    whole_model = models.build("several_units")
    parts = (
        nn.Sequential(whole_model.embed, whole_model.blocks[0]),
        nn.Sequential(whole_model.blocks[1], whole_model.head),
    )
    reference = copy.deepcopy(parts)
    model = fully_shard_model(
        parts[stage], mesh["dp"], fsdp_unit_modules=[Block], preserve_fp32_weights=False
    )
    other = mesh.get_group("stage")
    for microbatch in range(2):
        x = batch(0, place, microbatch)
        with model.no_sync():
            run_stage(model, stage, x, other)
        for rank in range(2):
            (loss_of(reference[1](reference[0](batch(0, rank, microbatch)))) / 2).backward()
    model.finish_grad_sync()
    expected = {name: parameter.grad for name, parameter in reference[stage].named_parameters()}
    compare_pieces(
        model,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        expected,
        f"stage {stage}",
    )


def run_stage(model: nn.Module, stage: int, x: Tensor, group: dist.ProcessGroup) -> None:
    if stage == 0:
        output = model(x)
        dist.send(output.detach().clone(), group=group, group_dst=1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, group=group, group_src=1)
        output.backward(gradient)
    else:
        received = torch.empty(BATCH, WIDTH, dtype=torch.float64)
        dist.recv(received, group=group, group_src=0)
        received.requires_grad_()
        loss_of(model(received)).backward()
        dist.send(received.grad, group=group, group_dst=0)


def shard_other_stages_by_mistake() -> str:
    """Ranks of one data axis that hold other stages."""
    return message_of(
        ValueError,
        fully_shard_model,
        nn.Linear(2, 2) if dist.get_rank() else nn.Linear(2, 3),
        shard_mesh(),
    )


def test_29_pipeline_stages_train_and_ranks_that_hold_other_modules_are_told_together(
    ranks: Ranks,
) -> None:
    ranks(4, train_a_stage)
    messages = ranks(2, shard_other_stages_by_mistake)
    assert messages[0] == messages[1]
    assert "differs between ranks" in messages[0]


def shard_beside_megatron_core() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig as OtherConfig

    module = models.build("several_units")
    model, optimizer = fully_shard(module, optimizer_over(module), fsdp_unit_modules=[Block])
    loss_of(model(batch(0, 0, 0))).backward()
    optimizer.step()
    config = OtherConfig(data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True)
    model = MegatronFSDP(models.build("several_units"), FSDPDistributedIndex(), config)
    loss_of(model(batch(0, 0, 0))).backward()
    model.finish_grad_sync()
    assert model.strategy == 2 and all(
        parameter.grad is not None for parameter in model.parameters()
    )


WITHOUT_MEGATRON_CORE = """
import sys
sys.modules["megatron.core"] = None  # importing it fails
import torch
from megatron_fsdp import fully_shard
import megatron_fsdp.megatron_fsdp, megatron_fsdp.uneven_dtensor, megatron_fsdp.utils
module = torch.nn.Linear(3, 3)
model, optimizer = fully_shard(module, torch.optim.AdamW(module.parameters()))
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
assert not [name for name in sys.modules if name.startswith("megatron.core.")]
torch.distributed.destroy_process_group()
print("trained")
"""


def test_30_the_engine_works_with_megatron_core_beside_it_and_without(ranks: Ranks) -> None:
    ranks(2, shard_beside_megatron_core)
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON_CORE],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "trained\n", done.stderr


def copy_state(level: int, dtype: torch.dtype) -> None:
    module = models.build("scalars", dtype)
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[Block],
    )
    loss_of(model(batch(0, 0, 0).to(dtype))).backward()
    optimizer.step()
    optimizer.zero_grad()
    offsets = {parameter.to_local().storage_offset() for parameter in model.parameters()}
    assert len(offsets) > 1  # the local tensors do not begin where their storage does
    best, best_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = {name: value.clone() for name, value in whole(model.state_dict()).items()}
    loss_of(model(batch(1, 0, 0).to(dtype))).backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in whole(best).items())
    assert not all(
        torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items()
    )
    model.load_state_dict(best)
    optimizer.load_state_dict(best_optimizer)
    assert all(
        torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items()
    )
    assert {float(slots["step"]) for slots in optimizer.state_dict()["state"].values()} == {1.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_44_state_dicts_can_be_deep_copied(ranks: Ranks, dtype: torch.dtype) -> None:
    for level in (1, 3):
        ranks(2, copy_state, level, dtype)
