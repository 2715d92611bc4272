# SPDX-License-Identifier: Apache-2.0
"""MegatronFSDP: the wrapper that shards a module."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from megatron.fsdp import model_state
from megatron.fsdp.collectives import Communicator, agree
from megatron.fsdp.config import DistributedDataParallelConfig, policy_of, refuse_unbuilt, refuse_unbuilt_config
from megatron.fsdp.hooks import UnitHooks
from megatron.fsdp.mesh import FSDPDistributedIndex
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.policy import GradientPolicy, MixedPrecisionPolicy, OverlapPolicy, ShardingStrategy
from megatron.fsdp.schedule import Schedule, Unit
from megatron.fsdp.sharded_param import ShardedParam
from megatron.fsdp.units import assign_parameters, find_units


class MegatronFSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are divided among the ranks of a mesh axis.

    ``parameters()`` yields the main weights as DTensors, the same objects at every call; they are what an optimizer
    steps. The user's module is ``module``; its own parameters hold values only while a unit computes.

    Args:
        module: initialised on every rank; the weights of the axis' first rank are taken.
        dist_index: the mesh.
        ddp_config: strategy and overlap; of this package or Megatron-Core's. None: level 3 with overlap.
        mixed_precision_policy: dtypes of main weights and gradients; the default takes those of ``ddp_config``.
        fsdp_unit_modules: classes, instances or import paths of the modules that are gathered and freed as one. The
            parameters outside of them, without any all parameters, form the unit of the whole module.
        disable_bucketing: no units at all: one group per dtype.
        device: where the module goes first; None: the mesh's.
        calculate_per_token_loss: gradients are summed, not averaged.
        sync_model_each_microbatch: every backward outside ``no_sync`` ends with final gradients on ``param.grad``.
        report_nan_in_param_grad: raise and name the parameter and rank of a NaN or Inf gradient.

    Raises:
        NotImplementedError: for arguments of the published interface that are not built yet.
        ValueError: for units or strategies that are none.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: Any = None,
        mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
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
        super().__init__()
        refuse_unbuilt(
            init_model_with_meta_device=init_model_with_meta_device,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache,
            nccl_ub=nccl_ub,
            fsdp_double_buffer=fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=disable_symmetric_registration,
            enable_fine_grained_param_gather_hook=enable_fine_grained_param_gather_hook,
            enable_fine_grained_param_gather_backward_hook=enable_fine_grained_param_gather_backward_hook,
            fine_grained_recurse_module_types=fine_grained_recurse_module_types,
        )
        self.ddp_config = ddp_config if ddp_config is not None else DistributedDataParallelConfig.fully_sharded()
        refuse_unbuilt_config(self.ddp_config)
        device = torch.device(device) if device is not None else dist_index.device
        self.strategy = ShardingStrategy.parse(
            self.ddp_config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy"
        )
        gradients = GradientPolicy(calculate_per_token_loss, getattr(self.ddp_config, "average_in_collective", False))
        overlap = OverlapPolicy(self.ddp_config.overlap_grad_reduce, self.ddp_config.overlap_param_gather)
        self._units = find_units(module, () if disable_bucketing else fsdp_unit_modules)
        self._index = dist_index
        self._auto_sync = sync_model_each_microbatch
        self.checkpoint_ready = True  # state dicts tell torch's checkpoint which chunks they hold
        self._report_nan = report_nan_in_param_grad or getattr(self.ddp_config, "check_for_nan_in_grad", False)
        self._grads_attached = False  # final gradients are on `param.grad`
        self._grads_final = True  # no backward since they were made final

        self.module = module.to(device)
        communicator = Communicator.over(
            dist_index.get_fsdp_group(), device, gradients.sum_only, gradients.average_in_collective
        )
        if mixed_precision_policy == MixedPrecisionPolicy():
            mixed_precision_policy = policy_of(self.ddp_config)
        self._shard(assign_parameters(self._units), mixed_precision_policy, communicator, device)
        self._schedule = Schedule(
            self._units, self.strategy, overlap, self._forget_cleared_grads, self._after_backward
        )
        UnitHooks(self._schedule)

    def _shard(
        self,
        parameters_of: dict[Unit, dict[str, nn.Parameter]],
        precision: MixedPrecisionPolicy,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        sharded: dict[nn.Parameter, ShardedParam] = {}
        for unit, parameters in parameters_of.items():
            kinds: dict[tuple[torch.dtype, bool], list[str]] = defaultdict(list)
            for name, parameter in parameters.items():
                kinds[parameter.dtype, parameter.requires_grad].append(name)
            for (dtype, trainable), names in kinds.items():
                group = ParamGroup(
                    names,
                    [parameters[name] for name in names],
                    self.strategy,
                    precision.resolve(dtype, trainable),
                    communicator,
                    device,
                )
                unit.groups.append(group)
                for position, parameter in enumerate(group.parameters):
                    sharded[parameter] = self._present(ShardedParam(group, position, self._index.shard_mesh), parameter)
        # In the module's own order, tied names included.
        self._by_name = {
            name: sharded[parameter] for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        self._by_compute = sharded
        self._trainable: dict[ParamGroup, list[ShardedParam]] = defaultdict(list)
        for member in sharded.values():
            if member.group.requires_grad:
                self._trainable[member.group].append(member)

    def _present(self, sharded: ShardedParam, compute: nn.Parameter) -> ShardedParam:
        """Attributes that others have put on the module's parameter belong on the optimizer's too."""
        for name, value in vars(compute).items():
            setattr(sharded.parameter, name, value)
        sharded.parameter._fsdp_model = self
        sharded.parameter._fsdp_sharded = sharded
        return sharded

    # ---- module interface ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as of any wrapper with a ``module``, and main weights as DTensors.

        They are the wrapper's own, whether ``recurse`` or not: torch's ``set_state_dict`` asks module by module.
        """
        seen: set[ShardedParam] = set()
        prefix = f"{prefix}.module." if prefix else "module."
        for name, sharded in self._by_name.items():
            if not remove_duplicate or sharded not in seen:
                seen.add(sharded)
                yield prefix + name, sharded.parameter

    @property
    def sharded_params(self) -> list[ShardedParam]:
        """Every parameter once, in the module's order."""
        return list(dict.fromkeys(self._by_name.values()))

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for unit in self._units for group in unit.groups]

    def state_dict(self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Main weights as DTensors of full shape, ready for torch.distributed.checkpoint; buffers as they are."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=True)
        for key in [key for key in state if key.startswith(prefix)]:
            state[key] = self._for_checkpoint(state[key], keep_vars)
        return state

    def _for_checkpoint(self, value: Any, keep_vars: bool) -> Any:
        sharded = self._by_compute.get(value) if isinstance(value, nn.Parameter) else None
        if sharded is not None:
            return sharded.parameter if keep_vars else sharded.checkpoint_tensor(with_chunks=self.checkpoint_ready)
        return value.detach() if isinstance(value, torch.Tensor) and not keep_vars else value

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False):
        """Load DTensors of the same layout, or full tensors, under the wrapper's names or the module's own.

        The weights are active at once. Raises ``RuntimeError`` like any module, listing everything that does not fit,
        and ``NotImplementedError`` for ``assign``: the weights lie in buffers that many views share.
        """
        refuse_unbuilt(assign=assign)
        # Wrappers inside (Float16Module) name keys as they like: ask the module, not its parameters' paths.
        own = self.module.state_dict(keep_vars=True)
        sharded = {key: self._by_compute[value] for key, value in own.items() if isinstance(value, nn.Parameter)}
        result = model_state.load(self.module, sharded, set(own), state_dict, strict)
        for group in self.groups:
            group.install_main_weights()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, accumulated ones included."""
        super().zero_grad(set_to_none)
        self.zero_grad_buffer()

    # ---- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches inside are not the last one of the step."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    @property
    def is_last_microbatch(self) -> bool:
        return self._schedule.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._schedule.is_last_microbatch = value

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Every backward inside synchronises."""
        before, self._auto_sync = self._auto_sync, True
        try:
            yield
        finally:
            self._auto_sync = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether every backward ends with final gradients on ``param.grad``."""
        self._auto_sync = sync_model

    def _after_backward(self) -> None:
        self._grads_final = False
        if self._auto_sync and self.is_last_microbatch:
            self.finish_grad_sync()

    def start_grad_sync(self, *unused: Any) -> None:
        """Begin to reduce everything that has accumulated."""
        self._schedule.reduce_pending()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions that have begun."""
        self._schedule.wait_for_reductions()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce what is left, wait, and put the final gradients on ``param.grad``.

        ``force_all_reduce`` asks for whole gradients on every rank, which no strategy here needs: not built.
        """
        if force_all_reduce and self.strategy.shards_optimizer:
            raise NotImplementedError("force_all_reduce: gradients are reduced to the rank that owns them")
        if self._grads_final and self._grads_attached:
            return
        self.start_grad_sync()
        self.synchronize_gradient_reduce()
        self.attach_grad_to_optimizer_state()

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the reduced gradients on the parameters; of size zero where this rank owns nothing."""
        for group, members in self._trainable.items():
            gradient = group.final_grad()
            for sharded in members:
                sharded.attach_grad(gradient)
        self._grads_final = self._grads_attached = True
        if self._report_nan:
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Raise on every rank what any rank has found."""
        names = [
            sharded.name
            for group, members in self._trainable.items()
            if not torch.isfinite(group.grad_shard.sum(dtype=torch.float32))  # one look at each group; names if need be
            for sharded in members
            if not torch.isfinite(sharded.parameter.grad._local_tensor).all()
        ]
        problem = f"rank {torch.distributed.get_rank()}: NaN or Inf in the gradient of {', '.join(names)}" if names else None
        problems = agree(problem, self._index.get_dp_group())
        if problems:
            raise RuntimeError("\n".join(problems))

    def _forget_cleared_grads(self) -> None:
        """Gradients that a plain ``optimizer.zero_grad()`` took off the parameters must not come back."""
        if not self._grads_attached:
            return
        for group, members in self._trainable.items():
            if all(sharded.parameter.grad is None for sharded in members):
                group.forget_reduced_grad()
        self._grads_attached = False

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every reduced gradient by ``factor``, a number or a 0-d tensor."""
        for group in self._trainable:
            group.scale_grad(factor)
        if self._grads_attached:
            self.attach_grad_to_optimizer_state()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients: accumulated, reduced, and those on parameters."""
        for group, members in self._trainable.items():
            group.zero_grad()
            for sharded in members:
                sharded.parameter.grad = None
        self._grads_attached = False
        self._grads_final = True

    # ---- weights -------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(self, only_shared: bool = False) -> None:
        """Put main weights into compute weights; the next forward uses them.

        ``only_shared`` leaves those of another dtype alone; the others are the main weights, and what other ranks have
        gathered of them is out of date.
        """
        for group in self._trainable:
            if not only_shared or group.main_shard is group.compute_shard:
                group.install_main_weights()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Begin to gather weights that stay gathered (levels 1 and 2); level 3 gathers unit by unit in forward."""
        if self.strategy.shards_parameters and not force_dispatch:
            return
        for unit in self._units:
            unit.unshard()
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Wait for the gathers that have begun."""
        for unit in self._units:
            unit.wait_for_unshard()

    def broadcast_params(self) -> None:
        """Take the weights of the first rank of the axis."""
        for group in self.groups:
            group.broadcast()

    def stop_communication(self) -> None:
        """Wait for everything that has begun."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    def mixed_precision_context(self, policy: MixedPrecisionPolicy) -> Any:
        raise NotImplementedError("mixed_precision_context: changing the communication dtype for a while is not built yet")

    def reset_mixed_precision_policy(self, policy: MixedPrecisionPolicy) -> None:
        raise NotImplementedError("reset_mixed_precision_policy: changing the communication dtype is not built yet")

    def get_distributed_index(self) -> FSDPDistributedIndex:
        return self._index
