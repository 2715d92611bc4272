# SPDX-License-Identifier: Apache-2.0
"""Which parameter is in which param group.

torch_dist files do not say; it follows from Megatron-Core's rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpoint.core.key_rules import VOCABULARY, canonical_name, is_expert
from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.core.training_state import OptimizerParamGroup

_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_OF_ENGINE = {"bias_correction": True}


def assign(
    shapes: Mapping[str, tuple[int, ...]],
    groups: list[dict[str, Any]],
    args: argparse.Namespace | None,
    numbers: Mapping[str, int] | None = None,
) -> list[OptimizerParamGroup]:
    """Give every parameter to one of ``groups``, the fields of the optimizer's param groups.

    Biases and what has one dim do not decay; experts are apart where a group is for them; embedding
    and output layer are where they have a learning rate of their own.

    Args:
        shapes: of the parameters that the optimizer has, by canonical name.
        args: of the run.
        numbers: canonical name -> position in ``groups``, for the parameters of which it is known.

    Raises:
        ValueError: listing the parameters that no group fits, or a number without a group.
    """
    result = [OptimizerParamGroup(dict(fields), []) for fields in groups]
    problems = []
    for name, shape in shapes.items():
        number = (numbers or {}).get(name)
        fitting = _fitting(name, shape, groups, args) if number is None else [number]
        if not fitting or fitting[0] >= len(groups):
            problems.append(
                f"{name}: " + ("none fits" if number is None else f"the map says {number}")
            )
        elif any(groups[other] != groups[fitting[0]] for other in fitting):
            problems.append(f"{name}: groups {', '.join(map(str, fitting))} fit, and they differ")
        else:
            result[fitting[0]].names.append(name)
    if problems:
        head = (
            f"the file has {len(groups)} param groups, and the rules do not say which of them these"
            " parameters are in"
        )
        raise ValueError(listed(f"{head} (--param-to-param-group-map-json does)", problems))
    return result


def _fitting(
    name: str, shape: tuple[int, ...], groups: list[dict[str, Any]], args: argparse.Namespace | None
) -> list[int]:
    """Numbers of the groups that the rules allow for a parameter."""
    decays = len(shape) > 1 and not name.endswith(".bias")
    if getattr(args, "apply_wd_to_qk_layernorm", False) and any(
        norm in name for norm in (".q_layernorm.", ".k_layernorm.")
    ):
        decays = True
    wanted = {
        "wd_mult": lambda value: (value != 0.0) == decays,
        "is_expert_parallel": lambda value: value == is_expert(name),
        "is_decoupled_lr": lambda value: value == (name in VOCABULARY),
    }
    fitting = list(range(len(groups)))
    for field, is_right in wanted.items():
        values = [
            _has_own_rate(group, groups) if field == "is_decoupled_lr" else group.get(field)
            for group in groups
        ]
        if len(set(values)) > 1:  # the groups differ in it
            fitting = [number for number in fitting if is_right(values[number])]
    return fitting


def _has_own_rate(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> bool:
    """Whether a group is that of a run's --decoupled-lr.

    From 0.16 on ``is_decoupled_lr`` is False in all groups.
    """
    usual = [
        (each.get("max_lr"), each.get("min_lr")) for each in groups if each.get("default_config")
    ]
    is_other = (
        group.get("default_config") is False
        and (group.get("max_lr"), group.get("min_lr")) not in usual
    )
    return bool(group.get("is_decoupled_lr")) or is_other


def group_by_fields(fields_of: Mapping[str, dict[str, Any]]) -> list[OptimizerParamGroup]:
    """The param groups of parameters whose fields are known: one for all that agree, experts last."""
    groups: list[OptimizerParamGroup] = []
    for name, fields in fields_of.items():
        group = next((group for group in groups if group.fields == fields), None)
        if group is None:
            group = OptimizerParamGroup(dict(fields), [])
            groups.append(group)
        group.names.append(name)
    return sorted(
        groups,
        key=lambda group: (
            bool(group.fields.get("is_expert_parallel")),
            group.fields.get("wd_mult") == 0.0,
        ),
    )


def for_any_optimizer(fields: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    """``fields`` with those that torch's AdamW and Transformer Engine's ask for, at their defaults."""
    complete = {**_OF_TORCH, **_OF_ENGINE, **fields}
    if step is not None:
        complete.setdefault("step", step)
    return complete


def parse_group_map(content: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Numbers of param groups by canonical name, from a map that a run has dumped.

    A run of several pipeline stages counts layers anew in each, so that its map may lack the later
    ones: those are left out.

    Raises:
        ValueError: where it has none of ``names``, or numbers that are none.
    """
    numbers = {
        canonical_name(name.removeprefix("model.")): number for name, number in content.items()
    }
    wrong = [
        name
        for name, number in numbers.items()
        if not isinstance(number, int) or isinstance(number, bool) or number < 0
    ]
    if wrong:
        raise ValueError(f"the map of param groups should hold numbers of groups: {some(wrong)}")
    found = {name: numbers[name] for name in names if name in numbers}
    if not found:
        raise ValueError("the map of param groups has no parameter of this checkpoint")
    return found
