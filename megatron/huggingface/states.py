# SPDX-License-Identifier: Apache-2.0
"""States of sharded models: checkpoints in which every rank writes its shards, and whole weights.

A folder of shards is written by torch.distributed.checkpoint. Its weights have the names of the
unwrapped module, so they load into a plain model too, and onto any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from megatron.fsdp import ShardedModule
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.module.own_names import own_name

SHARDS_FOLDER = "sharded_state"
"""Folder inside a checkpoint of the Trainer or of `save_state`."""

PREFIX = "module."
"""Prefix of the wrapper's names."""

Path = str | os.PathLike[str]


def is_peft_model(module: nn.Module) -> bool:
    """Return True for PEFT's wrapper, whose files contain the adapters without the base model."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def shards_folder(checkpoint: Path) -> str | None:
    """Return the folder of shards in a checkpoint, None if it has none.

    Raises:
        ValueError: if the folder is incomplete, because its save was interrupted.
    """
    folder = os.path.join(checkpoint, SHARDS_FOLDER)
    if not os.path.isdir(folder):
        return None
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        raise ValueError(
            f"{folder} is incomplete: its save was interrupted. Resume from another checkpoint"
        )
    return folder


def shared_shards_folder(checkpoint: Path) -> str | None:
    """Return what :func:`shards_folder` does, the same on every rank; a collective.

    Raises:
        ValueError: on every rank, if the folder is incomplete, if some ranks do not see it, or if
            they look at different checkpoints. They would wait for each other in a load.
    """
    if not dist.is_initialized():
        return shards_folder(checkpoint)
    names = agree([os.fspath(checkpoint)])
    if len(names) > 1:
        raise ValueError(f"ranks want to load different checkpoints: {', '.join(names[:5])}")
    folder = None
    problems = []
    try:
        folder = shards_folder(checkpoint)
    except ValueError as error:
        problems.append(str(error))
    problems = agree(problems)
    if problems:
        raise ValueError(problems[0])
    missing_here = []
    if folder is None:
        missing_here.append(f"rank {dist.get_rank()}")
    blind = agree(missing_here)
    if 0 < len(blind) < dist.get_world_size():
        raise ValueError(
            f"{os.path.join(checkpoint, SHARDS_FOLDER)} is not seen by {', '.join(blind[:5])}"
            f" ({len(blind)} of {dist.get_world_size()} ranks): all ranks must share a file system"
        )
    return folder


def save_shards(
    checkpoint: Path,
    models: Sequence[ShardedModule],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Write the shards of models and optimizers into a checkpoint; a collective.

    Of a PEFT model only what is trained is written.

    Args:
        checkpoint: folder of the checkpoint; the shards go into a folder in it.
        models: sharded models.
        optimizers: sharded optimizers.
    """
    folder = os.path.join(checkpoint, SHARDS_FOLDER)
    if not dist.is_initialized() or dist.get_rank() == 0:
        # Without it earlier shards are incomplete until all are written. The other ranks write
        # only when this one has planned what each of them does.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, ".metadata"))
    save(_state(models, optimizers), checkpoint_id=folder)


def load_shards(
    checkpoint: Path,
    models: Sequence[ShardedModule],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Load what :func:`save_shards` has written, on any number of ranks; a collective.

    Args:
        checkpoint: folder of the checkpoint.
        models: sharded models, in the order in which they were saved; their weights change.
        optimizers: sharded optimizers, in the order in which they were saved.

    Raises:
        ValueError: if the checkpoint has no complete folder of shards.
    """
    folder = shared_shards_folder(checkpoint)
    if folder is None:
        raise ValueError(f"{checkpoint} has no folder {SHARDS_FOLDER}")
    state = _state(models, optimizers)
    load(state, checkpoint_id=folder)
    for number, model in enumerate(models):
        model.load_state_dict(state[f"model_{number}"], strict=not is_peft_model(model.module))
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(state[f"optimizer_{number}"])


def load_weights_of_shards(
    model: nn.Module,
    checkpoint: Path,
    number: int = 0,
) -> None:
    """Load the weights in a checkpoint of shards into a plain model; needs no process group.

    Args:
        model: an unsharded module, built like the one that was trained.
        checkpoint: the checkpoint, such as the Trainer's `checkpoint-50`.
        number: of the model among those that were prepared.

    Raises:
        ValueError: if the checkpoint has no complete folder of shards.
    """
    folder = shards_folder(checkpoint)
    if folder is None:
        raise ValueError(f"{checkpoint} has no folder {SHARDS_FOLDER}")
    weights = model.state_dict()
    if is_peft_model(model):
        for name in _frozen_names(model):
            weights.pop(name, None)
    state = {f"model_{number}": weights}
    load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(weights, strict=not is_peft_model(model))


def whole_state_dict(
    model: ShardedModule,
    keep: bool = True,
) -> dict[str, torch.Tensor]:
    """Gather the weights, one tensor at a time; a collective.

    Weights have the dtype of the module, not that of main weights, and the names of the module.
    Names of tied weights share a tensor. Of a PEFT model, frozen weights are left out, but for its
    embeddings, which PEFT may want to save.

    Args:
        model: a sharded model.
        keep: False on ranks that only take part; they get an empty dict.

    Returns:
        Tensors on the CPU.
    """
    main_weights = model.state_dict(keep_vars=True)
    dtypes = {sharded.parameter: sharded.compute.dtype for sharded in model.sharded_params}
    unwanted = _unwanted_names(model.module)
    gathered = {}
    whole = {}
    for key, value in model.state_dict().items():
        name = key.removeprefix(PREFIX)
        if name in unwanted:
            continue
        if isinstance(value, DTensor):
            main_weight = main_weights[key]
            if main_weight not in gathered:
                tensor = full_tensor(value)
                gathered[main_weight] = torch.empty(0)
                if keep:
                    dtype = dtypes.get(main_weight, value.dtype)
                    # A shard of a single rank is a view of the weights, which training changes.
                    gathered[main_weight] = tensor.to("cpu", dtype, copy=True)
            value = gathered[main_weight]
        elif keep and isinstance(value, torch.Tensor):
            value = value.cpu()
        if keep:
            whole[name] = value
    return whole


def _state(
    models: Sequence[ShardedModule],
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, Any]:
    """Return the state of models and optimizers as DTensors, ready to be saved or loaded into."""
    state = {}
    for number, model in enumerate(models):
        frozen = set()
        if is_peft_model(model.module):
            frozen = _frozen_names(model.module)
        weights = {}
        for key, value in model.state_dict().items():
            name = key.removeprefix(PREFIX)
            if name not in frozen:
                weights[name] = value
        state[f"model_{number}"] = weights
    for number, optimizer in enumerate(optimizers):
        state[f"optimizer_{number}"] = optimizer.state_dict()
    return state


def _frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters of a module that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {own_name(name) for name, parameter in named if not parameter.requires_grad}


def _unwanted_names(module: nn.Module) -> set[str]:
    """Return the names of weights that no file of a whole model needs."""
    if not is_peft_model(module):
        return set()
    embeddings = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        if hasattr(module, method):
            embeddings.append(getattr(module, method)())
    prefixes = []
    for name, inner in module.named_modules():
        if inner in embeddings:
            prefixes.append(f"{own_name(name)}.")
    return {name for name in _frozen_names(module) if not name.startswith(tuple(prefixes))}
