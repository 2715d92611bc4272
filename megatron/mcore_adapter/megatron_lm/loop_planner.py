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
    """Set torch's planner up, after a check that the loop's state dict fits the file.

    Args:
        planner: torch's, of a load.
        state_dict: state dict of the loop; keys that older files lack are removed in place.
        metadata: metadata of the file; None where torch does not pass it.
        is_coordinator: passed on.

    Raises:
        ValueError: lists everything that does not fit.
    """
    if metadata is not None and isinstance(state_dict.get("model"), ModelEntries):
        stored = metadata.state_dict_metadata
        _ask_as_the_file_does(state_dict, stored, planner.allow_partial_load)
        _check(state_dict, stored, planner.allow_partial_load)
    _original_set_up_planner(planner, state_dict, metadata, is_coordinator)


@functools.wraps(_original_create_global_plan)
def create_global_plan(planner: DefaultLoadPlanner, global_plan: list[LoadPlan]) -> list[LoadPlan]:
    """Plan as torch does, if each entry of the model in the file is requested by some rank."""
    content = planner.original_state_dict
    if isinstance(content.get("model"), ModelEntries) and not planner.allow_partial_load:
        assert planner.metadata is not None, "the planner is set up before it plans"
        prefixes = ["model."]
        if content.get("optimizer"):
            prefixes.append(STATE_PREFIX)
        requested = set()
        for plan in global_plan:
            for item in plan.items:
                requested.add(item.dest_index.fqn)
        unrequested = _unrequested(planner.metadata, requested, tuple(prefixes))
        if unrequested:
            _refuse([f"only in the file: {some(unrequested)}"])
    return _original_create_global_plan(planner, global_plan)


def _unrequested(
    metadata: Metadata,
    requested: set[str],
    prefixes: tuple[str, ...],
) -> list[str]:
    """List the keys of the file that begin with one of ``prefixes`` and are not ``requested``.

    Tensors without elements are never requested.
    """
    keys = []
    for key, entry in metadata.state_dict_metadata.items():
        is_empty = isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0
        if key.startswith(prefixes) and key not in requested and not is_empty:
            keys.append(key)
    return sorted(keys)


def _ask_as_the_file_does(
    state_dict: dict[str, Any],
    stored: Mapping[str, Any],
    is_partial: bool,
) -> None:
    """Leave out entries that older files lack, and use the wrapper prefixes of the file."""
    if "grad_scaler" in state_dict and not has_loss_scaler(stored):
        state_dict["grad_scaler"] = {}  # it has no keys, but torch looks for its name
    optimizer = state_dict.get("optimizer")
    if not optimizer:
        return
    settings = optimizer["param_to_group_meta"]
    prefix = wrapper_prefix(stored, [plain_name(name) for name in settings])

    def name_in_file(name: str) -> str:
        if prefix is None:
            return name
        return prefix + plain_name(name)

    if is_partial:
        drop_absent_settings(settings, stored, name_in_file)
    renamed = {}
    for part, values in optimizer.items():
        renamed[part] = {name_in_file(name): value for name, value in values.items()}
    state_dict["optimizer"] = renamed


def _check(
    state_dict: Mapping[str, Any],
    stored: Mapping[str, Any],
    is_partial: bool,
) -> None:
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
