# SPDX-License-Identifier: Apache-2.0
"""Loading of a state dict into a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.dtensor.sharded_param import ShardedParam


def load_model_state(
    module: nn.Module,
    sharded_params: dict[str, ShardedParam],
    names: set[str],
    state: Mapping[str, Any],
    strict: bool,
) -> _IncompatibleKeys:
    """Copy ``state`` into main weights and buffers, unless anything does not fit.

    Args:
        module: the wrapped module.
        sharded_params: its sharded parameters, by the names in its state dict.
        names: all names in its state dict.
        state: full tensors, or DTensors of the same layout, under those names or the wrapper's.
        strict: treat missing and unexpected keys as errors.

    Returns:
        Missing and unexpected keys, like ``torch.nn.Module.load_state_dict``.

    Raises:
        RuntimeError: lists wrong shapes and, if ``strict``, missing and unexpected keys. Nothing
            has been changed then.
    """
    own = _without_wrapper_prefix(names, state)
    weights = {name: own.pop(name) for name in list(own) if name in sharded_params}
    shards: dict[str, torch.Tensor] = {}
    problems = []
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
    if problems:
        raise RuntimeError(
            "the state dict does not fit the sharded model:\n  " + "\n  ".join(problems)
        )

    with torch.no_grad():
        for name, shard in shards.items():
            sharded_param = sharded_params[name]
            sharded_param.group.main_view(sharded_param.index).copy_(shard)
    module.load_state_dict(
        {name: value for name, value in own.items() if name in expected}, strict=False
    )
    return _IncompatibleKeys(missing, unexpected)


def _without_wrapper_prefix(names: set[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` under the wrapped module's names, without the wrapper's ``module.``."""
    all_prefixed = bool(state) and all(key.startswith("module.") for key in state)
    if all_prefixed and not any(key in names for key in state):
        return {key.removeprefix("module."): value for key, value in state.items()}
    return dict(state)
