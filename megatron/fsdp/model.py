# SPDX-License-Identifier: Apache-2.0
"""MegatronFSDP: the wrapper around a sharded module, with its published controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from megatron.fsdp.client_members import ClientMembers
from megatron.fsdp.config import (
    DistributedDataParallelConfig,
    precision_of,
    refuse_unbuilt,
    refuse_unbuilt_config,
)
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.problems import Problems
from megatron.fsdp.settings import DEFAULT_PRECISION, ShardingSettings
from megatron.fsdp.sharded_module import OWNER, ShardedModule


class MegatronFSDP(ClientMembers):
    """The published wrapper: a sharded module and the controls of its communication.

    :func:`megatron.fsdp.fully_shard.fully_shard_model` creates it from keyword arguments, by
    :meth:`from_settings`. This constructor takes the mesh and a configuration object instead, as
    in the published package.

    Args:
        module: the module, initialised on every rank. Ranks take the weights of the first data
            rank.
        dist_index: the mesh.
        ddp_config: strategy and overlap, an object of this package or Megatron-Core's. None: level
            3 with overlap.
        mixed_precision_policy: dtypes of main weights and gradients; the default policy takes them
            from ``ddp_config``.
        fsdp_unit_modules: classes, instances or import paths of the modules that are units.
            Outside them, every module that owns parameters is a unit by itself, but for small ones,
            which the model's own unit includes.
        disable_bucketing: make the whole model one unit, with as few groups as dtypes and
            trainability allow.
        device: the device that the module is moved to; None: the mesh's.
        calculate_per_token_loss: sum gradients instead of averaging them.
        init_model_with_meta_device: parameters on the meta device get their values unit by unit, by
            ``reset_parameters``.
        sync_model_each_microbatch: end every backward outside ``no_sync`` with final gradients on
            ``param.grad``.
        keep_fp8_transpose_cache: not built yet.
        nccl_ub: register the memory slots of gathered weights and gradients with NCCL; implies
            ``fsdp_double_buffer``.
        fsdp_double_buffer: gather weights and collect gradients in a fixed set of memory slots.
        fsdp_db_use_persist_buf_on_alloc_fail: train with separate storage if slots cannot be
            allocated.
        disable_symmetric_registration: register memory locally, not as symmetric windows.
        enable_fine_grained_param_gather_hook: together with the next argument: every module that
            owns parameters is gathered and freed by itself, inside units too.
        enable_fine_grained_param_gather_backward_hook: see the previous argument.
        fine_grained_recurse_module_types: not built yet.
        report_nan_in_param_grad: raise an error that names the parameter and the rank of a NaN or
            Inf gradient.

    Raises:
        NotImplementedError: for arguments of the published interface that are not built yet.
        ValueError: lists every problem with the arguments, the same on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
        fsdp_unit_modules: Sequence[type | nn.Module | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | str | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: Sequence[type] | None = None,
        report_nan_in_param_grad: bool = False,
    ):
        config = DistributedDataParallelConfig.fully_sharded() if ddp_config is None else ddp_config
        problems = Problems()
        of_config = _settings_of(config, dist_index, mixed_precision_policy, problems)
        fine_grained = problems.check(
            _parse_fine_grained,
            of_config.enable_fine_grained_param_gather,
            enable_fine_grained_param_gather_hook,
            enable_fine_grained_param_gather_backward_hook,
            fine_grained_recurse_module_types,
        )
        settings = replace(
            of_config,
            fsdp_unit_modules=fsdp_unit_modules,
            disable_bucketing=disable_bucketing,
            device=device,
            calculate_per_token_loss=calculate_per_token_loss,
            init_model_with_meta_device=init_model_with_meta_device,
            sync_model_each_microbatch=sync_model_each_microbatch,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache,
            nccl_ub=nccl_ub or of_config.nccl_ub,
            fsdp_double_buffer=fsdp_double_buffer or of_config.fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail
            or of_config.fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=disable_symmetric_registration
            or of_config.disable_symmetric_registration,
            enable_fine_grained_param_gather=fine_grained or False,  # None: a problem
            report_nan_in_param_grad=report_nan_in_param_grad or of_config.report_nan_in_param_grad,
        )
        super().__init__(module, settings, problems)
        self.ddp_config = config

    @classmethod
    def from_settings(
        cls, module: nn.Module, settings: ShardingSettings, problems: Problems | None = None
    ) -> MegatronFSDP:
        """Shard a module with ``settings``; see :class:`ShardedModule` for the errors raised.

        Args:
            module: the module to shard.
            settings: all settings of the sharded model.
            problems: problems that the caller has found, which are raised together with others.
        """
        model = cls.__new__(cls)  # `__init__` takes the published arguments
        ShardedModule.__init__(model, module, settings, problems)
        model.ddp_config = settings.as_config()
        return model

    # ---- microbatches

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward is the last one of the step; may be assigned."""
        return self._microbatches.is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._microbatches.is_last = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the microbatches inside the context as not the last one of the step."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Make every backward inside the context end with final gradients."""
        before, self._microbatches.sync_each = self._microbatches.sync_each, True
        try:
            yield
        finally:
            self._microbatches.sync_each = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with final gradients on ``param.grad``.

        Otherwise the optimizer's step makes them final, and levels 0 and 1 reduce nothing before
        it, unless the caller marks microbatches by :meth:`no_sync`.
        """
        self._microbatches.set_sync_each(sync_model)

    # ---- gradients

    def start_grad_sync(self, *unused: object) -> None:
        """Start to reduce all gradients that have accumulated; arguments are ignored."""
        self._gradients.start()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions that have started."""
        self._gradients.wait()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce the remaining gradients, wait, and put the final ones on ``param.grad``.

        Args:
            force_all_reduce: request whole gradients on every rank, which only level 0 has.

        Raises:
            NotImplementedError: for ``force_all_reduce`` at level 1 and above.
            GradientError: for a NaN or Inf gradient, if they are reported.
        """
        if force_all_reduce and self.strategy.shards_optimizer:
            raise NotImplementedError("force_all_reduce: gradients are reduced to their owners")
        self._gradients.finish()

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the gradients whose reduction has started on the parameters.

        The local tensor is empty if this rank owns nothing of a parameter.

        Raises:
            GradientError: for a NaN or Inf gradient, if they are reported.
        """
        self._gradients.attach()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, reduced or not yet, by ``factor``, a number or a 0-d tensor."""
        self._gradients.scale(factor)

    def zero_grad_buffer(self, only_hidden: bool = False) -> None:
        """Drop all gradients, or only the final ones of groups whose parameters show none."""
        if only_hidden:
            self._gradients.clear_hidden()
        else:
            self._gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, like :meth:`zero_grad_buffer`.

        Args:
            set_to_none: False leaves gradients of zeros on the parameters.
        """
        self.zero_grad_buffer()
        if not set_to_none:
            self.attach_grad_to_optimizer_state()

    # ---- weights

    def install_optimized_model_weights(
        self, only_shared: bool = False, only_trainable: bool = False
    ) -> None:
        """Let the next forward cast and gather the main weights as they are when it begins.

        The sharded optimizer's step ends with this. Below level 3 weights stay gathered: whoever
        edits main weights after a forward, in a way that torch does not see, calls this.

        Args:
            only_shared: install those only whose compute and main weights share storage.
            only_trainable: skip groups that no optimizer updates.
        """
        observe.begin_step()
        self._schedule.prefetcher.weights_change()
        self._assign_memory_slots()
        for group in self.groups:
            is_wanted = group.requires_grad or not only_trainable
            if is_wanted and (group.main_is_compute or not only_shared):
                group.install_main_weights()

    def start_param_sync(
        self, *unused: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Start the all-gathers of new weights, which the next forward would start when it begins.

        At levels 1 and 2 these are all units, at level 3 those with which the next forward begins
        if all-gathers overlap compute. Megatron-Core's distributed optimizer calls this after its
        step. Edits afterwards need :meth:`install_optimized_model_weights`.

        Args:
            *unused: accepted for Megatron-Core's schedules, which pass modules or nothing.
            force_sync: wait for the all-gathers.
            force_dispatch: gather all units at level 3 too.
        """
        if self.strategy.shards_parameters and not force_dispatch:
            self._schedule.prefetcher.start_next_forward()
            if force_sync:
                self.synchronize_param_gather()
            return
        for unit in self._units:
            if not unit.blockers:  # otherwise it is gathered when its memory slot is free
                unit.unshard()
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Wait for the all-gathers that have started."""
        for unit in self._units:
            unit.wait_for_unshard()

    def broadcast_params(self) -> None:
        """Broadcast main weights from the first rank of every axis that replicates them."""
        for group in self.groups:
            group.broadcast()

    # ---- communication

    def stop_communication(self) -> None:
        """Wait for all reductions and all-gathers that have started."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    @contextmanager
    def mixed_precision_context(self, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Reduce gradients in the policy's ``grad_comm_dtype`` inside; main dtypes do not change.

        Raises:
            ValueError: for anything but a :class:`MixedPrecisionPolicy`.
        """
        before = [group.gradients.comm_dtype for group in self.groups]
        self.reset_mixed_precision_policy(policy)
        try:
            yield
        finally:
            self._schedule.wait_for_reductions()
            for group, dtype in zip(self.groups, before):
                group.gradients.set_comm_dtype(dtype)

    def reset_mixed_precision_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Reduce gradients in the policy's ``grad_comm_dtype`` from now on; keep main dtypes.

        Raises:
            ValueError: for anything but a :class:`MixedPrecisionPolicy`.
        """
        if not isinstance(policy, MixedPrecisionPolicy):
            raise ValueError(f"mixed precision expects a MixedPrecisionPolicy but got {policy!r}")
        self._schedule.wait_for_reductions()
        for group in self.groups:
            group.gradients.set_comm_dtype(policy.grad_comm_dtype)


def find_megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """Return the wrapper in a chain of wrappers that have each other as ``module``; None if none.

    Args:
        model: the outermost of them.
    """
    each: object = model
    while isinstance(each, nn.Module) and not isinstance(each, MegatronFSDP):
        each = getattr(each, "module", None)
    return each if isinstance(each, MegatronFSDP) else None


def owner_of(parameter: torch.Tensor) -> MegatronFSDP:
    """Return the model that a sharded parameter belongs to.

    Raises:
        AttributeError: for any other tensor; see :func:`is_owned`.
    """
    model: MegatronFSDP = getattr(parameter, OWNER)
    return model


def is_owned(parameter: torch.Tensor) -> bool:
    """Return True if a parameter belongs to a sharded model."""
    return hasattr(parameter, OWNER)


def _settings_of(
    config: DistributedDataParallelConfig,
    dist_index: FSDPDistributedIndex,
    policy: MixedPrecisionPolicy,
    problems: Problems,
) -> ShardingSettings:
    """Read the settings of a configuration object, of this package or Megatron-Core's.

    Args:
        config: the object; fields that it lacks have their defaults.
        dist_index: the mesh.
        policy: takes precedence over the dtypes of ``config`` unless it is the default policy.
        problems: problems of fields are added to it.

    Raises:
        ValueError: if the mesh or the configuration is an object of another class.
    """
    if not isinstance(dist_index, FSDPDistributedIndex):
        raise ValueError(
            f"dist_index expects an FSDPDistributedIndex but got {type(dist_index).__name__}"
        )
    if not hasattr(config, "data_parallel_sharding_strategy"):
        raise ValueError(f"ddp_config expects a DistributedDataParallelConfig but got {config!r}")
    problems.check(refuse_unbuilt_config, config)
    strategy = problems.check(
        ShardingStrategy.parse,
        config.data_parallel_sharding_strategy,
        "data_parallel_sharding_strategy",
    )
    precision = problems.check(precision_of, config) if policy == DEFAULT_PRECISION else policy
    return ShardingSettings(
        dist_index=dist_index,
        # An invalid strategy is among the problems, which are raised before this value is used.
        zero_dp_strategy=ShardingStrategy.OPTIM_GRADS_PARAMS if strategy is None else strategy,
        mixed_precision_policy=DEFAULT_PRECISION if precision is None else precision,
        outer_dp_sharding_strategy=getattr(config, "outer_dp_sharding_strategy", 0),
        suggested_communication_unit_size=getattr(
            config, "suggested_communication_unit_size", None
        ),
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        average_in_collective=_flag(config, "average_in_collective"),
        report_nan_in_param_grad=_flag(config, "check_for_nan_in_grad"),
        nccl_ub=_flag(config, "nccl_ub"),
        fsdp_double_buffer=_flag(config, "fsdp_double_buffer"),
        fsdp_db_use_persist_buf_on_alloc_fail=_flag(
            config, "fsdp_db_use_persist_buf_on_alloc_fail"
        ),
        disable_symmetric_registration=_flag(config, "disable_symmetric_registration"),
        fsdp_manual_registration=_flag(config, "fsdp_manual_registration"),
        cuda_graph_mode=_flag(config, "megatron_fsdp_cuda_graph_mode"),
        maxpool_double_buffer=_flag(config, "megatron_fsdp_max_pool_double_buffer"),
        use_decoupled_grad=_flag(config, "megatron_fsdp_use_decoupled_grad"),
        enable_fine_grained_param_gather=_flag(
            config, "megatron_fsdp_enable_fine_grained_param_gather"
        ),
    )


def _flag(config: object, name: str) -> bool:
    """Return a flag of a configuration object, which is checked later; False if it has none."""
    value: bool | None = getattr(config, name, False)
    return False if value is None else value


def _parse_fine_grained(
    of_config: bool, forward: bool, backward: bool, module_types: Sequence[type] | None
) -> bool:
    """Return True if modules inside units are gathered by themselves.

    Raises:
        NotImplementedError: if that is requested in forward or in backward only, or for some types
            of modules.
    """
    is_wanted = of_config or (forward and backward)
    refuse_unbuilt(
        enable_fine_grained_param_gather_hook=forward and not is_wanted,
        enable_fine_grained_param_gather_backward_hook=backward and not is_wanted,
        fine_grained_recurse_module_types=module_types,
    )
    return is_wanted
