# SPDX-License-Identifier: Apache-2.0
"""The settings of a sharded model: the user's arguments, and the parsed and checked settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.checks import (
    check_flags,
    check_function,
    check_module,
    check_nccl,
    check_units,
    parse_device,
    parse_granularity,
    parse_outer_strategy,
    parse_size,
)
from megatron.fsdp.config import DistributedDataParallelConfig, refuse_unbuilt
from megatron.fsdp.engine.layout import Granularity
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import (
    GradientPolicy,
    MixedPrecisionPolicy,
    OverlapPolicy,
    ShardingStrategy,
    SlotPolicy,
)
from megatron.fsdp.engine.unit_choice import resolve_unit_modules
from megatron.fsdp.meta_init import GivenInitialiser, Initialiser
from megatron.fsdp.problems import Problems

DEFAULT_PRECISION = MixedPrecisionPolicy()
"""The default policy. If the user passes no other, the older keywords may replace it."""


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """The arguments of :func:`megatron.fsdp.fully_shard.fully_shard_model`, which explains them.

    Args:
        dist_index: the mesh, if it exists already. The arguments that describe a mesh
            (``device_mesh`` to ``expt_fsdp_group_ag``) are then ignored.
    """

    dist_index: FSDPDistributedIndex | None = None
    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    fsdp_unit_modules: Sequence[type | nn.Module | str] | None = None
    zero_dp_strategy: str | int | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS
    outer_dp_sharding_strategy: str | int | ShardingStrategy = ShardingStrategy.NO_SHARD
    device: torch.device | str | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_PRECISION
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    check_for_nan_in_grad: bool | None = None
    grad_reduce_in_fp32: bool | None = None
    preserve_fp32_weights: bool | None = None
    suggested_communication_unit_size: int | None = None
    param_init_fn: Callable[[nn.Module], object] | None = None
    find_unused_parameters: bool = False
    granularity: str = "prefer_rows"
    fsdp_manual_registration: bool = False

    def resolve(
        self, module: nn.Module, initialiser: Initialiser, problems: Problems
    ) -> ResolvedSettings:
        """Create the mesh, parse every setting, and check all of them and the module.

        Args:
            module: the module to shard.
            initialiser: initialises meta parameters with ``init_model_with_meta_device``.
            problems: problems that the caller has found, which are raised together with others.

        Raises:
            ValueError: lists the problems of all ranks, the same on every rank.
            NotImplementedError: if every problem is a setting that is not built yet.
            RuntimeError: if the program was not started for torch.distributed.
        """
        self._check_plain_values(problems)
        mesh = problems.check(self._make_mesh)
        strategy = problems.check(ShardingStrategy.parse, self.zero_dp_strategy)
        outer_strategy = problems.check(
            parse_outer_strategy, self.outer_dp_sharding_strategy, mesh, strategy
        )
        precision = problems.check(self._precision)
        gradients = problems.check(
            GradientPolicy, self.calculate_per_token_loss, self.average_in_collective
        )
        unit_modules = problems.check(resolve_unit_modules, self.fsdp_unit_modules)
        device = problems.check(self._parse_device, mesh)
        slots = problems.check(self._slot_policy, device)
        overlap = problems.check(self._overlap_policy)
        granularity = problems.check(parse_granularity, self.granularity)
        initialiser_or_none = self._choose_initialiser(module, initialiser)
        problems.check(check_units, module, unit_modules)
        problems.check(check_module, module, mesh, strategy, initialiser_or_none)
        problems.raise_everywhere(self._reach())

        assert mesh is not None and strategy is not None and outer_strategy is not None
        assert precision is not None and gradients is not None and unit_modules is not None
        assert overlap is not None and device is not None and granularity is not None
        return ResolvedSettings(
            mesh=mesh,
            strategy=strategy,
            outer_strategy=outer_strategy,
            precision=precision,
            gradients=gradients,
            overlap=overlap,
            slots=slots,
            unit_modules=tuple(unit_modules),
            root_only=self.disable_bucketing,
            fine_grained=self.enable_fine_grained_param_gather,
            device=device,
            initialiser=initialiser_or_none,
            sync_each_microbatch=self.sync_model_each_microbatch,
            report_nan=self._reports_nan,
            use_decoupled_grad=self.use_decoupled_grad,
            checkpoint_ready=self.preproc_state_dict_for_dcp_ckpt,
            find_unused=self.find_unused_parameters,
            granularity=granularity,
        )

    def _check_plain_values(self, problems: Problems) -> None:
        flags = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if isinstance(field.default, bool)
        }
        older = {
            "check_for_nan_in_grad": self.check_for_nan_in_grad,
            "grad_reduce_in_fp32": self.grad_reduce_in_fp32,
            "preserve_fp32_weights": self.preserve_fp32_weights,
        }
        flags |= {name: value for name, value in older.items() if value is not None}
        problems.check(check_flags, **flags)
        if self.report_nan_in_param_grad is True and self.check_for_nan_in_grad is False:
            problems.add(
                "check_for_nan_in_grad=False contradicts report_nan_in_param_grad=True: give one of"
                " them"
            )
        problems.check(check_function, self.param_init_fn)
        problems.check(
            refuse_unbuilt,
            keep_fp8_transpose_cache=self.keep_fp8_transpose_cache,
        )

    def _choose_initialiser(
        self, module: nn.Module, initialiser: Initialiser
    ) -> Initialiser | None:
        """Return the source of first values of meta tensors; None: there must be none."""
        if not self.init_model_with_meta_device:
            return None
        if callable(self.param_init_fn):
            return GivenInitialiser(self.param_init_fn)
        if isinstance(module, nn.Module):  # otherwise the check of the module reports it
            return initialiser.for_model(module)
        return initialiser

    def _parse_device(self, mesh: FSDPDistributedIndex | None) -> torch.device | None:
        if mesh is not None and mesh.device.type == "meta":
            return mesh.device  # a simulated run
        device = parse_device(self.device)
        if mesh is not None and (device is None or self.init_model_with_meta_device):
            return mesh.device
        return device

    def _overlap_policy(self) -> OverlapPolicy:
        prefetch_bytes = parse_size(self.suggested_communication_unit_size)
        return OverlapPolicy(
            self.overlap_grad_reduce, self.overlap_param_gather, prefetch_bytes=prefetch_bytes
        )

    def _slot_policy(self, device: torch.device | None) -> SlotPolicy | None:
        """Return the policy of memory slots; None: no setting asks for them.

        Raises:
            ValueError: for registration with NCCL where there is none.
        """
        if self.nccl_ub:
            check_nccl(device)
        elif self.fsdp_manual_registration:
            raise ValueError("fsdp_manual_registration needs nccl_ub: it says when to register")
        if not (
            self.fsdp_double_buffer
            or self.maxpool_double_buffer
            or self.nccl_ub
            or self.cuda_graph_mode
        ):
            return None
        return SlotPolicy(
            equal_sizes=self.maxpool_double_buffer,
            allows_own_storage=self.fsdp_db_use_persist_buf_on_alloc_fail,
            holds_addresses=self.cuda_graph_mode,
            registers=self.nccl_ub,
            is_symmetric=not self.disable_symmetric_registration,
        )

    def _make_mesh(self) -> FSDPDistributedIndex:
        if self.dist_index is not None:
            return self.dist_index
        return FSDPDistributedIndex(
            device_mesh=self.device_mesh,
            dp_shard_dim=self.dp_shard_dim,
            dp_outer_dim=self.dp_outer_dim,
            tp_dim=self.tp_dim,
            hybrid_fsdp_group=self.hybrid_fsdp_group,
            hybrid_fsdp_expt_group=self.hybrid_fsdp_expt_group,
            expt_device_mesh=self.expt_device_mesh,
            fsdp_group_ag=self.fsdp_group_ag,
            expt_fsdp_group_ag=self.expt_fsdp_group_ag,
        )

    def _reach(self) -> Sequence[dist.ProcessGroup | None]:
        """Return groups that reach every rank of the mesh if they are used one after the other.

        They are the groups of the mesh that the user passed, which may be invalid; without one, the
        group of all ranks.
        """
        if self.dist_index is not None:
            return self.dist_index.all_groups()
        if isinstance(self.device_mesh, DeviceMesh):
            return self.device_mesh.get_all_groups()
        return [None]

    @property
    def _reports_nan(self) -> bool:
        older = self.check_for_nan_in_grad
        return self.report_nan_in_param_grad if older is None else older

    def _precision(self) -> MixedPrecisionPolicy:
        older = self.grad_reduce_in_fp32, self.preserve_fp32_weights
        return precision_policy(self.mixed_precision_policy, *older)

    def as_config(self) -> DistributedDataParallelConfig:
        """Return the published configuration object with the settings that it has fields for."""
        precision = self._precision()
        return DistributedDataParallelConfig(
            data_parallel_sharding_strategy=self.zero_dp_strategy,
            outer_dp_sharding_strategy=self.outer_dp_sharding_strategy,
            overlap_grad_reduce=self.overlap_grad_reduce,
            overlap_param_gather=self.overlap_param_gather,
            check_for_nan_in_grad=self._reports_nan,
            average_in_collective=self.average_in_collective,
            suggested_communication_unit_size=self.suggested_communication_unit_size,
            nccl_ub=self.nccl_ub,
            fsdp_double_buffer=self.fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=self.fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=self.disable_symmetric_registration,
            fsdp_manual_registration=self.fsdp_manual_registration,
            megatron_fsdp_main_params_dtype=precision.main_params_dtype,
            megatron_fsdp_main_grads_dtype=precision.main_grads_dtype,
            megatron_fsdp_grad_comm_dtype=precision.grad_comm_dtype,
            megatron_fsdp_cuda_graph_mode=self.cuda_graph_mode,
            megatron_fsdp_max_pool_double_buffer=self.maxpool_double_buffer,
            megatron_fsdp_use_decoupled_grad=self.use_decoupled_grad,
            megatron_fsdp_enable_fine_grained_param_gather=self.enable_fine_grained_param_gather,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """Settings that are parsed, checked and complete.

    Args:
        mesh: the mesh and the names of its axes.
        strategy: the ZeRO level of the inner axis.
        outer_strategy: the strategy of the outer axis: replication, or sharded optimizer state.
        precision: dtypes of main weights and gradients.
        gradients: the reduction of gradients: a mean or a sum.
        overlap: the overlap of communication with compute.
        slots: memory slots; None: buffers have storage of their own.
        unit_modules: classes and instances of the modules that are units.
        root_only: the whole model is one unit.
        fine_grained: every module that owns parameters is a unit, inside named units too.
        device: the device of the parameters.
        initialiser: initialises meta parameters; None: there are none.
        sync_each_microbatch: gradients are final after every backward.
        report_nan: NaN or Inf gradients raise an error.
        use_decoupled_grad: gradients go to ``param.decoupled_grad`` instead of ``param.grad``.
        checkpoint_ready: tensors of state dicts describe their chunks to torch's checkpoint.
        find_unused: parameters that got no gradient on any rank show none.
        granularity: the smallest part of a parameter that no shard boundary cuts.
    """

    mesh: FSDPDistributedIndex
    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy
    precision: MixedPrecisionPolicy
    gradients: GradientPolicy
    overlap: OverlapPolicy
    slots: SlotPolicy | None
    unit_modules: tuple[type | nn.Module, ...]
    root_only: bool
    fine_grained: bool
    device: torch.device
    initialiser: Initialiser | None
    sync_each_microbatch: bool
    report_nan: bool
    use_decoupled_grad: bool
    checkpoint_ready: bool
    find_unused: bool
    granularity: Granularity


def precision_policy(
    policy: MixedPrecisionPolicy | None,
    grad_reduce_in_fp32: bool | None,
    preserve_fp32_weights: bool | None,
) -> MixedPrecisionPolicy:
    """Return the policy given by ``mixed_precision_policy`` or by the older keywords.

    Args:
        policy: ``mixed_precision_policy``. None or :data:`DEFAULT_PRECISION`: not given.
        grad_reduce_in_fp32: the older keyword; None: not given.
        preserve_fp32_weights: the older keyword; None: not given.

    Raises:
        ValueError: if both are given and contradict each other.
    """
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
    grad_comm_dtype = policy.grad_comm_dtype or policy.main_grads_dtype
    in_fp32 = policy.main_grads_dtype == grad_comm_dtype == torch.float32
    if grad_reduce_in_fp32 is not None and grad_reduce_in_fp32 != in_fp32:
        raise ValueError(
            f"grad_reduce_in_fp32={grad_reduce_in_fp32} contradicts"
            f" mixed_precision_policy.main_grads_dtype={policy.main_grads_dtype} and"
            f" grad_comm_dtype={policy.grad_comm_dtype}: give one of them"
        )
    return policy
