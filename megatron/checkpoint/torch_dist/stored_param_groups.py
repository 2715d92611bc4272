# SPDX-License-Identifier: Apache-2.0
"""Param groups of the optimizers in a torch_dist file.

They are in the common state, or in an object of each rank. A run has several chained optimizers
where experts have one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist.optimizer_keys import OptimizerOfRank
from megatron.checkpoint.torch_dist.sharded_objects import read_sharded_object


def in_common(common: Mapping[str, Any]) -> list[Any]:
    """Return the state of each chained optimizer in the common state."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    if optimizer and all(isinstance(number, int) for number in optimizer):
        return [optimizer[number] for number in sorted(optimizer)]
    return [optimizer]


def of_ranks(stored: StoredCheckpoint, keys: Mapping[OptimizerOfRank, str]) -> dict[int, Any]:
    """Return the state of each chained optimizer that ranks have stored.

    A rank without parameters in a group lacks fields of it, which another rank has.

    Args:
        stored: the checkpoint.
        keys: of each rank's object ``optimizer``.
    """
    groups_of_chain: dict[int, list[dict[str, Any]]] = {}
    for (chain, _), key in sorted(keys.items()):
        stored_groups = read_sharded_object(stored, key)["param_groups"]
        groups = groups_of_chain.setdefault(chain, [{} for _ in stored_groups])
        for group, fields in zip(groups, stored_groups):
            for name, value in fields.items():
                if group.get(name) is None:
                    group[name] = value
    return {
        chain: {"optimizer": {"param_groups": groups}} for chain, groups in groups_of_chain.items()
    }


def groups_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the param groups of all optimizers, those of experts last.

    They have ``is_expert_parallel`` and, if the file has it, ``step``, but no ``params``.
    """
    groups = []
    for number, state in enumerate(optimizers):
        inner = state.get("optimizer", state) if isinstance(state, dict) else {}
        common_step = (inner.get("state") or {}).get("common_step")
        is_last_of_several = 0 < number == len(optimizers) - 1
        for fields in inner.get("param_groups", []):
            group = {name: value for name, value in fields.items() if name != "params"}
            group.setdefault("is_expert_parallel", is_last_of_several)
            step = group.get("step", common_step)
            if step is not None:
                group["step"] = step.item() if isinstance(step, torch.Tensor) else step
            groups.append(group)
    return sorted(groups, key=lambda group: bool(group["is_expert_parallel"]))
