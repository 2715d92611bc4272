# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments are refused before anything has happened."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.fsdp.config.memory import problems_of_nccl
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from tests.fsdp.engine.test_mesh import HYBRID
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import Ranks
from tests.support.fsdp.wrong_calls import (
    Scene,
    WrongCall,
    check_refusals,
    message_of,
    on_mesh,
    sharded_linear,
    with_arguments,
)

STRATEGY_NAMES = ("zero_dp_strategy expects", "no_shard/0", "optim_grads_params/3")


STRATEGIES: dict[str, WrongCall] = {
    **{
        f"strategy {value!r}": with_arguments(*STRATEGY_NAMES, repr(value), zero_dp_strategy=value)
        for value in ("zero3", 4, -1, True, None, 2.0, [3])
    },
    **{
        f"outer strategy {value!r}": with_arguments(
            "outer_dp_sharding_strategy expects",
            "optim/1",
            repr(value),
            outer_dp_sharding_strategy=value,
        )
        for value in (2, "optim_grads_params", False, None, "hsdp")
    },
    "outer strategy without outer axis": with_arguments(
        "outer_dp_sharding_strategy", "dp_outer_dim", outer_dp_sharding_strategy=1
    ),
    "outer strategy at level 2": on_mesh(
        "outer_dp_sharding_strategy",
        "zero_dp_strategy='optim_grads_params'",
        "'optim_grads'",
        **HYBRID,
        dp_outer_dim="dp_outer",
        outer_dp_sharding_strategy="optim",
        zero_dp_strategy=2,
    ),
}


OPTIONS: dict[str, WrongCall] = {
    "units are a class": with_arguments(
        "fsdp_unit_modules expects", "list", fsdp_unit_modules=ResidualBlock
    ),
    "units are one path": with_arguments(
        "fsdp_unit_modules expects",
        "list",
        fsdp_unit_modules="tests.support.fsdp.models.ResidualBlock",
    ),
    "units cannot be imported": with_arguments(
        "fsdp_unit_modules", "nowhere.Block", fsdp_unit_modules=["nowhere.Block"]
    ),
    "unit is no path": with_arguments(
        "fsdp_unit_modules", "'Block'", "package.module.Class", fsdp_unit_modules=["Block"]
    ),
    "units are no modules": with_arguments(
        "fsdp_unit_modules", "int", "3", fsdp_unit_modules=[int, 3]
    ),
    "device unknown": with_arguments("device expects", "'abacus'", device="abacus"),
    "device of another type": with_arguments("device expects", "2.5", device=2.5),
    "device meta": with_arguments("device", "meta", "init_model_with_meta_device", device="meta"),
    "policy is text": with_arguments(
        "mixed_precision_policy expects a MixedPrecisionPolicy",
        "'bf16'",
        mixed_precision_policy="bf16",
    ),
    "policy is a dtype": with_arguments(
        "mixed_precision_policy expects", mixed_precision_policy=torch.bfloat16
    ),
    "policy contradicts preserve_fp32_weights": with_arguments(
        "preserve_fp32_weights=True contradicts",
        "main_params_dtype",
        "give one of them",
        mixed_precision_policy=MixedPrecisionPolicy(None),
        preserve_fp32_weights=True,
    ),
    "policy contradicts grad_reduce_in_fp32": with_arguments(
        "grad_reduce_in_fp32=True contradicts",
        "main_grads_dtype",
        "give one of them",
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.bfloat16),
        grad_reduce_in_fp32=True,
    ),
    "older keywords are text": with_arguments(
        "check_for_nan_in_grad expects True or False but got 'no'",
        "grad_reduce_in_fp32 expects True or False but got 'false'",
        "preserve_fp32_weights expects True or False but got 'off'",
        check_for_nan_in_grad="no",
        grad_reduce_in_fp32="false",
        preserve_fp32_weights="off",
    ),
    "report_nan_in_param_grad contradicts check_for_nan_in_grad": with_arguments(
        "check_for_nan_in_grad=False contradicts report_nan_in_param_grad=True",
        report_nan_in_param_grad=True,
        check_for_nan_in_grad=False,
    ),
    "per-token loss averaged": with_arguments(
        "calculate_per_token_loss",
        "average_in_collective",
        calculate_per_token_loss=True,
        average_in_collective=True,
    ),
    "decoupled gradients with torch's optimizer": with_arguments(
        "use_decoupled_grad", "AdamW", "Leave it False", use_decoupled_grad=True
    ),
    **{
        f"flag {name}": with_arguments(
            f"{name} expects True or False", "'false'", **{name: "false"}
        )
        for name in (
            "overlap_grad_reduce",
            "init_model_with_meta_device",
            "calculate_per_token_loss",
            "sync_model_each_microbatch",
        )
    },
    **{
        f"suggested_communication_unit_size={value!r}": with_arguments(
            "suggested_communication_unit_size expects a positive number of bytes",
            f"got {value!r}",
            suggested_communication_unit_size=value,
        )
        for value in (0, -1, 1.5, True, "1M")
    },
    "function is text": with_arguments("param_init_fn", "'zeros'", param_init_fn="zeros"),
    "offload policy is a number": with_arguments("offload_policy", offload_policy=3),
    "copies sometimes": with_arguments(
        "keep_fp8_transpose_cache expects True or False", keep_fp8_transpose_cache="sometimes"
    ),
    "nccl_ub without NCCL": with_arguments(
        "nccl_ub registers memory with NCCL", "on cpu", "fsdp_double_buffer", nccl_ub=True
    ),
}


class WithoutInitialiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, device="meta")
        self.scale = nn.Parameter(torch.empty(2, device="meta"))


def expert() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.allreduce = False
    return module


def complex_parameter() -> nn.Module:
    module = nn.Linear(2, 2)
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return module


def slices_of_a_parameter() -> nn.Module:
    """Return a module whose first parameter contains the others, which are apart."""
    module = nn.Module()
    module.whole = nn.Parameter(torch.zeros(12))
    for name, start in (("first", 0), ("second", 4), ("third", 8)):
        module.register_parameter(name, nn.Parameter(module.whole.data[start : start + 2]))
    return module


def split_by_tensor_parallelism(scene: Scene, *, tp_dim: str | None, other: bool = False) -> None:
    mesh = mesh_of("dp", "tp", sizes=(1, 2))
    module = nn.Linear(4, 4)
    axis = mesh["tp"] if not other else mesh_of("elsewhere", "more", sizes=(2, 1))
    placements = [Shard(0)] * axis.ndim
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), axis, placements))
    fully_shard_model(module, mesh, "dp", tp_dim=tp_dim)


def split_over_the_data_axis(scene: Scene) -> None:
    """Shard a weight as FSDP2 does, over an axis as large as that of tensor parallelism."""
    mesh = mesh_of("dp", "tp", sizes=(2, 2))
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["dp"], [Shard(0)]))
    fully_shard_model(module, mesh, "dp", tp_dim="tp")


def shard_the_same_module_twice(scene: Scene) -> None:
    module = nn.Linear(3, 3)
    fully_shard_model(module)
    fully_shard_model(module)


def thaw(scene: Scene) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    model = fully_shard_model(module)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()


MODELS: dict[str, WrongCall] = {
    "no module": WrongCall(
        ("module expects a torch.nn.Module but got str",), lambda scene: fully_shard_model("linear")
    ),
    "module class": WrongCall(
        ("module expects a torch.nn.Module but got type",),
        lambda scene: fully_shard_model(nn.Linear),
    ),
    "module None": WrongCall(
        ("module expects a torch.nn.Module but got NoneType",),
        lambda scene: fully_shard(None, scene.optimizer),
    ),
    "no parameters": WrongCall(
        ("no parameters to shard",), lambda scene: fully_shard_model(nn.ReLU())
    ),
    "complex parameter": WrongCall(
        ("floating-point", "phase", "complex64"),
        lambda scene: fully_shard_model(complex_parameter()),
    ),
    "slices of a parameter": WrongCall(
        ("whole and second overlap", "whole and third overlap", "first", "one nn.Parameter"),
        lambda scene: fully_shard_model(slices_of_a_parameter()),
    ),
    "sharded wrapper again": WrongCall(
        ("sharded already",), lambda scene: fully_shard_model(sharded_linear()[0])
    ),
    "sharded module inside": WrongCall(
        ("sharded already",),
        lambda scene: fully_shard_model(nn.Sequential(sharded_linear()[0], nn.Linear(3, 3))),
    ),
    "same module twice": WrongCall(("sharded already",), shard_the_same_module_twice),
    "meta parameters": WrongCall(
        ("meta device", "weight, bias", "init_model_with_meta_device=True"),
        lambda scene: fully_shard_model(nn.Linear(2, 2, device="meta")),
    ),
    "meta parameters nobody initialises": WrongCall(
        ("init_model_with_meta_device", "reset_parameters()", "WithoutInitialiser: scale"),
        lambda scene: fully_shard_model(WithoutInitialiser(), init_model_with_meta_device=True),
    ),
    "meta parameters at level 0": WrongCall(
        ("init_model_with_meta_device", "level 0"),
        lambda scene: fully_shard_model(
            nn.Linear(2, 2, device="meta"), init_model_with_meta_device=True, zero_dp_strategy=0
        ),
    ),
    "expert parameters without mesh": WrongCall(
        ("weight", "allreduce=False", "pass expt_device_mesh"),
        lambda scene: fully_shard_model(expert()),
    ),
    "DTensor without tp_dim": WrongCall(
        ("weight is a DTensor over ('tp',)", "tp_dim", "DistributedConfig), load it without"),
        lambda scene: split_by_tensor_parallelism(scene, tp_dim=None),
    ),
    "DTensor over another mesh": WrongCall(
        ("weight is a DTensor", "tp_dim='tp'"),
        lambda scene: split_by_tensor_parallelism(scene, tp_dim="tp", other=True),
    ),
    "DTensor over the data axis": WrongCall(
        ("weight is a DTensor over another mesh", "tp_dim='tp'"),
        split_over_the_data_axis,
        world_size=4,
    ),
    "frozen and thawed": WrongCall(
        ("0.weight", "frozen when the model was sharded"), thaw, RuntimeError
    ),
    "wrapper given a mesh": WrongCall(
        ("dist_index expects", "FSDPDistributedIndex", "DeviceMesh"),
        lambda scene: MegatronFSDP(scene.module, mesh_of("dp")),
    ),
    "wrapper given no configuration": WrongCall(
        ("ddp_config expects", "'level 3'"),
        lambda scene: MegatronFSDP(scene.module, FSDPDistributedIndex(), "level 3"),
    ),
    **{
        f"configuration {name}": WrongCall(
            (name, message),
            lambda scene, name=name: MegatronFSDP(
                scene.module, FSDPDistributedIndex(), DistributedDataParallelConfig(**{name: 1})
            ),
            kind,
        )
        for name, message, kind in (
            ("nccl_ub", "use fsdp_double_buffer alone", ValueError),
            ("fsdp_manual_registration", "needs nccl_ub", ValueError),
        )
    },
    "configuration with text for a flag": WrongCall(
        ("overlap_grad_reduce expects True or False but got 'false'",),
        lambda scene: MegatronFSDP(
            scene.module,
            FSDPDistributedIndex(),
            DistributedDataParallelConfig(overlap_grad_reduce="false"),
        ),
    ),
    "wrapper with text for a flag": WrongCall(
        ("fsdp_double_buffer expects True or False but got 'no'",),
        lambda scene: MegatronFSDP(
            scene.module,
            FSDPDistributedIndex(),
            fsdp_double_buffer="no",
        ),
    ),
    "half of fine-grained gathers": WrongCall(
        ("enable_fine_grained_param_gather_hook", "not built yet"),
        lambda scene: MegatronFSDP(
            scene.module, FSDPDistributedIndex(), enable_fine_grained_param_gather_hook=True
        ),
        NotImplementedError,
    ),
}


def linear_on_gpus() -> nn.Module:
    """Return a module as a device_map leaves it, without values and thus without GPUs."""
    module = nn.Linear(2, 2)
    values, mode = torch.empty(2, device="meta"), FakeTensorMode()
    for number, name in enumerate(("weight", "bias")):
        # No factory of torch, which the adapter replaces where there is no GPU.
        on_gpu = FakeTensor(mode, values, torch.device("cuda", number))
        setattr(module, name, nn.Parameter(on_gpu))
    return module


DEVICES = {
    "mesh on another device than the module": WrongCall(
        ("parameters on cuda:0, cuda:1", "trains on cpu", "torch.cuda.set_device", "device_map"),
        lambda scene: fully_shard_model(linear_on_gpus()),
    ),
}


WRONG_CALLS = {**DEVICES, **STRATEGIES, **OPTIONS, **MODELS}


def test_wrong_calls_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)


def test_nccl_is_refused_by_a_build_for_gpus_on_a_machine_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a build says that its accelerator is CUDA, unless asked for one that is available."""

    def of_the_build(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_the_build)
    (problem,) = problems_of_nccl(None)
    assert "does not run on cpu" in problem


def shard_a_linear() -> None:
    module = nn.Linear(2, 2)
    fully_shard(module, torch.optim.SGD(module.parameters()))


OUTSIDE: dict[str, Callable[[], Any]] = {
    "fully_shard": shard_a_linear,
    "fully_shard_model": lambda: fully_shard_model(nn.Linear(2, 2)),
    "FSDPDistributedIndex": FSDPDistributedIndex,
}


def outside() -> dict[str, str]:
    dist.destroy_process_group()
    del os.environ["RANK"]
    return {name: message_of(RuntimeError, call) for name, call in OUTSIDE.items()}


def test_outside_torch_distributed_the_message_names_torchrun(ranks: Ranks) -> None:
    (messages,) = ranks(1, outside)
    assert all(
        "torchrun" in message and "init_process_group" in message for message in messages.values()
    )
