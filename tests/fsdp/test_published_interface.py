# SPDX-License-Identifier: Apache-2.0
"""The published names and signatures exist; the walk through the interface has the members."""

import importlib
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
import megatron_fsdp.experimental
from megatron.fsdp import GradientError
from megatron.fsdp.trace.failed_collectives import CollectiveError
from megatron_fsdp.translation import published_names
from megatron_fsdp.utils import (
    contains_submesh,
    find_megatron_fsdp,
    get_mcore_tensor_parallel_partition_dim,
    get_mesh_names,
    is_mcore_tensor_model_parallel,
)
from tests.support.fsdp.reference import on_ranks

MODULES = {
    "megatron_fsdp": """
        DistributedDataParallelConfig FSDPDistributedIndex MegatronFSDP MixedPrecisionPolicy
        ShardingStrategy __version__ clip_grad_norm_ fully_shard fully_shard_model
        fully_shard_optimizer
    """,
    "megatron_fsdp.fully_shard": """
        ShardingStrategy fully_shard fully_shard_model fully_shard_optimizer
    """,
    "megatron_fsdp.megatron_fsdp": "MegatronFSDP",
    "megatron_fsdp.mixed_precision": "MixedPrecisionPolicy",
    "megatron_fsdp.distributed_data_parallel_config": "DistributedDataParallelConfig",
    "megatron_fsdp.utils": """
        FSDPDistributedIndex contains_submesh find_megatron_fsdp
        get_mcore_tensor_parallel_partition_dim get_mesh_names is_mcore_tensor_model_parallel
        state_of_other_optimizers
    """,
    "megatron_fsdp.param_and_grad_buffer": "make_fsdp_dtensor",
    "megatron_fsdp.package_info": "__version__",
    "megatron_fsdp.experimental": """
        DBuffer Placements fully_shard fully_shard_context fully_shard_optimizer load_checkpoint
        microbatch save_checkpoint
    """,
    "megatron_fsdp.experimental.dbuffer": "BufferLayout DBuffer",
    "megatron_fsdp.uneven_dtensor": """
        filter_unflattened_state_dict gather_and_compute_chunk_metadata
        gather_uneven_dtensor_to_full_tensor get_state_dict get_unflattened_state_dict
        make_uneven_dtensor preprocess_state_dict_for_uneven_dtensor
        redistribute_uneven_dtensor_to_replicated split_dtensor uneven_dtensor_to_full_tensor
        update_uneven_dtensor_chunk_metadata validate_uneven_dtensor
    """,
}
"""Names that modules export."""

SHARD = """
    device_mesh=None, dp_shard_dim=None, dp_outer_dim=None, tp_dim=None, hybrid_fsdp_group=None,
    hybrid_fsdp_expt_group=None, expt_device_mesh=None, fsdp_group_ag=None,
    expt_fsdp_group_ag=None, fsdp_unit_modules=None, zero_dp_strategy=3,
    outer_dp_sharding_strategy=0, device=None, init_model_with_meta_device=False,
    mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32,
    main_grads_dtype=None, grad_comm_dtype=None), overlap_grad_reduce=True,
    overlap_param_gather=True, sync_model_each_microbatch=True,
    preproc_state_dict_for_dcp_ckpt=True, report_nan_in_param_grad=False,
    average_in_collective=False, disable_bucketing=False, calculate_per_token_loss=False,
    keep_fp8_transpose_cache=False, nccl_ub=False, fsdp_double_buffer=False,
    fsdp_db_use_persist_buf_on_alloc_fail=False, disable_symmetric_registration=False,
    enable_fine_grained_param_gather=False, use_decoupled_grad=False, cuda_graph_mode=False,
    maxpool_double_buffer=False, *, check_for_nan_in_grad=None, grad_reduce_in_fp32=None,
    preserve_fp32_weights=None, suggested_communication_unit_size=None, param_init_fn=None,
    find_unused_parameters=False, granularity='prefer_rows', fsdp_manual_registration=False,
    ignored_params=None, offload_policy=None, expert_zero_dp_strategy=None,
    expert_outer_dp_sharding_strategy=None, embedding_zero_dp_strategy=None
"""

SHARDED = ("module", "optimizer")

SIGNATURES = {
    "fully_shard_model": f"module, {SHARD}",
    "fully_shard": f"module, optimizer, {SHARD}",
    "fully_shard_optimizer": "optimizer, preproc_state_dict_for_dcp_ckpt=True",
    "MixedPrecisionPolicy": (
        "main_params_dtype=torch.float32, main_grads_dtype=None, grad_comm_dtype=None"
    ),
    "FSDPDistributedIndex": """
        device_mesh=None, dp_shard_dim=None, dp_outer_dim=None, tp_dim=None,
        hybrid_fsdp_group=None, hybrid_fsdp_expt_group=None, hsdp_outer_dp_shard=False,
        expt_device_mesh=None, fsdp_group_ag=None, expt_fsdp_group_ag=None
    """,
    "MegatronFSDP": """
        module, dist_index, ddp_config=None,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32,
        main_grads_dtype=None, grad_comm_dtype=None), fsdp_unit_modules=None,
        disable_bucketing=False, device=None, calculate_per_token_loss=False,
        init_model_with_meta_device=False, sync_model_each_microbatch=False,
        keep_fp8_transpose_cache=False, nccl_ub=False, fsdp_double_buffer=False,
        fsdp_db_use_persist_buf_on_alloc_fail=False, disable_symmetric_registration=False,
        enable_fine_grained_param_gather_hook=False,
        enable_fine_grained_param_gather_backward_hook=False,
        fine_grained_recurse_module_types=None, report_nan_in_param_grad=False
    """,
    "DistributedDataParallelConfig": """
        overlap_grad_reduce=False, overlap_param_gather=False, check_for_nan_in_grad=False,
        bucket_size=None, average_in_collective=False, fp8_param_gather=False,
        data_parallel_sharding_strategy='no_shard', gradient_reduce_div_fusion=True,
        suggested_communication_unit_size=None, keep_fp8_transpose_cache=False, nccl_ub=False,
        fsdp_double_buffer=False, fsdp_all_gather_in_start_param_sync=True,
        fsdp_db_use_persist_buf_on_alloc_fail=False, outer_dp_sharding_strategy='no_shard',
        disable_symmetric_registration=False, fsdp_manual_registration=False,
        megatron_fsdp_main_params_dtype=torch.float32, megatron_fsdp_main_grads_dtype=None,
        megatron_fsdp_grad_comm_dtype=None, megatron_fsdp_use_decoupled_grad=False,
        megatron_fsdp_cuda_graph_mode=False, megatron_fsdp_enable_fine_grained_param_gather=False,
        megatron_fsdp_max_pool_double_buffer=False, expert_data_parallel_sharding_strategy=None,
        expert_outer_dp_sharding_strategy=None, embedding_data_parallel_sharding_strategy=None,
        megatron_fsdp_offload_policy=None, megatron_fsdp_granularity='prefer_rows'
    """,
    "uneven_dtensor.split_dtensor": (
        "dtensor, split_size_or_sections, dim=0, update_uneven_dtensor_chunk_meta=False"
    ),
    "uneven_dtensor.gather_uneven_dtensor_to_full_tensor": "dtensor, target_device=None",
    "uneven_dtensor.get_unflattened_state_dict": "state_dict, key_chain=[]",
    "experimental.fully_shard": (
        "module, mesh, placements, mixed_precision_policy=None, grad_divisor=1"
    ),
    "experimental.fully_shard_context": (
        "device=None, *, use_symmetric_memory=False, unify_communication_stream=False"
    ),
    "experimental.fully_shard_optimizer": "optimizer",
    "experimental.microbatch": "context, is_last",
    "experimental.Placements": "dp_axes, parameter, gradient, optimizer",
    "experimental.save_checkpoint": "model, optimizer, checkpoint_dir",
    "experimental.load_checkpoint": (
        "model, optimizer, checkpoint_dir, *, sync_model_weights=True"
    ),
}
"""Parameters in their order, with their defaults."""


def signature_of(function: Callable[..., Any]) -> str:
    """Return parameters and defaults without annotations."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))[1:-1]


@pytest.mark.parametrize("name", MODULES)
def test_exported_names(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(MODULES[name].split())
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


class CallEndedError(Exception):
    """Ends a call where its keywords are translated; its argument is all of them."""


@pytest.mark.parametrize("name", ["fully_shard_model", "fully_shard"])
def test_every_argument_is_translated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def translated(keywords: dict[str, Any]) -> None:
        raise CallEndedError(keywords)

    home = sys.modules["megatron_fsdp.fully_shard"]
    monkeypatch.setattr(home, "_translated", translated)
    function = getattr(home, name)
    given = {argument: object() for argument in inspect.signature(function).parameters}
    with pytest.raises(CallEndedError) as error:
        function(**given)
    (keywords,) = error.value.args
    assert keywords == {
        argument: value for argument, value in given.items() if argument not in SHARDED
    }


@on_ranks(1)
def test_older_flags_are_read_as_python_reads_them() -> None:
    older: dict[str, Any] = {"check_for_nan_in_grad": 1, "preserve_fp32_weights": 0}
    model = megatron_fsdp.fully_shard_model(nn.Linear(3, 3).bfloat16(), **older)
    assert next(model.parameters()).dtype is torch.bfloat16
    with pytest.raises(GradientError, match="weight"):
        (model(torch.ones(1, 3, dtype=torch.bfloat16)) * float("nan")).sum().backward()


def test_errors_of_any_class_get_the_published_names() -> None:
    with pytest.raises(CollectiveError) as error, published_names():
        raise CollectiveError("Strategy.level is 4", "failed")
    assert str(error.value) == "zero_dp_strategy is 4\nfailed"
    assert error.value.explanation == "Strategy.level is 4"  # which other ranks have too


@on_ranks(1)
def test_questions_about_models_and_parameters() -> None:
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


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found = signature_of(attrgetter(name)(megatron_fsdp))
    assert found.split() == SIGNATURES[name].split()


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


@on_ranks(1)
def test_the_configuration_of_a_sharded_model_has_its_settings() -> None:
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


@on_ranks(2)
def test_torchs_own_data_parallelism_around_a_sharded_model_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for level in (0, 1, 3):
        model = megatron_fsdp.fully_shard_model(
            nn.Linear(5, 5), device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=level
        )
        with pytest.raises(RuntimeError, match="DistributedDataParallel around a sharded model"):
            nn.parallel.DistributedDataParallel(model)
        model(torch.ones(2, 5)).sum().backward()


@on_ranks(1)
def test_signatures_of_methods() -> None:
    linear = nn.Linear(3, 3)
    model, optimizer = megatron_fsdp.fully_shard(linear, torch.optim.AdamW(linear.parameters()))
    methods = (optimizer.step, optimizer.zero_grad, model.finish_grad_sync)
    assert [signature_of(method) for method in methods] == [
        "closure=None, *, sync_grad_before_optimizer_step=True,"
        " install_optimized_model_weights=True",
        "set_to_none=True, *, zero_grad_buffer=True",
        "force_all_reduce=False",
    ]


@on_ranks(4)
def test_names_of_mesh_axes() -> None:
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
