# SPDX-License-Identifier: Apache-2.0
"""The published functions: shard a model, an optimizer, or both, by keywords.

They translate their keywords into the settings of :func:`megatron.fsdp.fully_shard`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import OffloadPolicy

from megatron.fsdp.config.offload import Offload
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Settings
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.fully_shard import Optimizers, shard_both
from megatron.fsdp.module.sharded_module import ShardedModule
from megatron.fsdp.optimizer.sharded_optimizer import shard_optimizer
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.translation import (
    DEFAULT_PRECISION,
    KEYWORDS,
    config_of,
    published_names,
    settings_of,
)

__all__ = ["ShardingStrategy", "fully_shard", "fully_shard_model", "fully_shard_optimizer"]


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
    mixed_precision_policy: MixedPrecisionPolicy | TorchPrecision = DEFAULT_PRECISION,
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
    granularity: str | int = "prefer_rows",
    fsdp_manual_registration: bool = False,
    ignored_params: Iterable[nn.Parameter] | None = None,
    offload_policy: OffloadPolicy | Offload | str | os.PathLike[str] | None = None,
    expert_zero_dp_strategy: str | int | ShardingStrategy | None = None,
    expert_outer_dp_sharding_strategy: str | int | ShardingStrategy | None = None,
    embedding_zero_dp_strategy: str | int | ShardingStrategy | None = None,
) -> MegatronFSDP:
    """Shard a model over data ranks, by the published keywords.

    They become settings of ``megatron.fsdp.fully_shard``: ZeRO levels 0 to 3, plain or hybrid.

    Weights, gradients and optimizer state are sharded over the ranks of the axis ``dp_shard_dim``;
    ``zero_dp_strategy`` chooses which of them. At level 3, the default, each rank keeps its shard
    of the weights only. The weights of a *unit* (one of ``fsdp_unit_modules``, usually a
    transformer layer) are all-gathered before its forward and its backward, and freed afterwards.
    docs/how_it_works.md shows how.

    ``model.parameters()`` yields the *main weights*, which the optimizer updates, in
    ``main_params_dtype``: DTensors of the full logical shape, whose local tensors are views of this
    rank's shard. Their gradients are on ``param.grad`` after backward. Create the optimizer over
    them and pass it to :func:`fully_shard_optimizer`; the forward after its step casts and gathers
    the main weights as they are when it begins. Everything else (forward, loss, ``backward``,
    clipping, schedulers, checkpoints) is used as without sharding.

    Args:
        module: any initialised module. Ranks take the weights and buffers of the first data rank.
            Its parameters stay the same objects and become views of flat buffers.
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
            ``experts``), with axes of these names and any sizes. Its ranks store the same experts.
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
        mixed_precision_policy: dtypes of main weights and gradients. torch's own policy of
            ``torch.distributed.fsdp`` has FSDP2's meaning: the module is computed with weights cast
            to ``param_dtype``, while main weights keep its dtypes; gradients are reduced in
            ``reduce_dtype``; inputs of units and the output of the model are cast.
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
        keep_fp8_transpose_cache: make the transposed copies of FP8 weights that the backward reads
            in the forward, and keep them till then; otherwise they are made in the backward.
        nccl_ub: register the memory slots of ``fsdp_double_buffer``, which this implies, with NCCL.
            Drop the model before you call ``destroy_process_group()``, so that its memory is not
            registered any more.
        fsdp_double_buffer: gather weights and collect gradients in a fixed set of memory slots,
            whose addresses never change. The first step finds out what is needed at the same time;
            ``model.memory_slots`` has the bytes of the slots.
        fsdp_db_use_persist_buf_on_alloc_fail: if slots cannot be allocated, train with separate
            storage for each buffer. Otherwise that is an error, and always in ``cuda_graph_mode``
            and with the windows of ``nccl_ub``.
        disable_symmetric_registration: register memory with NCCL locally, not as symmetric windows.
            Where NCCL has no windows, that is done anyway, with a warning.
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
            whatever the padding costs. A number: not inside a block of so many elements either, as
            optimizers need that quantize their state. "prefer_tensors": nowhere, if no parameter of
            a group has to be cut within that 1 %, as is best for optimizers of whole matrices.
            ``fully_shard`` sees both in its optimizers.
        fsdp_manual_registration: leave the registration of ``nccl_ub`` to
            ``model.manual_buffer_registration()``, called after the first step. Otherwise the end
            of that step registers.
        ignored_params: parameters of ``module`` that are not sharded, as in FSDP2. They stay plain,
            on their device and with the values of their rank, in ``model.parameters()`` and state
            dicts too, and an optimizer steps them as plain tensors. Their gradients are yours, as
            in FSDP2: nothing reduces them over ranks. Reduce them before gradients are clipped.
        offload_policy: where main weights, reduced gradients and optimizer state lie, if not on the
            device: ``CPUOffloadPolicy()`` of FSDP2 or "host": in host memory; a folder: in files on
            a local disk, which take memory only while they are in use. ``Offload`` of
            ``megatron.fsdp`` has more settings. None: on the device.
        expert_zero_dp_strategy: ``zero_dp_strategy`` of expert parameters, over
            ``expt_device_mesh``. None: as for other parameters.
        expert_outer_dp_sharding_strategy: ``outer_dp_sharding_strategy`` of expert parameters.
            None: as for other parameters where the level of experts is 3, otherwise 0.
        embedding_zero_dp_strategy: ``zero_dp_strategy`` of embeddings and of the output layer:
            parameters of ``nn.Embedding`` and of the module that ``get_output_embeddings`` returns,
            and those with the attribute ``is_embedding_or_output_parameter``. Below 3 they stay
            gathered, as a fused cross entropy over the output layer needs it, and the outer axis
            does not shard their state. None: as for other parameters.

    Returns:
        The wrapper; the user's module is its ``module``.

    Raises:
        ValueError: lists every problem with the arguments, the same on every rank.
        NotImplementedError: names the arguments that are not built yet.
        RuntimeError: if the program was not started for torch.distributed.

    Sources:
        ZeRO: Rajbhandari et al., arXiv:1910.02054. FSDP: Zhao et al., arXiv:2304.11277.
    """
    keywords = {
        "device_mesh": device_mesh,
        "dp_shard_dim": dp_shard_dim,
        "dp_outer_dim": dp_outer_dim,
        "tp_dim": tp_dim,
        "hybrid_fsdp_group": hybrid_fsdp_group,
        "hybrid_fsdp_expt_group": hybrid_fsdp_expt_group,
        "expt_device_mesh": expt_device_mesh,
        "fsdp_group_ag": fsdp_group_ag,
        "expt_fsdp_group_ag": expt_fsdp_group_ag,
        "fsdp_unit_modules": fsdp_unit_modules,
        "zero_dp_strategy": zero_dp_strategy,
        "outer_dp_sharding_strategy": outer_dp_sharding_strategy,
        "device": device,
        "init_model_with_meta_device": init_model_with_meta_device,
        "mixed_precision_policy": mixed_precision_policy,
        "overlap_grad_reduce": overlap_grad_reduce,
        "overlap_param_gather": overlap_param_gather,
        "sync_model_each_microbatch": sync_model_each_microbatch,
        "preproc_state_dict_for_dcp_ckpt": preproc_state_dict_for_dcp_ckpt,
        "report_nan_in_param_grad": report_nan_in_param_grad,
        "average_in_collective": average_in_collective,
        "disable_bucketing": disable_bucketing,
        "calculate_per_token_loss": calculate_per_token_loss,
        "keep_fp8_transpose_cache": keep_fp8_transpose_cache,
        "nccl_ub": nccl_ub,
        "fsdp_double_buffer": fsdp_double_buffer,
        "fsdp_db_use_persist_buf_on_alloc_fail": fsdp_db_use_persist_buf_on_alloc_fail,
        "disable_symmetric_registration": disable_symmetric_registration,
        "enable_fine_grained_param_gather": enable_fine_grained_param_gather,
        "use_decoupled_grad": use_decoupled_grad,
        "cuda_graph_mode": cuda_graph_mode,
        "maxpool_double_buffer": maxpool_double_buffer,
        "check_for_nan_in_grad": check_for_nan_in_grad,
        "grad_reduce_in_fp32": grad_reduce_in_fp32,
        "preserve_fp32_weights": preserve_fp32_weights,
        "suggested_communication_unit_size": suggested_communication_unit_size,
        "param_init_fn": param_init_fn,
        "find_unused_parameters": find_unused_parameters,
        "granularity": granularity,
        "fsdp_manual_registration": fsdp_manual_registration,
        "ignored_params": ignored_params,
        "offload_policy": offload_policy,
        "expert_zero_dp_strategy": expert_zero_dp_strategy,
        "expert_outer_dp_sharding_strategy": expert_outer_dp_sharding_strategy,
        "embedding_zero_dp_strategy": embedding_zero_dp_strategy,
    }
    problems, settings = _translated(keywords)
    with published_names():
        return _KeywordModel(module, settings, problems, keywords)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
) -> torch.optim.Optimizer:
    """Shard an optimizer over the ``parameters()`` of a sharded model, in place, and return it.

    Its ``step(closure=None, *, sync_grad_before_optimizer_step=True,
    install_optimized_model_weights=True)`` finishes reductions and updates the main weights; the
    next forward casts and gathers them. Its ``zero_grad(set_to_none=True, *,
    zero_grad_buffer=True)`` also clears the accumulation buffers. The state of torch's optimizers
    is created at once (moments zero, step 0).

    Args:
        optimizer: any optimizer. Element-wise ones of torch step on flat tensors, Muon on matrices
            that have owners; all others on DTensors, which gather the whole tensors they need.
        preproc_state_dict_for_dcp_ckpt: make ``state_dict()`` ready for
            torch.distributed.checkpoint.

    Raises:
        ValueError: if a parameter belongs to no sharded model, or the optimizer is already sharded.
        NotImplementedError: for sparse gradients and differentiable updates.
    """
    with published_names():
        return shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)


def fully_shard(
    module: nn.Module,
    optimizer: Optimizers,
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
    mixed_precision_policy: MixedPrecisionPolicy | TorchPrecision = DEFAULT_PRECISION,
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
    granularity: str | int = "prefer_rows",
    fsdp_manual_registration: bool = False,
    ignored_params: Iterable[nn.Parameter] | None = None,
    offload_policy: OffloadPolicy | Offload | str | os.PathLike[str] | None = None,
    expert_zero_dp_strategy: str | int | ShardingStrategy | None = None,
    expert_outer_dp_sharding_strategy: str | int | ShardingStrategy | None = None,
    embedding_zero_dp_strategy: str | int | ShardingStrategy | None = None,
) -> tuple[MegatronFSDP, Optimizers]:
    """Shard an existing model and its optimizer together, by the published keywords.

    ``model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])`` is all that a
    training loop needs. The optimizer keeps its param groups, hyper-parameters and state. A list of
    optimizers works too, such as torch's Muon over matrices and AdamW over all other parameters.

    All arguments after the first two are those of :func:`fully_shard_model`, whose documentation
    explains them; :func:`fully_shard_optimizer` makes the returned optimizer. After an error, the
    model and the optimizer are unchanged.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: names the arguments that are not built yet, or the optimizer.
        RuntimeError: if the program was not started for torch.distributed.
    """
    keywords = {
        "device_mesh": device_mesh,
        "dp_shard_dim": dp_shard_dim,
        "dp_outer_dim": dp_outer_dim,
        "tp_dim": tp_dim,
        "hybrid_fsdp_group": hybrid_fsdp_group,
        "hybrid_fsdp_expt_group": hybrid_fsdp_expt_group,
        "expt_device_mesh": expt_device_mesh,
        "fsdp_group_ag": fsdp_group_ag,
        "expt_fsdp_group_ag": expt_fsdp_group_ag,
        "fsdp_unit_modules": fsdp_unit_modules,
        "zero_dp_strategy": zero_dp_strategy,
        "outer_dp_sharding_strategy": outer_dp_sharding_strategy,
        "device": device,
        "init_model_with_meta_device": init_model_with_meta_device,
        "mixed_precision_policy": mixed_precision_policy,
        "overlap_grad_reduce": overlap_grad_reduce,
        "overlap_param_gather": overlap_param_gather,
        "sync_model_each_microbatch": sync_model_each_microbatch,
        "preproc_state_dict_for_dcp_ckpt": preproc_state_dict_for_dcp_ckpt,
        "report_nan_in_param_grad": report_nan_in_param_grad,
        "average_in_collective": average_in_collective,
        "disable_bucketing": disable_bucketing,
        "calculate_per_token_loss": calculate_per_token_loss,
        "keep_fp8_transpose_cache": keep_fp8_transpose_cache,
        "nccl_ub": nccl_ub,
        "fsdp_double_buffer": fsdp_double_buffer,
        "fsdp_db_use_persist_buf_on_alloc_fail": fsdp_db_use_persist_buf_on_alloc_fail,
        "disable_symmetric_registration": disable_symmetric_registration,
        "enable_fine_grained_param_gather": enable_fine_grained_param_gather,
        "use_decoupled_grad": use_decoupled_grad,
        "cuda_graph_mode": cuda_graph_mode,
        "maxpool_double_buffer": maxpool_double_buffer,
        "check_for_nan_in_grad": check_for_nan_in_grad,
        "grad_reduce_in_fp32": grad_reduce_in_fp32,
        "preserve_fp32_weights": preserve_fp32_weights,
        "suggested_communication_unit_size": suggested_communication_unit_size,
        "param_init_fn": param_init_fn,
        "find_unused_parameters": find_unused_parameters,
        "granularity": granularity,
        "fsdp_manual_registration": fsdp_manual_registration,
        "ignored_params": ignored_params,
        "offload_policy": offload_policy,
        "expert_zero_dp_strategy": expert_zero_dp_strategy,
        "expert_outer_dp_sharding_strategy": expert_outer_dp_sharding_strategy,
        "embedding_zero_dp_strategy": embedding_zero_dp_strategy,
    }
    problems, settings = _translated(keywords)

    def wrap(
        module: nn.Module,
        settings: Settings,
        problems: Problems,
    ) -> MegatronFSDP:
        return _KeywordModel(module, settings, problems, keywords)

    with published_names():
        return shard_both(module, optimizer, settings, problems, wrap)


def _translated(keywords: dict[str, Any]) -> tuple[Problems, Settings]:
    """Return the problems and the settings of keywords of :func:`fully_shard_model`."""
    device_mesh = keywords["device_mesh"]
    groups: Sequence[dist.ProcessGroup | None] = (None,)
    if isinstance(device_mesh, DeviceMesh):
        groups = device_mesh.get_all_groups()
    problems = Problems(groups)
    of_mesh = {keyword: keywords[keyword] for keyword in KEYWORDS[Mesh].values()}
    mesh = problems.check(FSDPDistributedIndex, **of_mesh)
    older = keywords["check_for_nan_in_grad"]
    if older is not None and not older and keywords["report_nan_in_param_grad"] is True:
        problems.add(
            "check_for_nan_in_grad=False contradicts report_nan_in_param_grad=True: give one of"
            " them"
        )
    if older is not None:
        keywords["report_nan_in_param_grad"] = older
    return problems, settings_of(keywords, mesh, problems)


class _KeywordModel(MegatronFSDP):
    """The wrapper that keywords make, which have settings that no configuration object has.

    Args:
        module: the module.
        settings: the settings that the keywords ask for.
        problems: the problems of the keywords.
        keywords: all keywords of :func:`fully_shard_model`.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        problems: Problems,
        keywords: dict[str, Any],
    ):
        ShardedModule.__init__(self, module, settings, problems)
        self.checkpoint_ready = keywords["preproc_state_dict_for_dcp_ckpt"]
        self.ddp_config = config_of(keywords, settings)

    def _get_name(self) -> str:
        return MegatronFSDP.__name__
