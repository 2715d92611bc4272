# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters: any torch optimizer whose update is element-wise, exactly as it is."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.model import MegatronFSDP
from megatron.fsdp.sharded_param import ShardedParam

# Why an optimizer cannot work on pieces: the updates of most of these look at whole rows, matrices or the whole model.
_WHOLE = "needs whole matrices or the whole model, but ranks hold pieces of them: not built yet"
NOT_ELEMENT_WISE = dict.fromkeys(("Adafactor", "Muon", "Shampoo", "LBFGS", "SOAP"), _WHOLE) | {
    "Rprop": "assigns by index, which torch's DTensors cannot do",
}

COUNTERS = ("step", "mu_product")  # state of a parameter as a whole, which a scalar parameter's shape cannot tell apart


class ShardedOptimizer(torch.optim.Optimizer):
    """What sharding adds to an optimizer; mixed into its class by :func:`shard_optimizer`."""

    _fsdp_models: list[MegatronFSDP]
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
            install_optimized_model_weights: False leaves compute weights of another dtype as they are until
                ``model.install_optimized_model_weights()``. Where the dtypes agree they are the same tensors.
        """

        def synchronised_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._finish_grad_sync(sync_grad_before_optimizer_step)
            return loss

        self._finish_grad_sync(sync_grad_before_optimizer_step)
        loss = super().step() if closure is None else super().step(synchronised_closure)
        for model in self._fsdp_models:
            model.install_optimized_model_weights(only_shared=not install_optimized_model_weights)
            model.start_param_sync()
        return loss

    def zero_grad(self, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        """Clear ``param.grad`` and, if ``zero_grad_buffer``, the accumulation buffers behind it."""
        super().zero_grad(set_to_none)
        if zero_grad_buffer:
            for model in self._fsdp_models:
                model.zero_grad_buffer()
                if not set_to_none:
                    model.attach_grad_to_optimizer_state()  # zeros

    def state_dict(self) -> dict[str, Any]:
        """torch's structure with ``param_names`` in every group; tensors are DTensors that torch's checkpoint takes."""
        state = super().state_dict()
        if self._fsdp_checkpoint_ready:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            state["state"] = {
                position: _checkpoint_slots(parameters[position], slots) for position, slots in state["state"].items()
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer over parameters of the same names, full tensors or DTensors.

        Raises:
            ValueError: where the names or shapes do not agree.
        """
        _check_names(self.param_groups, state_dict["param_groups"])
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # Numbers, or the names that torch's `set_state_dict` puts in their place.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameter_of = dict(zip(saved, parameters))
        state = {
            key: _local_slots(parameter_of[key], slots) if key in parameter_of else slots
            for key, slots in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def _finish_grad_sync(self, wanted: bool) -> None:
        if wanted:
            for model in self._fsdp_models:
                model.finish_grad_sync()


def shard_optimizer(optimizer: torch.optim.Optimizer, checkpoint_ready: bool = True) -> torch.optim.Optimizer:
    """Make an optimizer over a sharded model's ``parameters()`` reduce, install and save; in place.

    Its class becomes a subclass of what it was. Its state exists at once, so that a checkpoint can be loaded into it.

    Raises:
        ValueError: where a parameter belongs to no sharded model.
        NotImplementedError: for optimizers whose update is not element-wise.
    """
    kind = type(optimizer)
    if issubclass(kind, ShardedOptimizer):
        raise ValueError("the optimizer is sharded already")
    refuse_optimizer(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(1 for parameter in parameters if not hasattr(parameter, "_fsdp_model"))
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's {len(parameters)} parameters belong to no sharded model:"
            " make it on model.parameters() after fully_shard_model, or hand both to fully_shard"
        )
    optimizer._fsdp_models = list(dict.fromkeys(parameter._fsdp_model for parameter in parameters))
    optimizer._fsdp_checkpoint_ready = checkpoint_ready
    optimizer.__class__ = type(kind.__name__, (ShardedOptimizer, kind), {"__module__": kind.__module__})
    _keep_scheduler(optimizer)
    for group in optimizer.param_groups:
        group["param_names"] = ["module." + parameter._fsdp_sharded.name for parameter in group["params"]]
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                optimizer.state[parameter] = initial_state(optimizer, group, parameter)
    return optimizer


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``NotImplementedError`` for optimizers that cannot work on pieces of matrices."""
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in NOT_ELEMENT_WISE), None)
    if name:
        raise NotImplementedError(
            f"{name} {NOT_ELEMENT_WISE[name]}. Use AdamW, Adam, SGD, RMSprop, Adagrad or another element-wise one"
        )


def swap_parameters(optimizer: torch.optim.Optimizer, model: MegatronFSDP) -> None:
    """Replace the module's parameters in an optimizer by the sharded ones, with its groups and state.

    Raises:
        ValueError: where a parameter of the optimizer is none of the module's; nothing is changed then.
    """
    sharded = {member.compute: member for member in model.sharded_params}
    own = {member.parameter for member in sharded.values()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(1 for parameter in parameters if parameter not in sharded and parameter not in own)
    if strangers:
        raise ValueError(f"{strangers} of the optimizer's {len(parameters)} parameters are none of the module's")
    for group in optimizer.param_groups:
        group["params"] = [_sharded(sharded, parameter) for parameter in group["params"]]
    for parameter in [key for key in optimizer.state if key in sharded]:
        member = sharded[parameter]
        slots = optimizer.state.pop(parameter)
        optimizer.state[member.parameter] = {
            name: member.sharded_like(value) if _is_slot(name, value, member) else value
            for name, value in slots.items()
        }


def _sharded(sharded: dict[nn.Parameter, ShardedParam], parameter: nn.Parameter) -> nn.Parameter:
    return sharded[parameter].parameter if parameter in sharded else parameter


def initial_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The state that the optimizer's first step would make, before that step: zero moments, step 0.

    Empty for optimizers not known here; they make their state at the first step.
    """

    def zeros() -> torch.Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    step_device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=step_device)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        return {"step": step, **{name: zeros() for name in names}}
    if isinstance(optimizer, torch.optim.RMSprop):
        names = ["square_avg"] + (["momentum_buffer"] if group["momentum"] > 0 else [])
        names += ["grad_avg"] if group["centered"] else []
        return {"step": step, **{name: zeros() for name in names}}
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0:
        # With dampening torch's first step differs from one that finds a buffer of zeros.
        return {"momentum_buffer": zeros()}
    return {}


def _keep_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """A learning-rate scheduler made before sharding has wrapped the old class' step on the instance."""
    wrapped = optimizer.__dict__.pop("step", None)
    if wrapped is None:
        return

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what the scheduler looks at to warn about a wrong order
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step.__get__(optimizer)


def _is_slot(name: str, value: Any, member: ShardedParam) -> bool:
    """Whether a piece of optimizer state is element-wise, not a counter."""
    if name in COUNTERS or not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, DTensor) or tuple(value.shape) == member.run.shape


def _checkpoint_slots(parameter: nn.Parameter, slots: dict[str, Any]) -> dict[str, Any]:
    member: ShardedParam = parameter._fsdp_sharded
    return {
        name: member.checkpoint_tensor(value) if isinstance(value, DTensor) else value for name, value in slots.items()
    }


def _local_slots(parameter: nn.Parameter, slots: dict[str, Any]) -> dict[str, Any]:
    member: ShardedParam = parameter._fsdp_sharded
    return {
        name: member.sharded_like(value) if _is_slot(name, value, member) else value for name, value in slots.items()
    }


def _check_names(groups: list[dict], saved: list[dict]) -> None:
    for number, (group, other) in enumerate(zip(groups, saved)):
        if other.get("param_names") is None:
            continue
        # Those of an optimizer over the unsharded model have no wrapper in front.
        names, own = ([name.removeprefix("module.") for name in each["param_names"]] for each in (other, group))
        if names != own:
            different = sorted(set(names) ^ set(own)) or "the same names in another order"
            raise ValueError(f"param_groups[{number}] of the state dict is for other parameters: {different}")
