# SPDX-License-Identifier: Apache-2.0
"""The parser knows every flag of Megatron-LM's table with its destination, default and choices."""

import argparse
import json
from itertools import chain

import megatron.core
import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron.pretrain.arguments import all_flags, config_flags
from megatron.pretrain.arguments.config_flags import Declared, known_flags
from megatron.pretrain.arguments.flags import IN_SHORT_HELP, Refused, integer, named, text
from megatron.pretrain.arguments.help_text import WIDTH, lines_of
from megatron.pretrain.arguments.values import STATE_DTYPES, frequency
from tests.support.pretrain.arguments.command_lines import (
    MOCK,
    OWN_DEFAULTS,
    TABLE,
    parse,
    problems,
)

EN_DASH = "\u2013"
"""The table's spelling of no value."""


def destination(row: dict[str, str]) -> str:
    return row.get("dest", row["name"].removeprefix("--").replace("-", "_"))


def expected_default(row: dict[str, str]) -> object:
    text, dest = row["default"], destination(row)
    if dest in OWN_DEFAULTS:
        return OWN_DEFAULTS[dest]
    if row["kind"] in ("flag", "off", "bool"):
        return text == "on"
    if dest == "attention_backend":
        return AttnBackend[text]
    if dest.endswith("_dtype") and text in (*STATE_DTYPES, "auto"):
        return STATE_DTYPES.get(text)
    if text in (EN_DASH, "2³²"):
        return None if text == EN_DASH else 2**32
    try:
        return json.loads(text.replace("'", '"'))
    except json.JSONDecodeError:
        return text


def test_every_flag_of_the_table_is_known_with_its_destination_and_default(
    known: dict[str, argparse.Action],
) -> None:
    assert len(TABLE) > 300
    wrong = {}
    for entry in TABLE:
        action, default = known[entry["name"]], expected_default(entry)
        is_switch = entry["kind"] in ("flag", "off", "bool")
        # The value of a switch that is given; others have none.
        const = entry["kind"] != "off" if is_switch else action.const
        expected = (destination(entry), default, is_switch, const)
        found = (action.dest, action.default, action.nargs == 0, action.const)
        same_type = type(action.default) is type(default) or isinstance(
            action.default, (int, float)
        )
        if found != expected or not same_type:
            wrong[entry["name"]] = (found, expected)
    assert not wrong


def test_every_choice_of_the_table_is_understood(known: dict[str, argparse.Action]) -> None:
    unknown = []
    for entry in TABLE:
        if not entry["kind"].startswith("{"):
            continue
        action = known[entry["name"]]
        for word in entry["kind"].strip("{} +").split(", "):
            try:
                value = action.type(word)
            except (ValueError, argparse.ArgumentTypeError):
                unknown.append((entry["name"], word))
                continue
            if action.choices is not None and value not in action.choices:
                unknown.append((entry["name"], word))
    assert not unknown


def test_required_flags_are_listed_together() -> None:
    found = problems("--mock-data")
    assert any(
        "--num-layers, --hidden-size, --num-attention-heads, --seq-length, --micro-batch-size" in p
        for p in found
    )
    assert "required but not given: --lr" in found
    assert any(p.startswith("NullTokenizer needs --vocab-size") for p in found)


def test_a_value_that_is_refused_is_not_required_as_well() -> None:
    found = problems("--mock-data --lr 0,001 --num-layers 2,5")
    assert not any(p.startswith("required") and ("--lr" in p or "--num-layers" in p) for p in found)
    assert sum("--lr" in p for p in found) == 1


def test_empty_values_are_refused_but_where_they_mean_none() -> None:
    given = "--save '' --load= --data-path 0.5 '' --wandb-project ''"
    found = problems(f"{MOCK} {given}")
    empty = [each.split(": its value is empty")[0] for each in found if "is empty" in each]
    assert empty == ["--save", "--load", "--data-path"]
    args, _ = parse(f"{MOCK} --load=/tmp/run= --wandb-project '' --wandb-exp-name ''")
    assert args.load == "/tmp/run="


@pytest.mark.parametrize("spelling", ["opt_param-scheduler", "opt-param-scheduler"])
def test_both_spellings_of_the_scheduler_flags(spelling: str) -> None:
    assert parse(f"{MOCK} --override-{spelling}")[0].override_opt_param_scheduler
    assert parse(f"{MOCK} --use-checkpoint-{spelling}")[0].use_checkpoint_opt_param_scheduler


def shown(flag: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse(flag)
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


def test_help_is_short_and_help_all_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = shown("--help", capsys), shown("--help-all", capsys)
    every = [*chain.from_iterable(all_flags().values())]
    names_in_short = {line.split()[0] for line in short if line.startswith("  --")}
    assert names_in_short == {flag.name for flag in every if IN_SHORT_HELP in flag.rules}
    assert not [line for line in short if line.startswith("   ")], "a line for each"
    assert len(short) < 60
    names = {line.split()[0] for line in everything if line.startswith("  --")}
    assert names == {flag.name for flag in every if flag.help or flag.refusal} and len(names) > 300


def test_a_line_has_the_type_the_first_sentence_and_the_default() -> None:
    flag = integer("--steps", "Number of steps. There may be many of them.", default=7)
    assert " ".join(lines_of(flag).split()) == "--steps N Number of steps (default: 7)"
    assert "[only the default: too slow]" in lines_of(integer("--steps", Refused("too slow")))
    for short in ("e.g. 10 each", "i.e. 10 each"):
        help_of_steps = " ".join(lines_of(text("--x", f"steps, {short}. Or more.")).split())
        assert help_of_steps == f"--x WORD steps, {short}"
    lines = lines_of(text("--x", "word " * 40)).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH


def test_help_shows_the_default_that_holds() -> None:
    level, layout = (
        " ".join(lines_of(known_flags()[dest]).split())
        for dest in ("data_parallel_sharding_strategy", "ckpt_format")
    )
    assert level.endswith("(default: optim_grads_params)")
    assert layout.endswith("(default: torch_dist, with --use-megatron-fsdp fsdp_dtensor)")
    assert "(set by --use-nccl-ub)" in lines_of(known_flags()["fsdp_double_buffer"])


def test_frequency_reads_numbers_and_list_expressions() -> None:
    assert frequency("3") == 3
    assert frequency("([0]*3+[1]*2)") == [0, 0, 0, 1, 1]


def test_a_flag_whose_field_the_release_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    otherwise = Declared(settings=named("--written-otherwise"))
    monkeypatch.setitem(config_flags.declared_fields(), "field_of_tomorrow", Declared())
    monkeypatch.setitem(config_flags.declared_fields(), "renamed_field", otherwise)
    config_flags.absent_flags.cache_clear()
    found = problems(f"{MOCK} --field-of-tomorrow 3 --written-otherwise")
    config_flags.absent_flags.cache_clear()
    assert [problem.split(":")[0] for problem in found] == [
        "--field-of-tomorrow",
        "--written-otherwise",
    ]
    for problem in found:
        assert f"Megatron-Core {megatron.core.__version__} has no such setting" in problem
