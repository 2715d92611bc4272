# SPDX-License-Identifier: Apache-2.0
"""The published wrapper around a sharded module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import parse_precision
from megatron.fsdp.engine.policy import MixedPrecisionPolicy
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.not_offered import attributes_of
from megatron_fsdp.outside_schedule import OutsideSchedule
from megatron_fsdp.translation import (
    DEFAULT_PRECISION,
    FIELDS,
    keywords_of,
    precision_of,
    published_names,
    refuse_unbuilt,
    settings_of,
)

__all__ = ["MegatronFSDP"]


class MegatronFSDP(OutsideSchedule):
    """The published wrapper: a sharded module and the controls of its communication.

    :func:`megatron_fsdp.fully_shard_model` creates it from keyword arguments. This constructor
    takes the mesh and a configuration object instead. The controls are those of
    :class:`megatron.fsdp.ShardedModule`.

    Args:
        module: the module, initialised on every rank. Ranks take the weights and buffers of the
            first data rank.
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
        keep_fp8_transpose_cache: make the transposed copies of FP8 weights that the backward reads
            in the forward, and keep them till then; otherwise they are made in the backward.
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

    is_param_fsdp_distributed = True
    """Outside a forward, ``model.module.parameters()`` yields sharded parameters."""

    ddp_config: DistributedDataParallelConfig

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
        config = _checked_config(dist_index, ddp_config)
        problems = Problems(dist_index.all_groups())
        given = {
            "mixed_precision_policy": mixed_precision_policy,
            "fsdp_unit_modules": fsdp_unit_modules,
            "disable_bucketing": disable_bucketing,
            "device": device,
            "calculate_per_token_loss": calculate_per_token_loss,
            "init_model_with_meta_device": init_model_with_meta_device,
            "sync_model_each_microbatch": sync_model_each_microbatch,
            "keep_fp8_transpose_cache": keep_fp8_transpose_cache,
            "nccl_ub": nccl_ub,
            "fsdp_double_buffer": fsdp_double_buffer,
            "fsdp_db_use_persist_buf_on_alloc_fail": fsdp_db_use_persist_buf_on_alloc_fail,
            "disable_symmetric_registration": disable_symmetric_registration,
            "report_nan_in_param_grad": report_nan_in_param_grad,
        }
        keywords = keywords_of(config)
        for name, value in given.items():
            keywords[name] = value or keywords.get(name, value)
        if dist_index.hsdp_outer_dp_shard:
            keywords["outer_dp_sharding_strategy"] = 1
        if mixed_precision_policy == DEFAULT_PRECISION:
            keywords["mixed_precision_policy"] = problems.check(precision_of, config)
        forward = enable_fine_grained_param_gather_hook
        backward = enable_fine_grained_param_gather_backward_hook
        is_fine_grained = keywords["enable_fine_grained_param_gather"] or (forward and backward)
        keywords["enable_fine_grained_param_gather"] = is_fine_grained
        problems.check(
            refuse_unbuilt,
            enable_fine_grained_param_gather_hook=forward and not is_fine_grained,
            enable_fine_grained_param_gather_backward_hook=backward and not is_fine_grained,
            fine_grained_recurse_module_types=fine_grained_recurse_module_types,
        )
        of_fields = {name: field for name, field in FIELDS.items() if name not in given}
        with published_names(of_fields):
            super().__init__(module, settings_of(keywords, dist_index, problems), problems)
        self.ddp_config = config

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of main weights, gradients and reductions, as given."""
        return self._settings.precision

    @property
    def expt_device_mesh(self) -> DeviceMesh | None:
        """The mesh of expert parameters; None if they have no mesh of their own."""
        return self.get_distributed_index().expt_device_mesh

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the mesh."""
        assert isinstance(self._mesh, FSDPDistributedIndex)
        return self._mesh

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with final gradients on ``param.grad``.

        Otherwise the optimizer's step makes them final, and levels 0 and 1 reduce nothing before
        it, unless microbatches are marked by :meth:`no_sync`.
        """
        self._microbatches.set_sync_each(sync_model)

    @contextmanager
    def mixed_precision_context(self, policy: Any) -> Iterator[None]:
        """Reduce gradients in the policy's ``grad_comm_dtype`` inside; keep main dtypes."""
        before = [group.gradients.comm_dtype for group in self.groups]
        self.reset_mixed_precision_policy(policy)
        try:
            yield
        finally:
            for group, dtype in zip(self.groups, before):
                group.gradients.set_comm_dtype(dtype)

    def reset_mixed_precision_policy(self, policy: Any) -> None:
        """Reduce gradients in the policy's ``grad_comm_dtype`` from now on; keep main dtypes.

        Raises:
            ValueError: for anything but a policy of this package or FSDP2's.
        """
        dtype = parse_precision(policy).grad_comm_dtype
        for group in self.groups:
            group.gradients.set_comm_dtype(dtype)

    # Programs make the published package exchange the parameters of the module: NeMo Automodel
    # after sharding, Megatron-Core's overlapped schedules before a forward. Here there is nothing
    # to exchange: forwards use compute parameters, and other code sees the sharded ones.

    def _replace_param_with_distributed_if_needed(self) -> None:
        """Do nothing: the module's parameters are the sharded ones outside a forward."""

    def _replace_param_with_raw_if_needed(self) -> None:
        """Do nothing: a forward of the model or of a module in it uses the compute parameters."""


def _checked_config(
    dist_index: object,
    config: DistributedDataParallelConfig | None,
) -> DistributedDataParallelConfig:
    """Return the configuration, by default that of level 3 with overlap, if types are right."""
    if not isinstance(dist_index, FSDPDistributedIndex):
        raise ValueError(
            f"dist_index expects an FSDPDistributedIndex but got {type(dist_index).__name__}"
        )
    if config is None:
        return DistributedDataParallelConfig.fully_sharded()
    if not hasattr(config, "data_parallel_sharding_strategy"):
        raise ValueError(f"ddp_config expects a DistributedDataParallelConfig but got {config!r}")
    return config


_HOOKS = "hooks on modules and tensors drive the schedule; torch's own module hooks can be added"
__getattr__ = attributes_of(
    __name__,
    {
        "RegisterFSDPBackwardFunction": _HOOKS,
        "TrainingState": "the states of units are in megatron.fsdp.engine.states",
    },
)
