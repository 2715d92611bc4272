# SPDX-License-Identifier: Apache-2.0
"""Assignment of parameters to the optimizer's param groups.

torch_dist files do not say which parameter is in which group. It follows from Megatron-Core's
rules.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.core.spelling import canonical_name, is_expert
from megatron.checkpoint.core.training_state import OptimizerParamGroup

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


def assign(
    shapes: Mapping[str, Shape],
    groups: list[dict[str, Any]],
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
    result = [OptimizerParamGroup(dict(fields), []) for fields in groups]
    problems = []
    for name, shape in shapes.items():
        number = (numbers or {}).get(name)
        if number is None:
            fitting = _fitting(name, shape, groups, decay_query_key_norms)
            if has_muon(groups):
                is_adams = name not in momentum_only
                fitting = [each for each in fitting if ("betas" in groups[each]) == is_adams]
        else:
            fitting = [number]
        if not fitting or fitting[0] >= len(groups):
            reason = "none fits" if number is None else f"the map says {number}"
            problems.append(f"{name}: {reason}")
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
    name: str, shape: Shape, groups: list[dict[str, Any]], decay_query_key_norms: bool
) -> list[int]:
    """Return the numbers of the groups that the rules allow for a parameter.

    A rule counts only if the groups differ in its field.
    """
    decays = [group.get("wd_mult") for group in groups]
    of_experts = [group.get("is_expert_parallel") for group in groups]
    with_own_rate = [_has_own_rate(group, groups) for group in groups]
    should_decay = _has_weight_decay(name, shape, decay_query_key_norms)
    fitting = list(range(len(groups)))
    if len(set(decays)) > 1:
        fitting = [number for number in fitting if (decays[number] != 0.0) == should_decay]
    if len(set(of_experts)) > 1:
        fitting = [number for number in fitting if of_experts[number] == is_expert(name)]
    if len(set(with_own_rate)) > 1:
        fitting = [number for number in fitting if with_own_rate[number] == (name in VOCABULARY)]
    return fitting


def has_muon(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return True for the groups of a run in which Muon steps matrices, and Adam the rest."""
    return len({"betas" in fields for fields in groups}) > 1


def _has_weight_decay(name: str, shape: Shape, decay_query_key_norms: bool) -> bool:
    is_query_key_norm = ".q_layernorm." in name or ".k_layernorm." in name
    if is_query_key_norm and decay_query_key_norms:
        return True
    return len(shape) > 1 and not name.endswith(".bias")


def _has_own_rate(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> bool:
    """Return True if a group is that of a run's --decoupled-lr.

    From 0.16 on ``is_decoupled_lr`` is False in all groups.
    """
    usual = [
        (other.get("max_lr"), other.get("min_lr"))
        for other in groups
        if other.get("default_config")
    ]
    is_other = (
        group.get("default_config") is False
        and (group.get("max_lr"), group.get("min_lr")) not in usual
    )
    return bool(group.get("is_decoupled_lr")) or is_other


def group_by_fields(fields_of: Mapping[str, dict[str, Any]]) -> list[OptimizerParamGroup]:
    """Return one param group for all parameters with the same fields, groups of experts last."""
    groups: list[OptimizerParamGroup] = []
    for name, fields in fields_of.items():
        group = next((group for group in groups if group.fields == fields), None)
        if group is None:
            group = OptimizerParamGroup(dict(fields), [])
            groups.append(group)
        group.names.append(name)
    return sorted(groups, key=_order_of_group)


def _order_of_group(group: OptimizerParamGroup) -> tuple[bool, bool]:
    is_without_decay = group.fields.get("wd_mult") == 0.0
    return bool(group.fields.get("is_expert_parallel")), is_without_decay


def for_any_optimizer(fields: Mapping[str, Any], step: float | None) -> dict[str, Any]:
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
