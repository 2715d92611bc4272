# SPDX-License-Identifier: Apache-2.0
"""Commands of docs/data_and_tokenizers.md, word for word; its tables name all flags of data."""

import re

import pytest

from megatron.pretrain.arguments.not_built import refusal
from megatron.pretrain.arguments.program_flags import PROGRAM_GROUPS
from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES
from tests.examples.conftest import Shell
from tests.support.examples.documents import check_block, command_blocks, run_document
from tests.support.warm_programs import ROOT

DOCUMENT = ROOT / "docs" / "data_and_tokenizers.md"


@pytest.mark.exhaustive  # tests/pretrain shows by smaller runs what these commands do
def test_the_commands_print_what_is_quoted(shell: Shell) -> None:
    blocks = command_blocks(DOCUMENT)
    run = run_document(blocks, shell, timeout=240)
    for block, output, code in zip(blocks, run.outputs, run.codes):
        check_block(block, output, code)


def test_every_tokenizer_and_every_flag_of_data_is_explained() -> None:
    text = DOCUMENT.read_text()
    named = set(re.findall(r"--[\w-]+", text))
    flags = PROGRAM_GROUPS["data and tokenizer"]
    refused = {flag.dest for flag in flags if refusal(flag.dest)}
    assert all(dest.startswith("fim_") for dest in refused)
    taken = [flag for flag in flags if flag.dest not in refused]
    assert not [flag.names for flag in taken if not named & set(flag.names)]
    assert all(f"`{kind}`" in text for kind in TOKENIZER_TYPES)
