# SPDX-License-Identifier: Apache-2.0
"""Properties of meshes, models and parameters, and state of one optimizer for another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.dtensor.tensor_part import get_mcore_tensor_parallel_partition_dim
from megatron.fsdp.engine.mesh import axis_names
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.not_offered import attributes_of

__all__ = [
    "FSDPDistributedIndex",
    "contains_submesh",
    "find_megatron_fsdp",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "is_mcore_tensor_model_parallel",
    "state_of_other_optimizers",
]


def find_megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """Return the wrapper in a chain of wrappers that have each other as ``module``; None if none.

    Args:
        model: the outermost of them.
    """
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, MegatronFSDP):
        inner = getattr(inner, "module", None)
    if isinstance(inner, MegatronFSDP):
        return inner
    return None


def get_mesh_names(device_mesh: DeviceMesh | None, only_submesh_dims: bool = False) -> list[str]:
    """Return the names of the axes that ``device_mesh`` can be sliced by; empty without names.

    Args:
        device_mesh: may be a slice of a larger mesh; the axes of the larger mesh are then included.
        only_submesh_dims: return the axes of ``device_mesh`` itself only, neither those of the
            larger mesh nor flattened ones.
    """
    if device_mesh is None:
        return []
    names = list(axis_names(device_mesh))
    if only_submesh_dims:
        return names
    root = device_mesh._get_root_mesh()
    return list(dict.fromkeys([*names, *axis_names(root), *root._flatten_mapping]))


def contains_submesh(
    device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None
) -> bool:
    """Return True if every one of ``submesh_names`` names an axis, which may be a flattened one.

    Args:
        device_mesh: None contains nothing.
        submesh_names: one name or several; the result is False without any.
    """
    if isinstance(submesh_names, str):
        submesh_names = (submesh_names,)
    wanted = set(submesh_names or ())
    return bool(wanted) and wanted <= set(get_mesh_names(device_mesh))


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return True if tensor parallelism divides a parameter of Megatron-Core."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def state_of_other_optimizers(
    optimizer: torch.optim.Optimizer, saved: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """Return a state dict for a sharded Adam or Muon with the momentum of other optimizers.

    ``momentum_buffer`` of Muon and ``exp_avg`` of Adam are the same average of gradients. Adam's
    ``exp_avg_sq`` is dropped for Muon; after Muon it begins at the square of ``exp_avg``, the least
    that it can be, with the largest number of steps in ``saved``.

    Args:
        optimizer: has all settings of its param groups already.
        saved: state dicts of sharded optimizers, which have all of its parameters; a collective.

    Raises:
        ValueError: there is no momentum for a parameter, or it is in another basis, as SOAP's, or
            a sum of gradients, as SGD's.
    """
    result = optimizer.state_dict()
    _refuse_sums(result)
    param_state_of: dict[str, dict[str, Any]] = {}  # by the names of parameters
    last_step = 0.0
    for state_dict in saved:
        _refuse_sums(state_dict)
        for group in state_dict["param_groups"]:
            for name, key in zip(group["param_names"], group["params"], strict=True):
                param_state = state_dict["state"].get(key, {})
                param_state_of[name] = param_state
                last_step = max(last_step, float(param_state.get("step", 0.0)))
    for group in result["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            wanted = result["state"].get(key, {})
            param_state = param_state_of.get(name, {})
            if wanted or param_state:  # else it is frozen
                result["state"][key] = _param_state_for(name, wanted, param_state, last_step)
    return result


def _refuse_sums(state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        if "dampening" in group:
            raise ValueError(
                "the momentum of SGD is a sum of gradients, not an average as of the others"
            )


def _param_state_for(
    name: str,
    wanted: dict[str, Any],
    param_state: dict[str, Any],
    last_step: float,
) -> dict[str, Any]:
    """Return the entries ``wanted`` of a parameter's state, made of another optimizer's state."""
    momentum = param_state.get("exp_avg", param_state.get("momentum_buffer"))
    has_momentum = "exp_avg" in wanted or "momentum_buffer" in wanted
    if momentum is None or "Q_L" in param_state or not has_momentum:
        raise ValueError(f"{name}: {sorted(wanted)} cannot be made of {sorted(param_state)}")
    if "momentum_buffer" in wanted:
        return {"momentum_buffer": momentum}
    if "exp_avg_sq" in param_state:
        return param_state
    return {
        "step": torch.tensor(last_step),
        "exp_avg": momentum,
        "exp_avg_sq": momentum.square(),
    }


_SLOTS = "memory at fixed addresses is fsdp_double_buffer=True, its bytes model.memory_slots"
__getattr__ = attributes_of(
    __name__, {"GlobalMemoryBuffer": _SLOTS, "get_global_memory_buffer": _SLOTS}
)
