# SPDX-License-Identifier: Apache-2.0
"""A check that all ranks are about to shard the same model with the same settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.settings import ResolvedSettings

_SEPARATOR = "\0"
"""Separator of a name and its value in one string; it sorts before all other characters."""


def check_agreement(
    settings: ResolvedSettings, parameters_of: dict[Unit, dict[str, nn.Parameter]]
) -> None:
    """Check that all ranks shard the same parameters with the same settings.

    Ranks that differ would wait for each other forever.

    Args:
        settings: those that affect communication are compared.
        parameters_of: the parameters of each unit, by name.

    Raises:
        ValueError: on every rank, naming up to ten differences.
    """
    values: dict[str, object] = {
        "the sharding strategy": f"{settings.strategy.name}, outer {settings.outer_strategy.name}",
        "mixed_precision_policy": settings.precision,
        "the gradient policy": settings.gradients,
        "report_nan_in_param_grad": settings.report_nan,
        "sync_model_each_microbatch": settings.sync_each_microbatch,
        "overlap_grad_reduce": settings.overlap.grad_reduce,
        "overlap_param_gather": settings.overlap.param_gather,
        "suggested_communication_unit_size": settings.overlap.prefetch_bytes,
        "the settings of memory slots": settings.slots,
        "use_decoupled_grad": settings.use_decoupled_grad,
        "find_unused_parameters": settings.find_unused,
        "granularity": settings.granularity.unit
        if settings.granularity.is_required
        else "prefer_rows",
        "the list of units": ", ".join(unit.name or "the model" for unit in parameters_of),
    }
    number = 0
    for parameters in parameters_of.values():
        for name, parameter in parameters.items():
            values[f"parameter {number}"] = _description(name, parameter)
            number += 1
    values["the number of parameters"] = number
    axes = settings.mesh.dense
    groups = [axes.inner.get_group()]
    if axes.outer is not None:
        groups.append(axes.outer.get_group())
    differing = differences(values, groups)
    if differing:
        raise ValueError("\n".join(differing[:10]))


def differences(values: dict[str, object], groups: Sequence[dist.ProcessGroup]) -> list[str]:
    """Return a problem for every value that differs between ranks; a collective over ``groups``."""
    given = agree([name + _SEPARATOR + str(value) for name, value in values.items()], groups)
    values_of: dict[str, list[str]] = {name: [] for name in values}
    for each in given:
        name, _, value = each.partition(_SEPARATOR)
        # A rank with fewer parameters ignores those that only other ranks have. The numbers of
        # parameters then differ too, and are reported.
        if name in values_of:
            values_of[name].append(value)
    return [
        f"{name} differs between ranks: {'; '.join(each)}"
        for name, each in values_of.items()
        if len(each) > 1
    ]


def _description(name: str, parameter: nn.Parameter) -> str:
    trainable = "trainable" if parameter.requires_grad else "frozen"
    on_meta = " on meta" if parameter.is_meta else ""
    return f"{name} {tuple(parameter.shape)} {parameter.dtype} {trainable}{on_meta}"
