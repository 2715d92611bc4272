# SPDX-License-Identifier: Apache-2.0
"""Warnings of probable mistakes, and the error of an optimizer that would train nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.fsdp.config.settings import Units, resolve_unit_modules

_logger = logging.getLogger(__name__)

IS_COMPUTE = "_fsdp_is_compute"
"""Attribute of the parameters of modules that are sharded."""

# Optimizers whose parameters were looked at. Their number of groups may grow.
_checked: WeakSet[torch.optim.Optimizer] = WeakSet()
_is_watching = False


def warn(
    message: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Log a message on the first rank only.

    Args:
        message: the message, with placeholders of ``logging``.
        args: values of the placeholders.
        level: level of ``logging``.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        _logger.log(level, message, *args)


def warn_of_unmatched_units(module: nn.Module, units: Units) -> None:
    """Warn of classes of units that are nowhere in the model."""
    inside = list(module.modules())[1:]
    unmatched = []
    for unit in resolve_unit_modules(units):
        if isinstance(unit, type) and not any(isinstance(other, unit) for other in inside):
            unmatched.append(unit.__name__)
    if not unmatched:
        return
    counts: Counter[str] = Counter()
    for parent in module.modules():
        if next(parent.children(), None) is not None:
            counts[type(parent).__name__] += 1
    present = [name for name, count in counts.most_common(5) if count > 1]
    hint = ""
    if present:
        hint = f" Its repeated modules are {', '.join(present)}"
    warn(
        f"units: the model has no {' and no '.join(unmatched)}, so nothing is gathered layer by"
        f" layer for it.{hint}"
    )


def warn_of_absent_state(optimizer: str) -> None:
    """Warn of a state dict without state, for an optimizer that has some after its first step."""
    warn(
        f"load_state_dict of {optimizer} got no state. If torch.distributed.checkpoint has loaded"
        f" it, what the checkpoint has is not restored: {optimizer} has no state before its first"
        " step, so there was nothing to load into. Take a step before state_dict() and dcp.load,"
        " which restore the weights too"
    )


def warn_of_frozen_parameters(optimizer: str, names: Sequence[str]) -> None:
    """Warn of frozen parameters that a state dict has no state for, while others have some."""
    more = ", ..." if len(names) > 5 else ""
    warn(
        f"load_state_dict of {optimizer} got no state for {len(names)} frozen parameters"
        f" ({', '.join(names[:5])}{more}). torch.distributed.checkpoint.state_dict leaves them out:"
        " to keep their moments, load before they are frozen, or by optimizer.load_state_dict"
    )


def warn_of_no_optimizer() -> None:
    """Warn that gradients are computed that no sharded optimizer uses."""
    warn(
        "a backward has ended on a sharded model whose parameters no sharded optimizer steps. To"
        " train it, create the optimizer over model.parameters() and pass it to"
        " fully_shard_optimizer, or shard both by fully_shard(model, optimizer). This warning"
        " appears once"
    )


# ---- optimizers from before sharding


def watch_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse the steps of optimizers over the parameters of a module from before it was sharded."""
    global _is_watching
    _checked.clear()  # an optimizer may have stepped the module before
    for parameter in parameters:
        setattr(parameter, IS_COMPUTE, True)
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_refuse_parameters_from_before)


def _refuse_parameters_from_before(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Raise ``RuntimeError`` at the first step of an optimizer that would train nothing."""
    if optimizer in _checked:
        return
    num_parameters = 0
    num_stale = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            num_parameters += 1
            num_stale += hasattr(parameter, IS_COMPUTE) and parameter.requires_grad
    if num_stale:
        raise RuntimeError(
            f"{num_stale} of the optimizer's {num_parameters} parameters are those of a module that"
            " has been sharded since: they have no gradients, and a step would train nothing."
            " Create the optimizer over model.parameters() after fully_shard_model and pass it to"
            " fully_shard_optimizer, or shard both by fully_shard(model, optimizer)"
        )
    _checked.add(optimizer)
