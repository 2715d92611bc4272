# SPDX-License-Identifier: Apache-2.0
"""Assignment of parameters to the optimizer's param groups.

torch_dist files do not store which parameter is in which group. It follows from Megatron-Core's
rules.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.core.listing import refuse, some
from megatron.checkpoint.core.spelling import canonical_name, is_in_expert
from megatron.checkpoint.core.training_state import Fields, OptimizerParamGroup

_FIELDS_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_FIELDS_OF_TRANSFORMER_ENGINE = {"bias_correction": True}

Groups = list[Fields]
"""Fields of the optimizer's param groups."""

EXPERT_FIELD = "is_expert_parallel"
"""Megatron-Core's field of a param group: its parameters are those of experts."""


def assign(
    shapes: Mapping[str, Shape],
    groups: Groups,
    decay_query_key_norms: bool = False,
    numbers: Mapping[str, int] | None = None,
    momentum_only: Container[str] = (),
) -> list[OptimizerParamGroup]:
    """Assign every parameter to one of ``groups``.

    Biases and parameters with one dim have no weight decay. Experts are in groups of their own if
    there are such groups, and so are embedding and output layer if they have their own learning
    rate. Where Muon steps matrices and Adam the rest, Adam's groups are those with ``betas``.

    Args:
        shapes: shapes of the parameters that the optimizer has, by canonical name.
        groups: fields of the optimizer's param groups.
        decay_query_key_norms: the run's --apply-wd-to-qk-layernorm: norms of queries and keys have
            weight decay.
        numbers: canonical name -> position in ``groups``, for the parameters of which it is known.
        momentum_only: parameters whose state has no second moment.

    Raises:
        ValueError: lists the parameters that no group fits, or a number without a group.
    """
    result = []
    for fields in groups:
        result.append(OptimizerParamGroup(dict(fields), []))
    known_numbers = numbers or {}
    problems = []
    for name, shape in shapes.items():
        if name in known_numbers:
            fitting = [known_numbers[name]]
        else:
            fitting = _fitting(
                name,
                shape,
                groups,
                decay_query_key_norms=decay_query_key_norms,
                is_adams=name not in momentum_only,
            )
        if not fitting:
            problems.append(f"{name}: none fits")
            continue
        first, *others = fitting
        if first >= len(groups):
            problems.append(f"{name}: the map names group {first}")
        elif any(groups[other] != groups[first] for other in others):
            names = ", ".join(str(number) for number in fitting)
            problems.append(f"{name}: groups {names} fit, and they differ")
        else:
            result[first].names.append(name)
    refuse(
        f"the file has {len(groups)} param groups, and the rules do not determine which of them"
        " these parameters are in (--param-to-param-group-map-json does)",
        problems,
    )
    return result


def _fitting(
    name: str,
    shape: Shape,
    groups: Groups,
    decay_query_key_norms: bool,
    is_adams: bool,
) -> list[int]:
    """Return the numbers of the groups that the rules allow for a parameter.

    A rule counts only if the groups differ in it. That of decay counts for any two multipliers: of
    0.5 and 1, neither is that of a bias. A group without one has 1.
    """
    multipliers = [group.get("wd_mult", 1.0) for group in groups]
    fitting = list(range(len(groups)))
    if len(set(multipliers)) > 1:
        should_decay = _has_weight_decay(name, shape, decay_query_key_norms)
        fitting = [number for number in fitting if (multipliers[number] != 0.0) == should_decay]
    # The value of each group, and the one that the parameter's group has.
    rules = (
        ([bool(group.get(EXPERT_FIELD)) for group in groups], is_in_expert(name)),
        ([_has_own_rate(group, groups) for group in groups], name in VOCABULARY),
        (["betas" in group for group in groups], is_adams),
    )
    for values, wanted in rules:
        if len(set(values)) > 1:
            fitting = [number for number in fitting if values[number] == wanted]
    return fitting


def has_muon(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return True for the groups of a run in which Muon steps matrices, and Adam the rest."""
    return len({"betas" in fields for fields in groups}) > 1


def _has_weight_decay(
    name: str,
    shape: Shape,
    decay_query_key_norms: bool,
) -> bool:
    is_query_key_norm = ".q_layernorm." in name or ".k_layernorm." in name
    if is_query_key_norm and decay_query_key_norms:
        return True
    return len(shape) > 1 and not name.endswith(".bias")


def _has_own_rate(group: Mapping[str, Any], groups: Groups) -> bool:
    """Return True if a group is that of a run's --decoupled-lr.

    From 0.16 on ``is_decoupled_lr`` is False in all groups.
    """
    if group.get("is_decoupled_lr"):
        return True
    if group.get("default_config") is not False:
        return False
    for other in groups:
        if other.get("default_config") and _rates(other) == _rates(group):
            return False
    return True


def _rates(group: Mapping[str, Any]) -> tuple[Any, Any]:
    return group.get("max_lr"), group.get("min_lr")


def group_by_fields(fields_of: Mapping[str, Fields]) -> list[OptimizerParamGroup]:
    """Return one param group for all parameters with the same fields, groups of experts last."""
    groups: list[OptimizerParamGroup] = []
    for name, fields in fields_of.items():
        for group in groups:
            if group.fields == fields:
                group.names.append(name)
                break
        else:
            groups.append(OptimizerParamGroup(dict(fields), [name]))
    return sorted(groups, key=_order_of_group)


def _order_of_group(group: OptimizerParamGroup) -> tuple[bool, bool]:
    is_without_decay = group.fields.get("wd_mult") == 0.0
    return bool(group.fields.get(EXPERT_FIELD)), is_without_decay


def for_any_optimizer(fields: Mapping[str, Any], step: float | None) -> Fields:
    """Complete the fields of a group of Adam for both torch's AdamW and Transformer Engine's."""
    complete = dict(fields)
    if "betas" in fields:
        complete = {**_FIELDS_OF_TORCH, **_FIELDS_OF_TRANSFORMER_ENGINE, **fields}
    if step is not None:
        complete.setdefault("step", step)
    return complete


def parse_group_map(content: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of param groups by canonical name, from a map that a run has dumped.

    A run with several pipeline stages counts layers from 0 in each stage, so its map may lack the
    later layers. They are left out, and so is what is not in ``names``.

    Raises:
        ValueError: if it has none of ``names``, or values that are no numbers of groups.
    """
    numbers = {}
    wrong = []
    for name, number in content.items():
        canonical = canonical_name(name.removeprefix("model."))
        numbers[canonical] = number
        if type(number) is not int or number < 0:  # True and False are integers too
            wrong.append(canonical)
    if wrong:
        raise ValueError(f"the map of param groups should hold numbers of groups: {some(wrong)}")
    found = {}
    for name in names:
        if name in numbers:
            found[name] = numbers[name]
    if not found:
        raise ValueError("the map of param groups has no parameter of this checkpoint")
    return found
