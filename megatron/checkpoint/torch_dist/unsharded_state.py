# SPDX-License-Identifier: Apache-2.0
"""The common state of a torch_dist checkpoint: everything that is not sharded over ranks.

It is a dict in the file ``common.pt``, or from Megatron-Core 0.19 on in an object of the directory:
the run's arguments, counters, the schedule of rates and the optimizer's param groups. In some
layouts of the optimizer the param groups are in an object of each rank instead. A run has several
chained optimizers where experts have one of their own.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.checkpoint.core.param_groups import EXPERT_FIELD, has_muon
from megatron.checkpoint.core.training_state import Fields, OptimizerParamGroup, TrainingState
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError
from megatron.checkpoint.store import durable
from megatron.checkpoint.torch_dist.optimizer_keys import OptimizerOfRank

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"

KNOWN_FIELDS = (
    "args",
    "checkpoint_version",
    "iteration",
    "num_floating_point_operations_so_far",
    "optimizer",
    "opt_param_scheduler",
    "content_metadata",
)
"""Fields that :class:`TrainingState` has, or that follow from the layout."""


def read_common(stored: StoredCheckpoint) -> Fields:
    """Read the common state, from its file or from its object.

    Raises:
        DamagedCheckpointError: if it is missing, or cannot be read.
        RefusedPickleError: if it names a class that checkpoints do not hold.
    """
    path = stored.directory / COMMON_FILE
    if path.is_file():
        with durable.naming(path), safe_pickle.naming(str(path)):
            common = safe_pickle.load_torch(path.read_bytes())
    elif COMMON_OBJECT in stored.objects:
        common = read_sharded_object(stored, COMMON_OBJECT)
    else:
        raise DamagedCheckpointError(
            f"{stored.directory} has neither {COMMON_FILE} nor the object {COMMON_OBJECT}"
        )
    if not isinstance(common, dict):
        raise DamagedCheckpointError(
            f"{stored.directory}: the common state is a {type(common).__name__}, not a dict"
        )
    if not common:
        raise DamagedCheckpointError(f"{stored.directory}: the common state is empty")
    return common


def grad_scaler_in(common: Mapping[str, Any]) -> Fields | None:
    """Return the state of the gradient scaler, which is in one of the optimizers; None without."""
    for optimizer in optimizers_in(common):
        scaler: Fields | None = optimizer.get("grad_scaler")
        if scaler:
            return scaler
    return None


def is_distributed(groups: Sequence[OptimizerParamGroup] | None) -> bool:
    """Return True if Megatron-Core's optimizer of these groups is distributed: with Muon none."""
    return not has_muon(group.fields for group in groups or ())


def common_of(state: TrainingState) -> Fields:
    """Return the common state to write, for the optimizer's layout in :func:`is_distributed`."""
    content: Fields = dict(state.others)
    has_distributed = is_distributed(state.groups)
    if state.args is not None:
        content["args"] = _args_of_format(state.args, has_distributed)
    content |= {"checkpoint_version": state.version, "iteration": state.iteration or 0}
    if state.operations is not None:
        content["num_floating_point_operations_so_far"] = state.operations
    content["content_metadata"] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if state.groups is not None:
        content["optimizer"] = _optimizer(state, has_distributed)
        if has_distributed:
            content["content_metadata"] |= {
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
    if state.scheduler is not None:
        content["opt_param_scheduler"] = dict(state.scheduler)
    return content


def notes_on_steps(state: TrainingState) -> Iterator[str]:
    """Yield a note for each parameter whose step count the format cannot keep.

    Megatron-Core has one count for all parameters, and refuses a file with several.
    """
    steps = _steps(state)
    last = max(steps.values(), default=None)
    for name, step in steps.items():
        if step != last:
            yield f"{name}: its moments have seen {step:g} steps; torch_dist has {last:g} for all"


def _args_of_format(args: Namespace, has_distributed: bool) -> Namespace:
    """Return the arguments of a run that writes this format."""
    values = {
        "use_megatron_fsdp": False,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": has_distributed,
        "dist_ckpt_optim_fully_reshardable": True,
    }
    return Namespace(**vars(args) | values)


def _optimizer(state: TrainingState, has_distributed: bool) -> dict[Any, Any]:
    """Return the param groups in Megatron-Core's form, in which there may be several optimizers.

    Experts have their own, but not in runs that divide whole matrices among ranks. Muon's go before
    those of Adam.
    """
    args = state.args
    last = max(_steps(state).values(), default=None)
    is_layer_wise = getattr(args, "optimizer", "") == "dist_muon"
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        is_layer_wise = True
    groups_of: dict[tuple[bool, bool], list[Fields]] = {}
    for group in state.groups or []:
        fields = dict(group.fields)
        is_adams = has_distributed or "betas" in fields
        if last is not None and is_adams:
            fields["step"] = last
        of_experts = bool(fields.get(EXPERT_FIELD)) and not is_layer_wise
        groups_of.setdefault((is_adams, of_experts), []).append(fields)
    optimizers = []
    for is_adams, of_experts in sorted(groups_of):
        inner: Fields = {"param_groups": groups_of[is_adams, of_experts]}
        if has_distributed:
            optimizer = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
            if state.grad_scaler:
                optimizer["grad_scaler"] = state.grad_scaler
            optimizers.append(optimizer)
            continue
        if last is not None and is_adams:
            inner["state"] = {"common_step": torch.tensor(float(last))}
        if getattr(args, "bf16", False):
            inner = {"optimizer": inner}
        optimizers.append(inner)
    if len(optimizers) == 1:
        return optimizers[0]
    return dict(enumerate(optimizers))


def _steps(state: TrainingState) -> dict[str, float]:
    """Return the number of steps that each parameter's moments have seen, where that is known."""
    steps = {}
    for group in state.groups or []:
        for name in group.names:
            step = state.step_of(name)
            if step is not None:
                steps[name] = step
    return steps


def read_sharded_object(stored: StoredCheckpoint, key: str) -> Any:
    """Read an object, without the list of one that some releases have put around it.

    Raises:
        DamagedCheckpointError: if it cannot be read.
        RefusedPickleError: if it names a class that checkpoints do not hold.
    """
    value = stored.read_object(key)
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def optimizers_in(common: Mapping[str, Any]) -> list[Any]:
    """Return the state of each chained optimizer in the common state."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    if optimizer and all(isinstance(number, int) for number in optimizer):
        return [optimizer[number] for number in sorted(optimizer)]
    return [optimizer]


def optimizers_of_ranks(
    stored: StoredCheckpoint,
    keys: Mapping[OptimizerOfRank, str],
) -> dict[int, Any]:
    """Return the state of each chained optimizer that ranks have stored.

    A rank without parameters in a group lacks fields of it, which another rank has. ``keys`` are
    those of each rank's object ``optimizer``.
    """
    groups_of_chain: dict[int, list[Fields]] = {}
    for (chain, _), key in sorted(keys.items()):
        stored_groups = read_sharded_object(stored, key)["param_groups"]
        groups = groups_of_chain.setdefault(chain, [{} for _ in stored_groups])
        for group, fields in zip(groups, stored_groups):
            for name, value in fields.items():
                if group.get(name) is None:
                    group[name] = value
    optimizers = {}
    for chain, groups in groups_of_chain.items():
        optimizers[chain] = {"optimizer": {"param_groups": groups}}
    return optimizers


def param_groups_of(optimizers: Sequence[Any]) -> list[Fields]:
    """Return the param groups of all optimizers, those of experts last.

    They have ``EXPERT_FIELD`` and, if the file has it, ``step``, but no ``params``.
    """
    groups = []
    for number, state in enumerate(optimizers):
        if not isinstance(state, dict):
            continue
        inner = state.get("optimizer", state)
        common_step = (inner.get("state") or {}).get("common_step")
        is_last_of_several = 0 < number == len(optimizers) - 1
        for fields in inner.get("param_groups", []):
            group = {}
            for name, value in fields.items():
                if name != "params":
                    group[name] = value
            group.setdefault(EXPERT_FIELD, is_last_of_several)
            step = common_step
            if step is None:
                step = group.get("step")
            if isinstance(step, torch.Tensor):
                step = step.item()
            if step is not None:
                group["step"] = step
            groups.append(group)
    return sorted(groups, key=lambda group: bool(group[EXPERT_FIELD]))
