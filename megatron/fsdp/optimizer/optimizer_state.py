# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer over sharded parameters: first values, sharding, and state dicts."""

# An entry of the state of one parameter is element-wise (a moment, sharded like the parameter), or
# one value (a step count), or what else an optimizer keeps, which is the same on all ranks.

from __future__ import annotations

import hashlib
import inspect
import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.module_access.own_names import own_name
from megatron.fsdp.optimizer.host.host_state import moved, new_moment

OptimizerClass = type[torch.optim.Optimizer]

Setting = dict[str, Any]  # the settings of a param group, by name
Slots = dict[str, Any]  # the state of one parameter, by name

_ADAM = ("exp_avg", "exp_avg_sq")

# Optimizers of torch whose update is element-wise, which step on flat tensors, with the names of
# their moments, in torch's order, as far as these can exist before the first step.
ELEMENTWISE: dict[OptimizerClass, Callable[[Setting], tuple[str, ...]]] = {
    torch.optim.Adam: lambda group: _ADAM + ("max_exp_avg_sq",) * group["amsgrad"],
    torch.optim.AdamW: lambda group: _ADAM + ("max_exp_avg_sq",) * group["amsgrad"],
    torch.optim.NAdam: lambda group: _ADAM,
    torch.optim.RAdam: lambda group: _ADAM,
    torch.optim.Adamax: lambda group: ("exp_avg", "exp_inf"),
    torch.optim.Adadelta: lambda group: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda group: ("sum",),
    torch.optim.RMSprop: lambda group: (
        ("square_avg",)
        + ("momentum_buffer",) * (group["momentum"] > 0)
        + ("grad_avg",) * bool(group["centered"])
    ),
    # The first step with dampening differs from one that finds state, and the next two keep the
    # learning rate of the first step: it must create their state.
    torch.optim.SGD: lambda group: (
        ("momentum_buffer",) if group["momentum"] != 0 and group["dampening"] == 0 else ()
    ),
    torch.optim.ASGD: lambda group: (),
    torch.optim.Rprop: lambda group: (),
}

# Entries that are not element-wise; shapes do not show it if all parameters have one element.
COUNTERS = ("step", "mu_product", "eta", "mu")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def elementwise_class(kind: OptimizerClass) -> OptimizerClass | None:
    """Return the class in :data:`ELEMENTWISE` of which ``kind`` inherits the update, or None."""
    known = next((base for base in kind.__mro__ if base in ELEMENTWISE), None)
    if known is None:
        return None
    # torch wraps the `step` of a class when its first instance is created.
    has_own_step = inspect.unwrap(kind.step) is not inspect.unwrap(known.step)
    # `_init_group` creates the state of a parameter at the first step.
    makes_own_state = getattr(kind, "_init_group", None) is not getattr(known, "_init_group", None)
    return None if has_own_step or makes_own_state else known


def initial_state(
    optimizer: torch.optim.Optimizer,
    kind: OptimizerClass,
    group: Setting,
    parameter: nn.Parameter,
) -> Slots:
    """Return the state that the first step would create; none if only that step can do so."""
    known = elementwise_class(kind)
    names = ELEMENTWISE[known](group) if known is not None else ()
    if not names:
        return {}
    slots: Slots = {}
    if known is not torch.optim.SGD:  # all others count steps
        is_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        dtype = torch.float64 if is_double else torch.float32
        device = parameter.device if keeps_counters_beside(group) else torch.device("cpu")
        slots["step"] = torch.zeros((), dtype=dtype, device=device)
        if known is torch.optim.NAdam:
            slots["mu_product"] = torch.ones((), dtype=dtype, device=device)
    for name in names:
        value = optimizer.defaults["initial_accumulator_value"] if name == "sum" else 0.0
        slots[name] = new_moment(parameter, value)
    return slots


def keeps_counters_beside(group: Setting) -> bool:
    """Return True if counters of a param group lie on the device of its parameters."""
    return bool(group.get("capturable") or group.get("fused"))


def makes_state_late(kind: OptimizerClass, group: Setting) -> bool:
    """Return True for an optimizer of torch that has state, but none before its first step."""
    known = elementwise_class(kind)
    if known is None or (known is torch.optim.SGD and group["momentum"] == 0):
        return False
    return not ELEMENTWISE[known](group)


# ---- sharding and state dicts


def elementwise_names(states: Iterable[tuple[ShardedParam, Slots]]) -> set[str]:
    """Return the names of the entries that are sharded like their parameters."""
    # They are DTensors for some parameter, or have the shape of the parameter for all of them.
    # Parameters of one element are left out, because step counts may have the same shape.
    sharded: set[str] = set()
    fits: dict[str, bool] = {}
    for sharded_param, slots in states:
        shape = sharded_param.flat_range.shape
        for name, value in slots.items() if prod(shape) > 1 else ():
            if _is_like(value, sharded_param):
                sharded.add(name)
            elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                fits[name] = fits.get(name, True) and tuple(value.shape) == shape
    return sharded | {name for name, fit in fits.items() if fit}


def shard_slots(sharded_param: ShardedParam, slots: Slots, names: set[str]) -> Slots:
    """Return ``slots`` with shards of the tensors in ``names`` (of :func:`elementwise_names`)."""
    return {
        name: moved(sharded_param.sharded_like(value), sharded_param.parameter)
        if _is_elementwise(name, value, sharded_param, names)
        else value
        for name, value in slots.items()
    }


def _is_elementwise(name: str, value: Any, sharded_param: ShardedParam, names: set[str]) -> bool:
    if isinstance(value, DTensor):
        return _is_like(value, sharded_param)
    if not isinstance(value, torch.Tensor):
        return False
    if names or prod(sharded_param.flat_range.shape) > 1:
        return name in names
    return name not in COUNTERS


def _is_like(value: Any, sharded_param: ShardedParam) -> bool:
    """Return True for a DTensor of the shape of a parameter, or of its checkpoint entry."""
    shapes = (sharded_param.slice.shape, sharded_param.parameter.shape)
    return isinstance(value, DTensor) and tuple(value.shape) in shapes


def checkpoint_slots(sharded_param: ShardedParam, slots: Slots) -> Slots:
    """Return ``slots`` with sharded tensors in a form that torch's checkpoint can save and load."""
    return {
        name: sharded_param.checkpoint_tensor(value)
        if isinstance(value, UnevenDTensor) and _is_like(value, sharded_param)
        else value
        for name, value in slots.items()
    }


def refuse_local_state(
    optimizer: str, states: Sequence[tuple[ShardedParam, Slots]], groups: list[dist.ProcessGroup]
) -> None:
    """Raise ``ValueError``, on every rank, for state that is a rank's own; a collective."""
    # A checkpoint has one copy of what is no DTensor: that of any rank.
    told = []
    for sharded_param, slots in states:
        mesh = sharded_param.parameter.device_mesh.mesh.tolist()  # others have other experts
        for name, value in slots.items():
            content = "\0".join(map(_content, tree_leaves(value)))
            told.append(f"{sharded_param.name}[{name!r}]\0{mesh}\0{content}")
    found = [text.split("\0") for text in agree(told, groups)]
    counts = Counter((name, mesh) for name, mesh, *_ in found)
    local = [f"{text[0]} {text[2]}" for text in found if counts[text[0], text[1]] > 1]
    if local:
        raise ValueError(
            f"{optimizer} has state that is each rank's own, and a checkpoint would have one rank's"
            f" copy: {'; '.join(local[:4])}. Keep it in tensors like the parameter"
            " (torch.zeros_like(parameter)), or compute it by operations on the parameter and its"
            " gradient, not on to_local(), so that all ranks have the same"
        )


def _content(value: Any) -> str:
    """Return a text that is the same on all ranks if a checkpoint can have one copy of a value."""
    if isinstance(value, DTensor):
        shape, mesh, placements = value.shape, value.device_mesh, value.placements
        even, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        is_right = isinstance(value, UnevenDTensor) or value._local_tensor.shape == even
        return f"{tuple(shape)}" if is_right else f"{tuple(shape)} of rank {dist.get_rank()}"
    if isinstance(value, torch.Tensor):
        file = io.BytesIO()  # `torch.save` knows sparse tensors and subclasses too
        torch.save(value.detach().cpu().clone(), file)
        return f"{tuple(value.shape)}\0{hashlib.sha256(file.getvalue()).hexdigest()}"
    return repr(value) if isinstance(value, int | float | str) else ""


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


def match_groups(groups: list[Setting], saved: list[Setting]) -> list[Setting]:
    """Return saved groups, and the parameters in each, in the order of ``groups``, by name."""
    if any(group.get("param_names") is None for group in saved):
        return saved  # matched by position, as in torch
    own_names = [group["param_names"] for group in groups]
    all_own = set().union(*own_names)
    saved_names = [_names_with_prefix(group, all_own) for group in saved]
    is_same = list(map(len, saved_names)) == list(map(len, own_names))
    # A module around several models adds a prefix of its own to the names of each.
    if is_same and all(map(str.endswith, chain(*saved_names), chain(*own_names))):
        return [{**group, "param_names": names} for names, group in zip(own_names, saved)]
    keys = [dict(zip(names, group["params"])) for names, group in zip(saved_names, saved)]
    matched = []
    for number, names in enumerate(own_names):
        found = [position for position, each in enumerate(keys) if each.keys() == set(names)]
        if len(found) != 1 or len(names) != len(keys[found[0]]):
            different = sorted(all_own ^ set().union(*saved_names))
            raise ValueError(
                f"param_groups[{number}] is over other parameters in the state dict: "
                + (", ".join(different) or "the same names are grouped in another way")
            )
        (position,) = found
        params = [keys[position][name] for name in names]
        matched.append({**saved[position], "param_names": names, "params": params})
    return matched


def _names_with_prefix(group: Setting, own: set[str]) -> list[str]:
    """Return a saved group's names with the prefix ``module.``, which unsharded models lack."""
    # torch's `set_state_dict` replaces numbers by names, in the order of our group, and does not
    # change `param_names`.
    is_by_name = group["params"] and all(isinstance(key, str) for key in group["params"])
    names = list(map(own_name, group["params"] if is_by_name else group["param_names"]))
    return [
        "module." + name if name not in own and "module." + name in own else name for name in names
    ]
