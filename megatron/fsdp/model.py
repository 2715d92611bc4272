# SPDX-License-Identifier: Apache-2.0
"""MegatronFSDP: the wrapper that shards a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import meta_init, model_state
from megatron.fsdp.checks import check_agreement, check_module, device_of, outer_strategy
from megatron.fsdp.config import (
    DistributedDataParallelConfig,
    policy_of,
    refuse_unbuilt,
    refuse_unbuilt_config,
)
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.hooks import UnitHooks
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import (
    GradientPolicy,
    MixedPrecisionPolicy,
    OverlapPolicy,
    ShardingStrategy,
)
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.units import assign_parameters, find_units, resolve_unit_modules
from megatron.fsdp.problems import Problems
from megatron.fsdp.sharding import Sharding


class GradientError(RuntimeError):
    """A gradient is NaN or Inf; the message names parameters and ranks."""


class MegatronFSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are divided among the ranks of a mesh axis.

    ``parameters()`` yields the main weights as DTensors, the same objects at every call; they are
    what an optimizer steps. The user's module is ``module``; its own parameters hold values only
    while a unit computes.

    Args:
        module: initialised on every rank; the weights of the first data rank are taken.
        dist_index: the mesh.
        ddp_config: strategy and overlap; of this package or Megatron-Core's. None: level 3 with
            overlap.
        mixed_precision_policy: dtypes of main weights and gradients; the default takes those of
            ``ddp_config``.
        fsdp_unit_modules: classes, instances or import paths of the modules that are gathered and
            freed as one. Outside of them every module that owns parameters is gathered and freed by
            itself.
        disable_bucketing: no units at all: one group per dtype.
        device: where the module goes first; None: the mesh's.
        calculate_per_token_loss: gradients are summed, not averaged.
        init_model_with_meta_device: parameters on the meta device get their values unit by unit, by
            ``reset_parameters``.
        sync_model_each_microbatch: every backward outside ``no_sync`` ends with final gradients on
            ``param.grad``.
        enable_fine_grained_param_gather_hook, enable_fine_grained_param_gather_backward_hook: both:
            inside of units too every module that owns parameters is gathered and freed by itself.
        report_nan_in_param_grad: raise and name the parameter and rank of a NaN or Inf gradient.

    Raises:
        NotImplementedError: for arguments of the published interface that are not built yet.
        ValueError: listing everything that is wrong with the arguments, the same on every rank.
    """

    initialiser = meta_init.Initialiser()  # of modules on the meta device
    _fsdp_is_sharded = True

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
        config = (
            ddp_config if ddp_config is not None else DistributedDataParallelConfig.fully_sharded()
        )
        fine_grained = (
            enable_fine_grained_param_gather_hook and enable_fine_grained_param_gather_backward_hook
        )
        fine_grained = fine_grained or getattr(
            config, "megatron_fsdp_enable_fine_grained_param_gather", False
        )
        if not isinstance(dist_index, FSDPDistributedIndex):
            raise ValueError(
                f"dist_index expects an FSDPDistributedIndex but got {type(dist_index).__name__}"
            )
        if not hasattr(config, "data_parallel_sharding_strategy"):
            raise ValueError(
                f"ddp_config expects a DistributedDataParallelConfig but got {config!r}"
            )
        problems = Problems()
        problems.check(device_of, device)
        problems.check(
            refuse_unbuilt,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache,
            nccl_ub=nccl_ub,
            fsdp_double_buffer=fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=disable_symmetric_registration,
            enable_fine_grained_param_gather_hook=enable_fine_grained_param_gather_hook
            and not fine_grained,
            enable_fine_grained_param_gather_backward_hook=enable_fine_grained_param_gather_backward_hook
            and not fine_grained,
            fine_grained_recurse_module_types=fine_grained_recurse_module_types,
        )
        problems.check(refuse_unbuilt_config, config)
        problems.check(resolve_unit_modules, fsdp_unit_modules)
        strategy = problems.check(
            ShardingStrategy.parse,
            config.data_parallel_sharding_strategy,
            "data_parallel_sharding_strategy",
        )
        outer = problems.check(outer_strategy, config, dist_index, strategy)
        gradients = problems.check(
            GradientPolicy,
            calculate_per_token_loss,
            getattr(config, "average_in_collective", False),
        )
        initialiser = self.initialiser if init_model_with_meta_device else None
        problems.check(check_module, module, dist_index, strategy, initialiser)
        problems.raise_everywhere(dist_index.all_groups())

        self.ddp_config = config
        self.strategy = strategy
        self._index = dist_index
        self._auto_sync = sync_model_each_microbatch
        self.checkpoint_ready = True  # state dicts tell torch's checkpoint which chunks they hold
        self._report_nan = report_nan_in_param_grad or getattr(
            config, "check_for_nan_in_grad", False
        )
        self._use_decoupled_grad = getattr(config, "megatron_fsdp_use_decoupled_grad", False)
        self._grads_attached = False  # final gradients are on `param.grad`
        self._grads_final = True  # no backward since they were made final

        sharding = Sharding(
            index=dist_index,
            strategy=strategy,
            outer_strategy=outer,
            gradients=gradients,
            precision=(
                policy_of(config)
                if mixed_precision_policy == MixedPrecisionPolicy()
                else mixed_precision_policy
            ),
            device=(
                dist_index.device
                if device is None or initialiser is not None
                else torch.device(device)
            ),
            initialiser=initialiser,
        )
        self._units = find_units(
            module, fsdp_unit_modules or (), only_root=disable_bucketing, fine_grained=fine_grained
        )
        # What has no values yet is materialised where it belongs.
        self.module = module._apply(
            lambda tensor: tensor if tensor.is_meta else tensor.to(sharding.device)
        )
        self._shard(sharding)
        overlap = OverlapPolicy(config.overlap_grad_reduce, config.overlap_param_gather)
        self._schedule = Schedule(
            self._units, strategy, overlap, self._forget_cleared_grads, self._after_backward
        )
        sharded = {compute: member.parameter for compute, member in self._by_compute.items()}
        self._hooks = UnitHooks(self._schedule, sharded)

    def _shard(self, sharding: Sharding) -> None:
        parameters_of = assign_parameters(self._units)
        check_agreement(
            sharding,
            parameters_of,
            report_nan_in_param_grad=self._report_nan,
            sync_model_each_microbatch=self._auto_sync,
            overlap_grad_reduce=self.ddp_config.overlap_grad_reduce,
            overlap_param_gather=self.ddp_config.overlap_param_gather,
            use_decoupled_grad=self._use_decoupled_grad,
        )
        sharded = sharding.shard(self._units, parameters_of)
        for compute, member in sharded.items():
            self._present(member, compute)
        # In the module's own order, tied names included.
        self._by_name = {
            name: sharded[parameter]
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        self._by_compute = sharded
        self._trainable: dict[ParamGroup, list[ShardedParam]] = defaultdict(list)
        for member in sharded.values():
            if member.group.requires_grad:
                self._trainable[member.group].append(member)
        self._frozen = [member for member in sharded.values() if not member.group.requires_grad]

    def _present(self, sharded: ShardedParam, compute: nn.Parameter) -> None:
        """Attributes that others have put on the module's parameter belong on the optimizer's too."""
        for name, value in vars(compute).items():
            if not (isinstance(compute, DTensor) and name in ("_local_tensor", "_spec")):
                setattr(sharded.parameter, name, value)
        sharded.parameter._fsdp_model = self
        sharded.parameter._fsdp_sharded = sharded

    # ---- module interface
    # ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._hooks.forget_calls()
            raise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as of any wrapper with a ``module``, and main weights as DTensors.

        They are the wrapper's own, whether ``recurse`` or not: torch's ``set_state_dict`` asks
        module by module.
        """
        seen: set[ShardedParam] = set()
        prefix = f"{prefix}.module." if prefix else "module."
        for name, sharded in self._by_name.items():
            if not remove_duplicate or sharded not in seen:
                seen.add(sharded)
                yield prefix + name, sharded.parameter

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse_copy()

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        _refuse_copy()

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> MegatronFSDP:
        """``to``, ``cuda``, ``half`` and so on: nothing to do where the parameters are as asked for, else refused."""
        for group in self.groups:
            empty = group.main_shard.new_empty(0, dtype=group.precision.compute)
            changed = fn(empty)
            if (changed.dtype, changed.device) != (empty.dtype, empty.device):
                raise NotImplementedError(
                    f"a sharded model cannot be moved or converted ({empty.dtype} on {empty.device}"
                    f" to {changed.dtype} on {changed.device}): convert the module before sharding"
                    " it, or pass device="
                )
        return self

    @property
    def sharded_params(self) -> list[ShardedParam]:
        """Every parameter once, in the module's order."""
        return list(dict.fromkeys(self._by_name.values()))

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for unit in self._units for group in unit.groups]

    def state_dict(
        self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict:
        """Main weights as DTensors of full shape, ready for torch.distributed.checkpoint; buffers as they are."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=True)
        for key in [key for key in state if key.startswith(prefix)]:
            state[key] = self._for_checkpoint(state[key], keep_vars)
        return state

    def _for_checkpoint(self, value: Any, keep_vars: bool) -> Any:
        sharded = self._member(value)
        if sharded is not None:
            return (
                sharded.parameter
                if keep_vars
                else sharded.checkpoint_tensor(with_chunks=self.checkpoint_ready)
            )
        return value.detach() if isinstance(value, torch.Tensor) and not keep_vars else value

    def _member(self, value: Any) -> ShardedParam | None:
        """The sharded parameter of what the module shows: one of its own, or the sharded one already."""
        return getattr(value, "_fsdp_sharded", None) or (
            self._by_compute.get(value) if isinstance(value, nn.Parameter) else None
        )

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load DTensors of the same layout, or full tensors, under the wrapper's names or the module's own.

        The weights are active at once. Raises ``RuntimeError`` like any module, listing everything
        that does not fit,
        and ``NotImplementedError`` for ``assign``: the weights lie in buffers that many views
            share.
        """
        refuse_unbuilt(assign=assign)
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict expects a mapping but got {type(state_dict).__name__}")
        # Wrappers inside (Float16Module) name keys as they like: ask the module, not its
        # parameters' paths.
        own = self.module.state_dict(keep_vars=True)
        sharded = {
            key: self._member(value)
            for key, value in own.items()
            if isinstance(value, nn.Parameter)
        }
        result = model_state.load(self.module, sharded, set(own), state_dict, strict)
        for group in self.groups:
            group.install_main_weights()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, accumulated ones included."""
        super().zero_grad(set_to_none)
        self.zero_grad_buffer()
        if not set_to_none:
            self.attach_grad_to_optimizer_state()  # zeros

    # ---- gradients
    # -----------------------------------------------------------------------------------------------

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

        ``force_all_reduce`` asks for whole gradients on every rank, which no strategy here needs:
            not built.
        """
        if force_all_reduce and self.strategy.shards_optimizer:
            raise NotImplementedError(
                "force_all_reduce: gradients are reduced to the rank that owns them"
            )
        if self._grads_final and self._grads_attached:
            return
        self.start_grad_sync()
        self.synchronize_gradient_reduce()
        self.attach_grad_to_optimizer_state()

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the reduced gradients on the parameters; of size zero where this rank owns nothing.

        Raises:
            GradientError: for a NaN or Inf, if they are to be reported.
            RuntimeError: for a parameter that was frozen when it was sharded
                and is not any more.
        """
        thawed = [
            each.name
            for each in self._frozen
            if each.parameter.requires_grad or each.compute.requires_grad
        ]
        if thawed:
            raise RuntimeError(
                f"{', '.join(thawed[:5])}: frozen when the model was sharded, so there are no"
                " gradients; shard the model with every parameter trainable that is to be trained,"
                " and freeze afterwards"
            )
        for group, members in self._trainable.items():
            gradient = group.gradients.final(in_main_dtype=not self._use_decoupled_grad)
            for sharded in members:
                wanted = (
                    sharded.parameter.requires_grad and sharded.compute.requires_grad
                )  # may have been frozen since
                self._set_grad(sharded.parameter, sharded.gradient(gradient) if wanted else None)
        self._grads_final = self._grads_attached = True
        if self._report_nan:
            self._check_gradients()

    def _set_grad(self, parameter: nn.Parameter, gradient: DTensor | None) -> None:
        if self._use_decoupled_grad:
            parameter.decoupled_grad = gradient
        else:
            parameter.grad = gradient

    def _get_grad(self, parameter: nn.Parameter) -> DTensor | None:
        return (
            getattr(parameter, "decoupled_grad", None)
            if self._use_decoupled_grad
            else parameter.grad
        )

    def _check_gradients(self) -> None:
        """Raise on every rank what any rank has found."""
        names = [
            self._shown_name(sharded)
            for group, members in self._trainable.items()
            if not torch.isfinite(
                group.gradients.shard.sum(dtype=torch.float32)
            )  # one look at each group; names if need be
            for sharded in members
            if (gradient := self._get_grad(sharded.parameter)) is not None
            and not torch.isfinite(gradient._local_tensor).all()
        ]
        found = (
            [
                f"rank {torch.distributed.get_rank()}: NaN or Inf in the gradient of"
                f" {', '.join(names)}"
            ]
            if names
            else []
        )
        found = agree(found, self._groups_that_end_together())
        if found:
            raise GradientError("\n".join(found))

    def _shown_name(self, sharded: ShardedParam) -> str:
        """The name of a parameter in messages."""
        return sharded.name

    def _groups_that_end_together(self) -> list[torch.distributed.ProcessGroup]:
        """Through these groups an error reaches every rank that would wait for this one."""
        return self._index.all_groups()

    def _forget_cleared_grads(self) -> None:
        """Gradients that a plain ``optimizer.zero_grad()`` took off the parameters must not come back."""
        if not self._grads_attached:
            return
        for group, members in self._trainable.items():
            if all(self._get_grad(sharded.parameter) is None for sharded in members):
                group.gradients.forget_reduced()
                continue
            for sharded in members:
                if self._get_grad(sharded.parameter) is None:
                    shard_view(
                        group.gradients.shard, group.layout, sharded.index, group.rank
                    ).zero_()
        self._grads_attached = False

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, reduced or not yet, by ``factor``, a number or a 0-d tensor."""
        for group in self._trainable:
            group.gradients.scale(factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients: accumulated, reduced, and those on parameters."""
        for group, members in self._trainable.items():
            group.gradients.clear()
            for sharded in members:
                self._set_grad(sharded.parameter, None)
        self._grads_attached = False
        self._grads_final = True

    # ---- weights
    # -------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(
        self, only_shared: bool = False, only_trainable: bool = False
    ) -> None:
        """Put main weights into compute weights; the next forward uses them.

        ``only_shared`` leaves those of another dtype alone; the others are the main weights, and
        what other ranks have gathered of them is out of date. ``only_trainable`` leaves those alone
        that no optimizer updates.
        """
        for group in self._trainable if only_trainable else self.groups:
            if not only_shared or group.main_is_compute:
                group.install_main_weights()

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
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

    @contextmanager
    def mixed_precision_context(self, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Inside, gradients travel in the policy's ``grad_comm_dtype``; main dtypes stay as they are."""
        before = [group.gradients.comm_dtype for group in self.groups]
        self.reset_mixed_precision_policy(policy)
        try:
            yield
        finally:
            self._schedule.wait_for_reductions()
            for group, dtype in zip(self.groups, before):
                group.gradients.set_comm_dtype(dtype)

    def reset_mixed_precision_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Gradients travel in the policy's ``grad_comm_dtype`` from now on; main dtypes stay as they are."""
        if not isinstance(policy, MixedPrecisionPolicy):
            raise ValueError(f"mixed precision expects a MixedPrecisionPolicy but got {policy!r}")
        self._schedule.wait_for_reductions()
        for group in self.groups:
            group.gradients.set_comm_dtype(policy.grad_comm_dtype)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        return self._index


def _refuse_copy() -> NoReturn:
    raise NotImplementedError(
        "a sharded model cannot be copied or pickled: its hooks and communicators belong to this"
        " process. Copy or save model.state_dict(), which works"
    )
