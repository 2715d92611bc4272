# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer over sharded parameters: first values, sharding, and state dicts."""

# An entry of the state of one parameter is element-wise (a moment, sharded like the parameter), or
# one value (a step count), or what else an optimizer keeps, which is the same on all ranks.

from __future__ import annotations

import hashlib
import inspect
import io
from collections import Counter, OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.loops_in_c import concatenated
from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.optimizer.host_state import moved, new_moment

OptimizerClass = type[Optimizer]

GroupSettings = dict[str, Any]  # the settings of a param group, by name
ParamState = dict[str, Any]  # the state of one parameter, by name
States = Sequence[tuple[ShardedParam, ParamState]]  # parameters with their state
Params = Sequence[Sequence[torch.Tensor]]  # tensors to update, of each param group

_ADAM = ("exp_avg", "exp_avg_sq")

# Optimizers of torch whose update is element-wise, which step on flat tensors, with the names of
# the moments that they always have, in torch's order.
ELEMENTWISE: dict[OptimizerClass, tuple[str, ...]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: _ADAM,
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: ("exp_avg", "exp_inf"),
    torch.optim.Adadelta: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: ("sum",),
    torch.optim.RMSprop: ("square_avg",),
    torch.optim.SGD: (),
    # These two have state, which only their first step can create.
    torch.optim.ASGD: (),
    torch.optim.Rprop: (),
}

# The setting with which an optimizer has one more moment, and the moment's name.
_MORE_MOMENTS: dict[OptimizerClass, dict[str, str]] = {
    torch.optim.Adam: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.AdamW: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.RMSprop: {"momentum": "momentum_buffer", "centered": "grad_avg"},
    torch.optim.SGD: {"momentum": "momentum_buffer"},
}

# Entries that are not element-wise; shapes do not show it if all parameters have one element.
COUNTERS = ("step", "mu_product", "eta", "mu")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return concatenated([group["params"] for group in optimizer.param_groups])


def elementwise_class(kind: OptimizerClass) -> OptimizerClass | None:
    """Return the class in :data:`ELEMENTWISE` of which ``kind`` inherits the update, or None."""
    for known in kind.__mro__:
        if known not in ELEMENTWISE:
            continue
        # torch wraps the `step` of a class when its first instance is created.
        own_step = inspect.unwrap(kind.step)
        if own_step is not inspect.unwrap(known.step):
            return None
        # `_init_group` creates the state of a parameter at the first step.
        own_init = getattr(kind, "_init_group", None)
        if own_init is not getattr(known, "_init_group", None):
            return None
        return known
    return None


def _initial_moments(known: OptimizerClass, group: GroupSettings) -> list[str]:
    """Return the names of the moments that can exist before the first step."""
    # The first step with dampening differs from one that finds state, and the next two keep the
    # learning rate of the first step: it must create their state.
    if known is torch.optim.SGD and group["dampening"] != 0:
        return []
    names = list(ELEMENTWISE[known])
    more = _MORE_MOMENTS.get(known, {})
    for setting, name in more.items():
        if group[setting]:
            names.append(name)
    return names


def initial_state(
    optimizer: Optimizer,
    kind: OptimizerClass,
    group: GroupSettings,
    parameter: nn.Parameter,
) -> ParamState:
    """Return the state that the first step would create; none if only that step can do so.

    Args:
        optimizer: has the settings that are not in its groups.
        kind: the user's class of the optimizer.
        group: the param group of the parameter.
        parameter: a parameter, whose placements, dtype and device the moments get.
    """
    known = elementwise_class(kind)
    if known is None:
        return {}
    names = _initial_moments(known, group)
    if not names:
        return {}
    param_state: ParamState = {}
    if known is not torch.optim.SGD:  # all others count steps
        dtype = torch.float32
        if not group.get("fused") and torch.get_default_dtype() == torch.float64:
            dtype = torch.float64
        device = torch.device("cpu")
        if has_counters_on_device(group):
            device = parameter.device
        zero = torch.zeros((), dtype=dtype, device=device)
        param_state["step"] = zero
        if known is torch.optim.NAdam:
            param_state["mu_product"] = torch.ones_like(zero)
    value = 0.0
    if known is torch.optim.Adagrad:
        value = optimizer.defaults["initial_accumulator_value"]
    for name in names:
        param_state[name] = new_moment(parameter, value)
    return param_state


def has_counters_on_device(group: GroupSettings) -> bool:
    """Return True if counters of a param group are on the device of its parameters."""
    return bool(group.get("capturable") or group.get("fused"))


def makes_state_late(kind: OptimizerClass, group: GroupSettings) -> bool:
    """Return True for an optimizer of torch that has state, but none before its first step."""
    known = elementwise_class(kind)
    if known is None:
        return False
    if known is torch.optim.SGD and group["momentum"] == 0:
        return False
    return not _initial_moments(known, group)


# ---- sharding and state dicts


def elementwise_names(states: States) -> set[str]:
    """Return the names of the entries that are sharded like their parameters."""
    # They are DTensors for some parameter, or have the shape of the parameter for all of them. A
    # tensor of size 1 in some dims of its parameter is a statistic, such as Adafactor's of columns:
    # for a matrix of one row, and for no other, it has the shape of the matrix. Parameters of one
    # element are left out, because step counts may have the same shape.
    sharded = set()
    fitting = set()
    others = set()
    statistics = set()
    for sharded_param, param_state in states:
        shape = sharded_param.flat_range.shape
        if prod(shape) <= 1:
            continue
        for name, value in param_state.items():
            if _is_like(value, sharded_param):
                sharded.add(name)
            elif not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            elif value.shape == shape:
                fitting.add(name)
            else:
                others.add(name)
                if _is_of_some_dims(value.shape, shape):
                    statistics.add(name)
    return (sharded - statistics) | (fitting - others)


def _is_of_some_dims(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return True for the shape of a tensor with its size in some dims and 1 in the others."""
    if len(shape) != len(whole):
        return False
    return all(size in (1, full) for size, full in zip(shape, whole))


def shard_param_state(
    sharded_param: ShardedParam,
    param_state: ParamState,
    names: set[str],
) -> ParamState:
    """Return the state of a parameter with shards in place of element-wise tensors.

    Args:
        sharded_param: the parameter.
        param_state: whole tensors, or DTensors that are divided in any way; not changed.
        names: those of the element-wise entries, from :func:`elementwise_names`.

    Raises:
        ValueError: if a tensor does not have the parameter's shape.
    """
    sharded = {}
    for name, value in param_state.items():
        if _is_elementwise(name, value, sharded_param, names):
            shard = sharded_param.sharded_like(value)
            value = moved(shard, sharded_param.parameter)
        sharded[name] = value
    return sharded


def _is_elementwise(
    name: str,
    value: Any,
    sharded_param: ShardedParam,
    names: set[str],
) -> bool:
    if isinstance(value, DTensor):
        return _is_like(value, sharded_param)
    if not isinstance(value, torch.Tensor):
        return False
    if names or prod(sharded_param.flat_range.shape) > 1:
        return name in names
    return name not in COUNTERS


def _is_like(value: Any, sharded_param: ShardedParam) -> bool:
    """Return True for a DTensor of the shape of a parameter, or of its checkpoint entry."""
    if not isinstance(value, DTensor):
        return False
    if value.shape == sharded_param.slice.shape:
        return True
    return value.shape == sharded_param.parameter.shape


def checkpoint_param_state(
    sharded_param: ShardedParam,
    param_state: ParamState,
) -> ParamState:
    """Return ``param_state`` with sharded tensors in the form of torch's checkpoint."""
    converted = {}
    for name, value in param_state.items():
        if isinstance(value, UnevenDTensor) and _is_like(value, sharded_param):
            value = sharded_param.checkpoint_tensor(value)
        converted[name] = value
    return converted


def refuse_local_state(
    optimizer: str,
    states: States,
    groups: list[dist.ProcessGroup],
) -> None:
    """Raise an error if ranks have different state where a checkpoint has one copy; a collective.

    Args:
        optimizer: the name of its class, for the message.
        states: the state of each parameter.
        groups: process groups which together reach all ranks.

    Raises:
        ValueError: on every rank, if an entry differs on any.
    """
    # A checkpoint has one copy of an entry that is no DTensor: that of any rank.
    entries = []
    for sharded_param, param_state in states:
        mesh = sharded_param.parameter.device_mesh.mesh.tolist()  # others have other experts
        for name, value in param_state.items():
            leaves = [_content(leaf) for leaf in tree_leaves(value)]
            content = "\0".join(leaves)
            entries.append(f"{sharded_param.name}[{name!r}]\0{mesh}\0{content}")
    found = [text.split("\0") for text in agree(entries, groups)]
    counts = Counter((text[0], text[1]) for text in found)
    different = []
    for name, on_mesh, shape, *_ in found:
        if counts[name, on_mesh] > 1:
            different.append(f"{name} {shape}")
    if different:
        raise ValueError(
            f"{optimizer} has state that is each rank's own, and a checkpoint would have one rank's"
            f" copy: {'; '.join(different[:4])}. Keep it in tensors like the parameter"
            " (torch.zeros_like(parameter)), or compute it by operations on the parameter and its"
            " gradient, not on to_local(), so that all ranks have the same"
        )


def _content(value: Any) -> str:
    """Return a text that is the same on all ranks if a checkpoint can have one copy of a value."""
    if isinstance(value, int | float | str):
        return repr(value)
    if not isinstance(value, torch.Tensor):
        return ""
    shape = tuple(value.shape)
    if isinstance(value, DTensor):
        if isinstance(value, UnevenDTensor):
            return f"{shape}"
        even_shape, _ = compute_local_shape_and_global_offset(
            shape,
            value.device_mesh,
            value.placements,
        )
        if value._local_tensor.shape == even_shape:
            return f"{shape}"
        return f"{shape} of rank {dist.get_rank()}"
    file = io.BytesIO()  # `torch.save` knows sparse tensors and subclasses too
    copy = value.detach().cpu().clone()
    torch.save(copy, file)
    digest = hashlib.sha256(file.getvalue())
    return f"{shape}\0{digest.hexdigest()}"


class NamedGroup(dict[str, Any]):
    """A param group of a state dict, whose ``param_names`` go with its ``params``."""

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a setting, as a dict does, and the names with the parameters."""
        # torch's flattening takes `params` out, and saves the rest for each of them: names would
        # grow with the square of their number. Its keys are names then.
        if key == "params":
            self["param_names"] = []
        return super().pop(key, *default)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # files need no class of ours


def match_groups(
    groups: list[GroupSettings],
    saved: list[GroupSettings],
) -> list[GroupSettings]:
    """Return saved groups, and the parameters in each, in the order of ``groups``, by name.

    Raises:
        ValueError: if a group has other parameters in the state dict.
    """
    if any(group.get("param_names") is None for group in saved):
        return saved  # matched by position, as in torch
    own_names = [group["param_names"] for group in groups]
    all_own = set(concatenated(own_names))
    saved_names = [_names_with_prefix(group, all_own) for group in saved]
    matched = []
    if _end_alike(own_names, saved_names):
        # A module around several models adds a prefix of its own to the names of each.
        for names, group in zip(own_names, saved):
            matched.append({**group, "param_names": names})
        return matched
    keys = []
    for names, group in zip(saved_names, saved):
        keys.append(dict(zip(names, group["params"])))
    for number, names in enumerate(own_names):
        found = []
        for position, key_of in enumerate(keys):
            if key_of.keys() == set(names):
                found.append(position)
        if len(found) != 1 or len(names) != len(keys[found[0]]):
            all_saved = concatenated(saved_names)
            different = ", ".join(sorted(all_own.symmetric_difference(all_saved)))
            if not different:
                different = "the same names are grouped in another way"
            raise ValueError(
                f"param_groups[{number}] is over other parameters in the state dict: {different}"
            )
        (position,) = found
        key_of = keys[position]
        params = [key_of[name] for name in names]
        group = {**saved[position], "param_names": names, "params": params}
        matched.append(group)
    return matched


def _end_alike(
    own_names: list[list[str]],
    saved_names: list[list[str]],
) -> bool:
    """Return True if each saved name is ours, in the same order, or ours behind a prefix."""
    if len(own_names) != len(saved_names):
        return False
    for own_group, saved_group in zip(own_names, saved_names):
        if len(own_group) != len(saved_group):
            return False
        for name, end in zip(saved_group, own_group):
            if not name.endswith(end):
                return False
    return True


def _names_with_prefix(
    group: GroupSettings,
    own_names: set[str],
) -> list[str]:
    """Return a saved group's names with the prefix ``module.``, which unsharded models lack."""
    # torch's `set_state_dict` replaces numbers by names, in the order of our group, and does not
    # change `param_names`.
    keys = group["param_names"]
    params = group["params"]
    if params and all(isinstance(key, str) for key in params):
        keys = params
    names = []
    for key in keys:
        name = own_name(key)
        with_prefix = "module." + name
        if name not in own_names and with_prefix in own_names:
            name = with_prefix
        names.append(name)
    return names
