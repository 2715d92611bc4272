# SPDX-License-Identifier: Apache-2.0
"""The public functions: shard a model, an optimizer, or both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.checks import check_flags, check_module, device_of, outer_strategy
from megatron.fsdp.config import DistributedDataParallelConfig, refuse_unbuilt
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import GradientPolicy, MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.engine.units import resolve_unit_modules
from megatron.fsdp.model import MegatronFSDP
from megatron.fsdp.optimizer import (
    refuse_optimizer,
    refuse_own_step,
    shard_optimizer,
    swap_parameters,
)
from megatron.fsdp.problems import Problems

# The object itself says that no policy was given, and the older keywords may speak.
DEFAULT_PRECISION = MixedPrecisionPolicy()


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type | nn.Module | str] | None = None,
    zero_dp_strategy: str | int | ShardingStrategy = 3,
    outer_dp_sharding_strategy: str | int | ShardingStrategy = 0,
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    *,
    check_for_nan_in_grad: bool | None = None,
    grad_reduce_in_fp32: bool | None = None,
    preserve_fp32_weights: bool | None = None,
) -> MegatronFSDP:
    """Shard a model over the ranks of a mesh axis.

    Weights, gradients and optimizer state are divided as ``zero_dp_strategy`` says. At level 3 (the
    default) the weights of a unit, one of ``fsdp_unit_modules``, are gathered for its forward,
    freed, gathered for its backward and freed again, while the next unit is gathered ahead.
    Gradients are averaged over the ranks and divided among them during backward; the optimizer
    updates the piece that a rank owns, in ``main_params_dtype``.

    ``model.parameters()`` yields those pieces as DTensors of the full logical shape: make the
    optimizer on them and pass it to :func:`fully_shard_optimizer`. Everything else (forward, loss,
    ``backward``, clipping, schedulers) is as without sharding.

    Args:
        module: any module, initialised; the weights of the first data rank are taken.
        device_mesh: mesh with named axes. None: one axis over all ranks, on the accelerator there
            is, else cpu.
        dp_shard_dim: axis to shard over, also a flattened one; required with a mesh of several
            axes.
        dp_outer_dim: outer data axis, whose ranks replicate what the shard axis divides: hybrid
            sharding.
        tp_dim: tensor-parallel axis, of a model whose parameters are DTensors or have
            Megatron-Core's attributes.
        hybrid_fsdp_group: group over outer x shard; derived from the mesh if it is not given.
        hybrid_fsdp_expt_group: the same for expert parameters.
        expt_device_mesh: mesh of expert parameters (``allreduce=False``, or inside a module called
            ``experts``), with axes of the same names: the ranks that hold the same experts.
        fsdp_group_ag, expt_fsdp_group_ag: groups of the shard axis' ranks for gathers alone, so
            that they do not queue behind reductions.
        fsdp_unit_modules: classes (or instances, or import paths) of units, whose parameters are
            used inside their forward only, or handed on as arguments. Outside of them, without any
            everywhere, each module that owns
            parameters is gathered and freed by itself: little memory, many small gathers.
        zero_dp_strategy: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        outer_dp_sharding_strategy: 0 ("no_shard"), or 1 ("optim"): the outer axis divides optimizer
            state too.
        device: where the module goes first. None: the mesh's. Ignored with meta initialisation.
        init_model_with_meta_device: parameters on the meta device get their values unit by unit,
            through ``reset_parameters()`` of the modules that own them, in module order.
        mixed_precision_policy: dtypes of main weights and gradients.
        overlap_grad_reduce, overlap_param_gather: communicate beside compute.
        sync_model_each_microbatch: after every backward gradients are final on ``param.grad``;
            several backward passes before a step add up. False: the optimizer's step, or
                ``finish_grad_sync``, makes them final.
        preproc_state_dict_for_dcp_ckpt: state dicts are ready for torch.distributed.checkpoint.
        report_nan_in_param_grad: name parameter and rank of a NaN or Inf gradient (older:
            ``check_for_nan_in_grad``).
        average_in_collective: the process group divides; otherwise its sum is divided.
        disable_bucketing: one group per dtype instead of per unit.
        calculate_per_token_loss: gradients are summed, not averaged.
        enable_fine_grained_param_gather: inside of units too each module that owns parameters is
            gathered by itself.
        use_decoupled_grad: gradients go to ``param.decoupled_grad``, in ``main_grads_dtype``, for
            optimizers that read it.
        grad_reduce_in_fp32, preserve_fp32_weights: older spellings of ``mixed_precision_policy``.

    Raises:
        ValueError: listing everything that is wrong with the arguments, the same on every rank.
        NotImplementedError: for arguments that ask for what is not built yet, by name.
        RuntimeError: outside torch.distributed.

    ZeRO: Rajbhandari et al., arXiv:1910.02054. FSDP: Zhao et al., arXiv:2304.11277.
    """
    return _shard(Problems(), dict(locals()))


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Shard an optimizer made on the ``parameters()`` of a sharded model; the same object is returned.

    Its ``step(closure=None, *, sync_grad_before_optimizer_step=True,
    install_optimized_model_weights=True)`` finishes reductions, updates the main weights and puts
    them into the compute weights. Its ``zero_grad(set_to_none=True, *, zero_grad_buffer=True)``
    also clears the accumulation buffers. Its state exists at once (moments zero, step 0).

    Args:
        optimizer: an element-wise torch optimizer.
        preproc_state_dict_for_dcp_ckpt: ``state_dict()`` is ready for torch.distributed.checkpoint.

    Raises:
        ValueError: where a parameter belongs to no sharded model.
        NotImplementedError: for optimizers that need whole matrices.
    """
    return shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard an existing model and its optimizer: ``model, optimizer = fully_shard(model, optimizer, ...)``.

    The optimizer keeps its param groups, hyper-parameters and state. The arguments are those of
    :func:`fully_shard_model`, in the same order.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as both functions do; the model and the
            optimizer are as before then.
    """
    problems = Problems()
    for text in _problems_of_optimizer(module, optimizer):
        problems.add(text)
    problems.check(refuse_optimizer, optimizer)
    problems.check(refuse_own_step, optimizer)
    bound = inspect.signature(fully_shard).bind(module, optimizer, *args, **kwargs)
    bound.apply_defaults()
    problems.check(_refuse_decoupled, optimizer, bound.arguments["use_decoupled_grad"])
    model = _shard(problems, bound.arguments)
    swap_parameters(optimizer, model)
    return model, shard_optimizer(optimizer, model.checkpoint_ready)


# Names of the arguments of `fully_shard_model`, by what they are for.
FLAGS = [
    name
    for name, parameter in inspect.signature(fully_shard_model).parameters.items()
    if isinstance(parameter.default, bool)
]
PRECISION = ["mixed_precision_policy", "grad_reduce_in_fp32", "preserve_fp32_weights"]
MESH = [
    "device_mesh",
    "dp_shard_dim",
    "dp_outer_dim",
    "tp_dim",
    "hybrid_fsdp_group",
    "hybrid_fsdp_expt_group",
]
MESH += ["expt_device_mesh", "fsdp_group_ag", "expt_fsdp_group_ag"]
UNBUILT = [
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
]
UNBUILT += ["disable_symmetric_registration", "cuda_graph_mode", "maxpool_double_buffer"]


def _signature_with_optimizer() -> inspect.Signature:
    module, *others = inspect.signature(fully_shard_model).parameters.values()
    optimizer = module.replace(name="optimizer", annotation=torch.optim.Optimizer)
    return inspect.Signature(
        [module, optimizer, *others], return_annotation=tuple[MegatronFSDP, torch.optim.Optimizer]
    )


fully_shard.__signature__ = _signature_with_optimizer()  # what editors and `help` show


def precision_policy(
    policy: MixedPrecisionPolicy,
    grad_reduce_in_fp32: bool | None,
    preserve_fp32_weights: bool | None,
) -> MixedPrecisionPolicy:
    """The policy of either spelling; ``ValueError`` where both are given and disagree."""
    old = MixedPrecisionPolicy(
        main_params_dtype=None if preserve_fp32_weights is False else torch.float32,
        main_grads_dtype=torch.float32 if grad_reduce_in_fp32 else None,
        grad_comm_dtype=torch.float32 if grad_reduce_in_fp32 else None,
    )
    if policy is None or policy is DEFAULT_PRECISION:
        return old
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"mixed_precision_policy expects a MixedPrecisionPolicy but got {policy!r}"
        )
    if preserve_fp32_weights is not None and policy.main_params_dtype != old.main_params_dtype:
        raise ValueError(
            f"preserve_fp32_weights={preserve_fp32_weights} contradicts"
            f" mixed_precision_policy.main_params_dtype={policy.main_params_dtype}: give one of"
            " them"
        )
    in_fp32 = (
        policy.main_grads_dtype
        == torch.float32
        == (policy.grad_comm_dtype or policy.main_grads_dtype)
    )
    if grad_reduce_in_fp32 is not None and grad_reduce_in_fp32 != in_fp32:
        raise ValueError(
            f"grad_reduce_in_fp32={grad_reduce_in_fp32} contradicts"
            f" mixed_precision_policy.main_grads_dtype={policy.main_grads_dtype} and"
            f" grad_comm_dtype={policy.grad_comm_dtype}: give one of them"
        )
    return policy


def _shard(problems: Problems, given: dict[str, Any]) -> MegatronFSDP:
    """:func:`fully_shard_model` with all its arguments ``given``; what is wrong with them is raised together with the
    ``problems`` that the caller has found.
    """
    module, device_mesh, device = given["module"], given["device_mesh"], given["device"]
    problems.check(refuse_unbuilt, **{name: given[name] for name in UNBUILT})
    problems.check(check_flags, **{name: given[name] for name in FLAGS})
    policy, in_fp32, fp32_weights = (given[name] for name in PRECISION)
    precision = problems.check(precision_policy, policy, in_fp32, fp32_weights)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=given["zero_dp_strategy"],
        outer_dp_sharding_strategy=given["outer_dp_sharding_strategy"],
        overlap_grad_reduce=given["overlap_grad_reduce"],
        overlap_param_gather=given["overlap_param_gather"],
        average_in_collective=given["average_in_collective"],
        megatron_fsdp_use_decoupled_grad=given["use_decoupled_grad"],
        megatron_fsdp_enable_fine_grained_param_gather=given["enable_fine_grained_param_gather"],
    )
    strategy = problems.check(ShardingStrategy.parse, given["zero_dp_strategy"])
    units = problems.check(resolve_unit_modules, given["fsdp_unit_modules"])
    problems.check(
        GradientPolicy, given["calculate_per_token_loss"], given["average_in_collective"]
    )
    index = problems.check(FSDPDistributedIndex, **{name: given[name] for name in MESH})
    problems.check(outer_strategy, config, index, strategy)
    problems.check(device_of, device)
    initialiser = MegatronFSDP.initialiser if given["init_model_with_meta_device"] else None
    problems.check(check_module, module, index, strategy, initialiser)
    problems.raise_everywhere(reach(device_mesh))

    older = given["check_for_nan_in_grad"]
    model = MegatronFSDP(
        module,
        index,
        config,
        mixed_precision_policy=precision,
        fsdp_unit_modules=units,
        disable_bucketing=given["disable_bucketing"],
        device=device,
        calculate_per_token_loss=given["calculate_per_token_loss"],
        init_model_with_meta_device=given["init_model_with_meta_device"],
        sync_model_each_microbatch=given["sync_model_each_microbatch"],
        report_nan_in_param_grad=given["report_nan_in_param_grad"] if older is None else older,
    )
    model.checkpoint_ready = given["preproc_state_dict_for_dcp_ckpt"]
    return model


def _problems_of_optimizer(module: Any, optimizer: Any) -> list[str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [f"optimizer expects a torch.optim.Optimizer but got {type(optimizer).__name__}"]
    if not isinstance(module, nn.Module):
        return []  # the model's own check names it
    known = set(module.parameters())
    strangers = sum(
        1 for group in optimizer.param_groups for p in group["params"] if p not in known
    )
    return (
        [f"{strangers} parameters of the optimizer are none of the module's"] if strangers else []
    )


def _refuse_decoupled(optimizer: Any, use_decoupled_grad: bool) -> None:
    if use_decoupled_grad and type(optimizer).__module__.startswith("torch.optim"):
        raise ValueError(
            "use_decoupled_grad puts gradients on param.decoupled_grad, which"
            f" {type(optimizer).__name__} does not read: it would not train. Leave it False, or"
            " pass a precision-aware optimizer"
        )


def reach(device_mesh: Any) -> list[dist.ProcessGroup | None]:
    """Groups that reach every rank of a mesh, one after the other; all ranks there are where it is none."""
    return list(device_mesh.get_all_groups()) if isinstance(device_mesh, DeviceMesh) else [None]
