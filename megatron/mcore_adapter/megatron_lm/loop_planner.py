# SPDX-License-Identifier: Apache-2.0
"""Comparison of Megatron-LM's state dicts with a file, while torch plans to load it.

The content of a file is first known when the load planner is set up. The requested keys are
compared with it there. Both functions replace a method of torch's planner, and call that, and no
more, for other state dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.spelling import plain_name
from megatron.checkpoint.fsdp_dtensor.keys import STATE_PREFIX, wrapper_prefix
from megatron.mcore_adapter.checkpoint_entries import drop_absent_settings, has_loss_scaler
from megatron.mcore_adapter.file_differences import FileDifferences
from megatron.mcore_adapter.megatron_lm.loop_state_dicts import ModelEntries

_original_set_up_planner = DefaultLoadPlanner.set_up_planner
_original_create_global_plan = DefaultLoadPlanner.create_global_plan


@functools.wraps(_original_set_up_planner)
def set_up_planner(
    planner: DefaultLoadPlanner,
    state_dict: dict[str, Any],
    metadata: Metadata | None = None,
    is_coordinator: bool = False,
) -> None:
    """Set torch's planner up, after everything of the loop's state dict fits the file."""
    if metadata is not None and isinstance(state_dict.get("model"), ModelEntries):
        stored = metadata.state_dict_metadata
        _ask_as_the_file_does(state_dict, stored, planner.allow_partial_load)
        _check(state_dict, stored, planner.allow_partial_load)
    _original_set_up_planner(planner, state_dict, metadata, is_coordinator)


@functools.wraps(_original_create_global_plan)
def create_global_plan(planner: DefaultLoadPlanner, global_plan: list[LoadPlan]) -> list[LoadPlan]:
    """Plan as torch does, if some rank asks for each entry of the model in the file."""
    content = planner.original_state_dict
    if isinstance(content.get("model"), ModelEntries) and not planner.allow_partial_load:
        assert planner.metadata is not None, "the planner is set up before it plans"
        starts = ("model.", STATE_PREFIX) if content.get("optimizer") else ("model.",)
        asked: set[str] = set()
        for plan in global_plan:
            asked.update(item.dest_index.fqn for item in plan.items)
        left = _asked_by_none(planner.metadata, asked, starts)
        _refuse([f"only in the file: {some(left)}"] if left else [])
    return _original_create_global_plan(planner, global_plan)


def _asked_by_none(metadata: Metadata, asked: set[str], starts: tuple[str, ...]) -> list[str]:
    """List the keys of the file that begin with one of ``starts`` and are not ``asked`` for.

    Tensors without elements are never asked for.
    """
    left = []
    for key, entry in metadata.state_dict_metadata.items():
        is_empty = isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0
        if key.startswith(starts) and key not in asked and not is_empty:
            left.append(key)
    return sorted(left)


def _ask_as_the_file_does(
    state_dict: dict[str, Any], stored: Mapping[str, Any], is_partial: bool
) -> None:
    """Leave out entries that older files lack, and use the wrapper prefixes of the file."""
    if "grad_scaler" in state_dict and not has_loss_scaler(stored):
        state_dict["grad_scaler"] = {}  # it has no keys, but torch looks for its name
    optimizer = state_dict.get("optimizer")
    if not optimizer:
        return
    settings = optimizer["param_to_group_meta"]
    prefix = wrapper_prefix(stored, map(plain_name, settings))

    def name_in_file(name: str) -> str:
        return name if prefix is None else prefix + plain_name(name)

    if is_partial:
        drop_absent_settings(settings, stored, name_in_file)
    state_dict["optimizer"] = {
        part: {name_in_file(name): value for name, value in values.items()}
        for part, values in optimizer.items()
    }


def _check(state_dict: Mapping[str, Any], stored: Mapping[str, Any], is_partial: bool) -> None:
    """Raise an error for entries that do not fit, before anything is overwritten."""
    asked, _ = flatten_state_dict(dict(state_dict))
    differences = FileDifferences.between(asked, stored, "here")
    problems = differences.problems(is_partial)
    if differences.concern_random_state:
        problems.append(
            "the random state does not fit this machine or layout: --no-load-rng skips it"
        )
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(
            "the checkpoint is one of another model or run:\n  " + "\n  ".join(problems)
        )
