# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer over sharded parameters: first values, sharding, and state dicts.

A *slot* is an entry of the state of one parameter. It is element-wise (a moment: one value for each
element of the parameter, sharded like it) or one value for the whole parameter (a step count).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.optimizer.elementwise import OptimizerClass, state_names, torch_class

Slots = dict[str, Any]
"""The state of one parameter, by name."""

COUNTERS = ("step", "mu_product", "eta", "mu")
"""Slots that are not element-wise; shapes do not show it if all parameters have one element."""


def initial_state(
    optimizer: torch.optim.Optimizer,
    kind: OptimizerClass,
    group: dict[str, Any],
    parameter: nn.Parameter,
) -> Slots:
    """Return the state that the first step would create, before that step: zero moments, step 0.

    It is empty for optimizers that must create it at the first step: SGD with dampening, whose
    first step differs from one that finds state; ASGD and Rprop, which keep the learning rate of
    the first step; and optimizers that are not torch's.

    Args:
        optimizer: the optimizer; its defaults are read.
        kind: the user's class, before sharding.
        group: the param group of ``parameter``.
        parameter: a sharded parameter.
    """
    known = torch_class(kind)
    names = state_names(known, group)
    if not names:
        return {}
    slots: Slots = {}
    if known is not torch.optim.SGD:  # all others count steps
        is_on_device = group.get("capturable") or group.get("fused")
        is_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        dtype = torch.float64 if is_double else torch.float32
        device = parameter.device if is_on_device else torch.device("cpu")
        slots["step"] = torch.zeros((), dtype=dtype, device=device)
        if known is torch.optim.NAdam:
            slots["mu_product"] = torch.ones((), dtype=dtype, device=device)
    for name in names:
        value = optimizer.defaults["initial_accumulator_value"] if name == "sum" else 0.0
        slots[name] = torch.full_like(parameter, value, memory_format=torch.preserve_format)
    return slots


def makes_state_late(kind: OptimizerClass, group: dict[str, Any]) -> bool:
    """Return True for an optimizer of torch that has state, but none before its first step."""
    known = torch_class(kind)
    if known is torch.optim.SGD:
        return bool(group["momentum"] and group["dampening"])
    return known in (torch.optim.ASGD, torch.optim.Rprop)


def elementwise_names(states: Iterable[tuple[ShardedParam, Slots]]) -> set[str]:
    """Return the names of the slots whose tensors have the shapes of their parameters.

    Parameters of one element are left out, because step counts may have the same shape.
    """
    names = set()
    for sharded_param, slots in states:
        shape = sharded_param.flat_range.shape
        if prod(shape) == 1:
            continue
        for name, value in slots.items():
            is_tensor = isinstance(value, torch.Tensor)
            if isinstance(value, DTensor) or (is_tensor and tuple(value.shape) == shape):
                names.add(name)
    return names


def shard_slots(sharded_param: ShardedParam, slots: Slots, names: set[str]) -> Slots:
    """Return ``slots`` with this rank's shard, as a DTensor, of every element-wise tensor.

    Args:
        sharded_param: the parameter that the state belongs to.
        slots: full tensors, DTensors and other values.
        names: the result of :func:`elementwise_names` for all parameters of the optimizer.

    Raises:
        ValueError: if the shape of a tensor is not the parameter's.
    """
    return {
        name: sharded_param.sharded_like(value)
        if _is_elementwise(name, value, sharded_param, names)
        else value
        for name, value in slots.items()
    }


def _is_elementwise(name: str, value: Any, sharded_param: ShardedParam, names: set[str]) -> bool:
    if isinstance(value, DTensor):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    if names or prod(sharded_param.flat_range.shape) > 1:
        return name in names
    return name not in COUNTERS


def checkpoint_slots(sharded_param: ShardedParam, slots: Slots) -> Slots:
    """Return ``slots`` with every DTensor in a form that torch's checkpoint can save and load."""
    return {
        name: sharded_param.checkpoint_tensor(value) if isinstance(value, DTensor) else value
        for name, value in slots.items()
    }


def match_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved param groups, and the parameters in each, in the order of ``groups``, by name.

    Without names in ``saved`` they are returned unchanged, and matched by position, as in torch.

    Raises:
        ValueError: if a group does not have the same parameters.
    """
    if any(group.get("param_names") is None for group in saved):
        return saved
    own_names = [group["param_names"] for group in groups]
    all_own = _all_names(own_names)
    saved_names = [_names_with_prefix(group, all_own) for group in saved]
    if saved_names == own_names:
        return [{**group, "param_names": names} for names, group in zip(own_names, saved)]
    keys = [dict(zip(names, group["params"])) for names, group in zip(saved_names, saved)]
    matched = []
    for number, names in enumerate(own_names):
        found = [position for position, each in enumerate(keys) if each.keys() == set(names)]
        if len(found) != 1 or len(names) != len(keys[found[0]]):
            different = sorted(all_own ^ _all_names(saved_names))
            raise ValueError(
                f"param_groups[{number}] is over other parameters in the state dict: "
                + (", ".join(different) or "the same names are grouped in another way")
            )
        (position,) = found
        params = [keys[position][name] for name in names]
        matched.append({**saved[position], "param_names": names, "params": params})
    return matched


def _all_names(names_of_groups: list[list[str]]) -> set[str]:
    return set().union(*names_of_groups)


def _names_with_prefix(group: dict[str, Any], own: set[str]) -> list[str]:
    """Return a saved group's names with the wrapper's prefix ``module.``.

    An optimizer over the unsharded model has saved them without it.
    """
    # torch's `set_state_dict` replaces numbers by names, in the order of our group, and does not
    # change `param_names`.
    is_by_name = group["params"] and all(isinstance(key, str) for key in group["params"])
    names = group["params"] if is_by_name else group["param_names"]
    return [
        "module." + name if name not in own and "module." + name in own else name for name in names
    ]
