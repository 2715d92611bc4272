# SPDX-License-Identifier: Apache-2.0
"""The wrapper as a ``torch.nn.Module``: its construction, parameters and state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.agreement import FreezingAgreement, check_agreement
from megatron.fsdp.dtensor.sharded_param import (
    ShardedParam,
    is_linked,
    link,
    sharded_param_of,
)
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.hooks import UnitHooks
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Microbatches, Schedule
from megatron.fsdp.engine.unit_choice import assign_parameters, find_units, merge_small_units
from megatron.fsdp.gradient_sync import GradientError, GradientSync
from megatron.fsdp.meta_init import Initialiser
from megatron.fsdp.module_access.model_state import load_model_state
from megatron.fsdp.module_access.module_loading import accept_full_tensors
from megatron.fsdp.module_access.sharded_copy import (
    copied_module,
    copy_main_weights,
    remove_hooks,
)
from megatron.fsdp.module_access.shown_parameters import ShownParameters
from megatron.fsdp.module_access.trainability import Trainability
from megatron.fsdp.module_access.unit_access import UnitAccess
from megatron.fsdp.module_access.wrapped_attributes import WrappedAttributes, prepare_wrapped_module
from megatron.fsdp.problems import Problems
from megatron.fsdp.settings import ShardingSettings
from megatron.fsdp.sharding import ShardedParams, Sharder, make_memory_slots
from megatron.fsdp.warnings_once import (
    warn_of_clipped_embeddings,
    warn_of_no_optimizer,
    warn_of_unmatched_units,
    watch_optimizers,
)

OWNER = "_fsdp_model"
"""Attribute of the parameters that an optimizer steps: the wrapper that they belong to."""


class ShardedModule(WrappedAttributes):
    """A module whose parameters, gradients and optimizer state are sharded.

    ``parameters()`` yields the main weights, which an optimizer steps, as DTensors, the same
    objects at every call. The user's module is ``module``, whose attributes and methods the wrapper
    has too. At level 3, its own parameters have values only while a unit is in use.

    Args:
        module: the module to shard; its parameters become views of flat buffers.
        settings: all settings of the sharded model.
        problems: problems that the caller has found, which are raised together with others.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: for settings that are not built yet.
    """

    initialiser = Initialiser()
    """Initialises modules that were built on the meta device."""

    _fsdp_is_sharded = True
    _gives_advice = True
    """Warn of what is hardly meant; not where a program chooses units and optimizer itself."""
    _has_optimizer = False
    """A sharded optimizer steps the parameters."""

    def __init__(
        self, module: nn.Module, settings: ShardingSettings, problems: Problems | None = None
    ):
        super().__init__()
        # Settings and mesh: from here on every argument is parsed, checked and complete.
        resolved = settings.resolve(module, self.initialiser, problems or Problems())
        self._settings = settings
        self.strategy = resolved.strategy
        self.checkpoint_ready = resolved.checkpoint_ready
        self._mesh = resolved.mesh

        # Units: modules whose parameters are all-gathered and freed together.
        self._units = find_units(
            module, resolved.unit_modules, resolved.root_only, resolved.fine_grained
        )
        if self._gives_advice:
            warn_of_unmatched_units(module, resolved.unit_modules)
            warn_of_clipped_embeddings(module)
        self.module = _move(module, resolved.device)
        parameters_of = assign_parameters(self._units)
        if not resolved.fine_grained:
            merge_small_units(self._units, parameters_of, resolved.overlap.prefetch_bytes)
        check_agreement(resolved, parameters_of)

        # Groups with flat buffers, and a sharded parameter (a DTensor over main weights) for each.
        self._memory_slots = make_memory_slots(resolved)
        sharder = Sharder(resolved, self._memory_slots)
        self._sharded_params = sharder.shard(parameters_of)
        sharder.initialise(self._units, self._sharded_params)
        self._by_name = self._name_parameters(self._sharded_params)

        # Gradients, and the schedule: when units are gathered, freed and reduced.
        sharded = _parameters_of_optimizer(self._sharded_params)
        self._trainability = Trainability(self._units, sharded)
        self._microbatches = Microbatches(resolved.sync_each_microbatch)
        self._schedule = Schedule(
            self._units,
            resolved.strategy,
            resolved.overlap,
            self._microbatches,
            reduces_late=resolved.find_unused,
        )
        self._gradients = GradientSync(
            self._sharded_params.values(),
            self._schedule,
            FreezingAgreement(self._trainability, self._mesh),
            use_decoupled_grad=resolved.use_decoupled_grad,
            report_nonfinite=self._report_nonfinite if resolved.report_nan else None,
            groups_of_use=resolved.mesh.all_groups() if resolved.find_unused else None,
            after_pass=self._advise,
        )

        # Hooks on modules and tensors, which report to the schedule, and what code sees.
        access = UnitAccess(self._units, self._trainability)
        self._hooks = UnitHooks(self._schedule, self._gradients, access)
        ShownParameters(self._hooks, sharded, self._trainability, self.module)
        self._hooks.handles |= accept_full_tensors(self.module)
        watch_optimizers(list(self._sharded_params))
        gathers_layers = resolved.strategy.shards_parameters and self._mesh.dense.inner.size() > 1
        prepare_wrapped_module(self.module, gathers_layers, self.state_dict, self._apply)

    def _name_parameters(self, sharded_params: ShardedParams) -> dict[str, ShardedParam]:
        """Return sharded parameters by name, in the module's own order, with all tied names.

        Each of them is marked as this wrapper's, and gets the attributes that user code has set on
        the module's parameter.
        """
        for compute, sharded_param in sharded_params.items():
            parameter = sharded_param.parameter
            for name, value in vars(compute).items():
                if not (isinstance(compute, DTensor) and name in ("_local_tensor", "_spec")):
                    setattr(parameter, name, value)
            setattr(parameter, OWNER, self)
            link(parameter, sharded_param)
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: sharded_params[parameter] for name, parameter in named}

    # ---- the parts

    @property
    def sharded_params(self) -> list[ShardedParam]:
        """Every parameter once, in the module's order."""
        return list(dict.fromkeys(self._by_name.values()))

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of all units, in the order of units."""
        groups = []
        for unit in self._units:
            groups += unit.groups
        return groups

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the mesh."""
        return self._mesh

    @property
    def memory_slots(self) -> dict[str, list[int]]:
        """Bytes of each memory slot, by contents; there are none before the first step has ended.

        They are fixed parts of memory in which gathered weights and local gradients take turns,
        with ``fsdp_double_buffer``.
        """
        return {} if self._memory_slots is None else self._memory_slots.sizes

    def _assign_memory_slots(self) -> None:
        """Give a memory slot to every buffer that was first used in this step.

        Raises:
            RuntimeError: on every rank, with the bytes needed, if some rank has too little memory.
        """
        if self._memory_slots is None or self._memory_slots.is_complete:
            return
        problems = agree(self._memory_slots.assign(), self._groups_that_end_together())
        self._memory_slots.end_assignment(problems)

    # ---- torch.nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the same arguments and return its result."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._hooks.forget_calls()
            raise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names, which begin with ``module.``, and main weights as DTensors.

        They are the wrapper's own parameters, whatever ``recurse`` is, because torch's
        ``set_state_dict`` asks module by module.
        """
        self._trainability.follow()
        seen: set[ShardedParam] = set()
        prefix = f"{prefix}.module." if prefix else "module."
        for name, sharded_param in self._by_name.items():
            if not remove_duplicate or sharded_param not in seen:
                seen.add(sharded_param)
                parameter = sharded_param.parameter
                assert isinstance(parameter, nn.Parameter)
                yield prefix + name, parameter

    def state_dict(  # type: ignore[override]  # one signature for torch's two overloads
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return main weights as DTensors of full shape, and buffers unchanged.

        The DTensors are ready for torch.distributed.checkpoint if ``checkpoint_ready``.
        """
        state: dict[str, Any] = super().state_dict(
            *args,
            destination=destination,  # type: ignore[arg-type]  # None makes one with metadata
            prefix=prefix,
            keep_vars=True,
        )
        for key in [key for key in state if key.startswith(prefix)]:
            state[key] = self._checkpoint_value(state[key], keep_vars)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load DTensors of the same layout, or full tensors; the next forward uses them.

        Args:
            state_dict: values under the wrapper's names or the module's own.
            strict: treat missing and unexpected keys as errors.
            assign: copies too: the weights remain views of flat buffers, in their own dtype.

        Raises:
            RuntimeError: lists everything that does not fit, like any module.
            TypeError: for anything but a mapping.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict expects a mapping but got {type(state_dict).__name__}")
        # Wrappers inside (Float16Module) may rename keys, so the keys are those of the module's
        # state dict, not the paths of its parameters.
        own = self.module.state_dict(keep_vars=True)
        sharded_params = {}
        for key, value in own.items():
            sharded_param = self._sharded_param_of(value)
            if sharded_param is not None:
                sharded_params[key] = sharded_param
        result = load_model_state(self.module, sharded_params, set(own), state_dict, strict)
        for group in self.groups:
            group.install_main_weights()
        return result

    def _checkpoint_value(self, value: Any, keep_vars: bool) -> Any:
        sharded_param = self._sharded_param_of(value)
        if sharded_param is None:
            is_detached = isinstance(value, torch.Tensor) and not keep_vars
            return value.detach() if is_detached else value
        if keep_vars:
            return sharded_param.parameter
        return sharded_param.checkpoint_tensor(with_chunks=self.checkpoint_ready)

    def _sharded_param_of(self, value: Any) -> ShardedParam | None:
        """Return the sharded parameter of an entry of the module's state dict, if it has one.

        The entry is the module's own parameter while it is unsharded, otherwise the sharded one.
        """
        if not isinstance(value, nn.Parameter):
            return None
        return sharded_param_of(value) if is_linked(value) else self._sharded_params.get(value)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> ShardedModule:
        """Refuse ``to``, ``cuda``, ``half`` and so on, unless they change nothing."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Return another sharded model with the same weights; gradients are left out.

        This is a collective, and gathers all weights on every rank for a moment: the copy is
        sharded anew.

        Raises:
            NotImplementedError: for models with tensor parallelism or of Megatron-Core.
        """
        if not hasattr(self, "from_settings") or self._mesh.dense.tensor is not None:
            _refuse_copy()
        self._trainability.follow()
        module, settings = copied_module(self.module, self._sharded_params, self._settings, memo)
        remove_hooks(self.module, module, self._hooks.handles)
        copied: ShardedModule = self.from_settings(
            module, replace(settings, dist_index=self._mesh, init_model_with_meta_device=False)
        )
        copy_main_weights(self.sharded_params, copied.sharded_params)
        copied.train(self.training)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        _refuse_copy()

    # ---- the end of a backward pass

    def _advise(self) -> None:
        if self._gives_advice and not self._has_optimizer:
            self._gives_advice = False
            warn_of_no_optimizer()

    def _report_nonfinite(self, found: list[ShardedParam]) -> None:
        """Raise :class:`GradientError` on every rank if any rank has found a NaN or Inf."""
        names = ", ".join(self._shown_name(sharded_param) for sharded_param in found)
        own = [f"rank {dist.get_rank()}: NaN or Inf in the gradient of {names}"] if found else []
        everywhere = agree(own, self._groups_that_end_together())
        if everywhere:
            raise GradientError("\n".join(everywhere))

    def _shown_name(self, sharded_param: ShardedParam) -> str:
        """Return the name of a parameter in messages."""
        return sharded_param.name

    def _groups_that_end_together(self) -> list[dist.ProcessGroup]:
        """Return groups through which an error reaches every rank that would wait for this one."""
        return self._mesh.all_groups()


def _move(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to ``device`` in place; tensors on meta are allocated there later."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    moved: nn.Module = module._apply(move)
    return moved


def _parameters_of_optimizer(sharded_params: ShardedParams) -> dict[nn.Parameter, nn.Parameter]:
    """Return the parameter that the optimizer steps for each of the module's own parameters."""
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for compute, sharded_param in sharded_params.items():
        parameter = sharded_param.parameter
        assert isinstance(parameter, nn.Parameter)
        parameters[compute] = parameter
    return parameters


def _refuse_copy() -> NoReturn:
    raise NotImplementedError(
        "a sharded model cannot be copied or pickled: its hooks and communicators belong to this"
        " process. Copy or save model.state_dict(), which works"
    )
