# SPDX-License-Identifier: Apache-2.0
"""The published names and signatures exist; the walk through the interface has the members."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron_fsdp.utils import (
    contains_submesh,
    find_megatron_fsdp,
    get_mcore_tensor_parallel_partition_dim,
    get_mesh_names,
    is_mcore_tensor_model_parallel,
)

MODULES: dict[str, list[str]] = {
    "megatron_fsdp": [
        *(
            "DistributedDataParallelConfig",
            "FSDPDistributedIndex",
            "MegatronFSDP",
            "MixedPrecisionPolicy",
            "ShardingStrategy",
        ),
        *("__version__", "fully_shard", "fully_shard_model", "fully_shard_optimizer"),
    ],
    "megatron_fsdp.fully_shard": [
        "ShardingStrategy",
        "fully_shard",
        "fully_shard_model",
        "fully_shard_optimizer",
    ],
    "megatron_fsdp.megatron_fsdp": ["MegatronFSDP"],
    "megatron_fsdp.mixed_precision": ["MixedPrecisionPolicy"],
    "megatron_fsdp.distributed_data_parallel_config": ["DistributedDataParallelConfig"],
    "megatron_fsdp.utils": [
        *("FSDPDistributedIndex", "contains_submesh", "find_megatron_fsdp"),
        *("get_mcore_tensor_parallel_partition_dim", "get_mesh_names"),
        *("is_mcore_tensor_model_parallel", "state_of_other_optimizers"),
    ],
    "megatron_fsdp.param_and_grad_buffer": ["make_fsdp_dtensor"],
    "megatron_fsdp.package_info": ["__version__"],
    "megatron_fsdp.uneven_dtensor": [
        *(
            "filter_unflattened_state_dict",
            "gather_and_compute_chunk_metadata",
            "gather_uneven_dtensor_to_full_tensor",
        ),
        *(
            "get_state_dict",
            "get_unflattened_state_dict",
            "make_uneven_dtensor",
            "preprocess_state_dict_for_uneven_dtensor",
            "redistribute_uneven_dtensor_to_replicated",
        ),
        *(
            "split_dtensor",
            "uneven_dtensor_to_full_tensor",
            "update_uneven_dtensor_chunk_metadata",
            "validate_uneven_dtensor",
        ),
    ],
}


MESH = {
    **dict.fromkeys(
        [
            "device_mesh",
            "dp_shard_dim",
            "dp_outer_dim",
            "tp_dim",
            "hybrid_fsdp_group",
            "hybrid_fsdp_expt_group",
        ]
    ),
}


SHARD = {
    **MESH,
    **dict.fromkeys(
        ["expt_device_mesh", "fsdp_group_ag", "expt_fsdp_group_ag", "fsdp_unit_modules"]
    ),
    "zero_dp_strategy": 3,
    "outer_dp_sharding_strategy": 0,
    "device": None,
    "init_model_with_meta_device": False,
    "mixed_precision_policy": megatron_fsdp.MixedPrecisionPolicy(),
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "sync_model_each_microbatch": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    **dict.fromkeys(
        ["report_nan_in_param_grad", "average_in_collective", "disable_bucketing"], False
    ),
    **dict.fromkeys(
        ["calculate_per_token_loss", "keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer"],
        False,
    ),
    **dict.fromkeys(
        ["fsdp_db_use_persist_buf_on_alloc_fail", "disable_symmetric_registration"], False
    ),
    **dict.fromkeys(
        [
            "enable_fine_grained_param_gather",
            "use_decoupled_grad",
            "cuda_graph_mode",
            "maxpool_double_buffer",
        ],
        False,
    ),
    **dict.fromkeys(
        ["check_for_nan_in_grad", "grad_reduce_in_fp32", "preserve_fp32_weights"]
    ),  # older spellings
    "suggested_communication_unit_size": None,
    "param_init_fn": None,
    "find_unused_parameters": False,
    "granularity": "prefer_rows",
    "fsdp_manual_registration": False,
    "ignored_params": None,
    "offload_policy": None,
    **dict.fromkeys(["expert_zero_dp_strategy", "expert_outer_dp_sharding_strategy"]),
}


REQUIRED = inspect.Parameter.empty


SIGNATURES: dict[str, dict[str, Any]] = {
    "fully_shard_model": {"module": REQUIRED, **SHARD},
    "fully_shard": {"module": REQUIRED, "optimizer": REQUIRED, **SHARD},
    "fully_shard_optimizer": {
        "optimizer": REQUIRED,
        "preproc_state_dict_for_dcp_ckpt": True,
    },
    "MixedPrecisionPolicy": {
        "main_params_dtype": torch.float32,
        "main_grads_dtype": None,
        "grad_comm_dtype": None,
    },
    "FSDPDistributedIndex": {
        **MESH,
        "hsdp_outer_dp_shard": False,
        **dict.fromkeys(["expt_device_mesh", "fsdp_group_ag", "expt_fsdp_group_ag"]),
    },
    "MegatronFSDP": {
        "module": REQUIRED,
        "dist_index": REQUIRED,
        "ddp_config": None,
        "mixed_precision_policy": megatron_fsdp.MixedPrecisionPolicy(),
        "fsdp_unit_modules": None,
        "disable_bucketing": False,
        "device": None,
        **dict.fromkeys(
            [
                "calculate_per_token_loss",
                "init_model_with_meta_device",
                "sync_model_each_microbatch",
            ],
            False,
        ),
        **dict.fromkeys(["keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer"], False),
        **dict.fromkeys(
            ["fsdp_db_use_persist_buf_on_alloc_fail", "disable_symmetric_registration"], False
        ),
        "enable_fine_grained_param_gather_hook": False,
        "enable_fine_grained_param_gather_backward_hook": False,
        "fine_grained_recurse_module_types": None,
        "report_nan_in_param_grad": False,
    },
    "DistributedDataParallelConfig": {
        **dict.fromkeys(
            ["overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"], False
        ),
        "bucket_size": None,
        **dict.fromkeys(["average_in_collective", "fp8_param_gather"], False),
        "data_parallel_sharding_strategy": "no_shard",
        "gradient_reduce_div_fusion": True,
        "suggested_communication_unit_size": None,
        **dict.fromkeys(["keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer"], False),
        "fsdp_all_gather_in_start_param_sync": True,
        "fsdp_db_use_persist_buf_on_alloc_fail": False,
        "outer_dp_sharding_strategy": "no_shard",
        **dict.fromkeys(["disable_symmetric_registration", "fsdp_manual_registration"], False),
        "megatron_fsdp_main_params_dtype": torch.float32,
        **dict.fromkeys(["megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"]),
        **dict.fromkeys(
            ["megatron_fsdp_use_decoupled_grad", "megatron_fsdp_cuda_graph_mode"], False
        ),
        **dict.fromkeys(
            [
                "megatron_fsdp_enable_fine_grained_param_gather",
                "megatron_fsdp_max_pool_double_buffer",
            ],
            False,
        ),
        **dict.fromkeys(
            ["expert_data_parallel_sharding_strategy", "expert_outer_dp_sharding_strategy"]
        ),
        "megatron_fsdp_offload_policy": None,
        "megatron_fsdp_granularity": "prefer_rows",
    },
}


@pytest.mark.parametrize("name", MODULES)
def test_exported_names(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(MODULES[name])
    assert all(getattr(module, export) is not None for export in module.__all__)


NOT_OFFERED = {
    "megatron_fsdp.param_and_grad_buffer": ("ParamAndGradBuffer", "model.parameters()"),
    "megatron_fsdp.utils": ("get_global_memory_buffer", "fsdp_double_buffer"),
    "megatron_fsdp.uneven_dtensor": ("copy_chunk_metadata", "update_uneven_dtensor_chunk_metadata"),
    "megatron_fsdp.megatron_fsdp": ("TrainingState", "megatron.fsdp.engine.states"),
}


@pytest.mark.parametrize("module", NOT_OFFERED)
def test_a_name_that_is_not_offered_says_what_does_its_work(module: str) -> None:
    name, alternative = NOT_OFFERED[module]
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {name}")
    assert f"{module} does not offer {name}" in str(error.value) and alternative in str(error.value)
    assert not hasattr(importlib.import_module(module), "anything_else")


def find_the_wrapper() -> None:
    class Outer(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

    linear = nn.Linear(3, 3)
    linear.weight.tensor_model_parallel, linear.weight.partition_dim = True, 1
    model = megatron_fsdp.fully_shard_model(linear)
    assert find_megatron_fsdp(model) is model is find_megatron_fsdp(Outer(Outer(model)))
    assert find_megatron_fsdp(linear) is None and find_megatron_fsdp(Outer(linear)) is None
    weight, bias = dict(model.named_parameters()).values()
    for parameter in (weight, linear.weight):
        assert is_mcore_tensor_model_parallel(parameter)
        assert get_mcore_tensor_parallel_partition_dim(parameter) == 1
    assert not is_mcore_tensor_model_parallel(bias)
    assert get_mcore_tensor_parallel_partition_dim(bias) is None


def test_questions_about_models_and_parameters(ranks: Callable[..., list[Any]]) -> None:
    ranks(1, find_the_wrapper)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(megatron_fsdp, name)).parameters
    assert {key: parameter.default for key, parameter in parameters.items()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])


@pytest.mark.parametrize("submodule", ["fully_shard", "utils", "megatron_fsdp"])
def test_fully_shard_is_the_function_whatever_was_imported_first(
    submodule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron_fsdp"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module(f"megatron_fsdp.{submodule}")
    from megatron_fsdp import fully_shard
    from megatron_fsdp.fully_shard import fully_shard as same

    importlib.import_module("megatron_fsdp.fully_shard")
    package = importlib.import_module("megatron_fsdp")
    assert inspect.isfunction(fully_shard)
    assert fully_shard is same is package.fully_shard
    assert inspect.ismodule(sys.modules["megatron_fsdp.fully_shard"])


def members_of_a_sharded_model() -> tuple[dict[str, str], dict[str, str]]:
    linear = nn.Linear(3, 3)
    model, optimizer = megatron_fsdp.fully_shard(linear, torch.optim.AdamW(linear.parameters()))
    assert model.module is linear
    assert model.is_last_microbatch is True
    assert isinstance(model.get_distributed_index(), megatron_fsdp.FSDPDistributedIndex)
    assert all(
        left is right for left, right in zip(model.parameters(), model.parameters(), strict=True)
    )
    signatures = {
        name: str(inspect.signature(getattr(optimizer, name))).split(" ->")[0]
        for name in ("step", "zero_grad")
    }
    methods = {
        name: str(inspect.signature(getattr(model, name))).split(" ->")[0]
        for name in ("finish_grad_sync", "scale_gradients")
    }
    return signatures, methods


def config_of_a_sharded_model() -> None:
    policy = megatron_fsdp.MixedPrecisionPolicy(None, torch.float32, torch.bfloat16)
    module = torch.nn.Linear(2, 2)
    model = megatron_fsdp.fully_shard_model(
        module, mixed_precision_policy=policy, report_nan_in_param_grad=True, zero_dp_strategy=2
    )
    config = model.ddp_config
    assert config.megatron_fsdp_main_params_dtype is None
    assert config.megatron_fsdp_main_grads_dtype == torch.float32
    assert config.megatron_fsdp_grad_comm_dtype == torch.bfloat16
    assert config.check_for_nan_in_grad and config.data_parallel_sharding_strategy == 2


def test_the_configuration_of_a_sharded_model_has_its_settings(
    ranks: Callable[..., list[Any]],
) -> None:
    ranks(1, config_of_a_sharded_model)


def test_keywords_of_the_optimizer_and_of_methods(
    ranks: Callable[..., list[Any]],
) -> None:
    ((signatures, methods),) = ranks(1, members_of_a_sharded_model)
    for keyword in (
        "*, sync_grad_before_optimizer_step: 'bool' = True",
        "install_optimized_model_weights: 'bool' = True",
    ):
        assert keyword in signatures["step"]
    assert "(closure: " in signatures["step"]
    assert (
        signatures["zero_grad"]
        == "(set_to_none: 'bool' = True, *, zero_grad_buffer: 'bool' = True)"
    )
    assert methods["finish_grad_sync"] == "(force_all_reduce: 'bool' = False)"


def look_at_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    assert get_mesh_names(mesh) == ["dp", "tp"]
    mesh["dp", "tp"]._flatten("all")
    assert get_mesh_names(mesh) == ["dp", "tp", "all"]
    assert get_mesh_names(mesh["tp"]) == ["tp", "dp", "all"]
    assert get_mesh_names(mesh["tp"], only_submesh_dims=True) == ["tp"]
    assert get_mesh_names(None) == []
    assert get_mesh_names(init_device_mesh("cpu", (dist.get_world_size(),))) == []
    for names, expected in {
        "tp": True,
        ("dp", "tp"): True,
        "all": True,
        "cp": False,
        ("dp", "cp"): False,
        (): False,
    }.items():
        assert contains_submesh(mesh, names) is expected, names
    assert contains_submesh(None, "dp") is contains_submesh(mesh, None) is False
    assert megatron_fsdp.FSDPDistributedIndex(mesh, "all").size == dist.get_world_size()


def test_names_of_mesh_axes(ranks: Callable[..., list[Any]]) -> None:
    ranks(4, look_at_meshes)
