# SPDX-License-Identifier: Apache-2.0
"""--help shows the flags that people need, --help-all every flag, each on one line."""

from itertools import chain

import pytest

from megatron.pretrain.arguments import all_flags
from megatron.pretrain.arguments.flags import row
from megatron.pretrain.arguments.help_text import COMMON, WIDTH, line_of
from tests.support.pretrain.arguments.command_lines import parse


def shown(flag: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse(flag)
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


def test_help_is_short_and_help_all_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = shown("--help", capsys), shown("--help-all", capsys)
    every = [*chain.from_iterable(all_flags().values())]
    flags = {flag.dest: flag for flag in every}
    assert set(COMMON.split()) <= set(flags)
    names_in_short = {line.split()[0] for line in short if line.startswith("  --")}
    assert names_in_short == {flags[dest].names[0] for dest in COMMON.split()}
    assert len(short) < 60
    names = {line.split()[0] for line in everything if line.startswith("  --")}
    assert names == {flag.names[0] for flag in every}


def test_a_line_has_the_type_the_first_sentence_and_the_default() -> None:
    flag = row("--steps", int, "Number of steps. There may be many of them.", 7)
    assert " ".join(line_of(flag, None).split()) == "--steps N Number of steps (default: 7)"
    assert "[only the default: too slow]" in line_of(flag, "too slow")
    assert len(line_of(row("--x", str, "y" * 200), None)) <= WIDTH
