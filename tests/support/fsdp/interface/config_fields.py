# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: fields of `DistributedDataParallelConfig`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
)
from tests.support.fsdp.interface.model_arguments import (
    check_report,
    is_waited_for_at_once,
    most_units_gathered,
    shows_average_in_collective,
    shows_zero_dp_strategy,
)
from tests.support.fsdp.interface.walk import (
    REFUSED,
    Make,
    backward,
    gradient,
    mean_gradient,
    names_of_units,
    num_on_all_ranks,
    shows,
    wrapped,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.watched_communication import watching_dtypes
from tests.support.fsdp.wrong_calls import message_of


def configured(module: nn.Module | None = None, **values: Any) -> MegatronFSDP:
    values = {"data_parallel_sharding_strategy": "optim_grads_params", **values}
    return wrapped(
        build_stack() if module is None else module,
        fsdp_unit_modules=[ResidualBlock],
        ddp_config=DistributedDataParallelConfig(**values),
    )


@shows("DistributedDataParallelConfig", "overlap_grad_reduce", "overlap_param_gather")
def shows_overlap_of_config(make: Make) -> None:
    assert is_waited_for_at_once(configured(), "reduce") and most_units_gathered(configured()) == 1
    assert not is_waited_for_at_once(configured(overlap_grad_reduce=True), "reduce")
    assert most_units_gathered(configured(overlap_param_gather=True)) == 2


@shows("DistributedDataParallelConfig", "check_for_nan_in_grad")
def shows_check_for_nan_of_config(make: Make) -> None:
    check_report(configured, "check_for_nan_in_grad")


@shows("DistributedDataParallelConfig", "average_in_collective")
def shows_average_of_config(make: Make) -> None:
    shows_average_in_collective(configured)


@shows("DistributedDataParallelConfig", "data_parallel_sharding_strategy")
def shows_strategy_of_config(make: Make) -> None:
    shows_zero_dp_strategy(
        lambda module, zero_dp_strategy: configured(
            module, data_parallel_sharding_strategy=zero_dp_strategy
        )
    )


@shows("DistributedDataParallelConfig", "outer_dp_sharding_strategy", world_size=4)
def shows_outer_strategy_of_config(make: Make) -> None:
    index = FSDPDistributedIndex(mesh_of("outer", "shard", sizes=(2, 2)), "shard", "outer")
    sizes = []
    for outer in ("no_shard", "optim"):
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=outer
        )
        sizes.append(num_on_all_ranks(MegatronFSDP(build_stack(), index, config)))
    assert sizes[0] == 2 * sizes[1]


@shows(
    "DistributedDataParallelConfig",
    *(f"megatron_fsdp_{name}_dtype" for name in ("main_params", "main_grads", "grad_comm")),
)
def shows_dtypes_of_config(make: Make) -> None:
    def by_config(module: nn.Module, mixed_precision_policy: MixedPrecisionPolicy) -> MegatronFSDP:
        return configured(
            module,
            **{
                f"megatron_fsdp_{name}": value
                for name, value in vars(mixed_precision_policy).items()
            },
        )

    policy = MixedPrecisionPolicy(torch.float64, torch.float32, torch.float16)
    model = by_config(build_stack().bfloat16(), policy)
    with watching_dtypes() as dtypes:
        backward(model, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {group.gradients.shard.dtype for group in model.groups} == {torch.float32}
    assert set(dtypes) == {torch.float16}


@shows("DistributedDataParallelConfig", "megatron_fsdp_use_decoupled_grad")
def shows_decoupled_of_config(make: Make) -> None:
    model = configured(megatron_fsdp_use_decoupled_grad=True)
    backward(model)
    assert all(
        parameter.grad is None and parameter.decoupled_grad is not None
        for parameter in model.parameters()
    )


@shows("DistributedDataParallelConfig", "megatron_fsdp_enable_fine_grained_param_gather")
def shows_fine_grained_of_config(make: Make) -> None:
    assert "blocks.0.up" in names_of_units(
        configured(megatron_fsdp_enable_fine_grained_param_gather=True)
    )


@shows(
    "DistributedDataParallelConfig",
    "bucket_size",
    "gradient_reduce_div_fusion",
    "fsdp_all_gather_in_start_param_sync",
    "fp8_param_gather",
)
def shows_what_has_nothing_to_change(make: Make) -> None:
    """Show that fields which tune another way of communicating change nothing here."""
    for name, value in {
        "bucket_size": 1,
        "gradient_reduce_div_fusion": False,
        "fsdp_all_gather_in_start_param_sync": False,
        "fp8_param_gather": True,  # there are no weights in FP8
    }.items():
        assert f"``{name}``" in DistributedDataParallelConfig.__doc__
        model = configured(**{name: value})
        backward(model)
        close(gradient(model), mean_gradient(2), name, 1e-5)


@shows("DistributedDataParallelConfig", "keep_fp8_transpose_cache")
def shows_copies_of_config(make: Make) -> None:
    """Show that the field arrives; tests of quantized weights show what it does."""
    message = message_of(ValueError, configured, keep_fp8_transpose_cache="sometimes")
    assert "keep_fp8_transpose_cache expects True or False" in message


def refused_field(name: str, kind: type[Exception]) -> Callable[[Make], None]:
    def shows_refused_field(make: Make) -> None:
        assert name in message_of(kind, configured, **{name: 1})

    return shows_refused_field


for _name, _kind in {
    **REFUSED,
    "fsdp_manual_registration": ValueError,  # without nccl_ub
}.items():
    shows("DistributedDataParallelConfig", _name)(refused_field(_name, _kind))


@shows(
    "DistributedDataParallelConfig",
    "fsdp_double_buffer",
    "megatron_fsdp_cuda_graph_mode",
    "megatron_fsdp_max_pool_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
)
def shows_slots_of_config(make: Make) -> None:
    for name, num_slots in {
        "fsdp_double_buffer": 3,
        "megatron_fsdp_cuda_graph_mode": 3,
        "megatron_fsdp_max_pool_double_buffer": 3,
        "fsdp_db_use_persist_buf_on_alloc_fail": 0,  # it needs slots to change anything
        "disable_symmetric_registration": 0,  # it needs nccl_ub
    }.items():
        model = configured(**{name: True}, overlap_param_gather=True)
        backward(model)
        model.install_optimized_model_weights()
        assert len(model.memory_slots.get("weights", [])) == num_slots


@shows("DistributedDataParallelConfig", "suggested_communication_unit_size")
def shows_size_of_config(make: Make) -> None:
    model = configured(suggested_communication_unit_size=1, overlap_param_gather=True)
    assert most_units_gathered(model) == 1


@shows("DistributedDataParallelConfig", "megatron_fsdp_granularity")
def shows_granularity_of_config(make: Make) -> None:
    for wanted in ("prefer_rows", "prefer_tensors"):
        model = configured(megatron_fsdp_granularity=wanted)
        assert model._settings.strategy.boundaries == wanted


@shows("DistributedDataParallelConfig", "megatron_fsdp_offload_policy")
def shows_offload_of_config(make: Make) -> None:
    model = configured(megatron_fsdp_offload_policy="host")
    assert all(group.memory.is_offloaded for group in model.groups)
