# SPDX-License-Identifier: Apache-2.0
"""Flags that are not built are refused with their reason unless they have their default."""

import argparse
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest

from megatron.pretrain.arguments import build_parser
from megatron.pretrain.arguments.config_flags import CONFIGS, OF_SOME_RELEASES, matches
from megatron.pretrain.arguments.flags import as_written, spelled
from megatron.pretrain.arguments.not_built import (
    LOSSES,
    MUON,
    NEEDS,
    NOT_BUILT_VALUES,
    REFUSED,
    SAME_HERE,
    Needs,
    refusal,
)
from tests.support.pretrain.arguments.command_lines import (
    DESTINATIONS,
    MOCK,
    REFUSED_HERE,
    SMALL,
    other_value,
    parse,
    problems,
)

REFUSED_VALUES: list[tuple[str, object]] = []
for _dest, _values in NOT_BUILT_VALUES.items():
    # Some releases have no such flag.
    REFUSED_VALUES += [(_dest, value) for value in _values if _dest in DESTINATIONS]


FLAGS = {action.dest: action.option_strings[0] for action in build_parser()._actions}
KNOWN = FLAGS.keys() | set(OF_SOME_RELEASES.split())
KNOWN |= {field.name for field in chain.from_iterable(map(fields, CONFIGS.values()))}
"""Destinations here, and fields of some release."""


def flag_of(dest: str) -> str:
    return FLAGS.get(dest, spelled(dest))


def test_tables_of_refusals_name_known_destinations() -> None:
    tables = [*REFUSED.values(), *SAME_HERE.values(), *(rule.dests for rule in NEEDS)]
    for patterns in tables:
        for pattern in patterns.split():
            assert any(matches(name, pattern) for name in KNOWN), pattern
    others = {rule.other for rule in NEEDS} | {rule.unless for rule in NEEDS if rule.unless}
    assert NOT_BUILT_VALUES.keys() | others - {"virtual_pipeline_model_parallel_size"} <= KNOWN


@pytest.fixture(scope="module")
def refused_together(known: dict[str, argparse.Action]) -> list[str]:
    """Return the problems of a command line with all flags that are not built."""
    given = [
        (name, other_value(action)) for name, action in known.items() if action.dest in REFUSED_HERE
    ]
    assert all(value is not None for _, value in given)
    return problems(MOCK + " " + " ".join(f"{name} {value}" for name, value in given))


@pytest.mark.parametrize("dest", sorted(REFUSED_HERE))
def test_a_flag_that_is_not_built_is_refused_with_its_reason(
    dest: str, known: dict[str, argparse.Action], refused_together: list[str]
) -> None:
    name = next(name for name, action in known.items() if action.dest == dest)
    assert any(
        p.startswith((f"{name}:", f"{name} ")) and p.endswith(str(refusal(dest)))
        for p in refused_together
    )


@pytest.mark.parametrize(("dest", "value"), REFUSED_VALUES)
def test_a_value_that_is_not_built_is_refused_with_its_reason(
    dest: str, value: Any, known: dict[str, argparse.Action]
) -> None:
    name = next(name for name, action in known.items() if action.dest == dest)
    word = as_written(value)
    assert f"{name} {word}: {NOT_BUILT_VALUES[dest][value]}" in problems(f"{MOCK} {name} {word}")


def test_a_refused_flag_is_accepted_at_its_default() -> None:
    line = (
        "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --cp-comm-type p2p"
        " --fp8-recipe delayed"
    )
    args, _ = parse(
        f"{MOCK} {line} --rerun-mode disabled --main-grads-dtype fp32 --megatron-fsdp-version 1"
    )
    assert args.expert_tensor_parallel_size == 1


BESIDE = {
    ("use_megatron_fsdp", (False,)): "--use-megatron-fsdp",
    ("multi_latent_attention", (False,)): "--multi-latent-attention",
    ("init_model_with_meta_device", (False,)): "--init-model-with-meta-device --use-megatron-fsdp",
    ("use_rope_scaling", ()): "--use-megatron-fsdp",
    ("optimizer", ("adam", *MUON)): "--optimizer sgd",
    ("bias_swiglu_fusion", ()): "--no-bias-swiglu-fusion",
    ("create_attention_mask_in_dataloader", ()): "--no-create-attention-mask-in-dataloader",
    ("fp8_recipe", ("delayed",)): "--fp8-recipe tensorwise",
    ("moe_router_load_balancing_type", LOSSES): "--moe-router-load-balancing-type none",
}
"""Values of the other flag that are not the default -> the flags that give them."""


@pytest.mark.parametrize("rule", NEEDS, ids=lambda rule: rule.end(flag_of).replace(" ", "-"))
def test_a_flag_that_would_do_nothing_is_refused(
    rule: Needs, known: dict[str, argparse.Action]
) -> None:
    found = [dest for dest in FLAGS if matches(dest, rule.dests) and not refusal(dest)]
    for dest in found:
        name = FLAGS[dest]
        line = f"{SMALL} --mock-data {name} {other_value(known[name])}"
        line += f" {BESIDE.get((rule.other, rule.values), '')}"
        if dest.startswith("moe_"):
            line += " --num-experts 4"
        if dest != rule.other:
            assert f"{name} {rule.end(flag_of)}" in problems(line)
