# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters: any torch optimizer whose update is element-wise, exactly as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.elementwise import OnLocalParts, state_names, torch_class, why_not_elementwise
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.model import MegatronFSDP

COUNTERS = ("step", "mu_product", "eta", "mu")
"""State of a parameter as a whole, for optimizers that hold nothing but parameters of one element."""


class ShardedOptimizer(torch.optim.Optimizer):
    """What sharding adds to an optimizer; mixed into its class by :func:`shard_optimizer`."""

    _fsdp_models: list[MegatronFSDP]
    _fsdp_whole_models: list[MegatronFSDP]  # those whose other parameters nobody trains
    _fsdp_checkpoint_ready: bool

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
    ) -> Any:
        """Finish reductions, update the main weights, put them into the compute weights.

        Args:
            closure: as in torch; its gradients are reduced too.
            sync_grad_before_optimizer_step: reduce what is not reduced yet.
            install_optimized_model_weights: False leaves compute weights of another dtype as they
                are until ``model.install_optimized_model_weights()``. Where the dtypes agree they
                are the same tensors.
        """
        parts = OnLocalParts()

        def synchronised_closure() -> Any:
            with parts.paused():
                with torch.enable_grad():
                    loss = closure()
                self._finish_communication(sync_grad_before_optimizer_step)
            return loss

        self._finish_communication(sync_grad_before_optimizer_step)
        with parts:
            loss = super().step() if closure is None else super().step(synchronised_closure)
        for model in self._fsdp_models:
            model.install_optimized_model_weights(
                only_shared=not install_optimized_model_weights, only_trainable=True
            )
            model.start_param_sync()
        return loss

    step.hooked = (
        True  # torch's hooks run in the wrapped step; it would put them around this one too
    )

    def zero_grad(self, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        """Clear ``param.grad`` and, if ``zero_grad_buffer``, the accumulation buffers behind it.

        Gradients of parameters that other optimizers hold stay, as in torch.
        """
        shared = [model for model in self._fsdp_models if model not in self._fsdp_whole_models]
        if zero_grad_buffer:
            for model in shared:
                self._zero_own_pieces(model)
        super().zero_grad(set_to_none)
        if zero_grad_buffer:
            for model in self._fsdp_whole_models:
                model.zero_grad_buffer()
                if not set_to_none:
                    model.attach_grad_to_optimizer_state()  # zeros

    def _zero_own_pieces(self, model: MegatronFSDP) -> None:
        model.finish_grad_sync()  # what is not reduced yet would come back
        for member in self._members():
            if member.parameter._fsdp_model is model:
                group = member.group
                shard_view(group.gradients.shard, group.layout, member.index, group.rank).zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with parameters of sharded models; their state exists at once.

        Raises:
            ValueError: where a parameter belongs to no sharded model.
            NotImplementedError: where the group's settings make the update one that is not
                element-wise.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else given
        if not isinstance(given, set):  # which torch refuses
            parameters = [each[1] if isinstance(each, tuple) else each for each in given]
            _refuse_strangers(parameters)
            param_group = {**param_group, "params": parameters, "param_names": _names(parameters)}
            _refuse(_user_class(self), self.defaults, [param_group])
        super().add_param_group(param_group)
        self._look_at_models()
        self._make_missing_state()

    def state_dict(self) -> dict[str, Any]:
        """Torch's structure with ``param_names`` in every group; tensors are DTensors that torch's checkpoint takes."""
        state = super().state_dict()
        if self._fsdp_checkpoint_ready:
            members = self._members()
            state["state"] = {
                position: _checkpoint_slots(members[position], slots)
                for position, slots in state["state"].items()
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer over parameters of the same names, full tensors or DTensors.

        With names in it, groups and parameters may come in another order; without, positions count,
        as in torch.

        Raises:
            ValueError: where names, groups or shapes do not agree; nothing is changed then.
        """
        groups = _matched_groups(self.param_groups, state_dict["param_groups"])
        # Numbers, or the names that torch's `set_state_dict` puts in their place.
        saved = [key for group in groups for key in group["params"]]
        member_of = dict(zip(saved, self._members()))
        pairs = [
            (member_of[key], slots)
            for key, slots in state_dict["state"].items()
            if key in member_of
        ]
        own = [
            (parameter._fsdp_sharded, slots)
            for parameter, slots in self.state.items()
            if isinstance(parameter, nn.Parameter)
        ]
        names = _elementwise_names(pairs + own)
        state = {
            key: _local_slots(member_of[key], slots, names) if key in member_of else slots
            for key, slots in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "param_groups": groups, "state": state})
        self._make_missing_state()  # where the other had not stepped yet

    def _members(self) -> list[ShardedParam]:
        return [
            parameter._fsdp_sharded for group in self.param_groups for parameter in group["params"]
        ]

    def _look_at_models(self) -> None:
        """Find the models of the parameters, and which of them have no other parameters to train."""
        own = {member.parameter: member.parameter._fsdp_model for member in self._members()}
        self._fsdp_models = list(dict.fromkeys(own.values()))
        self._fsdp_whole_models = [
            model
            for model in self._fsdp_models
            if all(parameter in own for parameter in model.parameters() if parameter.requires_grad)
        ]

    def _make_missing_state(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state.get(parameter):
                    slots = initial_state(self, group, parameter)
                    # An entry without state says that there is none: torch's `get_state_dict` would
                    # take a step to see.
                    if slots or (
                        torch_class(_user_class(self)) is torch.optim.SGD and group["momentum"] == 0
                    ):
                        self.state[parameter] = slots

    def _finish_communication(self, reduce: bool) -> None:
        for model in self._fsdp_models:
            # A gather that is under way, of another optimizer's step or of an unused unit, writes
            # the old weights back.
            model.synchronize_param_gather()
            if reduce:
                model.finish_grad_sync()


def shard_optimizer(
    optimizer: torch.optim.Optimizer, checkpoint_ready: bool = True
) -> torch.optim.Optimizer:
    """Make an optimizer over a sharded model's ``parameters()`` reduce, install and save; in place.

    Its class becomes a subclass of what it was. The state of torch's optimizers exists at once, so
    that a checkpoint can be loaded into it; see :func:`initial_state` for those that make theirs at
    the first step.

    Raises:
        ValueError: where a parameter belongs to no sharded model.
        NotImplementedError: for optimizers whose update is not element-wise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer expects a torch.optim.Optimizer but got {type(optimizer).__name__}"
        )
    refuse_own_step(optimizer)
    kind = type(optimizer)
    if issubclass(kind, ShardedOptimizer):
        raise ValueError("the optimizer is sharded already")
    refuse_optimizer(optimizer)
    _refuse_strangers(
        [parameter for group in optimizer.param_groups for parameter in group["params"]]
    )
    _keep_scheduler(optimizer)
    optimizer._fsdp_checkpoint_ready = checkpoint_ready
    optimizer.__class__ = type(
        kind.__name__, (ShardedOptimizer, kind), {"__module__": kind.__module__}
    )
    optimizer._look_at_models()
    for group in optimizer.param_groups:
        group["param_names"] = _names(group["params"])
    optimizer._make_missing_state()
    return optimizer


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``NotImplementedError`` for optimizers that cannot work on pieces of matrices."""
    if isinstance(
        optimizer, torch.optim.Optimizer
    ):  # what is none is refused with all other wrong arguments
        _refuse(_user_class(optimizer), optimizer.defaults, optimizer.param_groups)


def _refuse(kind: type, defaults: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    reason = why_not_elementwise(kind, defaults, groups)
    if reason:
        raise NotImplementedError(
            f"{kind.__name__} {reason}. Use AdamW, Adam, SGD, RMSprop, Adagrad or another"
            " element-wise optimizer"
        )


def _refuse_strangers(parameters: list[nn.Parameter]) -> None:
    strangers = sum(1 for parameter in parameters if not hasattr(parameter, "_fsdp_model"))
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's {len(parameters)} parameters belong to no sharded"
            " model: take them from model.parameters() after fully_shard_model, or hand both to"
            " fully_shard"
        )


def _user_class(optimizer: torch.optim.Optimizer) -> type:
    """The optimizer's class without what sharding has added."""
    return next(base for base in type(optimizer).__mro__ if not issubclass(base, ShardedOptimizer))


def _names(parameters: Iterable[nn.Parameter]) -> list[str]:
    return ["module." + parameter._fsdp_sharded.name for parameter in parameters]


def swap_parameters(optimizer: torch.optim.Optimizer, model: MegatronFSDP) -> None:
    """Replace the module's parameters in an optimizer by the sharded ones, with its groups and state.

    Raises:
        ValueError: where a parameter of the optimizer is none of the module's; nothing is changed
            then.
    """
    sharded = {member.compute: member for member in model.sharded_params}
    own = {member.parameter for member in sharded.values()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(
        1 for parameter in parameters if parameter not in sharded and parameter not in own
    )
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's {len(parameters)} parameters are none of the module's"
        )
    for group in optimizer.param_groups:
        group["params"] = [
            sharded[each].parameter if each in sharded else each for each in group["params"]
        ]
    unsharded = [parameter for parameter in optimizer.state if parameter in sharded]
    names = _elementwise_names(
        (sharded[parameter], optimizer.state[parameter]) for parameter in unsharded
    )
    for parameter in unsharded:  # one by one: whole state is freed as it is replaced by pieces
        member = sharded[parameter]
        optimizer.state[member.parameter] = _local_slots(
            member, optimizer.state.pop(parameter), names
        )


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """The state that the optimizer's first step would make, before that step: zero moments, step 0.

    Empty for those that make it at the first step: SGD with dampening, whose first step differs
    from one that finds state; ASGD and Rprop, which keep the learning rate of the first step; and
    optimizers that are not torch's.
    """
    kind = torch_class(_user_class(optimizer))
    names = state_names(kind, group)
    if not names:
        return {}
    state = {}
    if kind is not torch.optim.SGD:  # all others count steps
        on_device = group.get("capturable") or group.get("fused")
        double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        place = {
            "dtype": torch.float64 if double else torch.float32,
            "device": parameter.device if on_device else "cpu",
        }
        state["step"] = torch.zeros((), **place)
        if kind is torch.optim.NAdam:
            state["mu_product"] = torch.ones((), **place)
    for name in names:
        value = optimizer.defaults["initial_accumulator_value"] if name == "sum" else 0.0
        state[name] = torch.full_like(parameter, value, memory_format=torch.preserve_format)
    return state


def refuse_own_step(optimizer: Any) -> None:
    """``ValueError`` where the ``step`` of an instance has been replaced by anything but a learning-rate scheduler."""
    own = getattr(optimizer, "__dict__", {}).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ValueError(
            "the optimizer's step has been replaced on the instance: shard the optimizer before"
            " that"
        )


def _keep_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """A learning-rate scheduler made before sharding has wrapped the old class' step on the instance."""
    wrapped = optimizer.__dict__.get("step")
    if wrapped is None:
        return
    del optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what the scheduler looks at to warn about a wrong order
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step.__get__(optimizer)


def _elementwise_names(states: Iterable[tuple[ShardedParam, dict[str, Any]]]) -> set[str]:
    """Names of state that has one value for each element of a parameter, not one for all."""
    return {
        name
        for member, slots in states
        if prod(member.flat_range.shape) > 1
        for name, value in slots.items()
        if isinstance(value, DTensor)
        or (isinstance(value, torch.Tensor) and tuple(value.shape) == member.flat_range.shape)
    }


def _is_slot(name: str, value: Any, member: ShardedParam, names: set[str]) -> bool:
    """Whether a piece of optimizer state is element-wise, not a counter."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return isinstance(value, DTensor)
    return name in names if names or prod(member.flat_range.shape) > 1 else name not in COUNTERS


def _local_slots(member: ShardedParam, slots: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {
        name: member.sharded_like(value) if _is_slot(name, value, member, names) else value
        for name, value in slots.items()
    }


def _checkpoint_slots(member: ShardedParam, slots: dict[str, Any]) -> dict[str, Any]:
    return {
        name: member.checkpoint_tensor(value) if isinstance(value, DTensor) else value
        for name, value in slots.items()
    }


def _matched_groups(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups and their parameters in the order of ``groups``, by name; as they are without names."""
    if any(group.get("param_names") is None for group in saved):
        return saved
    own = [group["param_names"] for group in groups]
    others = [_with_prefix(group, {name for names in own for name in names}) for group in saved]
    if others == own:
        return [{**other, "param_names": names} for names, other in zip(own, saved)]
    key_of = [dict(zip(names, group["params"])) for names, group in zip(others, saved)]
    matched = []
    for number, names in enumerate(own):
        found = [place for place, keys in enumerate(key_of) if keys.keys() == set(names)]
        if len(found) != 1 or len(names) != len(key_of[found[0]]):
            different = sorted(
                {name for each in own for name in each} ^ {name for each in others for name in each}
            )
            raise ValueError(
                f"param_groups[{number}] is over other parameters in the state dict: "
                + (", ".join(different) or "the same names are grouped in another way")
            )
        matched.append(
            {
                **saved[found[0]],
                "param_names": names,
                "params": [key_of[found[0]][name] for name in names],
            }
        )
    return matched


def _with_prefix(group: dict[str, Any], own: set[str]) -> list[str]:
    """A saved group's names as the wrapper has them; an optimizer over the unsharded model knows of no wrapper."""
    # torch's `set_state_dict` puts names in the place of numbers, in the order of our group, and
    # leaves `param_names`.
    by_name = group["params"] and all(isinstance(key, str) for key in group["params"])
    names = group["params"] if by_name else group["param_names"]
    return [
        name if name in own or "module." + name not in own else "module." + name for name in names
    ]
