# SPDX-License-Identifier: Apache-2.0
"""The public functions: shard a model, an optimizer, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.engine.policy import MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.model import MegatronFSDP
from megatron.fsdp.optimizer.sharded_optimizer import (
    check_optimizer,
    shard_optimizer,
    swap_parameters,
)
from megatron.fsdp.problems import Problems
from megatron.fsdp.settings import DEFAULT_PRECISION, ShardingSettings


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
    suggested_communication_unit_size: int | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    find_unused_parameters: bool = False,
    granularity: str = "prefer_rows",
) -> MegatronFSDP:
    """Shard a model over the data-parallel ranks: ZeRO levels 0 to 3, plain or hybrid.

    Weights, gradients and optimizer state are sharded over the ranks of the axis ``dp_shard_dim``;
    ``zero_dp_strategy`` chooses which of them. At level 3, the default, each rank keeps its shard
    of the weights only. Before the forward of a *unit* (one of ``fsdp_unit_modules``, usually a
    transformer layer) the weights of the unit are all-gathered; after its forward they are freed.
    The same happens around its backward. While a unit computes, the next one is prefetched, in the
    order that the last forward has recorded.

    The parameters of a unit that share dtype, mesh and trainability form a *group*. A group is one
    flat buffer in which each parameter is contiguous. One all-gather fills it, and the module's own
    parameters are views of it, so nothing is copied. Each rank owns one contiguous shard of the
    buffer. A planner orders and pads parameters to let shards end between rows if that costs
    little; otherwise they end between any elements.

    In backward, autograd leaves local gradients on the module's own parameters. When a unit's
    backward is over, they are collected in a flat buffer like that of the weights and
    reduce-scattered (all-reduced at level 0) while the next unit computes. The sum over ranks is
    divided once, by the number of data ranks. With an outer axis, ``dp_outer_dim``, the result is
    reduced over that axis too, after the last microbatch of a step.

    ``model.parameters()`` yields the *main weights*, which the optimizer updates, in
    ``main_params_dtype``: DTensors of the full logical shape, whose local tensors are views of this
    rank's shard. Their gradients are on ``param.grad`` after backward. Create the optimizer over
    them and pass it to :func:`fully_shard_optimizer`; the forward after its step casts and gathers
    the main weights as they are when it begins. Everything else (forward, loss, ``backward``,
    clipping, schedulers, checkpoints) is used as without sharding.

    Hooks drive all of this: on modules (before and after forward), on the outputs and inputs of
    units (backward begins and ends), and on parameters (a gradient has arrived). They only report
    to the schedule, which gathers, frees and reduces in the same order on every rank.

    Args:
        module: any initialised module. Ranks take the weights of the first data rank. Its
            parameters stay the same objects and become views of flat buffers.
        device_mesh: mesh with named axes. None: one axis over all ranks, on the accelerator if
            there is one, otherwise on the CPU.
        dp_shard_dim: axis to shard over, which may be a flattened one; required with a mesh of
            several axes.
        dp_outer_dim: outer data axis, which replicates the shards: hybrid sharding.
        tp_dim: tensor-parallel axis, for a model whose parameters are DTensors or have
            Megatron-Core's attributes.
        hybrid_fsdp_group: group over outer x shard; derived from the mesh if it is not given.
        hybrid_fsdp_expt_group: group over outer x shard of the expert mesh; derived from that mesh
            if it is not given.
        expt_device_mesh: mesh of expert parameters (``allreduce=False``, or inside a module called
            ``experts``), with axes of the same names. Its ranks store the same experts.
        fsdp_group_ag: second group of the ranks of the shard axis, for all-gathers only, which then
            do not queue behind reductions.
        expt_fsdp_group_ag: ``fsdp_group_ag`` for the expert mesh.
        fsdp_unit_modules: classes, instances or import paths of units. The parameters of a unit
            must be used inside its forward only, or passed on as arguments. Outside the named
            units, each module that owns parameters is a unit by itself: little memory, many small
            all-gathers. The smallest of them, together at most as large as the largest named unit,
            are gathered with the parameters that ``module`` owns directly.
        zero_dp_strategy: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        outer_dp_sharding_strategy: 0 ("no_shard"), or 1 ("optim"): the outer axis shards optimizer
            state too.
        device: device that the module is moved to. None: the mesh's. Ignored with meta
            initialisation.
        init_model_with_meta_device: parameters on the meta device get their values unit by unit,
            through ``reset_parameters()`` of the modules that own them, in module order, or
            ``param_init_fn``.
        mixed_precision_policy: dtypes of main weights and gradients.
        overlap_grad_reduce: overlap gradient reductions with compute.
        overlap_param_gather: overlap all-gathers of weights with compute.
        sync_model_each_microbatch: after every backward the gradients on ``param.grad`` are final;
            several backward passes before a step add up. False: the optimizer's step, or
            ``finish_grad_sync``, makes them final, and levels 0 and 1 reduce nothing before it,
            unless ``no_sync`` marks all microbatches but the last.
        preproc_state_dict_for_dcp_ckpt: make state dicts ready for torch.distributed.checkpoint.
        report_nan_in_param_grad: raise an error that names the parameter and the rank of a NaN or
            Inf gradient.
        average_in_collective: let the process group average; otherwise its sum is divided.
        disable_bucketing: make the whole model one unit, with as few groups as dtypes and
            trainability allow.
        calculate_per_token_loss: sum gradients instead of averaging them.
        keep_fp8_transpose_cache: not built yet.
        nccl_ub: register the memory slots of ``fsdp_double_buffer``, which this implies, with NCCL.
        fsdp_double_buffer: gather weights and collect gradients in a fixed set of memory slots,
            whose addresses never change. The first step finds out what is needed at the same time;
            ``model.memory_slots`` tells the bytes of the slots.
        fsdp_db_use_persist_buf_on_alloc_fail: if slots cannot be allocated, train with separate
            storage for each buffer; otherwise, and in ``cuda_graph_mode``, that is an error.
        disable_symmetric_registration: register memory with NCCL locally, not as symmetric windows.
        enable_fine_grained_param_gather: make each module that owns parameters a unit by itself,
            inside named units too.
        use_decoupled_grad: put gradients on ``param.decoupled_grad``, in ``main_grads_dtype``, for
            optimizers that read it.
        cuda_graph_mode: hold the addresses of gathered weights and gradients for good, as CUDA
            graphs need; implies ``fsdp_double_buffer``.
        maxpool_double_buffer: give every memory slot the size of the largest unit; implies
            ``fsdp_double_buffer``.
        check_for_nan_in_grad: older name of ``report_nan_in_param_grad``.
        grad_reduce_in_fp32: older spelling: both gradient dtypes of the policy are float32.
        preserve_fp32_weights: older spelling: ``main_params_dtype`` is float32, or None if False.
        suggested_communication_unit_size: bytes up to which small units outside the named ones are
            gathered with the parameters that ``module`` owns directly, and the bound of what is
            gathered ahead. None: the size of the largest named unit, and one unit ahead.
        param_init_fn: with meta initialisation: called with every module that owns parameters or
            buffers on the meta device, children first, when they have storage; gives them their
            first values. None: ``reset_parameters()``, or in models of transformers their own
            ``_init_weights``.
        find_unused_parameters: leave ``param.grad`` None, so that optimizers leave the parameter
            alone, if it got no gradient on any rank since gradients were cleared. It costs one
            small all-reduce for each synchronisation, whose result the host waits for, and levels 0
            and 1 reduce when backward is over. False: the gradient is zero.
        granularity: "prefer_rows": a shard boundary may cut inside a row of a parameter where rows
            would cost more than 1 % of padding; the local tensor is then flat. "rows": never,
            whatever the padding costs.

    Returns:
        The wrapper; the user's module is its ``module``.

    Raises:
        ValueError: lists every problem with the arguments, the same on every rank.
        NotImplementedError: names the arguments that are not built yet.
        RuntimeError: if the program was not started for torch.distributed.

    Sources:
        ZeRO: Rajbhandari et al., arXiv:1910.02054. FSDP: Zhao et al., arXiv:2304.11277.
    """
    settings = ShardingSettings(
        device_mesh=device_mesh,
        dp_shard_dim=dp_shard_dim,
        dp_outer_dim=dp_outer_dim,
        tp_dim=tp_dim,
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
        fsdp_unit_modules=fsdp_unit_modules,
        zero_dp_strategy=zero_dp_strategy,
        outer_dp_sharding_strategy=outer_dp_sharding_strategy,
        device=device,
        init_model_with_meta_device=init_model_with_meta_device,
        mixed_precision_policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        sync_model_each_microbatch=sync_model_each_microbatch,
        preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
        maxpool_double_buffer=maxpool_double_buffer,
        check_for_nan_in_grad=check_for_nan_in_grad,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        suggested_communication_unit_size=suggested_communication_unit_size,
        param_init_fn=param_init_fn,
        find_unused_parameters=find_unused_parameters,
        granularity=granularity,
    )
    # From here on the settings stand for all arguments. `ShardedModule.__init__` builds what the
    # paragraphs above describe, in this order: settings and mesh, units, groups with their flat
    # buffers, sharded parameters, gradients, schedule, hooks.
    return MegatronFSDP.from_settings(module, settings)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
) -> torch.optim.Optimizer:
    """Shard an optimizer over the ``parameters()`` of a sharded model, in place, and return it.

    Its ``step(closure=None, *, sync_grad_before_optimizer_step=True,
    install_optimized_model_weights=True)`` finishes reductions, updates the main weights and casts
    them into the compute weights. Its ``zero_grad(set_to_none=True, *, zero_grad_buffer=True)``
    also clears the accumulation buffers. The state of torch's optimizers is created at once
    (moments zero, step 0).

    Args:
        optimizer: any optimizer. Element-wise ones of torch step on flat tensors; all others step
            on DTensors, whose operations gather the whole tensors that they need.
        preproc_state_dict_for_dcp_ckpt: make ``state_dict()`` ready for
            torch.distributed.checkpoint.

    Raises:
        ValueError: if a parameter belongs to no sharded model, or the optimizer is already sharded.
        NotImplementedError: for sparse gradients and differentiable updates.
    """
    return shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
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
    suggested_communication_unit_size: int | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    find_unused_parameters: bool = False,
    granularity: str = "prefer_rows",
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard an existing model and its optimizer together.

    ``model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])`` is all that a
    training loop needs. The optimizer keeps its param groups, hyper-parameters and state.

    All arguments after the first two are those of :func:`fully_shard_model`;
    :func:`fully_shard_optimizer` makes the returned optimizer. After an error, the model and the
    optimizer are unchanged.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: names the arguments that are not built yet, or the optimizer.
        RuntimeError: if the program was not started for torch.distributed.
    """
    settings = ShardingSettings(
        device_mesh=device_mesh,
        dp_shard_dim=dp_shard_dim,
        dp_outer_dim=dp_outer_dim,
        tp_dim=tp_dim,
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
        fsdp_unit_modules=fsdp_unit_modules,
        zero_dp_strategy=zero_dp_strategy,
        outer_dp_sharding_strategy=outer_dp_sharding_strategy,
        device=device,
        init_model_with_meta_device=init_model_with_meta_device,
        mixed_precision_policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        sync_model_each_microbatch=sync_model_each_microbatch,
        preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
        maxpool_double_buffer=maxpool_double_buffer,
        check_for_nan_in_grad=check_for_nan_in_grad,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        suggested_communication_unit_size=suggested_communication_unit_size,
        param_init_fn=param_init_fn,
        find_unused_parameters=find_unused_parameters,
        granularity=granularity,
    )
    problems = Problems()
    check_optimizer(problems, optimizer, module, use_decoupled_grad)
    model = MegatronFSDP.from_settings(module, settings, problems)
    swap_parameters(optimizer, model)
    return model, shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)
