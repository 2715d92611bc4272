# SPDX-License-Identifier: Apache-2.0
"""Entries of fsdp_dtensor checkpoints, made of a live model and its optimizer.

Training with this project's own loop and with Megatron-LM's loop save and load the same entries:
:mod:`megatron.checkpoint.fsdp_dtensor.keys` describes the format. Tensors share storage with the
model and the optimizer, so torch.distributed.checkpoint loads in place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.key_rules import entry_names
from megatron.checkpoint.core.spelling import is_in_expert, plain_name
from megatron.checkpoint.fsdp_dtensor.keys import (
    EXTRA_STATE,
    META_PREFIX,
    MODEL_PREFIX,
    without_layout,
)
from megatron.checkpoint.torch_dist.checkpoint import extra_state_tensor
from megatron.fsdp.dtensor.sharded_param import ShardedParam, sharded_param_of

Settings = dict[str, Any]
"""The settings of a param group: learning rate, weight decay and so on."""
Rename = Callable[[str], str]
"""Maps the name of a parameter or module in the model to that in the file."""


def named_parameters(model: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters on this rank by their names, which are global."""
    found: dict[str, nn.Parameter] = {}
    for chunk in model:
        found.update(chunk.named_parameters())
    return found


def sharded_params(model: Iterable[nn.Module]) -> dict[str, ShardedParam]:
    """Return the sharded parameters on this rank by their names without wrappers."""
    found = {}
    for name, parameter in named_parameters(model).items():
        found[plain_name(name)] = sharded_param_of(parameter)
    return found


def own_extra_states(model: Iterable[nn.Module]) -> dict[str, bytes]:
    """Return the extra states of modules by their keys, as bytes: scales, or nothing.

    Those of grouped experts are left out, since each has the scales of all experts of a rank.
    """
    found = {}
    for chunk in model:
        for key, value in chunk.state_dict().items():
            is_grouped = is_in_expert(key) and ".local_experts." not in key
            if not key.endswith(EXTRA_STATE) or is_grouped:
                continue
            found[key] = b""
            if isinstance(value, torch.Tensor):
                found[key] = value.numpy().tobytes()
    return found


def extra_states(model: Iterable[nn.Module], name_in_file: Rename) -> dict[str, bytes]:
    """Return the extra states that are not empty by the file's names: delayed scaling has some."""
    states = {}
    for key, value in own_extra_states(model).items():
        if value:
            states[MODEL_PREFIX + name_in_file(key)] = value
    return states


def scales_to_load(
    args: argparse.Namespace,
    model: Iterable[nn.Module],
    name_in_file: Rename,
    stored: Container[str],
) -> dict[str, None]:
    """Return entries for the extra states that the file has; runs without scales ask for none.

    Args:
        args: arguments of the run; only fp8 with the recipe "delayed" has scales to load.
        model: chunks of this pipeline stage.
        name_in_file: maps a key of the model to that of the file.
        stored: keys of the file.
    """
    if not getattr(args, "fp8", None) or getattr(args, "fp8_recipe", "") != "delayed":
        return {}
    entries: dict[str, None] = {}
    for name in own_extra_states(model):
        key = MODEL_PREFIX + name_in_file(name)
        if f"model.{key}" in stored:
            entries[key] = None
    return entries


def load_own_state(chunk: nn.Module, extra_state: Callable[[str], bytes | None]) -> None:
    """Install the values that were read in place, and the extra states of modules, in a model.

    ``extra_state`` returns the one of a key; where it returns nothing, a module keeps its own.
    """
    state: dict[str, Any] = {}
    for key, value in chunk.state_dict().items():
        if not key.endswith(EXTRA_STATE):
            state[key] = value
        elif loaded := extra_state(key):
            state[key] = extra_state_tensor(loaded)
    chunk.load_state_dict(state)


def entries_of(
    name: str,
    value: Any,
    sharded: ShardedParam | None,
    gated: bool = True,
) -> dict[str, Any]:
    """Return the entries of one value by name: the value, or the two halves of a gated weight.

    Args:
        name: name of the whole value in the file, with or without wrappers.
        value: a DTensor of the parameter's shape, or anything else (a buffer, a step counter),
            which is the same for both halves.
        sharded: the parameter that the value belongs to; None for a value that is stored unchanged.
        gated: the MLPs of the model are gated, and files store the halves of their weights.
    """
    names = entry_names(name, gated)
    if not isinstance(value, DTensor) or (sharded is None and len(names) == 1):
        return dict.fromkeys(names, value)
    if sharded is None:
        raise ValueError(
            f"{name}: the model has no parameter of this name, so it cannot be divided into"
            f" {', '.join(names)}"
        )
    return dict(zip(names, sharded.checkpoint_tensors(len(names), value)))


def state_entries(
    state: Mapping[str, Mapping[str, Any]],
    sharded: Mapping[str, ShardedParam],
    name_in_file: Rename = str,
    gated: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by the names of entries, as :func:`entries_of` divides it.

    Args:
        state: slots (moments, steps) by the names of parameters.
        sharded: as :func:`sharded_params` returns them.
        name_in_file: maps a name of ``state`` to that of the whole parameter in the file; by
            default it is the same.
        gated: as in :func:`entries_of`.
    """
    entries: dict[str, dict[str, Any]] = {}
    for wrapped, slots in state.items():
        name = name_in_file(wrapped)
        parameter = sharded.get(plain_name(wrapped))
        for slot, value in slots.items():
            for entry, part in entries_of(name, value, parameter, gated).items():
                entries.setdefault(entry, {})[slot] = part
    return entries


def settings_of_group(
    names: Iterable[str], saved: Mapping[str, Settings]
) -> tuple[Settings, str, list[str]]:
    """Compare the settings that a file has for the parameters of one param group.

    Returns:
        The settings of the first parameter that the file has (empty if it has none), its name, and
        the names of parameters with other settings.
    """
    first = ""
    common: Settings = {}
    others = []
    for name in names:
        if name not in saved:
            continue
        settings = without_layout(saved[name])
        if not first:
            first = name
            common = settings
        elif settings != common:
            others.append(name)
    return common, first, others


def drop_absent_settings(
    asked: dict[str, Settings],
    keys: Container[str],
    name_in_file: Rename = str,
) -> None:
    """Remove parameters that the file does not have from the settings to load, in place.

    In a partial load they get the settings of the other parameters of their group.

    Args:
        asked: settings to load, by the names of parameters.
        keys: keys of the file.
        name_in_file: maps a name of ``asked`` to that in the file.
    """
    for name, settings in list(asked.items()):
        start = f"{META_PREFIX}{name_in_file(name)}"
        if not any(f"{start}.{field}" in keys for field in settings):
            del asked[name]


def has_loss_scaler(keys: Iterable[str]) -> bool:
    """Return True if a file with these keys has the state of a loss scaler."""
    return any(key.startswith("grad_scaler.") for key in keys)
