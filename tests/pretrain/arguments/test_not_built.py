# SPDX-License-Identifier: Apache-2.0
"""Flags that are not built are refused with their reason unless they have their default."""

import argparse
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain

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
    rows_not_refused,
)

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


def test_a_flag_that_is_not_built_is_refused_with_its_reason(
    known: dict[str, argparse.Action],
) -> None:
    given = {
        name: other_value(action) for name, action in known.items() if action.dest in REFUSED_HERE
    }
    assert None not in given.values() and len(given) > 80
    found = problems(MOCK + " " + " ".join(f"{name} {value}" for name, value in given.items()))
    not_refused = {
        name
        for name in {FLAGS[dest] for dest in REFUSED_HERE}
        if not any(
            text.startswith((f"{name}:", f"{name} "))
            and text.endswith(str(refusal(known[name].dest)))
            for text in found
        )
    }
    assert not not_refused, found


def test_a_value_that_is_not_built_is_refused_with_its_reason() -> None:
    rows = []
    for dest, values in NOT_BUILT_VALUES.items():
        if dest in DESTINATIONS:  # some releases have no such flag
            for value, reason in values.items():
                given = f"{FLAGS[dest]} {as_written(value)}"
                rows.append((given, f"{given}: {reason}"))
    assert not rows_not_refused(MOCK, rows)


def test_a_refused_flag_is_accepted_at_its_default() -> None:
    line = (
        "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --cp-comm-type p2p"
        " --fp8-recipe delayed"
    )
    args, _ = parse(f"{MOCK} {line} --rerun-mode disabled --main-grads-dtype fp32")
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


def rows_of(rule: Needs, known: dict[str, argparse.Action]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a rule, each without what it needs, and what is said of it."""
    for dest, name in FLAGS.items():
        if not matches(dest, rule.dests) or refusal(dest) or dest == rule.other:
            continue
        given = f"{name} {other_value(known[name])} {BESIDE.get((rule.other, rule.values), '')}"
        if dest.startswith("moe_"):
            given += " --num-experts 4"
        yield given, f"{name} {rule.end(flag_of)}"


def test_a_flag_that_would_do_nothing_is_refused(known: dict[str, argparse.Action]) -> None:
    rows = [*chain.from_iterable(rows_of(rule, known) for rule in NEEDS)]
    assert len(rows) > 100
    assert not rows_not_refused(f"{SMALL} --mock-data", rows)
