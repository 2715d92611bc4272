# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters: any optimizer of torch's interface, unchanged."""

# [Note: the sharded optimizer] A sharded optimizer is the user's object. Its class is replaced by a
# subclass of `ShardedOptimizer` and the original class. Element-wise optimizers of torch step on
# flat segments (see [Note: flat segments]), Muon and its like on whole matrices (see [Note: owners
# of matrices]), all others on the DTensors: the first step logs once what these gather.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from megatron.fsdp.config.problems import Problems, refuse_differences
from megatron.fsdp.config.settings import Settings
from megatron.fsdp.config.warnings_once import warn, warn_of_absent_state, warn_of_frozen_parameters
from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.dtensor.tensor_part import gathered_bytes
from megatron.fsdp.engine.loops_in_c import concatenated
from megatron.fsdp.module.agreement import compared_settings, data_groups, names_on_all_ranks
from megatron.fsdp.module.gradient_sync import clear_gradient_shard
from megatron.fsdp.module.sharded_module import ShardedModule, is_owned, owner_of
from megatron.fsdp.optimizer.block_update import refuse_state_in_files
from megatron.fsdp.optimizer.flat_update import FlatUpdate
from megatron.fsdp.optimizer.matrix.owner_update import OwnerUpdate, owner_update
from megatron.fsdp.optimizer.matrix.owners import refuse_vectors
from megatron.fsdp.optimizer.optimizer_state import (
    NamedGroup,
    OptimizerClass,
    ParamState,
    checkpoint_param_state,
    elementwise_class,
    elementwise_names,
    initial_state,
    makes_state_late,
    match_groups,
    parameters_of,
    refuse_local_state,
    shard_param_state,
)
from megatron.fsdp.optimizer.quantized_state import LocalUpdate, quantizes_state

# Of a state dict, by its keys: numbers, or names if torch's `set_state_dict` has replaced them.
ParamsByKey = dict[Any, ShardedParam]
StateByKey = dict[Any, ParamState]


class ShardedOptimizer(Optimizer):
    """The methods that sharding adds to an optimizer; see [Note: the sharded optimizer]."""

    _fsdp_models: list[ShardedModule]
    _fsdp_whole_models: list[ShardedModule]  # models that no other optimizer steps
    _fsdp_ignored: list[nn.Parameter]  # parameters that are not sharded
    _fsdp_checkpoint_ready: bool
    _fsdp_update: FlatUpdate | LocalUpdate | OwnerUpdate | None  # None: it steps on the DTensors
    _fsdp_logs_gathers: bool  # the next step is the first one, which logs what it gathers

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
    ) -> Any:
        """Finish reductions and update the main weights; the next forward casts and gathers them.

        Args:
            closure: as in torch: computes the loss and its gradients, which are then reduced.
            sync_grad_before_optimizer_step: reduce gradients that are not reduced yet.
            install_optimized_model_weights: False keeps the old compute weights until
                ``model.install_optimized_model_weights()``, if their dtype differs from that of the
                main weights. Otherwise they share storage with the main weights.
        """
        if not install_optimized_model_weights:
            for model in self._fsdp_models:
                for group in model.groups:
                    group.keep_compute_weights()

        def reducing_closure() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self._finish_communication(sync_grad_before_optimizer_step)
            return loss

        self._finish_communication(sync_grad_before_optimizer_step)
        arguments = []
        if closure is not None:
            arguments.append(reducing_closure)
        if self._fsdp_update is not None:
            loss = _step_of_update(self, *arguments)
        elif self._fsdp_logs_gathers:
            with gathered_bytes() as gathered:
                loss = super().step(*arguments)
            self._fsdp_logs_gathers = False
            if gathered:
                warn(
                    f"{_user_class(self).__name__} gathers {len(gathered)} whole tensors in each"
                    f" step, {sum(gathered) / 1e6:.1f} MB altogether and one after the other: its"
                    " update needs more of a parameter than the part that a rank has"
                )
        else:
            loss = super().step(*arguments)
        for model in self._fsdp_models:
            model.install_optimized_model_weights(
                except_cast=not install_optimized_model_weights,
                only_trainable=True,
            )
        return loss

    # torch's hooks run around the update; it would put them around this one too.
    step.hooked = True  # type: ignore[attr-defined]  # torch's own mark on functions

    def zero_grad(
        self,
        set_to_none: bool = True,
        *,
        zero_grad_buffer: bool = True,
    ) -> None:
        """Clear the gradients of the parameters that this optimizer steps, as in torch.

        Args:
            set_to_none: False leaves gradients of zeros on the parameters.
            zero_grad_buffer: clear the accumulation buffers behind ``param.grad`` too.
        """
        if not zero_grad_buffer:
            super().zero_grad(set_to_none)
            return
        shared = []
        for model in self._fsdp_models:
            if model not in self._fsdp_whole_models:
                shared.append(model)
        if shared:
            for model in shared:
                model.finish_grad_sync()  # gradients not reduced yet would be added later
            for sharded_param in self._sharded_params().values():
                if owner_of(sharded_param.parameter) in shared:
                    clear_gradient_shard(sharded_param)
            super().zero_grad(set_to_none)
            for model in shared:
                model.zero_grad_buffer(only_hidden=True)
        for model in self._fsdp_whole_models:
            model.zero_grad_buffer()
            if not set_to_none:
                model.attach_grad_to_optimizer_state()  # zeros
        if self._fsdp_ignored:
            nn.ParameterList(self._fsdp_ignored).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of sharded models, and create their state."""
        given = param_group["params"]
        if isinstance(given, torch.Tensor):
            given = [given]
        if not isinstance(given, set):  # which torch refuses
            parameters = []
            for entry in given:
                if isinstance(entry, tuple):
                    entry = entry[1]  # behind its name
                parameters.append(entry)
            _refuse_unsharded(parameters)
            param_group = {
                **param_group,
                "params": parameters,
                "param_names": _names(parameters),
            }
        super().add_param_group(param_group)
        self._find_models()
        self._make_missing_state()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's structure, with DTensors, and ``param_names`` in every group.

        Above level 0, for optimizers that step on DTensors, a collective.

        Raises:
            ValueError: if ranks have different state of which a checkpoint has one copy.
        """
        result = super().state_dict()
        result["param_groups"] = [NamedGroup(group) for group in result["param_groups"]]
        if self._fsdp_checkpoint_ready:
            state = result["state"]
            sharded_params = self._sharded_params()
            self._refuse_local_state(sharded_params, state)
            for position, sharded_param in sharded_params.items():
                if position in state:
                    state[position] = checkpoint_param_state(sharded_param, state[position])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, with full tensors or DTensors, by ``param_names``, else by position.

        Raises:
            ValueError: if names, groups or shapes do not agree; nothing is changed then.
        """
        groups = match_groups(self.param_groups, state_dict["param_groups"])
        keys = concatenated([group["params"] for group in groups])
        by_position = self._sharded_params()
        sharded_params = {}
        for position, key in enumerate(keys):
            if position in by_position:
                sharded_params[key] = by_position[position]
        state = self._sharded_state(sharded_params, state_dict["state"])
        self._refuse_local_state(sharded_params, state)
        if isinstance(self._fsdp_update, FlatUpdate):
            self._fsdp_update.forget()
        loaded = {**state_dict, "param_groups": groups, "state": state}
        super().load_state_dict(loaded)
        self._make_missing_state()  # the saved optimizer may not have stepped yet
        self._warn_of_missing(sharded_params, state)

    def _sharded_state(
        self,
        sharded_params: ParamsByKey,
        state: StateByKey,
    ) -> StateByKey:
        """Return loaded state with shards, given the parameters by the keys of the state dict."""
        states = []
        for key in sharded_params.keys() & state.keys():
            states.append((sharded_params[key], state[key]))
        for parameter, param_state in self.state.items():
            if is_linked(parameter):
                sharded_param = sharded_param_of(parameter)
                states.append((sharded_param, param_state))
        names = elementwise_names(states)
        sharded = dict(state)
        for key, param_state in state.items():
            if key not in sharded_params:
                continue
            sharded_param = sharded_params[key]
            known = self.state.get(sharded_param.parameter)
            if known and param_state and known.keys().isdisjoint(param_state):
                raise ValueError(
                    f"{_user_class(self).__name__} got the state of another optimizer,"
                    f" {', '.join(param_state)}: hand it to"
                    " megatron_fsdp.utils.state_of_other_optimizers first"
                )
            sharded[key] = shard_param_state(sharded_param, param_state, names)
        return sharded

    def _warn_of_missing(
        self,
        sharded_params: ParamsByKey,
        state: StateByKey,
    ) -> None:
        kind = _user_class(self)
        if not state:
            if any(makes_state_late(kind, group) for group in self.param_groups):
                warn_of_absent_state(kind.__name__)
            return
        frozen = []  # now, but not when the model was sharded
        for key, sharded_param in sharded_params.items():
            if state.get(key) or sharded_param.parameter.requires_grad:
                continue
            if sharded_param.group.requires_grad:
                frozen.append(sharded_param.name)
        if frozen and any(state.values()):
            warn_of_frozen_parameters(kind.__name__, frozen)

    def _refuse_local_state(
        self,
        sharded_params: ParamsByKey,
        state: StateByKey,
    ) -> None:
        # These updates keep all state in DTensors, with equal step counts on all ranks. At level 0
        # every rank has all state.
        if self._fsdp_update is not None:
            return
        if not self._fsdp_checkpoint_ready:
            return
        groups: dict[Any, None] = {}  # groups in order, each one once
        for model in self._fsdp_models:
            if model.strategy.shards_optimizer:
                all_groups = model._mesh.all_groups()
                groups.update(dict.fromkeys(all_groups))
        if not groups:
            return
        states = []
        for key, sharded_param in sharded_params.items():
            if key in state:
                states.append((sharded_param, state[key]))
        name = _user_class(self).__name__
        refuse_local_state(name, states, list(groups))

    def _sharded_params(self) -> ParamsByKey:
        """Return the sharded parameters by their position in state dicts."""
        sharded_params = {}
        for position, parameter in enumerate(parameters_of(self)):
            if is_linked(parameter):
                sharded_params[position] = sharded_param_of(parameter)
        return sharded_params

    def _find_models(self) -> None:
        """Find the models of the parameters, and which of them no other optimizer steps."""
        parameters = parameters_of(self)
        self._fsdp_models = _models_of(self)
        self._fsdp_whole_models = []
        self._fsdp_ignored = []
        for parameter in parameters:
            if not is_linked(parameter):
                self._fsdp_ignored.append(parameter)
        for model in self._fsdp_models:
            model._has_optimizer = True
            trained = set()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    trained.add(parameter)
            if trained - model._ignored <= set(parameters):
                self._fsdp_whole_models.append(model)

    def _make_missing_state(self) -> None:
        kind = _user_class(self)
        for group in self.param_groups:
            # An empty entry shows that there is no state; torch's `get_state_dict` would otherwise
            # take a step to create it.
            has_none = elementwise_class(kind) is torch.optim.SGD and group["momentum"] == 0
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state.get(parameter):
                    param_state = initial_state(self, kind, group, parameter)
                    if param_state or has_none:
                        self.state[parameter] = param_state
        if self._fsdp_update is not None:
            self._fsdp_update.prepare(self)

    def _finish_communication(self, reduce: bool) -> None:
        for model in self._fsdp_models:
            # An all-gather under way, for another optimizer's step or for an unused unit, would
            # overwrite the new weights with the old ones.
            for group in model.groups:
                group.wait_for_readers()
            model._trainability.sync_requires_grad()
            if reduce:
                model.finish_grad_sync()


@Optimizer.profile_hook_step
def _step_of_update(
    optimizer: ShardedOptimizer,
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Run this library's update in place of the optimizer's own, with torch's hooks around it."""
    loss = None
    if closure is not None:
        loss = closure()
    assert optimizer._fsdp_update is not None
    optimizer._fsdp_update.step(optimizer)
    return loss


def shard_optimizer(optimizer: Optimizer, checkpoint_ready: bool = True) -> Optimizer:
    """Shard an optimizer over a sharded model's ``parameters()``, in place, and return it.

    The state of element-wise optimizers of torch is created at once, as checkpoints need it.

    Args:
        optimizer: its class becomes a subclass of :class:`ShardedOptimizer`.
        checkpoint_ready: make ``state_dict()`` ready for torch.distributed.checkpoint.

    Raises:
        ValueError: if a parameter belongs to no sharded model, or the optimizer is already sharded.
        NotImplementedError: for sparse gradients and differentiable updates.
    """
    kind = type(optimizer)
    if issubclass(kind, ShardedOptimizer):
        raise ValueError("the optimizer is sharded already")
    refuse_optimizer(optimizer)
    _refuse_unsharded(parameters_of(optimizer))
    names = []
    compared_names = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        names.append(_names(parameters))
        everywhere = [parameter for parameter in parameters if _is_everywhere(parameter)]
        compared_names.append(_names(everywhere))
    compared = compared_settings(optimizer, compared_names, "the optimizer")
    for model in _models_of(optimizer):
        refuse_differences(compared, data_groups(model._mesh))
    on_local = None
    if quantizes_state(kind):
        on_local = LocalUpdate(optimizer, kind)  # reads the class, which changes here
    _keep_scheduler(optimizer)
    bases = (ShardedOptimizer, kind)
    optimizer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    sharded = cast(ShardedOptimizer, optimizer)
    sharded._fsdp_checkpoint_ready = checkpoint_ready
    sharded._fsdp_logs_gathers = True
    known = elementwise_class(kind)
    if known is not None:
        sharded._fsdp_update = FlatUpdate(known)
    else:
        sharded._fsdp_update = on_local or owner_update(sharded, kind)
    sharded._find_models()
    for model in sharded._fsdp_models:
        refuse_state_in_files(kind, model._settings.offload)
    for group, own_names in zip(sharded.param_groups, names):
        group["param_names"] = own_names
    sharded._make_missing_state()
    return sharded


def swap_parameters(optimizer: Optimizer, model: ShardedModule) -> None:
    """Replace the module's parameters in an optimizer, and their state, by the sharded ones."""
    sharded_params = {sharded.compute: sharded for sharded in model.sharded_params}
    for parameter in parameters_of(optimizer):
        if is_linked(parameter):  # sharded before its class was replaced
            sharded_params[parameter] = sharded_param_of(parameter)
    known: set[Any] = {*sharded_params, *model._ignored}
    for sharded_param in sharded_params.values():
        known.add(sharded_param.parameter)
    _refuse_foreign_parameters(optimizer, known)
    for group in optimizer.param_groups:
        # In place: optimizers such as LBFGS have references to the list.
        parameters = group["params"]
        for position, parameter in enumerate(parameters):
            if parameter in sharded_params:
                parameters[position] = sharded_params[parameter].parameter
    unsharded = []
    states = []
    for key, param_state in optimizer.state.items():
        if isinstance(key, nn.Parameter) and key in sharded_params:
            unsharded.append(key)
            states.append((sharded_params[key], param_state))
    names = elementwise_names(states)
    # One parameter at a time: its whole state is freed before the next one is sharded.
    states.clear()
    for compute in unsharded:
        sharded_param = sharded_params[compute]
        param_state = optimizer.state.pop(compute)
        sharded_state = shard_param_state(sharded_param, param_state, names)
        optimizer.state[sharded_param.parameter] = sharded_state


# ---- checks


def list_of_optimizers(problems: Problems, given: Any) -> list[Any]:
    """Return a list of one optimizer or several, and check that no two step one parameter."""
    optimizers = [given]
    if isinstance(given, list | tuple):
        optimizers = list(given)
    counts = Counter[nn.Parameter]()
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            counts.update(set(parameters_of(optimizer)))
    shared = []
    for parameter, count in counts.items():
        if count > 1:
            shape = tuple(parameter.shape)
            shared.append(str(shape))
    if shared:
        problems.add(
            f"{len(shared)} parameters are in more than one optimizer, of the shapes"
            f" {', '.join(shared)}: give each of them to one"
        )
    return optimizers


def check_optimizer(
    problems: Problems,
    optimizer: Optimizer,
    which: str,
    module: nn.Module,
    settings: Settings,
) -> None:
    """Collect the reasons why an optimizer cannot be sharded, for arguments of any type.

    Args:
        problems: the collection.
        optimizer: the user's optimizer, which may be of another type.
        which: names the optimizer in messages.
        module: the module that is sharded with it, which may be of another type.
        settings: those with which the module is sharded.
    """
    problems.check(refuse_optimizer, optimizer)
    if not isinstance(optimizer, Optimizer):
        return
    kind = type(optimizer)
    if isinstance(module, nn.Module):  # otherwise the check of the module reports it
        parameters = set(module.parameters())
        problems.check(_refuse_foreign_parameters, optimizer, parameters)
        names = names_on_all_ranks(optimizer, module, settings)
        compared = compared_settings(optimizer, names, which)
        problems.compare(compared, lambda: data_groups(settings.checked_mesh))
    problems.check(refuse_state_in_files, kind, settings.offload)
    reads_grad = kind.__module__.startswith(("torch.optim", "torchao.optim"))
    if settings.gradients.are_decoupled and reads_grad:
        problems.add(
            "use_decoupled_grad puts gradients on param.decoupled_grad, which"
            f" {kind.__name__} does not read: it would not train. Leave it False, or"
            " pass a precision-aware optimizer"
        )


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise an error for what is no optimizer, or cannot be sharded with any model."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer expects a torch.optim.Optimizer but got {name}")
    if hasattr(optimizer, "param_d2h_map"):
        raise ValueError(
            f"{name} steps copies of its own: make it over the parameters() of the sharded model"
            " and use it as it is, or let Memory.offload='host' keep state and weights on the host"
        )
    own_step = vars(optimizer).get("step")  # learning-rate schedulers may replace it
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ValueError("the optimizer's step was replaced on the instance: shard it before that")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise NotImplementedError(f"{name} is for sparse gradients, which are not built: use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise NotImplementedError(
            f"{name} with differentiable=True would record its update through the weights: not"
            " built"
        )
    refuse_vectors(optimizer)


def _refuse_unsharded(parameters: list[nn.Parameter]) -> None:
    num_unsharded = sum(not is_owned(parameter) for parameter in parameters)
    if num_unsharded:
        raise ValueError(
            f"{num_unsharded} of the optimizer's {len(parameters)} parameters belong to no sharded"
            " model: take them from model.parameters() after fully_shard_model, or hand both to"
            " fully_shard"
        )


def _refuse_foreign_parameters(optimizer: Optimizer, known: set[Any]) -> None:
    num_foreign = sum(parameter not in known for parameter in parameters_of(optimizer))
    if num_foreign:
        raise ValueError(f"{num_foreign} parameters of the optimizer are none of the module's")


# ---- parts of optimizers


def _user_class(optimizer: Optimizer) -> OptimizerClass:
    """Return the user's class of a sharded optimizer."""
    bases = type(optimizer).__mro__
    user_class = next(base for base in bases if not issubclass(base, ShardedOptimizer))
    return cast(OptimizerClass, user_class)


def _models_of(optimizer: Optimizer) -> list[ShardedModule]:
    """List the models of an optimizer's parameters, in their order."""
    models = [owner_of(parameter) for parameter in parameters_of(optimizer)]
    return list(dict.fromkeys(models))


def _names(parameters: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of parameters in the wrapper."""
    return [owner_of(parameter)._name_of[parameter] for parameter in parameters]


def _is_everywhere(parameter: nn.Parameter) -> bool:
    """Return False for an expert that some data ranks do not have, and for ignored parameters."""
    if not is_linked(parameter):
        return False
    communicator = sharded_param_of(parameter).group.communicator
    return communicator.num_ranks >= owner_of(parameter)._mesh.dense.num_data_ranks


def _keep_scheduler(optimizer: Optimizer) -> None:
    """Let a learning-rate scheduler from before sharding see the steps of the new class."""
    if "step" not in vars(optimizer):
        return  # else it has wrapped the step of the old class and put it on the instance

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_opt_called"] = True  # without it the scheduler warns about a wrong order
        return type(self).step(self, *args, **kwargs)

    vars(step)["_wrapped_by_lr_sched"] = True
    vars(optimizer)["step"] = step.__get__(optimizer)
