# SPDX-License-Identifier: Apache-2.0
"""The state of a sharded model: loading of state dicts, and deep copies with the same weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.config.settings import Settings
from megatron.fsdp.config.warnings_once import IS_COMPUTE, warn
from megatron.fsdp.dtensor.sharded_param import (
    ShardedParam,
    is_linked,
    sharded_param_of,
)
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.module.shown_parameters import WatchedParameters


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
            if not keep_vars:
                state[key] = value.detach()
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
    """Copy a state dict into main weights and buffers, if all of it fits; a collective.

    Args:
        module: the sharded module.
        find: returns the sharded parameter of an entry of the module's state dict, or None.
        state: full tensors or DTensors, by names with or without the prefix ``module.``.
        strict: refuse missing and unexpected keys.
        groups: process groups which together reach all ranks.
        load_buffers: ``load_state_dict`` of the module without sharding; None: its own.

    Raises:
        TypeError: if ``state`` is no mapping.
        RuntimeError: on every rank, with the problems of all ranks; nothing is changed then.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict expects a mapping but got {type(state).__name__}")
    # Wrappers inside (Float16Module) may rename keys, so the keys are those of the module's state
    # dict, not the paths of its parameters.
    path_of: dict[str, str] = {}  # paths by own name
    sharded_params: dict[str, ShardedParam] = {}
    for path, value in module.state_dict(keep_vars=True).items():
        name = own_name(path)
        path_of[name] = path
        found = find(value)
        if found is not None:
            sharded_params[name] = found
    given = {own_name(key): value for key, value in state.items()}
    if not path_of.keys() & given.keys():  # the names are the wrapper's
        given = {key.removeprefix("module."): value for key, value in given.items()}
    known = "\n".join(sorted(path_of.keys() & given.keys()))
    digest = hashlib.sha256(known.encode()).hexdigest()
    parts = _divided(given, path_of, sharded_params)
    problems = parts.problems + _problems_of_keys(parts, strict, len(state))
    _raise_everywhere(problems, digest, groups)
    if not strict and (parts.missing or parts.unexpected):
        warn(
            "load_state_dict: not in the model: %s; not given and left as they are: %s",
            _first(parts.unexpected),
            _first(parts.missing),
        )
    changed: dict[ParamGroup, None] = {}
    with torch.no_grad():
        for name, shard in parts.shards.items():
            sharded_param = sharded_params[name]
            sharded_param.group.wait_for_readers()
            sharded_param.parameter._local_tensor.copy_(shard)
            changed[sharded_param.group] = None
    load_buffers = load_buffers or module.load_state_dict
    load_buffers(parts.others, strict=False)
    for group in changed:
        group.mark_main_weights_changed()  # quantized with scales that are among the buffers
    return _IncompatibleKeys(parts.missing, parts.unexpected)


class _Divided(NamedTuple):
    """The entries of a state dict, divided by what they are for."""

    shards: dict[str, torch.Tensor]  # shards of main weights, by own name
    others: dict[str, Any]  # buffers and extra state, by path in the module's state dict
    missing: list[str]
    unexpected: list[str]
    problems: list[str]


def _divided(
    given: dict[str, Any],
    path_of: dict[str, str],
    sharded_params: dict[str, ShardedParam],
) -> _Divided:
    parts = _Divided(
        shards={},
        others={},
        missing=[],
        unexpected=[],
        problems=[],
    )
    loaded: set[ShardedParam] = set()
    for name, value in given.items():
        wrapped = f"module.{name}"
        if wrapped in given and wrapped not in path_of:
            parts.problems.append(f"{name} and {wrapped} are given")
        if name in sharded_params:
            sharded_param = sharded_params[name]
            loaded.add(sharded_param)
            try:
                parts.shards[name] = sharded_param.local_shard(value)
            except (ValueError, AttributeError) as error:
                parts.problems.append(str(error))
        elif name in path_of:
            parts.others[path_of[name]] = value
        else:
            parts.unexpected.append(name)
    for name in path_of:
        if name in sharded_params:
            is_missing = sharded_params[name] not in loaded  # tied weights have several names
        else:
            is_missing = name not in given and not name.endswith("_extra_state")
        if is_missing:
            parts.missing.append(name)
    return parts


def _problems_of_keys(
    parts: _Divided,
    strict: bool,
    num_given: int,
) -> list[str]:
    missing = parts.missing
    unexpected = parts.unexpected
    problems = []
    if strict and missing:
        problems.append(f"missing keys: {', '.join(sorted(missing))}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(sorted(unexpected))}")
    if not strict and len(unexpected) == num_given > 0:
        problems.append(f"no key fits: {_first(unexpected)}; the model has {_first(missing)}")
    return problems


def _raise_everywhere(
    problems: list[str],
    digest: str,
    groups: Sequence[dist.ProcessGroup],
) -> None:
    # torch's `broadcast_from_rank0` leaves keys that it does not know on the first rank, so the
    # digest of all known keys is compared too. It has no spaces.
    texts = agree([*problems, digest], groups)
    problems = [text for text in texts if " " in text]
    if len(texts) > len(problems) + 1:
        problems.append("ranks load different keys: all need those of model.state_dict()")
    if problems:
        listed = "\n  ".join(problems)
        raise RuntimeError(f"the state dict does not fit the sharded model:\n  {listed}")


def _first(names: Sequence[str]) -> str:
    shown = sorted(names)[:5]
    if len(names) > 5:
        shown.append("…")
    return f"{len(names)} keys ({', '.join(shown)})"


def accept_full_tensors(module: nn.Module) -> set[int]:
    """Let a sharded module, and the modules in it, load full tensors; return the ids of hooks."""
    # torch refuses to copy full tensors into DTensors, or puts them in their place. So before a
    # module loads its own parameters, their values are copied into the shards, and the state dict
    # gets the sharded parameters, which torch finds in place. torch lists values of a wrong shape.
    changed: dict[ParamGroup, None] = {}  # groups whose main weights are newer

    def load_own(
        inner: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        *others: Any,
    ) -> None:
        errors: list[str] = others[-1]
        for name, parameter in inner._parameters.items():
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor):
                continue
            if parameter is None or not is_linked(parameter):
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
            group.mark_main_weights_changed()
        changed.clear()

    handles: set[int] = set()
    # Functions, not methods: a copy of the module would copy the owner of a method too.
    for inner in module.modules():
        if isinstance(inner._parameters, WatchedParameters):
            before = inner.register_load_state_dict_pre_hook(load_own)
            after = inner.register_load_state_dict_post_hook(install)
            handles.add(before.id)
            handles.add(after.id)
    return handles


def copied_module(
    module: nn.Module,
    sharded_params: dict[nn.Parameter, ShardedParam],
    settings: Settings,
    memo: dict[int, Any],
) -> tuple[nn.Module, Settings]:
    """Return a deep copy of a module that is not sharded, with hooks, and settings to shard it.

    Args:
        module: the wrapped module.
        sharded_params: its sharded parameters, by compute parameter.
        settings: those with which it is sharded; units and ignored parameters become the copy's.
        memo: of :func:`copy.deepcopy`; gets the new parameters.
    """
    for compute, sharded_param in sharded_params.items():
        group = sharded_param.group
        group.wait_for_readers()
        whole = full_tensor(sharded_param.parameter).to(compute.dtype)
        parameter = nn.Parameter(
            whole.view(compute.shape),
            requires_grad=group.requires_grad,
        )
        vars(parameter).update(vars(compute))
        delattr(parameter, IS_COMPUTE)
        memo[id(compute)] = parameter
        memo[id(sharded_param.parameter)] = parameter
    ignored = copy.deepcopy(settings.strategy.ignored, memo)
    strategy = replace(settings.strategy, ignored=ignored)
    copied = copy.deepcopy(module, memo)
    units = []
    for unit in settings.units or ():
        units.append(memo.get(id(unit), unit))
    copied_settings = replace(
        settings,
        units=units,
        strategy=strategy,
        initialisation=None,
    )
    return copied, copied_settings


def remove_hooks(
    original: nn.Module,
    copied: nn.Module,
    handles: set[int],
) -> None:
    """Remove hooks from a deep copy of a module, which has copied them too.

    Args:
        original: the sharded module.
        copied: its deep copy.
        handles: the ids of the hooks.
    """
    for source, target in zip(original.modules(), copied.modules()):
        for name, hooks in vars(source).items():
            if not name.endswith("_hooks") or not isinstance(hooks, dict):
                continue
            for number in handles.intersection(hooks):
                del vars(target)[name][number]
        vars(target).pop("_apply", None)


@torch.no_grad()
def copy_main_weights(
    sources: Sequence[ShardedParam],
    targets: Sequence[ShardedParam],
) -> None:
    """Copy main weights, whose precision may be higher than the module's, and their flags."""
    for source, target in zip(sources, targets, strict=True):
        target.parameter.requires_grad_(source.parameter.requires_grad)
        target.group.wait_for_readers()
        target.parameter._local_tensor.copy_(source.parameter._local_tensor)
    for group in dict.fromkeys(target.group for target in targets):
        group.mark_main_weights_changed()
