# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded in place, module by module: layers first, then the module around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from megatron.fsdp.backends.memory_slots import EngineSlots
from megatron.fsdp.config.meta_initialisation import Initialiser
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Settings
from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine.device import Streams, in_backward, streams_for
from megatron.fsdp.engine.mesh import NormGroup
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.agreement import data_groups
from megatron.fsdp.module.builder import ShardedParams, shard_parameters
from megatron.fsdp.module.model_state import (
    load_model_state,
    remove_hooks,
    show_main_weights,
)
from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.module.sharded_module import REFUSED_MODEL_COPY, ShardedModule
from megatron.fsdp.module.shown_parameters import WatchedParameters
from megatron.fsdp.module.wrapped_module import refuse_ddp

MODEL = "_fsdp_model_in_place"
"""Attribute of modules that were sharded, and of compute parameters: the model that has them."""

# [Note: sharding in place] Each call makes a model of the module: its parameters are sharded at
# once, so an optimizer may be created over them, and they train also if no call for a module around
# them follows. Such a call makes a larger model, which takes the units of the models inside, with
# their buffers and settings. Of these models only the hooks and the schedule end.


class Context:
    """The models that share streams and the order of prefetching.

    Args:
        device: of the streams. None: the device of the first model.
        has_one_stream: run all collectives on one stream.
    """

    def __init__(self, device: torch.device | str | None = None, has_one_stream: bool = False):
        self.device: torch.device | None = None
        if device is not None:
            self.device = torch.device(device)
        self._has_one_stream = has_one_stream
        self._streams: Streams | None = None
        self.roots: list[InPlaceModel] = []  # roots in the order of their calls
        self.is_open = False  # modules are being sharded
        self.has_run = False

    def is_on(self, device: torch.device) -> bool:
        """Return True for the device of the context, whose number may be left out."""
        if self.device is None:
            return True
        return self.device.type == device.type and self.device.index in (None, device.index)

    def streams(self, device: torch.device) -> Streams:
        """Return the streams of all collectives."""
        if self._streams is None:
            self._streams = streams_for(device, self._has_one_stream)
        return self._streams

    def begin_forward(self) -> None:
        """Note that construction is over; raise ``RuntimeError`` if it is not."""
        if self.is_open:
            raise RuntimeError(
                "a forward inside of fully_shard_context: leave the context when all modules are"
                " sharded, and train after it"
            )
        self.has_run = True

    def prefetch_after(self, root: InPlaceModel) -> None:
        """Gather the weights with which the root that follows begins."""
        following = self.roots[self.roots.index(root) + 1 :]
        if following and not in_backward():
            following[0]._schedule.prefetcher.prefetch_next_forward()


class InPlaceModel(ShardedModule):
    """The sharded model of a module that nothing wraps: programs use the module itself.

    Parameters that models inside have sharded stay in their units, whatever the settings; all
    others become one unit. Names are the module's own.

    Args:
        module: the module. Models inside become parts of this one.
        settings: of the parameters that no model inside has.
        problems: those of the caller's arguments.
        context: the context that it becomes a root of.
    """

    _gives_advice = False  # optimizers of torch may step the parameters
    _is_copyable = False
    _shows_attributes = False
    _prefix = ""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        problems: Problems,
        context: Context,
    ):
        self._inside = tuple(models_inside(module))
        self.context = context
        before: set[Any] = _tied_outside(module)
        for model in self._inside:
            before.update(model._sharded_params)
            before.update(sharded_param.parameter for sharded_param in model.sharded_params)
        self._sharded_before = before
        super().__init__(module, settings, problems)
        vars(module)[MODEL] = self
        for model in self._inside:
            model.context.roots.remove(model)
            for inner in model.module.modules():
                if MODEL in vars(inner):
                    vars(inner)[MODEL] = self
        for compute in self._sharded_params:
            vars(compute)[MODEL] = ProcessLink(self)
        context.roots.append(self)
        cls: Any = type(module)
        module.__class__ = _class_in_place(cls)
        module.register_load_state_dict_pre_hook(refuse_assignment)
        self._inside = ()

    @property
    def accumulates_locally(self) -> bool:
        """True if an axis replicates gradients: they are reduced at the last microbatch."""
        return any(
            group.communicator.is_hybrid or not group.strategy.shards_gradients
            for group in self.groups
        )

    def _shard_parameters(
        self, initialiser: Initialiser | None
    ) -> tuple[list[Unit], ShardedParams, EngineSlots | None]:
        streams = self.context.streams(self._settings.device)
        units, sharded_params, slots = shard_parameters(
            self.module,
            self._settings,
            initialiser,
            sharded_before=self._sharded_before,
            streams=streams,
        )
        paths = {inner: path for path, inner in self.module.named_modules()}
        for model in self._inside:
            model._hand_over(own_name(paths[model.module]))
            self.strategy = max(self.strategy, model.strategy)
            for group in model.groups:
                group.communicator.streams = streams
            for sharded_param in model._sharded_params.values():
                self._count_all_experts(sharded_param)
            units += model._units
            sharded_params |= model._sharded_params
        return units, sharded_params, slots

    def _hand_over(self, path: str) -> None:
        """End the hooks and the names of this model; its module is at ``path`` of a larger one."""
        self._hooks.remove_from_parameters()
        # Those that cast inputs and outputs stay: they are of the settings of this module.
        remove_hooks(self.module, self.module, self._hooks.hook_ids - self._casts)
        for inner in self.module.modules():
            if isinstance(inner._parameters, WatchedParameters):
                inner._parameters = dict(inner._parameters)
        for unit in self._units:
            unit.name = f"{path}.{unit.name}".removesuffix(".")
            unit.shown_name = unit.name
            unit.casts_inputs = False  # the hooks of this model's settings stay
            for group in unit.groups:
                group.rename([f"{path}.{name}" for name in group.names], unit.name)
        for sharded_param in self._sharded_params.values():
            sharded_param.name = f"{path}.{sharded_param.name}"

    def _count_all_experts(self, sharded_param: ShardedParam) -> None:
        """Sum the norm of an expert's gradient over the data ranks that have other experts."""
        dense = self._mesh.dense
        group = sharded_param.group
        num_ranks = group.communicator.num_ranks
        if num_ranks >= dense.num_data_ranks:
            return
        copies = num_ranks // group.partition.num_owned
        groups = data_groups(self._mesh)
        if dense.tensor is not None:
            groups.append(dense.tensor.get_group())
            if sharded_param.slice.dim is None:  # every tensor-parallel rank has a copy
                copies *= dense.tensor.size()
        sharded_param.norm_group = NormGroup(tuple(groups), copies)


def model_of(module: Any) -> InPlaceModel:
    """Return the model of a module that was sharded in place."""
    model: InPlaceModel = vars(module)[MODEL]
    return model


def is_root(module: nn.Module) -> bool:
    """Return True if no sharded module contains this one, which was sharded in place."""
    return model_of(module).module is module


def models_inside(module: object) -> Iterator[InPlaceModel]:
    """Yield the models of modules inside of ``module``, in its order, that no larger one has."""
    if not isinstance(module, nn.Module):
        return
    for inner in module.modules():
        model = vars(inner).get(MODEL)
        if model is not None and model.module is inner and inner is not module:
            yield model


def _tied_outside(module: object) -> set[nn.Parameter]:
    """Return the parameters that belong to models of other modules, not around this one."""
    # The module around both uses them by name, in the unit that they have.
    tied: set[nn.Parameter] = set()
    if not isinstance(module, nn.Module):
        return tied
    for parameter in module.parameters():
        link = vars(parameter).get(MODEL)
        if link is not None and module not in link.target.module.modules():
            tied.add(parameter)
    return tied


class FSDPModule(nn.Module):
    """The methods that ``megatron_fsdp.experimental.fully_shard`` adds to the class of a module."""

    _ddp_params_and_buffers_to_ignore = property(refuse_ddp)

    def __getattr__(self, name: str) -> Any:
        """Return ``context``, which all modules in a root share, or the function ``is_root``."""
        try:  # what the module has by these names is its own
            return super().__getattr__(name)
        except AttributeError:
            if name == "context":
                return model_of(self).context
            if name == "is_root":
                return partial(is_root, self)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        model = model_of(self)
        model.context.begin_forward()
        if not is_root(self):
            return super().__call__(*args, **kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            model._hooks.forget_calls()
            raise
        model.context.prefetch_after(model)
        return output

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
        model = model_of(self)
        state: dict[str, Any] = super().state_dict(
            *args,
            destination=destination,  # type: ignore[arg-type]  # None makes one with metadata
            prefix=prefix,
            keep_vars=True,
        )
        find = model._sharded_param_of
        show_main_weights(state, prefix, find, keep_vars, model.checkpoint_ready)
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load DTensors of the same layout, or full tensors; the next forward uses them.

        A collective above level 0, as that of :class:`ShardedModule`.

        Args:
            state_dict: the tensors by their names.
            strict: refuse missing and unexpected keys.
            assign: refused if it is True (``NotImplementedError``).
        """
        refuse_assignment(self, state_dict, "", {"assign_to_params_buffers": assign})
        model = model_of(self)
        return load_model_state(
            self,
            model._sharded_param_of,
            state_dict,
            strict,
            groups=model._groups_of_loading(),
            load_buffers=super().load_state_dict,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that no parameter shows yet."""
        if is_root(self):
            model_of(self).zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(REFUSED_MODEL_COPY)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotImplementedError(REFUSED_MODEL_COPY)


@cache
def _class_in_place(cls: Any) -> Any:
    if issubclass(cls, FSDPModule):
        return cls
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def refuse_assignment(
    module: nn.Module,
    state: Any,
    prefix: str,
    local: Any,
    *rest: Any,
) -> None:
    """Refuse to put tensors in place of weights: the hook before a module loads its state.

    Args:
        module: the module.
        state: the state dict.
        prefix: prefix of the module in it.
        local: metadata of the module, with the argument ``assign`` of the call.
        rest: other arguments of the hook.

    Raises:
        NotImplementedError: if the call assigns.
    """
    if local.get("assign_to_params_buffers"):
        raise NotImplementedError(
            "load_state_dict(assign=True) of a sharded module: its weights are views of buffers."
            " Load without assign, which copies, or assign before fully_shard"
        )
