# SPDX-License-Identifier: Apache-2.0
"""Flags that are not built are refused with their reason unless they have their default."""

import argparse
from typing import Any

import pytest

from megatron.pretrain.arguments.not_built import NEEDS, NOT_BUILT, NOT_BUILT_VALUES
from tests.support.pretrain.arguments.command_lines import (
    MOCK,
    REFUSED_HERE,
    SMALL,
    other_value,
    parse,
    problems,
)

REFUSED_VALUES: list[tuple[str, object]] = []
for _dest, _values in NOT_BUILT_VALUES.items():
    REFUSED_VALUES += [(_dest, value) for value in _values]


def test_tables_of_refusals_name_known_destinations(known: dict[str, argparse.Action]) -> None:
    destinations = {action.dest for action in known.values()}
    refused = set(" ".join(rule.dests for rule in NEEDS).split())
    switches = {rule.attribute for rule in NEEDS} | {rule.unless for rule in NEEDS if rule.unless}
    assert REFUSED_HERE | set(NOT_BUILT_VALUES) | refused | switches <= destinations
    assert not refused & set(NOT_BUILT)


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
        p.startswith((f"{name}:", f"{name} ")) and p.endswith(NOT_BUILT[dest])
        for p in refused_together
    )


@pytest.mark.parametrize(("dest", "value"), REFUSED_VALUES)
def test_a_value_that_is_not_built_is_refused_with_its_reason(
    dest: str, value: Any, known: dict[str, argparse.Action]
) -> None:
    name = next(name for name, action in known.items() if action.dest == dest)
    word = getattr(value, "name", value)
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


@pytest.mark.parametrize("rule", NEEDS, ids=lambda rule: rule.remedy.replace(" ", "-"))
def test_a_flag_that_would_do_nothing_is_refused(
    rule: Any, known: dict[str, argparse.Action]
) -> None:
    for dest in rule.dests.split():
        name = next(name for name, action in known.items() if action.dest == dest)
        line = f"{SMALL} --mock-data {name} {other_value(known[name])}"
        if rule.attribute == "use_megatron_fsdp" and rule.values == (False,):
            line += " --use-megatron-fsdp"
        if rule.attribute == "multi_latent_attention" and rule.values == (False,):
            line += " --multi-latent-attention"
        if rule.attribute in ("ckpt_format", "use_rope_scaling"):
            line += " --use-megatron-fsdp"
        elif rule.attribute == "optimizer":
            line += " --optimizer " + ("sgd" if rule.values == ("adam",) else "adam")
        elif rule.attribute == "tokenizer_type":
            line += " --tokenizer-type ByteTokenizer"
        assert f"{name} {rule.remedy}" in problems(line)
