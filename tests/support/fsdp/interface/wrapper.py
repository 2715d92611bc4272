# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: arguments of the wrapper and fields of its config, beside keywords.

What a keyword does is shown for `fully_shard_model`; here an argument or a field has to give the
model the settings that the keyword gives it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.fsdp.config.settings import Settings
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from tests.support.fsdp.interface.walk import (
    backward,
    gradient,
    mean_gradient,
    names_of_units,
    shows,
    wrapped,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.wrong_calls import message_of

CONFIG = "DistributedDataParallelConfig"
HALF = MixedPrecisionPolicy(torch.float64, torch.float32, torch.float16)

FIELDS: dict[str, tuple[str, Any]] = {
    "overlap_grad_reduce": ("overlap_grad_reduce", True),
    "overlap_param_gather": ("overlap_param_gather", True),
    "check_for_nan_in_grad": ("report_nan_in_param_grad", True),
    "average_in_collective": ("average_in_collective", True),
    "data_parallel_sharding_strategy": ("zero_dp_strategy", 2),
    "outer_dp_sharding_strategy": ("outer_dp_sharding_strategy", "optim"),
    "megatron_fsdp_use_decoupled_grad": ("use_decoupled_grad", True),
    "megatron_fsdp_enable_fine_grained_param_gather": ("enable_fine_grained_param_gather", True),
    "keep_fp8_transpose_cache": ("keep_fp8_transpose_cache", True),
    "fsdp_double_buffer": ("fsdp_double_buffer", True),
    "megatron_fsdp_cuda_graph_mode": ("cuda_graph_mode", True),
    "megatron_fsdp_max_pool_double_buffer": ("maxpool_double_buffer", True),
    "fsdp_db_use_persist_buf_on_alloc_fail": ("fsdp_db_use_persist_buf_on_alloc_fail", True),
    "disable_symmetric_registration": ("disable_symmetric_registration", True),
    "suggested_communication_unit_size": ("suggested_communication_unit_size", 100),
    "megatron_fsdp_granularity": ("granularity", "prefer_tensors"),
    "megatron_fsdp_offload_policy": ("offload_policy", "host"),
}
"""Fields of the config, the keyword that means the same, and a value that is not the default."""

ARGUMENTS: dict[str, Any] = {
    "mixed_precision_policy": HALF,
    "fsdp_unit_modules": [nn.Linear],
    "disable_bucketing": True,
    "device": "cpu",
    "calculate_per_token_loss": True,
    "init_model_with_meta_device": True,
    "sync_model_each_microbatch": True,
    "keep_fp8_transpose_cache": True,
    "fsdp_double_buffer": True,
    "fsdp_db_use_persist_buf_on_alloc_fail": True,
    "disable_symmetric_registration": True,
    "report_nan_in_param_grad": True,
}
"""Arguments of the wrapper that are keywords too, and values that are not the defaults."""

OF_CONFIG = {
    "zero_dp_strategy": 3,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "sync_model_each_microbatch": False,
}
"""Keywords for the settings of a wrapper with a config of level 3, which says nothing else."""


def settings_of(model: MegatronFSDP) -> Settings:
    """Return the settings, but for the mesh, of which every model here has one of its own."""
    return replace(model._settings, mesh=None)


def by_config(index: FSDPDistributedIndex, **fields: Any) -> Settings:
    fields = {"data_parallel_sharding_strategy": 3, **fields}
    return settings_of(
        MegatronFSDP(nn.Linear(2, 2), index, DistributedDataParallelConfig(**fields))
    )


@shows(CONFIG, *FIELDS)
def shows_fields_that_mean_what_keywords_mean() -> None:
    mesh = mesh_of("outer", "shard", sizes=(1, 2))
    axes = {"dp_shard_dim": "shard", "dp_outer_dim": "outer"}
    index = FSDPDistributedIndex(mesh, **axes)
    default = by_config(index)
    for field, (keyword, value) in FIELDS.items():
        keywords = {**OF_CONFIG, **axes, keyword: value}
        wanted = settings_of(fully_shard_model(nn.Linear(2, 2), mesh, **keywords))
        assert by_config(index, **{field: value}) == wanted != default, field


DTYPES = [f"megatron_fsdp_{name}_dtype" for name in ("main_params", "main_grads", "grad_comm")]


@shows(CONFIG, *DTYPES)
def shows_dtypes_of_config() -> None:
    index = FSDPDistributedIndex(mesh_of("dp"))
    dtypes = (HALF.main_params_dtype, HALF.main_grads_dtype, HALF.grad_comm_dtype)
    assert by_config(index, **dict(zip(DTYPES, dtypes, strict=True))).precision == HALF


UNUSED = {
    "bucket_size": 1,
    "gradient_reduce_div_fusion": False,
    "fsdp_all_gather_in_start_param_sync": False,
    "fp8_param_gather": True,
}
"""Fields that tune another way of communicating, or weights in FP8, and change nothing here."""


@shows(CONFIG, *UNUSED)
def shows_what_has_nothing_to_change() -> None:
    index = FSDPDistributedIndex(mesh_of("dp"))
    for name, value in UNUSED.items():
        assert f"``{name}``" in DistributedDataParallelConfig.__doc__
        assert by_config(index, **{name: value}) == by_config(index), name
    model = MegatronFSDP(build_stack(), index, DistributedDataParallelConfig(**UNUSED))
    with model.sync():
        backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows(CONFIG, "nccl_ub", "fsdp_manual_registration")
def shows_refused_fields() -> None:
    index = FSDPDistributedIndex(mesh_of("dp"))
    for name in ("nccl_ub", "fsdp_manual_registration"):
        assert name in message_of(ValueError, by_config, index, **{name: True})


@shows("MegatronFSDP", *ARGUMENTS)
def shows_arguments_that_mean_what_keywords_mean() -> None:
    mesh = mesh_of("dp")
    index = FSDPDistributedIndex(mesh)
    default = settings_of(MegatronFSDP(nn.Linear(2, 2), index))
    for name, value in ARGUMENTS.items():
        device = "meta" if name == "init_model_with_meta_device" else "cpu"
        models = [nn.Linear(2, 2, device=device) for _ in range(2)]
        keywords = {"sync_model_each_microbatch": False, name: value}
        wanted = settings_of(fully_shard_model(models[0], mesh, **keywords))
        found = settings_of(MegatronFSDP(models[1], index, **{name: value}))
        assert found == wanted != default, name


OLDER: dict[str, dict[str, Any]] = {
    "check_for_nan_in_grad": {"report_nan_in_param_grad": True},
    "grad_reduce_in_fp32": {
        "mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    },
}
"""Older keywords, and those of today that mean the same as True there."""


@shows("fully_shard_model", *OLDER, "preserve_fp32_weights")
def shows_older_keywords() -> None:
    mesh = mesh_of("dp")
    pairs = [({name: True}, today) for name, today in OLDER.items()]
    pairs.append(
        ({"preserve_fp32_weights": False}, {"mixed_precision_policy": MixedPrecisionPolicy(None)})
    )
    default = settings_of(fully_shard_model(nn.Linear(2, 2), mesh))
    for older, today in pairs:
        found, wanted = (
            settings_of(fully_shard_model(nn.Linear(2, 2), mesh, **each)) for each in (older, today)
        )
        assert found == wanted != default, older


@shows("MegatronFSDP", "nccl_ub", "fine_grained_recurse_module_types")
def shows_refused_arguments() -> None:
    assert "nccl_ub" in message_of(ValueError, wrapped, build_stack(), nccl_ub=True)
    name = "fine_grained_recurse_module_types"
    assert name in message_of(NotImplementedError, wrapped, build_stack(), **{name: True})


@shows(
    "MegatronFSDP",
    "enable_fine_grained_param_gather_hook",
    "enable_fine_grained_param_gather_backward_hook",
)
def shows_fine_grained_hooks() -> None:
    both = (
        "enable_fine_grained_param_gather_hook",
        "enable_fine_grained_param_gather_backward_hook",
    )
    units = {"fsdp_unit_modules": [ResidualBlock]}
    model = wrapped(build_stack(), **units, **dict.fromkeys(both, True))
    assert "blocks.0.up" in names_of_units(model)
    for name in both:
        assert name in message_of(NotImplementedError, wrapped, build_stack(), **{name: True})


@shows("MegatronFSDP", "module", "dist_index", "ddp_config")
@shows("members", "get_distributed_index", "ddp_config", "module", "forward")
@shows("members", "mp_policy", "expt_device_mesh")
def shows_index_and_config() -> None:
    index = FSDPDistributedIndex(mesh_of("dp"))
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")
    module = build_stack()
    model = MegatronFSDP(module, index, config)
    assert model.get_distributed_index() is index
    assert model.ddp_config is config and model.strategy == 1
    assert model.mp_policy.main_params_dtype is not None and model.expt_device_mesh is None
    assert model.module is module
    x = torch.ones(2, 5, dtype=torch.float64)
    assert torch.equal(model.forward(x), build_stack()(x))
    assert torch.equal(model(x=x, step=0), build_stack()(x))
    assert MegatronFSDP(build_stack(), index).strategy == 3
