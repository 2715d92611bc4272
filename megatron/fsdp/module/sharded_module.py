# SPDX-License-Identifier: Apache-2.0
"""The wrapper around a sharded module: its parameters, state dicts and controls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.backends.memory_slots import EngineSlots
from megatron.fsdp.config.meta_initialisation import Initialiser
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Settings
from megatron.fsdp.config.warnings_once import (
    warn_of_no_optimizer,
    warn_of_unmatched_units,
    watch_optimizers,
)
from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.sharded_param import (
    ShardedParam,
    is_linked,
    sharded_param_of,
)
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.hooks import UnitHooks
from megatron.fsdp.engine.param_group import ParamGroup, StoredForm
from megatron.fsdp.engine.schedule import Microbatches, Schedule
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.agreement import FreezingAgreement
from megatron.fsdp.module.builder import ShardedParams, shard_parameters
from megatron.fsdp.module.checks import check_all
from megatron.fsdp.module.gradient_sync import GradientError, GradientSync
from megatron.fsdp.module.known_parameters import KnownParameters
from megatron.fsdp.module.model_state import (
    accept_full_tensors,
    copied_module,
    copy_main_weights,
    load_model_state,
    remove_hooks,
    show_main_weights,
)
from megatron.fsdp.module.own_names import lead_by_own_names, own_name
from megatron.fsdp.module.shown_parameters import ShownParameters, watch_parameters
from megatron.fsdp.module.trainability import Trainability
from megatron.fsdp.module.unshard_handle import UnitHandle, units_of
from megatron.fsdp.module.weight_writes import WeightWrites
from megatron.fsdp.module.wrapped_module import (
    cast_at_units,
    prepare_wrapped_module,
    refuse_ddp,
)
from megatron.fsdp.trace import failed_collectives

OWNER = "_fsdp_model"  # attribute of the parameters that an optimizer steps: their wrapper

REFUSED_MODEL_COPY = (
    "a sharded model cannot be copied or pickled: its hooks and communicators belong to this"
    " process. Copy or save its state_dict(), which works"
)


class ShardedModule(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded.

    ``parameters()`` yields the main weights, which an optimizer steps, as DTensors, the same
    objects at every call. The user's module is ``module``, whose attributes and methods the wrapper
    has too. At level 3, its own parameters have values only while a unit is in use.

    Args:
        module: the module, whose parameters become views of flat buffers.
        settings: its settings.
        problems: problems that the caller has found; the constructor adds its own and raises all.
            None: no problems yet.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: names the features that are not built.
    """

    initialiser = Initialiser()  # initialises modules that were built on the meta device
    checkpoint_ready = True  # tensors of state dicts describe their chunks to torch's checkpoint
    # Warn of probable mistakes; not where a program chooses units and optimizer itself.
    _gives_advice = True
    _has_optimizer = False  # True if a sharded optimizer steps the parameters
    _shows_attributes = True  # False if the wrapper hides attributes of `module`
    _is_copyable = True
    _ddp_params_and_buffers_to_ignore = property(refuse_ddp)
    _prefix = "module."  # prefix of the names of parameters
    # Parameters of models inside that earlier calls have sharded, and their compute parameters.
    _sharded_before: Set[nn.Parameter] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        problems: Problems | None = None,
    ):
        super().__init__()
        failed_collectives.watch()
        if problems is None:
            problems = Problems(settings.checked_mesh.all_groups())
        initialiser = self.initialiser.for_model(module, settings.initialisation)
        check_all(problems, module, settings, initialiser, self._sharded_before)
        problems.raise_everywhere()
        if self._gives_advice:
            warn_of_unmatched_units(module, settings.units or ())
        self.strategy = settings.strategy.highest_level
        self._settings = settings
        self._mesh = settings.checked_mesh
        self.module = module
        # The parts follow in the order in which they need each other.
        units, self._sharded_params, self._memory_slots = self._shard_parameters(initialiser)
        self._units = units
        sharded: dict[nn.Parameter, Any] = {}
        for compute, sharded_param in self._sharded_params.items():
            sharded[compute] = sharded_param.parameter
        self._ignored = settings.strategy.ignored
        # The parameters that an optimizer may step, by all names of tied ones.
        self._by_name: dict[str, Any] = {}
        self._name_of: dict[Any, str] = {}  # the first name of each
        for name, parameter in module.named_parameters(remove_duplicate=False):
            shown = sharded.get(parameter, parameter)
            self._by_name[own_name(name)] = shown
            self._name_of.setdefault(shown, self._prefix + own_name(name))
        for parameter in self._name_of:
            setattr(parameter, OWNER, ProcessLink(self))
        self._trainability = Trainability(units, sharded)
        self._microbatches = Microbatches(settings.gradients.sync_each_microbatch)
        self._schedule = Schedule(
            units,
            settings.overlap,
            self._microbatches,
            reduces_late=settings.gradients.find_unused,
        )
        self._gradients = self._make_gradient_sync()
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._known = KnownParameters(self, names)
        writes = WeightWrites(units, self._trainability, self._known)
        self._hooks = UnitHooks(self._schedule, self._gradients, writes)
        shown_parameters = ShownParameters(self._hooks, sharded, self._trainability)
        watch_parameters(module, shown_parameters)
        self._casts = cast_at_units(units, settings.precision)
        self._hooks.hook_ids |= self._casts
        self._hooks.hook_ids |= accept_full_tensors(module)
        watch_optimizers(list(self._sharded_params))
        num_shards = self._mesh.dense.inner.size()
        gathers_layers = self.strategy.shards_parameters and num_shards > 1
        prepare_wrapped_module(module, gathers_layers, self.state_dict, self._apply)
        lead_by_own_names(self)

    def _make_gradient_sync(self) -> GradientSync:
        gradients = self._settings.gradients
        report_nonfinite = None
        if gradients.report_nonfinite:
            report_nonfinite = self._report_nonfinite
        groups_of_use = None
        if gradients.find_unused:
            groups_of_use = self._mesh.all_groups()
        return GradientSync(
            self._sharded_params.values(),
            self._schedule,
            FreezingAgreement(self._trainability, self._mesh),
            use_decoupled_grad=gradients.are_decoupled,
            report_nonfinite=report_nonfinite,
            groups_of_use=groups_of_use,
            after_pass=self._after_backward,
        )

    # ---- the parts

    def _shard_parameters(
        self, initialiser: Initialiser | None
    ) -> tuple[list[Unit], ShardedParams, EngineSlots | None]:
        return shard_parameters(self.module, self._settings, initialiser)

    @property
    def sharded_params(self) -> list[ShardedParam]:
        """All sharded parameters, each once, in the module's order."""
        sharded_params = []
        for parameter in self._name_of:
            if is_linked(parameter):
                sharded_params.append(sharded_param_of(parameter))
        return sharded_params

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of all units, in the order of units."""
        groups = []
        for unit in self._units:
            groups += unit.groups
        return groups

    @property
    def memory_slots(self) -> dict[str, list[int]]:
        """Bytes of each memory slot, by contents; none before the first step has ended."""
        if self._memory_slots is None:
            return {}
        return self._memory_slots.sizes

    # ---- torch.nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = vars(self).get("_modules", {})
            module: nn.Module | None = modules.get("module")
            if module is None or name.startswith("_") or not self._shows_attributes:
                raise
        value = getattr(module, name)
        if not inspect.ismethod(value) or value.__self__ is not module:
            return value
        return partial(self._hooks.call_method, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the same arguments and return its result."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._hooks.forget_calls()
            raise

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names, which begin with ``module.``, and main weights as DTensors.

        Args:
            prefix: precedes the names, with a dot.
            recurse: makes no difference: torch's ``set_state_dict`` asks module by module.
            remove_duplicate: yield a tied parameter under its first name only.
        """
        self._known.check()
        self._trainability.sync_requires_grad()
        if prefix:
            prefix += "."
        prefix += self._prefix
        for name, parameter in self._by_name.items():
            if not remove_duplicate or self._name_of[parameter] == self._prefix + name:
                yield prefix + name, parameter

    def state_dict(  # type: ignore[override]  # one signature for torch's two overloads
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return main weights as DTensors of full shape, and buffers unchanged.

        Args:
            args: older positional arguments of torch.
            destination: receives the entries. None: a new dictionary.
            prefix: precedes the names.
            keep_vars: return the parameters themselves, which require gradients.
        """
        self._known.check()
        state: dict[str, Any] = super().state_dict(
            *args,
            destination=destination,  # type: ignore[arg-type]  # None makes one with metadata
            prefix=prefix,
            keep_vars=True,
        )
        show_main_weights(
            state,
            prefix,
            self._sharded_param_of,
            keep_vars,
            with_chunks=self.checkpoint_ready,
        )
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> _IncompatibleKeys:
        """Load DTensors of the same layout, or full tensors; the next forward uses them.

        A collective above level 0: all ranks load the same keys.

        Args:
            state_dict: the tensors, by the names of the wrapper or those of the module.
            strict: refuse missing and unexpected keys. Otherwise a warning names them, and only a
                state dict of which no key fits is an error.
            assign: makes no difference: values are copied, because weights remain views.
        """
        return load_model_state(
            self.module,
            self._sharded_param_of,
            state_dict,
            strict,
            groups=self._groups_of_loading(),
        )

    def _groups_of_loading(self) -> Sequence[dist.ProcessGroup]:
        if self.strategy.shards_optimizer:
            return self._mesh.all_groups()
        return ()

    def _sharded_param_of(self, value: Any) -> ShardedParam | None:
        if not isinstance(value, nn.Parameter):
            return None
        if is_linked(value):
            return sharded_param_of(value)
        return self._sharded_params.get(value)

    def _apply(
        self,
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> ShardedModule:
        """Refuse ``to``, ``cuda``, ``half`` and so on, unless they change nothing."""
        for group in self.groups:
            dtype = group.precision.compute
            empty = group.compute.flat.new_empty(0, dtype=dtype)
            changed = fn(empty)
            if changed.dtype != empty.dtype or changed.device != empty.device:
                raise NotImplementedError(
                    f"a sharded model cannot be moved or converted ({empty.dtype} on {empty.device}"
                    f" to {changed.dtype} on {changed.device}): convert the module before sharding"
                    " it, or pass device="
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Return another sharded model with the same weights, without gradients; a collective."""
        if not self._is_copyable or self._mesh.dense.tensor is not None:
            raise NotImplementedError(REFUSED_MODEL_COPY)
        for group in self.groups:
            if type(group.form) is not StoredForm:
                raise NotImplementedError(REFUSED_MODEL_COPY)
        self._trainability.sync_requires_grad()
        module, settings = copied_module(
            self.module,
            self._sharded_params,
            self._settings,
            memo,
        )
        remove_hooks(self.module, module, self._hooks.hook_ids)
        copied = type(self).__new__(type(self))  # the constructor may take other arguments
        ShardedModule.__init__(copied, module, settings)
        for name, value in vars(self).items():
            vars(copied).setdefault(name, value)
        copy_main_weights(self.sharded_params, copied.sharded_params)
        copied.train(self.training)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotImplementedError(REFUSED_MODEL_COPY)

    # ---- microbatches

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward is the last one of the step; may be assigned."""
        return self._microbatches.is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._microbatches.mark(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the microbatches inside the context as not the last one of the step."""
        before = self.is_last_microbatch
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Make every backward inside the context end with final gradients."""
        before = self._microbatches.sync_each
        self._microbatches.sync_each = True
        try:
            yield
        finally:
            self._microbatches.sync_each = before

    # ---- gradients

    def start_grad_sync(self, *unused: object) -> None:
        """Start to reduce all gradients that have accumulated; arguments are ignored."""
        self._gradients.start()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions that have started."""
        self._schedule.wait_for_reductions()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce the remaining gradients, wait, and put the final ones on ``param.grad``."""
        if force_all_reduce and self.strategy.shards_optimizer:
            raise NotImplementedError("force_all_reduce: gradients are reduced to their owners")
        self._gradients.finish()

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the gradients whose reduction has started on the parameters."""
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
        """Drop all gradients; without ``set_to_none`` leave zeros on the parameters."""
        self.zero_grad_buffer()
        if not set_to_none:
            self.attach_grad_to_optimizer_state()
        if self._ignored:
            nn.ParameterList(self._ignored).zero_grad(set_to_none)

    # ---- weights

    def install_optimized_model_weights(
        self,
        except_cast: bool = False,
        only_trainable: bool = False,
    ) -> None:
        """Make the next forward cast and gather the main weights as they are when it begins.

        The sharded optimizer's step ends with this. Below level 3 weights stay gathered: code that
        edits them after a forward, in a way that torch does not see, calls this.

        Args:
            except_cast: leave out weights that are cast: their all-gathers send older values.
            only_trainable: leave out frozen weights.
        """
        for observer in observe.observers:
            observer.begin_step()
        self._schedule.prefetcher.reshard_for_new_weights()
        if not self._settings.memory.registers_manually:
            self._assign_memory_slots()
        for group in self.groups:
            if only_trainable and not group.requires_grad:
                continue
            # Offloaded weights of one dtype are installed as those that share storage are.
            is_shared = group.precision.main_param == group.compute.flat.dtype
            if is_shared or not except_cast:
                group.mark_main_weights_changed()

    def start_param_sync(
        self,
        *unused: object,
        force_sync: bool = False,
        force_dispatch: bool = False,
    ) -> None:
        """Start the all-gathers of new weights, which the next forward would start when it begins.

        At levels 1 and 2 these are all units, at level 3 those with which the next forward begins
        if all-gathers overlap compute.

        Args:
            unused: ignored.
            force_sync: wait for the all-gathers.
            force_dispatch: gather all units at level 3 too.
        """
        self._schedule.unshard_stale()
        if force_dispatch:
            for unit in self._units:
                if not unit.blockers:  # otherwise it is gathered when its memory slot is free
                    unit.unshard()
        elif self.strategy.shards_parameters:
            self._schedule.prefetcher.prefetch_next_forward()
        if force_sync or not self._settings.overlap.param_gather:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Wait for the all-gathers that have started."""
        for unit in self._units:
            unit.wait_for_unshard()

    def unshard(
        self,
        module: nn.Module | None = None,
        async_op: bool = False,
    ) -> UnitHandle | None:
        """Gather the weights of one unit ahead, as in FSDP2; its next call uses them, and reshards.

        Below level 3 weights are gathered only if they have changed.

        Args:
            module: module of the unit; units inside of it are not gathered. None: the root.
            async_op: return a handle whose ``wait()`` waits, as the next call of the unit does.
        """
        units = units_of(self._units, module)
        handle = UnitHandle(units, self._schedule.prefetcher)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, module: nn.Module | None = None) -> None:
        """Free the gathered weights of one unit at level 3, unless a call uses them."""
        units = units_of(self._units, module)
        self._schedule.prefetcher.reshard_if_unused(set(units))

    def broadcast_params(self) -> None:
        """Broadcast main weights from the first rank of every axis that replicates them."""
        for group in self.groups:
            group.broadcast()

    # ---- communication and memory

    def stop_communication(self) -> None:
        """Wait for all reductions and all-gathers that have started."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    def manual_buffer_registration(self) -> None:
        """Assign and register memory slots after a step, if that was left to it; a collective."""
        slots = self._memory_slots
        if slots is None or not self._settings.memory.registers_manually:
            return
        if slots.is_complete and not any(slots.sizes.values()):
            raise RuntimeError("manual_buffer_registration needs a step first, to see what is used")
        self._assign_memory_slots()

    def _assign_memory_slots(self) -> None:
        if self._memory_slots is not None and not self._memory_slots.is_complete:
            self._schedule.prefetcher.reshard_prefetched()  # buffers in use would get no slots
            self._memory_slots.assign(self._groups_that_end_together())

    # ---- calls of the parts

    def _after_backward(self) -> None:
        if self._gives_advice and not self._has_optimizer:
            self._gives_advice = False
            warn_of_no_optimizer()

    def _report_nonfinite(self, found: list[ShardedParam]) -> None:
        """Raise :class:`GradientError` on every rank if any rank has found a NaN or Inf."""
        problems = []
        if found:
            names = [self._shown_name(sharded_param) for sharded_param in found]
            problems.append(
                f"rank {dist.get_rank()}: NaN or Inf in the gradient of {', '.join(names)}"
            )
        problems = agree(problems, self._groups_that_end_together())
        if problems:
            raise GradientError("\n".join(problems))

    def _shown_name(self, sharded_param: ShardedParam) -> str:
        return sharded_param.name

    def _groups_that_end_together(self) -> list[dist.ProcessGroup]:
        # Through these an error reaches all ranks that would wait for this one.
        return self._mesh.all_groups()


def owner_of(parameter: torch.Tensor) -> ShardedModule:
    """Return the model that a parameter belongs to for which :func:`is_owned` is True."""
    model: ShardedModule = getattr(parameter, OWNER).target
    return model


def is_owned(parameter: torch.Tensor) -> bool:
    """Return True if a parameter belongs to a sharded model."""
    return getattr(parameter, OWNER, None) is not None
