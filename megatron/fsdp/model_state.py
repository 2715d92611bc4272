# SPDX-License-Identifier: Apache-2.0
"""Loading a state dict into a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.dtensor.sharded_param import ShardedParam


def load(
    module: nn.Module,
    sharded_by_name: dict[str, ShardedParam],
    names: set[str],
    state: dict[str, Any],
    strict: bool,
) -> _IncompatibleKeys:
    """Copy ``state`` into main weights and buffers; nothing is changed where anything does not fit.

    Args:
        module: the wrapped module.
        sharded_by_name: its parameters, by their names in its state dict.
        names: all names in its state dict.

    Raises:
        RuntimeError: listing wrong shapes and, if ``strict``, missing and unexpected keys.
    """
    own = _own_names(names, state)
    weights = {name: own.pop(name) for name in list(own) if name in sharded_by_name}
    pieces, problems = {}, []
    for name, value in weights.items():
        try:
            pieces[name] = sharded_by_name[name].local_shard(value)
        except (ValueError, AttributeError) as error:
            problems.append(str(error))

    loaded = {sharded_by_name[name] for name in weights}
    missing = [name for name, sharded in sharded_by_name.items() if sharded not in loaded]
    expected = names - set(sharded_by_name)
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
        for name, piece in pieces.items():
            sharded_by_name[name].parameter._local_tensor.copy_(piece)
    module.load_state_dict(
        {name: value for name, value in own.items() if name in expected}, strict=False
    )
    return _IncompatibleKeys(missing, unexpected)


def _own_names(names: set[str], state: dict[str, Any]) -> dict[str, Any]:
    """Keys as the wrapped module names them: the wrapper's ``module.`` is taken off where all keys have it."""
    if (
        state
        and all(key.startswith("module.") for key in state)
        and not any(key in names for key in state)
    ):
        return {key.removeprefix("module."): value for key, value in state.items()}
    return dict(state)
