# SPDX-License-Identifier: Apache-2.0
"""The state of a sharded model: loading of state dicts, and deep copies with the same weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.module_access.own_names import own_name
from megatron.fsdp.module_access.shown_parameters import WatchedParameters
from megatron.fsdp.settings import Settings
from megatron.fsdp.warnings_once import IS_COMPUTE, warn


def show_main_weights(
    state: dict[str, Any],
    prefix: str,
    find: Callable[[Any], ShardedParam | None],
    keep_vars: bool,
    with_chunks: bool,
) -> None:
    """Replace weights in a module's state dict by main weights, and names by own names, in place.

    Args:
        state: taken with ``keep_vars=True``.
        prefix: of the names that belong to the module.
        find: returns the sharded parameter of a weight, and None for other values.
        keep_vars: show the parameters; otherwise tensors without a graph.
        with_chunks: let tensors describe their chunks to torch.distributed.checkpoint.
    """
    for raw, value in list(state.items()):
        if not raw.startswith(prefix):
            continue
        key = prefix + own_name(raw[len(prefix) :])
        state[key] = state.pop(raw)  # all of them, which keeps their order
        sharded_param = find(value)
        if not isinstance(value, torch.Tensor):
            continue
        if sharded_param is None:
            state[key] = value if keep_vars else value.detach()
        elif keep_vars:
            state[key] = sharded_param.parameter
        else:
            group = sharded_param.group
            if group.memory.device.type != "cpu":  # there waiting could be a collective
                group.wait_for_readers()  # what is loaded in place is written next
            state[key] = sharded_param.checkpoint_tensor(with_chunks=with_chunks)


def load_model_state(
    module: nn.Module,
    find: Callable[[Any], ShardedParam | None],
    state: Mapping[str, Any],
    strict: bool,
    groups: Sequence[dist.ProcessGroup],
    load_buffers: Callable[..., Any] | None = None,
) -> _IncompatibleKeys:
    """Copy ``state`` into main weights, which ``find`` knows by entry, and buffers, if all fits.

    A collective of ``groups``: every rank raises the problems of all ranks. ``load_buffers`` is
    ``load_state_dict`` of the module without sharding; None: its own.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict expects a mapping but got {type(state).__name__}")
    # Wrappers inside (Float16Module) may rename keys, so the keys are those of the module's state
    # dict, not the paths of its parameters.
    values = module.state_dict(keep_vars=True)
    paths = {own_name(path): path for path in values}
    entries = {name: find(values[path]) for name, path in paths.items()}
    names = set(entries)
    sharded_params = {name: found for name, found in entries.items() if found is not None}
    own = {own_name(key): value for key, value in state.items()}
    if not names.intersection(own):  # they are the wrapper's
        own = {key.removeprefix("module."): value for key, value in own.items()}
    twice = [name for name in own if f"module.{name}" in own.keys() - names]
    problems = [f"{name} and module.{name} are given" for name in twice]
    given = hashlib.sha256("\n".join(sorted(names.intersection(own))).encode()).hexdigest()
    weights = {name: own.pop(name) for name in list(own) if name in sharded_params}
    shards: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        try:
            shards[name] = sharded_params[name].local_shard(value)
        except (ValueError, AttributeError) as error:
            problems.append(str(error))

    loaded = {sharded_params[name] for name in weights}
    missing = [name for name, sharded in sharded_params.items() if sharded not in loaded]
    expected = names - set(sharded_params)
    missing += [name for name in expected if name not in own and not name.endswith("_extra_state")]
    unexpected = [name for name in own if name not in expected]
    if strict and missing:
        problems.append(f"missing keys: {', '.join(sorted(missing))}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(sorted(unexpected))}")
    if not strict and len(unexpected) == len(state) > 0:
        problems.append(f"no key fits: {_first(unexpected)}; the model has {_first(missing)}")
    _raise_everywhere(problems, given, groups)
    if not strict and (missing or unexpected):
        left = _first(unexpected), _first(missing)
        warn("load_state_dict: not in the model: %s; not given and left as they are: %s", *left)
    with torch.no_grad():
        for name, shard in shards.items():
            sharded_params[name].group.wait_for_readers()
            sharded_params[name].parameter._local_tensor.copy_(shard)
    buffers = {paths[name]: value for name, value in own.items() if name in expected}
    (load_buffers or module.load_state_dict)(buffers, strict=False)
    for group in dict.fromkeys(sharded_params[name].group for name in shards):
        group.install_main_weights()  # quantized with scales that are among the buffers
    return _IncompatibleKeys(missing, unexpected)


def _raise_everywhere(problems: list[str], given: str, groups: Sequence[dist.ProcessGroup]) -> None:
    # torch's `broadcast_from_rank0` leaves keys that it does not know on the first rank.
    texts = agree([*problems, given], groups)
    problems = [text for text in texts if " " in text]
    if len(texts) > len(problems) + 1:
        problems.append("ranks load different keys: all need those of model.state_dict()")
    if problems:
        raise RuntimeError(
            "the state dict does not fit the sharded model:\n  " + "\n  ".join(problems)
        )


def _first(names: Sequence[str]) -> str:
    return f"{len(names)} keys ({', '.join(sorted(names)[:5])}{', …' * (len(names) > 5)})"


def accept_full_tensors(module: nn.Module) -> set[int]:
    """Let a sharded module, and the modules in it, load full tensors; return the ids of hooks."""
    # torch refuses to copy full tensors into DTensors, or puts them in their place. So before a
    # module loads its own parameters, their values are copied into the shards, and the state dict
    # gets the sharded parameters, which torch finds in place. torch lists values of a wrong shape.
    changed: dict[ParamGroup, None] = {}  # groups whose main weights are newer

    def load_own(inner: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        errors: list[str] = others[-1]
        for name, parameter in inner._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is None or not is_linked(parameter) or not isinstance(value, torch.Tensor):
                continue
            sharded_param = sharded_param_of(parameter)
            shape = sharded_param.slice.shape
            if tuple(value.shape) not in (shape, shape or (1,)):
                continue
            try:
                sharded_param.load(value)
                changed[sharded_param.group] = None
            except ValueError as error:
                errors.append(str(error))
            state_dict[prefix + name] = parameter

    def install(inner: nn.Module, incompatible_keys: Any) -> None:
        for group in changed:
            group.install_main_weights()
        changed.clear()

    handles: set[int] = set()
    # Functions, not methods: a copy of the module would copy the owner of a method too.
    for inner in module.modules():
        if isinstance(inner._parameters, WatchedParameters):
            before = inner.register_load_state_dict_pre_hook(load_own)
            after = inner.register_load_state_dict_post_hook(install)
            handles |= {before.id, after.id}
    return handles


def copied_module(
    module: nn.Module,
    sharded_params: dict[nn.Parameter, ShardedParam],
    settings: Settings,
    memo: dict[int, Any],
) -> tuple[nn.Module, Settings]:
    """Return a deep copy of a module that is not sharded, with hooks, and settings to shard it."""
    for compute, sharded_param in sharded_params.items():
        sharded_param.group.wait_for_readers()
        whole = full_tensor(sharded_param.parameter).to(compute.dtype).view(compute.shape)
        parameter = nn.Parameter(whole, requires_grad=sharded_param.group.requires_grad)
        vars(parameter).update(vars(compute))
        delattr(parameter, IS_COMPUTE)
        memo[id(compute)] = memo[id(sharded_param.parameter)] = parameter
    strategy = replace(settings.strategy, ignored=copy.deepcopy(settings.strategy.ignored, memo))
    copied = copy.deepcopy(module, memo)
    units = [memo.get(id(unit), unit) for unit in settings.units or ()]
    return copied, replace(settings, units=units, strategy=strategy, initialisation=None)


def remove_hooks(original: nn.Module, copied: nn.Module, handles: set[int]) -> None:
    """Remove the hooks with these ids from a deep copy of a module, which has copied them too."""
    for source, target in zip(original.modules(), copied.modules()):
        for name, hooks in vars(source).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for number in handles.intersection(hooks):
                    del vars(target)[name][number]
        vars(target).pop("_apply", None)


@torch.no_grad()
def copy_main_weights(sources: Sequence[ShardedParam], targets: Sequence[ShardedParam]) -> None:
    """Copy main weights, which may have more bits than the module's, and what is frozen now."""
    for source, target in zip(sources, targets, strict=True):
        target.parameter.requires_grad_(source.parameter.requires_grad)
        target.group.wait_for_readers()
        target.parameter._local_tensor.copy_(source.parameter._local_tensor)
    for group in dict.fromkeys(target.group for target in targets):
        group.install_main_weights()
