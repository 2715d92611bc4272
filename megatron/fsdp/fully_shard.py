# SPDX-License-Identifier: Apache-2.0
"""The public functions: shard a model, an optimizer, or both."""

from __future__ import annotations

import inspect
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.collectives import agree
from megatron.fsdp.config import DistributedDataParallelConfig, refuse_unbuilt
from megatron.fsdp.mesh import FSDPDistributedIndex
from megatron.fsdp.model import MegatronFSDP
from megatron.fsdp.optimizer import refuse_optimizer, shard_optimizer, swap_parameters
from megatron.fsdp.policy import GradientPolicy, MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.units import resolve_unit_modules


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

    Weights, gradients and optimizer state are divided as ``zero_dp_strategy`` says. At level 3 (the default) the
    weights of a unit, one of ``fsdp_unit_modules``, are gathered for its forward, freed, gathered for its backward
    and freed again, while the next unit is gathered ahead. Gradients are averaged over the ranks and divided among
    them during backward; the optimizer updates the piece that a rank owns, in ``main_params_dtype``.

    ``model.parameters()`` yields those pieces as DTensors of the full logical shape: make the optimizer on them and
    pass it to :func:`fully_shard_optimizer`. Everything else (forward, loss, ``backward``, clipping, schedulers) is
    as without sharding.

    Args:
        module: any initialised module; the weights of the axis' first rank are taken.
        device_mesh: mesh with named axes. None: one axis over all ranks, on the accelerator there is, else cpu.
        dp_shard_dim: axis to shard over; required with a mesh of several axes.
        tp_dim: tensor-parallel axis, of size 1 in this version.
        fsdp_unit_modules: classes (or instances, or import paths) of units. Parameters outside of units belong to
            the unit of the whole module, which is gathered for its whole forward and its whole backward.
        zero_dp_strategy: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        device: where the module goes first. None: the mesh's.
        mixed_precision_policy: dtypes of main weights and gradients.
        overlap_grad_reduce, overlap_param_gather: communicate beside compute.
        sync_model_each_microbatch: after every backward gradients are final on ``param.grad``; several backward
            passes before a step add up. False: the optimizer's step, or ``finish_grad_sync``, makes them final.
        report_nan_in_param_grad: name parameter and rank of a NaN or Inf gradient (older: ``check_for_nan_in_grad``).
        average_in_collective: the process group divides; otherwise its sum is divided.
        disable_bucketing: one group per dtype instead of per unit.
        calculate_per_token_loss: gradients are summed, not averaged.
        grad_reduce_in_fp32, preserve_fp32_weights: older spellings of ``mixed_precision_policy``.

    Raises:
        ValueError: listing everything that is wrong with the arguments, the same on every rank.
        NotImplementedError: for arguments that ask for what is not built yet, by name.
        RuntimeError: outside torch.distributed.

    ZeRO: Rajbhandari et al., arXiv:1910.02054. FSDP: Zhao et al., arXiv:2304.11277.
    """
    refuse_unbuilt(
        outer_dp_sharding_strategy=_parse_or_keep(outer_dp_sharding_strategy),
        init_model_with_meta_device=init_model_with_meta_device,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
        maxpool_double_buffer=maxpool_double_buffer,
    )
    problems: list[str] = []

    def check(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            problems.append(str(error))

    check(_check_module, module)
    strategy = check(ShardingStrategy.parse, zero_dp_strategy)
    units = check(resolve_unit_modules, fsdp_unit_modules)
    check(GradientPolicy, calculate_per_token_loss, average_in_collective)
    precision = check(precision_policy, mixed_precision_policy, grad_reduce_in_fp32, preserve_fp32_weights)
    index = check(
        FSDPDistributedIndex,
        device_mesh,
        dp_shard_dim,
        dp_outer_dim,
        tp_dim,
        hybrid_fsdp_group,
        hybrid_fsdp_expt_group,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
    )
    _raise_everywhere(problems)

    model = MegatronFSDP(
        module,
        index,
        DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy.name.lower(),
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            average_in_collective=average_in_collective,
        ),
        mixed_precision_policy=precision,
        fsdp_unit_modules=units,
        disable_bucketing=disable_bucketing,
        device=device,
        calculate_per_token_loss=calculate_per_token_loss,
        sync_model_each_microbatch=sync_model_each_microbatch,
        report_nan_in_param_grad=report_nan_in_param_grad if check_for_nan_in_grad is None else check_for_nan_in_grad,
    )
    model.checkpoint_ready = preproc_state_dict_for_dcp_ckpt
    return model


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Shard an optimizer made on the ``parameters()`` of a sharded model; the same object is returned.

    Its ``step(closure=None, *, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)`` finishes
    reductions, updates the main weights and puts them into the compute weights. Its ``zero_grad(set_to_none=True, *,
    zero_grad_buffer=True)`` also clears the accumulation buffers. Its state exists at once (moments zero, step 0).

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
        ValueError, NotImplementedError, RuntimeError: as both functions do; the model and the optimizer are as
            before then.
    """
    refuse_optimizer(optimizer)
    _raise_everywhere(_problems_of_optimizer(module, optimizer))
    model = fully_shard_model(module, *args, **kwargs)
    swap_parameters(optimizer, model)
    return model, shard_optimizer(optimizer, model.checkpoint_ready)


def _signature_with_optimizer() -> inspect.Signature:
    module, *others = inspect.signature(fully_shard_model).parameters.values()
    optimizer = module.replace(name="optimizer", annotation=torch.optim.Optimizer)
    return inspect.Signature([module, optimizer, *others], return_annotation=tuple[MegatronFSDP, torch.optim.Optimizer])


fully_shard.__signature__ = _signature_with_optimizer()  # what editors and `help` show


def precision_policy(
    policy: MixedPrecisionPolicy, grad_reduce_in_fp32: bool | None, preserve_fp32_weights: bool | None
) -> MixedPrecisionPolicy:
    """The policy of either spelling; ``ValueError`` where both are given and disagree."""
    old = MixedPrecisionPolicy(
        main_params_dtype=None if preserve_fp32_weights is False else torch.float32,
        main_grads_dtype=torch.float32 if grad_reduce_in_fp32 else None,
        grad_comm_dtype=torch.float32 if grad_reduce_in_fp32 else None,
    )
    if policy is None or policy is DEFAULT_PRECISION:
        return old
    if preserve_fp32_weights is not None and policy.main_params_dtype != old.main_params_dtype:
        raise ValueError(
            f"preserve_fp32_weights={preserve_fp32_weights} contradicts mixed_precision_policy.main_params_dtype="
            f"{policy.main_params_dtype}: give one of them"
        )
    in_fp32 = policy.main_grads_dtype == torch.float32 == (policy.grad_comm_dtype or policy.main_grads_dtype)
    if grad_reduce_in_fp32 is not None and grad_reduce_in_fp32 != in_fp32:
        raise ValueError(
            f"grad_reduce_in_fp32={grad_reduce_in_fp32} contradicts mixed_precision_policy.main_grads_dtype="
            f"{policy.main_grads_dtype} and grad_comm_dtype={policy.grad_comm_dtype}: give one of them"
        )
    return policy


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"module expects a torch.nn.Module but got {type(module).__name__}")
    if isinstance(module, MegatronFSDP):
        raise ValueError("the module is sharded already")
    meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(f"parameters on the meta device have no values to shard: {', '.join(meta[:5])}")
    if not any(True for _ in module.parameters()):
        raise ValueError("the module has no parameters to shard")


def _problems_of_optimizer(module: Any, optimizer: Any) -> list[str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [f"optimizer expects a torch.optim.Optimizer but got {type(optimizer).__name__}"]
    if not isinstance(module, nn.Module):
        return []  # the model's own check names it
    known = set(module.parameters())
    strangers = sum(1 for group in optimizer.param_groups for p in group["params"] if p not in known)
    return [f"{strangers} parameters of the optimizer are none of the module's"] if strangers else []


def _parse_or_keep(value: Any) -> Any:
    """The outer strategy as a number, so that "no_shard" counts as the default."""
    try:
        return int(ShardingStrategy.parse(value, "outer_dp_sharding_strategy"))
    except ValueError:
        return value


def _raise_everywhere(problems: list[str]) -> None:
    """Raise what any rank has found, on all of them."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = agree("\n".join(problems) or None)
    if problems:
        raise ValueError("\n".join(problems))
