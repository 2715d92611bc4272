# SPDX-License-Identifier: Apache-2.0
"""Functions that Megatron-LM's loop calls on its state dicts, for files in the fsdp_dtensor format.

The loop builds nested dicts over the live tensors, rewrites them with the functions below, and
passes them to torch.distributed.checkpoint, which loads in place. The functions have the names and
arguments of the Megatron-Core functions that they replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.spelling import plain_name
from megatron.mcore_adapter.checkpoint_entries import entries_of, sharded_params, state_entries
from megatron.mcore_adapter.file_differences import FileDifferences
from megatron_fsdp import uneven_dtensor

_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias))(\d+)")
_VIRTUAL_STAGE = re.compile(r"model\d+")


class ModelEntries(dict[str, Any]):
    """The model's part of a state dict that is ready for torch.distributed.checkpoint."""


class StageEntries(dict[str, Any]):
    """The model's part of a state dict, of all virtual stages on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[nn.Module] = []  # the wrapped stages


def join_virtual_stages(state_dict: dict[str, Any], chunks: Iterable[nn.Module]) -> None:
    """Move the entries of virtual stages, ``model0`` and so on, to one entry ``model``, in place.

    The loop makes one for each stage, but reads ``model`` when it saves and loads in this format.
    Names count layers over all stages, so the file is the same as without virtual stages. Calls for
    one state dict name some of the wrapped ``chunks`` each, and all of them together.
    """
    stages = []
    for key in state_dict:
        if _VIRTUAL_STAGE.fullmatch(key):
            stages.append(key)
    if stages:
        joined = StageEntries()
        for key in stages:
            joined.update(state_dict.pop(key))
        state_dict["model"] = joined
    if isinstance(state_dict.get("model"), StageEntries):
        state_dict["model"].chunks.extend(chunks)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make every DTensor ready for torch's checkpoint, and move the loss scaler to its key.

    Nested dicts are changed in place and returned.
    """
    optimizer = state_dict.get("optimizer")
    if isinstance(optimizer, Mapping):
        # The loop may load from this dict later, so the scaler stays in it.
        optimizer = dict(_of_all_stages(optimizer))
        if "grad_scaler" in optimizer:
            state_dict["grad_scaler"] = optimizer.pop("grad_scaler")
        state_dict["optimizer"] = optimizer
    if isinstance(state_dict.get("model"), Mapping):
        state_dict["model"] = ModelEntries(state_dict["model"])
    return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state_dict)


def handle_fp8_extra_state_case(model_state_dict: dict[str, Any]) -> None:
    """Drop ``_extra_state``, which files of this format do not have, in place."""
    for key in list(model_state_dict):
        if key.endswith("_extra_state"):
            del model_state_dict[key]


def handle_swiglu_in_state_dict(
    model: nn.Module | Sequence[nn.Module],
    model_state_dict: Mapping[str, Any],
    optimizer_state_dict: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return two entries, ``_w`` and ``_v``, for every gated weight and its optimizer state.

    Args:
        model: the wrapper, the engine inside it, or the chunks of a pipeline stage. The loop passes
            the first virtual stage only; entries of :func:`join_virtual_stages` know the others.
        model_state_dict: values by key; tensors of the result share storage with them.
        optimizer_state_dict: with ``state`` and ``param_to_group_meta``, which keeps its names, or
            several of these by number.
    """
    if isinstance(model_state_dict, StageEntries):
        chunks: Sequence[nn.Module] = model_state_dict.chunks
    elif isinstance(model, nn.Module):
        chunks = [model]
    else:
        chunks = model
    sharded = sharded_params(chunks)
    entries: dict[str, Any] = {}
    for key, value in model_state_dict.items():
        sharded_param = sharded.get(plain_name(key))
        entries.update(entries_of(key, value, sharded_param))
    if not optimizer_state_dict:
        return entries, None
    optimizer_state_dict = _of_all_stages(optimizer_state_dict)
    with_entries = dict(optimizer_state_dict)
    with_entries["state"] = state_entries(optimizer_state_dict["state"], sharded)
    return entries, with_entries


def _of_all_stages(content: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Join the state dicts of optimizers that Megatron-Core has chained, one a virtual stage.

    A single optimizer's is returned as it is. Containers of settings are shared with ``content``,
    into which a load writes.
    """
    are_numbered = all(isinstance(key, int) for key in content)
    if not content or not are_numbered:
        return content
    joined: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
    parts = list(content.values())
    for part in parts:
        for key, values in joined.items():
            values.update(part[key])
    if "grad_scaler" in parts[0]:
        # The loss is scaled by the first optimizer's scaler, so a load gives its state to all.
        scaler = parts[0]["grad_scaler"]
        for part in (*parts, joined):
            part["grad_scaler"] = scaler
    return joined


def handle_experts_in_state_dict(
    state_dict: Mapping[str, Any], num_experts: int | None = None
) -> dict[str, Any]:
    """Copy the entries: the engine's names count experts across ranks already."""
    wrong = []
    for key in state_dict:
        for number in _EXPERT.findall(key):
            is_beyond = num_experts and int(number) >= num_experts
            if is_beyond:
                wrong.append(key)
                break
    if wrong:
        raise ValueError(f"the model has {num_experts} experts, numbered from 0: {some(wrong)}")
    return dict(state_dict)


def print_diff_in_state_dicts(
    state_dict_metadata: Metadata | Mapping[str, Any],
    load_state_dict: Mapping[str, Any],
    limit: int = 100,
) -> None:
    """Print on rank 0 the differences between a file and the nested entries to load.

    Args:
        state_dict_metadata: metadata of the file, or its part ``state_dict_metadata``.
        load_state_dict: nested, with tensors to load into.
        limit: the most names of one list.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    stored: Any = getattr(state_dict_metadata, "state_dict_metadata", state_dict_metadata)
    asked, _ = flatten_state_dict(dict(load_state_dict))
    differences = FileDifferences.between(asked, stored, "here")
    lists = {
        "only in the file": sorted(stored.keys() - asked.keys()),
        "not in the file": differences.missing,
        "other shapes": differences.shapes,
    }
    for title, keys in lists.items():
        listed = some(keys, limit)
        print(f"{title}: {listed or 'nothing'}", flush=True)
