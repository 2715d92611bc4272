# SPDX-License-Identifier: Apache-2.0
"""State dicts of Megatron-LM's loop, between its model and optimizer and files in the fsdp_dtensor format.

The loop builds a nest of dicts over the live tensors, has it rewritten by the functions below, and
gives it to torch.distributed.checkpoint, which loads in place. They keep to the format of
:mod:`megatron.checkpoint.fsdp_dtensor.keys`. What a file has is known for the first time when the load
planner is set up: there the keys that are asked for are compared with it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.key_rules import entry_names, plain_name
from megatron.checkpoint.core.listing import some
from megatron.checkpoint.fsdp_dtensor.keys import (
    META_PREFIX,
    STATE_PREFIX,
    without_layout,
    wrapper_prefix,
)
from megatron.fsdp import MegatronFSDP
from megatron.fsdp.dtensor import uneven_dtensor
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel
from megatron.mcore_adapter.optimizer_state import make_optimizer_state

# ---- what the loop calls on its state dicts
# --------------------------------------------------------------------------


class ModelEntries(dict):
    """The model's part of a state dict that is ready for torch.distributed.checkpoint."""


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make every DTensor ready for torch.distributed.checkpoint, and move the loss scaler to where files have it.

    Args:
        state_dict: of the loop, or any nest of dicts; changed in place and returned.
    """
    optimizer = state_dict.get("optimizer")
    if isinstance(optimizer, Mapping) and "grad_scaler" in optimizer:
        state_dict["grad_scaler"] = optimizer["grad_scaler"]
        # The loop may have kept this dict to load from.
        state_dict["optimizer"] = {
            key: value for key, value in optimizer.items() if key != "grad_scaler"
        }
    if isinstance(state_dict.get("model"), Mapping):
        state_dict["model"] = ModelEntries(state_dict["model"])
    return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state_dict)


def handle_fp8_extra_state_case(model_state_dict: dict[str, Any]) -> None:
    """Drop ``_extra_state``, which files of this format do not have, in place."""
    for key in [key for key in model_state_dict if key.endswith("_extra_state")]:
        del model_state_dict[key]


def handle_swiglu_in_state_dict(
    model: nn.Module | Sequence[nn.Module],
    model_state_dict: Mapping[str, Any],
    optimizer_state_dict: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Two entries, ``_w`` and ``_v``, for every gated weight and its optimizer state; tensors share storage with before.

    Args:
        model: the wrapper, what is inside it, or the chunks of a pipeline stage.
        optimizer_state_dict: with ``state`` and ``param_to_group_meta``, which keeps its names.

    Raises:
        ValueError: for a gated weight that the model does not have.
    """
    members = _members(model)
    entries: dict[str, Any] = {}
    for key, value in model_state_dict.items():
        entries.update(_halves(key, value, members))
    if not optimizer_state_dict:
        return entries, None
    state: dict[str, dict[str, Any]] = {}
    for key, slots in optimizer_state_dict["state"].items():
        for slot, value in slots.items():
            for name, half in _halves(key, value, members).items():
                state.setdefault(name, {})[slot] = half
    return entries, {**optimizer_state_dict, "state": state}


def _members(model: nn.Module | Sequence[nn.Module]) -> dict[str, ShardedParam]:
    """The sharded parameters by their names without wrappers."""
    chunks = [model] if isinstance(model, nn.Module) else model
    engines = [chunk if isinstance(chunk, MegatronFSDP) else chunk.module for chunk in chunks]
    return {
        plain_name(name): each._fsdp_sharded
        for engine in engines
        for name, each in engine.named_parameters()
    }


def _halves(key: str, value: Any, members: dict[str, ShardedParam]) -> dict[str, Any]:
    """The entries of one value: itself, or its halves. A step counter is the same for both."""
    names = entry_names(key, True)
    if len(names) == 1 or not isinstance(value, DTensor):
        return dict.fromkeys(names, value)
    if plain_name(key) not in members:
        raise ValueError(
            f"{key}: the model has no parameter of this name, so it cannot be divided into"
            f" {', '.join(names)}"
        )
    return dict(zip(names, members[plain_name(key)].checkpoint_tensors(len(names), value)))


def handle_experts_in_state_dict(
    state_dict: Mapping[str, Any], num_experts: int | None = None
) -> dict[str, Any]:
    """The same entries: the engine's names count experts across ranks already.

    Raises:
        ValueError: for an expert beyond ``num_experts``.
    """
    wrong = [
        key
        for key in state_dict
        for number in _EXPERT.findall(key)
        if num_experts and int(number) >= num_experts
    ]
    if wrong:
        raise ValueError(f"the model has {num_experts} experts, numbered from 0: {some(wrong)}")
    return dict(state_dict)


_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias))(\d+)")


def print_diff_in_state_dicts(
    state_dict_metadata: Metadata | Mapping[str, Any],
    load_state_dict: Mapping[str, Any],
    limit: int = 100,
) -> None:
    """Print on rank 0 how a file and what is asked for differ.

    Args:
        state_dict_metadata: of the file.
        load_state_dict: nested, as it goes to torch.distributed.checkpoint.
        limit: of names in each list.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    have = (
        state_dict_metadata.state_dict_metadata
        if isinstance(state_dict_metadata, Metadata)
        else state_dict_metadata
    )
    asked, _ = flatten_state_dict(dict(load_state_dict))
    lists = {
        "only in the file": sorted(have.keys() - asked.keys()),
        "not in the file": sorted(asked.keys() - have.keys()),
        "other shapes": _shapes(asked, have),
    }
    for title, keys in lists.items():
        print(f"{title}: {some(keys, limit) or 'nothing'}", flush=True)


# ---- the optimizer
# ---------------------------------------------------------------------------------------------------


def _is_over_our_models(optimizer: DistributedOptimizer) -> bool:
    return all(isinstance(chunk, FullyShardedDataParallel) for chunk in optimizer.model_chunks)


def _parameters(optimizer: DistributedOptimizer) -> dict[str, nn.Parameter]:
    """By the names that the optimizer gives them in state dicts."""
    return {
        optimizer._param_name(each): each
        for group in optimizer.param_groups
        for each in group["params"]
    }


def replace_sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(
        optimizer: DistributedOptimizer,
        model_sharded_state_dict: Mapping[str, Any] = {},
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron-Core's, with state for what this rank owns nothing of, and the loss scaler; nothing moves a weight."""
        if not _is_over_our_models(optimizer):
            return original(
                optimizer, model_sharded_state_dict, is_loading, sharding_type, metadata
            )
        make_optimizer_state(optimizer)
        # With is_loading a step would be taken to make state. There is all of it.
        content = original(optimizer, model_sharded_state_dict, False, sharding_type, metadata)
        parameters = _parameters(optimizer)
        content["state"] = {
            name: {slot: _for_checkpoint(parameters[name], value) for slot, value in slots.items()}
            for name, slots in content["state"].items()
        }
        # Parameters of a group share one dict, in which a load would leave no trace of a difference
        # between them.
        content["param_to_group_meta"] = {
            name: dict(fields) for name, fields in content["param_to_group_meta"].items()
        }
        if optimizer.grad_scaler is not None:
            content["grad_scaler"] = optimizer.grad_scaler.state_dict()
        return content

    return sharded_state_dict


def _for_checkpoint(parameter: nn.Parameter, value: Any) -> Any:
    return parameter._fsdp_sharded.checkpoint_tensor(value) if isinstance(value, DTensor) else value


def replace_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(optimizer: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        """Take over what ``sharded_state_dict`` gave and a load has filled.

        Parameters that are not in it stay as they are.

        Raises:
            ValueError: where parameters, shapes or groups do not fit; nothing is changed then, but
                what was read in place.
        """
        if not _is_over_our_models(optimizer) or "param_to_group_meta" not in state_dict:
            return original(optimizer, state_dict)
        parameters = _parameters(optimizer)
        unknown = sorted(name for name in state_dict["state"] if name not in parameters)
        if unknown:
            raise ValueError(f"the optimizer has no parameters of these names: {some(unknown)}")
        meta = state_dict["param_to_group_meta"]
        names_of_groups = [
            map(optimizer._param_name, group["params"]) for group in optimizer.param_groups
        ]
        fields_of_groups = [_fields_of_group(names, meta) for names in names_of_groups]
        make_optimizer_state(optimizer)
        for name, slots in state_dict["state"].items():
            _load_slots(
                optimizer.optimizer.state[parameters[name]], slots, parameters[name]._fsdp_sharded
            )
        for group, fields in zip(optimizer.param_groups, fields_of_groups):
            group.update(fields)
        if optimizer.grad_scaler is not None and "grad_scaler" in state_dict:
            optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    return load_state_dict


def _fields_of_group(names: Iterable[str], meta: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What those parameters of a group that the file knows all say about it."""
    fields = {name: without_layout(meta[name]) for name in names if name in meta}
    first = next(iter(fields), None)
    different = [name for name in fields if fields[name] != fields[first]]
    if different:
        raise ValueError(
            f"the checkpoint has other param groups than this run: {first} and {some(different)}"
            " are in one group here, and differ there (--no-load-optim loads weights only)"
        )
    return fields[first] if fields else {}


@torch.no_grad()
def _load_slots(own: dict[str, Any], slots: Mapping[str, Any], member: ShardedParam) -> None:
    for slot, value in slots.items():
        live = own.get(slot)
        if isinstance(live, DTensor):
            live._local_tensor.copy_(member.local_part(value))
        elif isinstance(live, torch.Tensor):
            live.copy_(value)
        else:
            own[slot] = value


# ---- what a file has and what is asked for
# ---------------------------------------------------------------------------


def replace_set_up_planner(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_up_planner(
        planner: DefaultLoadPlanner,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """torch's, after comparing a state dict of the loop with the file.

        Raises:
            ValueError: listing all that does not fit; torch finds no more than the first missing
                key.
        """
        if metadata is not None and isinstance(state_dict.get("model"), ModelEntries):
            _ask_as_the_file_does(
                state_dict, metadata.state_dict_metadata, planner.allow_partial_load
            )
            _check(state_dict, metadata.state_dict_metadata, planner.allow_partial_load)
        original(planner, state_dict, metadata, is_coordinator)

    return set_up_planner


def _ask_as_the_file_does(
    state_dict: dict[str, Any], have: Mapping[str, Any], is_partial: bool
) -> None:
    """Leave out what older files do not have, and count wrappers in names as the run did that wrote the file."""
    if "grad_scaler" in state_dict and not any(key.startswith("grad_scaler.") for key in have):
        state_dict["grad_scaler"] = {}  # of no keys; torch wants its name to stay
    optimizer = state_dict.get("optimizer")
    if not optimizer:
        return
    meta = optimizer["param_to_group_meta"]
    prefix = wrapper_prefix(have, map(plain_name, meta))
    renamed = {
        name: name if prefix is None else prefix + plain_name(name)
        for name in [*optimizer["state"], *meta]
    }
    if is_partial:  # what the file does not know must not contradict what it knows
        for name, fields in list(meta.items()):
            if not any(f"{META_PREFIX}{renamed[name]}.{field}" in have for field in fields):
                del meta[name]
    state_dict["optimizer"] = {
        part: {renamed[name]: value for name, value in optimizer[part].items()}
        for part in optimizer
    }


def _check(state_dict: Mapping[str, Any], have: Mapping[str, Any], is_partial: bool) -> None:
    """Refuse what does not fit, before anything is overwritten."""
    asked, _ = flatten_state_dict(dict(state_dict))
    shapes, missing = _shapes(asked, have), [] if is_partial else sorted(asked.keys() - have.keys())
    problems = [f"other shapes: {some(shapes)}"] if shapes else []
    problems += [f"not in the file: {some(missing)}"] if missing else []
    if any(line.startswith("rng_state") for line in shapes + missing):
        problems.append(
            "the random state does not fit this machine or layout: --no-load-rng skips it"
        )
    _refuse(problems)


def replace_create_global_plan(
    original: Callable[..., list[LoadPlan]],
) -> Callable[..., list[LoadPlan]]:
    @functools.wraps(original)
    def create_global_plan(
        planner: DefaultLoadPlanner, global_plan: list[LoadPlan]
    ) -> list[LoadPlan]:
        """torch's, on the one rank that knows what all ask for: parts of the model that nobody takes are an error too."""
        content = planner.original_state_dict
        if isinstance(content.get("model"), ModelEntries) and not planner.allow_partial_load:
            asked = {item.dest_index.fqn for plan in global_plan for item in plan.items}
            parts = ("model.", STATE_PREFIX) if content.get("optimizer") else ("model.",)
            have = planner.metadata.state_dict_metadata
            left = [
                key
                for key, entry in have.items()
                if key.startswith(parts) and key not in asked and not _is_empty(entry)
            ]
            _refuse([f"only in the file: {some(sorted(left))}"] if left else [])
        return original(planner, global_plan)

    return create_global_plan


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(
            "the checkpoint is one of another model or run:\n  " + "\n  ".join(problems)
        )


def _is_empty(entry: Any) -> bool:
    """Whether there is nothing to ask for."""
    return isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0


def _shapes(asked: Mapping[str, Any], have: Mapping[str, Any]) -> list[str]:
    """Tensors that are of another shape in the file."""
    tensors = {
        key: entry for key, entry in have.items() if isinstance(entry, TensorStorageMetadata)
    }
    return [
        f"{key}: {tuple(tensors[key].size)} in the file, {tuple(value.shape)} here"
        for key, value in asked.items()
        if isinstance(value, torch.Tensor) and key in tensors and tensors[key].size != value.shape
    ]
