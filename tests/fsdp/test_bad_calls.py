# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: each raises the right type, names the argument and the way out, says the same on every rank, hangs nowhere, and
leaves the model and the optimizer as they were.
"""

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.fsdp.models import WIDTH, Block
from tests.fsdp.test_errors import message_of

Ranks = Callable[..., list[Any]]
TIMEOUT = 30.0
"""Seconds a call may take; a hang is a failure of its own test and not of the whole run."""


class Scene:
    """What a wrong call finds: a model and its optimizer, which has stepped once."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.rank = dist.get_rank()
        self.module = nn.Sequential(Block(), nn.Linear(WIDTH, 3))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.02)
        self.module(torch.ones(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.before = self.snapshot()

    def snapshot(
        self,
    ) -> tuple[list[tuple[int, Tensor]], list[list[int]], list[list[Tensor]], type]:
        parameters = [
            (id(parameter), parameter.detach().clone()) for parameter in self.module.parameters()
        ]
        groups = [
            [id(parameter) for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]
        state = [
            [value.clone() for value in slots.values()] for slots in self.optimizer.state.values()
        ]
        return parameters, groups, state, type(self.optimizer)

    def check_that_nothing_has_happened(self) -> None:
        (old, *others), (new, *others_now) = self.before, self.snapshot()
        assert [key for key, _ in old] == [key for key, _ in new]
        assert all(torch.equal(left, right) for (_, left), (_, right) in zip(old, new))
        assert others[0] == others_now[0] and others[2] is others_now[2]
        assert all(
            torch.equal(left, right)
            for one, two in zip(others[1], others_now[1])
            for left, right in zip(one, two)
        )
        assert not any(hasattr(parameter, "_fsdp_model") for parameter in self.module.parameters())

    def check_that_the_right_call_works(self) -> None:
        model, optimizer = fully_shard(self.module, self.optimizer, fsdp_unit_modules=[Block])
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()


@dataclass(frozen=True)
class Bad:
    """A wrong call, what it raises, and what the text must have in it."""

    parts: tuple[str, ...]
    call: Callable[[Scene], Any]
    kind: type[Exception] = ValueError
    world_size: int = 2


def with_arguments(*parts: str, kind: type[Exception] = ValueError, **arguments: Any) -> Bad:
    """`fully_shard` of a good model and a good optimizer with wrong arguments."""
    return Bad(parts, lambda scene: fully_shard(scene.module, scene.optimizer, **arguments), kind)


def mesh_of(*names: str, sizes: tuple[int, ...] | None = None) -> DeviceMesh:
    """All ranks on the first axis unless `sizes` says otherwise."""
    sizes = sizes or (dist.get_world_size(),) + (1,) * (len(names) - 1)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names or None)


def on_mesh(
    *parts: str,
    names: tuple[str, ...],
    world_size: int = 2,
    sizes: tuple[int, ...] | None = None,
    **arguments: Any,
) -> Bad:
    """The same on a mesh of the axes `names`; functions among the arguments are given the mesh."""

    def call(scene: Scene) -> None:
        mesh = mesh_of(*names, sizes=sizes)
        values = {
            key: value(mesh) if callable(value) else value for key, value in arguments.items()
        }
        fully_shard(scene.module, scene.optimizer, mesh, **values)

    return Bad(parts, call, world_size=world_size)


HYBRID = {
    "names": ("dp_outer", "dp_shard"),
    "sizes": (2, 2),
    "world_size": 4,
    "dp_shard_dim": "dp_shard",
}
LEVELS = ("zero_dp_strategy expects", "no_shard/0", "optim_grads_params/3")

STRATEGIES: dict[str, Bad] = {
    **{
        f"strategy {value!r}": with_arguments(*LEVELS, repr(value), zero_dp_strategy=value)
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

MESHES: dict[str, Bad] = {
    "mesh is text": with_arguments(
        "device_mesh expects a torch DeviceMesh but got str", device_mesh="cpu"
    ),
    "mesh is a number": with_arguments(
        "device_mesh expects a torch DeviceMesh but got int", device_mesh=2
    ),
    "mesh without names": on_mesh("device_mesh expects named axes", "mesh_dim_names", names=()),
    "axis not given": on_mesh("dp_shard_dim is required", "('dp', 'cp')", names=("dp", "cp")),
    "axis unknown": on_mesh(
        "dp_shard_dim='data'", "('dp', 'cp')", names=("dp", "cp"), dp_shard_dim="data"
    ),
    "axis is a number": on_mesh(
        "dp_shard_dim expects the name of an axis but got 0", names=("dp", "cp"), dp_shard_dim=0
    ),
    "axis is a tuple": on_mesh(
        "dp_shard_dim", "flattened", names=("dp", "cp"), dp_shard_dim=("dp", "cp")
    ),
    "outer axis unknown": on_mesh(
        "dp_outer_dim='outer'", names=("dp", "cp"), dp_shard_dim="dp", dp_outer_dim="outer"
    ),
    "tensor axis unknown": on_mesh(
        "tp_dim='tp'", names=("dp", "cp"), dp_shard_dim="dp", tp_dim="tp"
    ),
    "axes equal": on_mesh(
        "dp_shard_dim='dp'",
        "tp_dim='dp'",
        "must differ",
        names=("dp", "cp"),
        dp_shard_dim="dp",
        tp_dim="dp",
    ),
    "hybrid group without outer axis": on_mesh(
        "hybrid_fsdp_group needs dp_outer_dim",
        names=("dp", "cp"),
        dp_shard_dim="dp",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("dp"),
    ),
    "hybrid group of wrong size": on_mesh(
        "hybrid_fsdp_group",
        "2 ranks",
        "4",
        **HYBRID,
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("dp_shard"),
    ),
    "hybrid group of other ranks": on_mesh(
        "hybrid_fsdp_group",
        "ranks",
        names=("dp_outer", "dp_shard", "tp"),
        sizes=(2, 1, 2),
        world_size=4,
        dp_shard_dim="dp_shard",
        dp_outer_dim="dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("tp"),
    ),
    "hybrid group is a mesh": on_mesh(
        "hybrid_fsdp_group expects a torch.distributed.ProcessGroup but got DeviceMesh",
        **HYBRID,
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=lambda mesh: mesh,
    ),
    "expert hybrid group without expert mesh": on_mesh(
        "hybrid_fsdp_expt_group needs expt_device_mesh",
        names=("dp",),
        hybrid_fsdp_expt_group=lambda mesh: mesh.get_group("dp"),
    ),
    "gather group of other ranks": on_mesh(
        "fsdp_group_ag",
        "the shard axis",
        "must be the same",
        **HYBRID,
        fsdp_group_ag=lambda mesh: mesh.get_group("dp_outer"),
    ),
    "gather group is text": on_mesh(
        "fsdp_group_ag expects a torch.distributed.ProcessGroup but got str",
        names=("dp",),
        fsdp_group_ag="dp",
    ),
    "expert gather group without expert mesh": on_mesh(
        "expt_fsdp_group_ag needs expt_device_mesh",
        names=("dp",),
        expt_fsdp_group_ag=lambda mesh: mesh.get_group("dp"),
    ),
    "expert mesh is text": with_arguments(
        "expt_device_mesh expects a torch DeviceMesh but got str", expt_device_mesh="ep"
    ),
    "expert mesh without the shard axis": on_mesh(
        "expt_device_mesh needs the shard axis 'dp'",
        "('ep', 'tp')",
        names=("dp",),
        expt_device_mesh=lambda mesh: mesh_of("ep", "tp"),
    ),
}

OPTIONS: dict[str, Bad] = {
    "units are a class": with_arguments(
        "fsdp_unit_modules expects", "list", fsdp_unit_modules=Block
    ),
    "units are one path": with_arguments(
        "fsdp_unit_modules expects", "list", fsdp_unit_modules="tests.fsdp.models.Block"
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
        f"not built: {name}": with_arguments(
            name, "not built yet", "defaults", kind=NotImplementedError, **{name: True}
        )
        for name in (
            "keep_fp8_transpose_cache",
            "nccl_ub",
            "fsdp_double_buffer",
            "fsdp_db_use_persist_buf_on_alloc_fail",
            "disable_symmetric_registration",
            "cuda_graph_mode",
            "maxpool_double_buffer",
        )
    },
}


# ---- models and optimizers
# -----------------------------------------------------------------------------------------------


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


def split_by_tensor_parallelism(scene: Scene, *, tp_dim: str | None, other: bool = False) -> None:
    mesh = mesh_of("dp", "tp", sizes=(1, 2))
    module = nn.Linear(4, 4)
    axis = mesh["tp"] if not other else mesh_of("elsewhere", "more", sizes=(2, 1))
    placements = [Shard(0)] * axis.ndim
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), axis, placements))
    fully_shard_model(module, mesh, "dp", tp_dim=tp_dim)


def sharded() -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = nn.Linear(3, 3)
    return fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


def shard_the_same_module_twice(scene: Scene) -> None:
    module = nn.Linear(3, 3)
    fully_shard_model(module)
    fully_shard_model(module)


def step_replaced(scene: Scene) -> None:
    scene.optimizer.step = lambda: None
    try:
        fully_shard(scene.module, scene.optimizer)
    finally:
        del scene.optimizer.step


def thaw(scene: Scene) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    model = fully_shard_model(module)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()


MODELS: dict[str, Bad] = {
    "no module": Bad(
        ("module expects a torch.nn.Module but got str",), lambda scene: fully_shard_model("linear")
    ),
    "module class": Bad(
        ("module expects a torch.nn.Module but got type",),
        lambda scene: fully_shard_model(nn.Linear),
    ),
    "module None": Bad(
        ("module expects a torch.nn.Module but got NoneType",),
        lambda scene: fully_shard(None, scene.optimizer),
    ),
    "no parameters": Bad(("no parameters to shard",), lambda scene: fully_shard_model(nn.ReLU())),
    "complex parameter": Bad(
        ("floating-point", "phase", "complex64"),
        lambda scene: fully_shard_model(complex_parameter()),
    ),
    "sharded wrapper again": Bad(
        ("sharded already",), lambda scene: fully_shard_model(sharded()[0])
    ),
    "sharded module inside": Bad(
        ("sharded already",),
        lambda scene: fully_shard_model(nn.Sequential(sharded()[0], nn.Linear(3, 3))),
    ),
    "same module twice": Bad(("sharded already",), shard_the_same_module_twice),
    "meta parameters": Bad(
        ("meta device", "weight, bias", "init_model_with_meta_device=True"),
        lambda scene: fully_shard_model(nn.Linear(2, 2, device="meta")),
    ),
    "meta parameters nobody initialises": Bad(
        ("init_model_with_meta_device", "reset_parameters()", "WithoutInitialiser: scale"),
        lambda scene: fully_shard_model(WithoutInitialiser(), init_model_with_meta_device=True),
    ),
    "meta parameters at level 0": Bad(
        ("init_model_with_meta_device", "level 0"),
        lambda scene: fully_shard_model(
            nn.Linear(2, 2, device="meta"), init_model_with_meta_device=True, zero_dp_strategy=0
        ),
    ),
    "expert parameters without mesh": Bad(
        ("weight", "allreduce=False", "pass expt_device_mesh"),
        lambda scene: fully_shard_model(expert()),
    ),
    "DTensor without tp_dim": Bad(
        ("weight is a DTensor over ('tp',)", "tp_dim"),
        lambda scene: split_by_tensor_parallelism(scene, tp_dim=None),
    ),
    "DTensor over another mesh": Bad(
        ("weight is a DTensor", "tp_dim='tp'"),
        lambda scene: split_by_tensor_parallelism(scene, tp_dim="tp", other=True),
    ),
    "frozen and thawed": Bad(("0.weight", "frozen when the model was sharded"), thaw, RuntimeError),
    "wrapper given a mesh": Bad(
        ("dist_index expects", "FSDPDistributedIndex", "DeviceMesh"),
        lambda scene: MegatronFSDP(scene.module, mesh_of("dp")),
    ),
    "wrapper given no configuration": Bad(
        ("ddp_config expects", "'level 3'"),
        lambda scene: MegatronFSDP(scene.module, FSDPDistributedIndex(), "level 3"),
    ),
    **{
        f"configuration {name}": Bad(
            (name, "not built yet"),
            lambda scene, name=name: MegatronFSDP(
                scene.module, FSDPDistributedIndex(), DistributedDataParallelConfig(**{name: 1})
            ),
            NotImplementedError,
        )
        for name in (
            "fp8_param_gather",
            "nccl_ub",
            "fsdp_double_buffer",
            "megatron_fsdp_cuda_graph_mode",
            "fsdp_manual_registration",
        )
    },
    "half of fine-grained gathers": Bad(
        ("enable_fine_grained_param_gather_hook", "not built yet"),
        lambda scene: MegatronFSDP(
            scene.module, FSDPDistributedIndex(), enable_fine_grained_param_gather_hook=True
        ),
        NotImplementedError,
    ),
}


class Shampoo(torch.optim.SGD):
    """Needs whole matrices, as its name says."""


def over(scene: Scene, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    return kind(scene.module.parameters(), **settings)


OPTIMIZERS: dict[str, Bad] = {
    "optimizer is text": Bad(
        ("optimizer expects a torch.optim.Optimizer but got str",),
        lambda scene: fully_shard(scene.module, "adam"),
    ),
    "optimizer class": Bad(
        ("optimizer expects", "got type"),
        lambda scene: fully_shard(scene.module, torch.optim.AdamW),
    ),
    "optimizer None": Bad(
        ("optimizer expects", "NoneType"), lambda scene: fully_shard(scene.module, None)
    ),
    "fully_shard_optimizer given text": Bad(
        ("optimizer expects a torch.optim.Optimizer but got str",),
        lambda scene: fully_shard_optimizer("adam"),
    ),
    "optimizer of another model": Bad(
        ("2 parameters of the optimizer are none of the module's",),
        lambda scene: fully_shard(scene.module, torch.optim.SGD(nn.Linear(2, 2).parameters())),
    ),
    "optimizer over unsharded parameters": Bad(
        ("belong to no sharded model", "after fully_shard_model"),
        lambda scene: fully_shard_optimizer(scene.optimizer),
    ),
    "optimizer made before the model was sharded": Bad(
        ("belong to no sharded model", "hand both to fully_shard"),
        lambda scene: (
            lambda linear, optimizer: (fully_shard_model(linear), fully_shard_optimizer(optimizer))
        )(*(lambda linear: (linear, torch.optim.SGD(linear.parameters())))(nn.Linear(2, 2))),
    ),
    "optimizer sharded twice": Bad(
        ("sharded already",), lambda scene: fully_shard_optimizer(sharded()[1])
    ),
    "optimizer with a step of its own": Bad(
        ("step has been replaced", "before that"), step_replaced
    ),
    "LBFGS": Bad(
        ("LBFGS", "whole", "AdamW"),
        lambda scene: fully_shard(scene.module, over(scene, torch.optim.LBFGS)),
        NotImplementedError,
    ),
    "Shampoo": Bad(
        ("Shampoo", "whole matrices"),
        lambda scene: fully_shard(scene.module, over(scene, Shampoo)),
        NotImplementedError,
    ),
    "SparseAdam": Bad(
        ("SparseAdam", "sparse"),
        lambda scene: fully_shard(scene.module, over(scene, torch.optim.SparseAdam)),
        NotImplementedError,
    ),
    "differentiable": Bad(
        ("differentiable=True",),
        lambda scene: fully_shard(scene.module, over(scene, torch.optim.SGD, differentiable=True)),
        NotImplementedError,
    ),
    "param group of strangers": Bad(
        ("belong to no sharded model",),
        lambda scene: sharded()[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ),
}


# ---- later calls
# ---------------------------------------------------------------------------------------------------------


def enter_context(scene: Scene) -> None:
    with sharded()[0].mixed_precision_context("fp32"):
        pass


def load_other_optimizer(scene: Scene) -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    _, other = fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    sharded()[1].load_state_dict(other.state_dict())


def load_wrong_shape_of_state(scene: Scene) -> None:
    _, optimizer = sharded()
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(7)
    optimizer.load_state_dict(state)


def index_of(scene: Scene) -> FSDPDistributedIndex:
    return FSDPDistributedIndex(mesh_of("dp", "cp"), "dp")


LATER: dict[str, Bad] = {
    "context of text": Bad(("MixedPrecisionPolicy", "'fp32'"), enter_context),
    "policy reset to None": Bad(
        ("MixedPrecisionPolicy", "None"),
        lambda scene: sharded()[0].reset_mixed_precision_policy(None),
    ),
    "weights of wrong shape": Bad(
        (
            "weight: expects shape (3, 3) but got (7,)",
            "missing keys: bias",
            "unexpected keys: scale",
        ),
        lambda scene: sharded()[0].load_state_dict(
            {"weight": torch.zeros(7), "scale": torch.zeros(1)}
        ),
        RuntimeError,
    ),
    "weights that are no tensors": Bad(
        ("weight", "int"),
        lambda scene: sharded()[0].load_state_dict({"weight": 3, "bias": 4}),
        RuntimeError,
    ),
    "state dict is text": Bad(
        ("state_dict", "str"), lambda scene: sharded()[0].load_state_dict("file.pt"), TypeError
    ),
    "weights to be assigned": Bad(
        ("assign", "not built yet"),
        lambda scene: (lambda model: model.load_state_dict(model.state_dict(), assign=True))(
            sharded()[0]
        ),
        NotImplementedError,
    ),
    "optimizer state of other names": Bad(
        ("param_groups[0]", "module.0.weight", "module.weight"), load_other_optimizer
    ),
    "optimizer state of wrong shape": Bad(
        ("weight: expects shape (3, 3) but got (7,)",), load_wrong_shape_of_state
    ),
    "copy of the model": Bad(
        ("cannot be copied or pickled", "state_dict()"),
        lambda scene: copy.deepcopy(sharded()[0]),
        NotImplementedError,
    ),
    "pickle of the model": Bad(
        ("cannot be copied or pickled", "state_dict()"),
        lambda scene: pickle.dumps(sharded()[0]),
        NotImplementedError,
    ),
    "half": Bad(
        ("cannot be moved or converted", "torch.float16", "before sharding"),
        lambda scene: sharded()[0].half(),
        NotImplementedError,
    ),
    "moved": Bad(
        ("cannot be moved or converted", "meta"),
        lambda scene: sharded()[0].to("meta"),
        NotImplementedError,
    ),
    "whole gradients": Bad(
        ("force_all_reduce",),
        lambda scene: sharded()[0].finish_grad_sync(force_all_reduce=True),
        NotImplementedError,
    ),
    "submesh of unknown axis": Bad(
        ("('dp', 'cp')", "('pp',)"), lambda scene: index_of(scene).get_submesh("pp")
    ),
    "expert group without expert mesh": Bad(
        ("expt_device_mesh",), lambda scene: index_of(scene).get_fsdp_group(is_expert_parallel=True)
    ),
    "policy of an integer dtype": Bad(
        ("main_params_dtype expects", "torch.int8"), lambda scene: MixedPrecisionPolicy(torch.int8)
    ),
    "policy of a name": Bad(
        ("grad_comm_dtype expects", "'bf16'"),
        lambda scene: MixedPrecisionPolicy(grad_comm_dtype="bf16"),
    ),
}


# ---- ranks that differ
# ---------------------------------------------------------------------------------------------------


def differing(**values: Any) -> Callable[[Scene], Any]:
    """Rank 0 and all others give different values of an argument."""
    return lambda scene: fully_shard(
        scene.module,
        scene.optimizer,
        **{key: pair[min(scene.rank, 1)] for key, pair in values.items()},
    )


def several_things(scene: Scene) -> None:
    fully_shard_model(
        nn.ReLU(),
        mesh_of("dp", "cp"),
        "data",
        zero_dp_strategy="zero3",
        fsdp_unit_modules=[int],
        device="abacus",
        nccl_ub=True,
    )


DIFFERENT: dict[str, Bad] = {
    "strategy wrong on one rank": Bad(
        ("zero_dp_strategy expects", "but got 7"), differing(zero_dp_strategy=(3, 7))
    ),
    "module wrong on one rank": Bad(
        ("module expects",), lambda scene: fully_shard_model(scene.module if scene.rank else "text")
    ),
    "optimizer wrong on one rank": Bad(
        ("optimizer expects",),
        lambda scene: fully_shard(scene.module, scene.optimizer if scene.rank else "text"),
    ),
    "not built on one rank": Bad(
        ("nccl_ub",), differing(nccl_ub=(False, True)), NotImplementedError
    ),
    "strategies differ": Bad(
        ("the sharding strategy differs between ranks", "OPTIM_GRADS,", "OPTIM_GRADS_PARAMS"),
        differing(zero_dp_strategy=(2, 3)),
    ),
    "policies differ": Bad(
        ("mixed_precision_policy differs between ranks",),
        differing(mixed_precision_policy=(MixedPrecisionPolicy(), MixedPrecisionPolicy(None))),
    ),
    "units differ": Bad(
        ("the list of units differs between ranks",),
        differing(fsdp_unit_modules=([Block, nn.LayerNorm], [])),
    ),
    "per-token loss differs": Bad(
        ("gradient policy differs between ranks", "sum_only=True"),
        differing(calculate_per_token_loss=(False, True)),
    ),
    "reports of NaN differ": Bad(
        ("report_nan_in_param_grad differs between ranks",),
        differing(report_nan_in_param_grad=(False, True)),
    ),
    "synchronisation differs": Bad(
        ("sync_model_each_microbatch differs between ranks",),
        differing(sync_model_each_microbatch=(False, True)),
    ),
    "overlap differs": Bad(
        ("overlap_grad_reduce differs between ranks",), differing(overlap_grad_reduce=(False, True))
    ),
    "shapes differ": Bad(
        ("differs between ranks", "weight (3, 2)", "weight (4, 2)"),
        lambda scene: fully_shard_model(nn.Linear(2, 3 + scene.rank)),
    ),
    "numbers of parameters differ": Bad(
        ("the number of parameters differs between ranks",),
        lambda scene: fully_shard_model(nn.Linear(2, 3, bias=scene.rank == 0)),
    ),
    "frozen on one rank": Bad(
        ("differs between ranks", "trainable", "frozen"),
        lambda scene: fully_shard_model(nn.Linear(2, 3).requires_grad_(scene.rank == 0)),
    ),
    "shapes differ on one of four": Bad(
        ("differs between ranks", "weight (3, 2)", "weight (4, 2)"),
        lambda scene: fully_shard_model(nn.Linear(2, 3 + (scene.rank == 2))),
        world_size=4,
    ),
    "several things": Bad(
        (
            "no parameters",
            "zero_dp_strategy",
            "'zero3'",
            "dp_shard_dim='data'",
            "fsdp_unit_modules",
            "int",
            "'abacus'",
            "nccl_ub",
        ),
        several_things,
    ),
    "optimizer and arguments": Bad(
        ("optimizer expects", "zero_dp_strategy", "'abacus'"),
        lambda scene: fully_shard(scene.module, "adam", zero_dp_strategy=9, device="abacus"),
    ),
    "different things on two ranks": Bad(
        ("zero_dp_strategy", "fsdp_unit_modules"),
        lambda scene: fully_shard_model(
            scene.module,
            **({"zero_dp_strategy": 9} if scene.rank else {"fsdp_unit_modules": [int]}),
        ),
    ),
}

BAD_CALLS = {**STRATEGIES, **MESHES, **OPTIONS, **MODELS, **OPTIMIZERS, **LATER, **DIFFERENT}
FOLLOWED_BY_THE_RIGHT_CALL = {
    "strategy 4",
    "axis unknown",
    "units cannot be imported",
    "optimizer with a step of its own",
    "strategies differ",
    "LBFGS",
    "optimizer of another model",
    "decoupled gradients with torch's optimizer",
}


def call_wrongly(name: str) -> str:
    scene = Scene()
    bad = BAD_CALLS[name]
    message = message_of(bad.kind, bad.call, scene)
    scene.check_that_nothing_has_happened()
    if name in FOLLOWED_BY_THE_RIGHT_CALL:
        scene.check_that_the_right_call_works()
    return message


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_wrong_call_is_refused_alike_on_every_rank(ranks: Ranks, name: str) -> None:
    bad = BAD_CALLS[name]
    messages = ranks(bad.world_size, call_wrongly, name, timeout=TIMEOUT)
    assert len(set(messages)) == 1, messages
    for part in bad.parts:
        assert part in messages[0], f"{part!r} is not in: {messages[0]}"


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
