# SPDX-License-Identifier: Apache-2.0
"""Flags that are not built are refused with their reason unless they have their default."""

import argparse
from collections.abc import Iterator
from itertools import chain

from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.config_flags import known_flags
from megatron.pretrain.arguments.flags import Flag, Implied, Needs, Refused, spelled
from megatron.pretrain.arguments.tables import FIELD_GROUPS
from megatron.pretrain.arguments.tables.model_fields import LOSSES
from megatron.pretrain.arguments.values import as_written
from tests.support.pretrain.arguments.command_lines import (
    MOCK,
    REFUSED_HERE,
    SMALL,
    other_value,
    parse,
    problems,
    rows_not_refused,
)

FLAGS = known_flags()


def flag_of(dest: str) -> str:
    return FLAGS[dest].name if dest in FLAGS else spelled(dest)


def test_rules_name_known_destinations() -> None:
    rows = chain.from_iterable(FIELD_GROUPS.values())
    known = {*FLAGS, *rows, "virtual_pipeline_model_parallel_size"}
    for flag in FLAGS.values():
        for rule in flag.rules_of(Needs):
            assert rule.other in known and rule.unless in {*known, ""}, flag.name
        for implied in flag.rules_of(Implied):
            assert implied.other in known, flag.name


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
        for name in {FLAGS[dest].name for dest in REFUSED_HERE}
        if not any(
            text.startswith((f"{name}:", f"{name} "))
            and text.endswith(str(FLAGS[known[name].dest].refusal))
            for text in found
        )
    }
    assert not not_refused, found


def test_a_value_that_is_not_built_is_refused_with_its_reason() -> None:
    rows = []
    for flag in FLAGS.values():
        for rule in flag.rules_of(Refused):
            for value in rule.values:
                given = f"{flag.name} {as_written(value)}"
                rows.append((given, f"{given}: {rule.reason}"))
    assert len(rows) > 10
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
    ("optimizer_cpu_offload", (False,)): "--optimizer-cpu-offload --use-megatron-fsdp",
    ("normalization", ("LayerNorm",)): "--normalization RMSNorm",
    ("cross_entropy_loss_fusion", (False,)): "--cross-entropy-loss-fusion",
    ("group_query_attention", (False,)): "--group-query-attention",
    ("skip_train", (False,)): "--skip-train",
    ("optimizer", ("adam", *MUON)): "--optimizer sgd",
    ("bias_swiglu_fusion", ()): "--no-bias-swiglu-fusion",
    ("create_attention_mask_in_dataloader", ()): "--no-create-attention-mask-in-dataloader",
    ("fp8_recipe", ("delayed",)): "--fp8-recipe tensorwise",
    ("moe_router_load_balancing_type", LOSSES): "--moe-router-load-balancing-type none",
}
"""Values of the other flag that are not the default -> the flags that give them."""


def rows_of(flag: Flag, known: dict[str, argparse.Action]) -> Iterator[tuple[str, str]]:
    """Yield a flag without what it needs, for each of its needs, and what is said of it."""
    for rule in flag.rules_of(Needs):
        given = f"{flag.name} {other_value(known[flag.name])}"
        given += f" {BESIDE.get((rule.other, rule.values), '')}"
        if flag.dest.startswith("moe_"):
            given += " --num-experts 4"
        yield given, f"{flag.name} {rule.end(flag_of)}"


def test_a_flag_that_would_do_nothing_is_refused(known: dict[str, argparse.Action]) -> None:
    rows = [*chain.from_iterable(rows_of(flag, known) for flag in FLAGS.values())]
    assert len(rows) > 100
    assert not rows_not_refused(f"{SMALL} --mock-data", rows)
