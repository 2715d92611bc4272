# SPDX-License-Identifier: Apache-2.0
"""Commands of docs/migrating_to_fsdp.md, word for word: their output, and losses that continue."""

import json
import re

import pytest

from tests.examples.conftest import Shell, repository_in
from tests.support.examples.documents import (
    CommandBlock,
    DocumentRun,
    check_block,
    command_blocks,
    run_document,
)
from tests.support.warm_programs import ROOT

GUIDE = ROOT / "docs" / "migrating_to_fsdp.md"
BLOCKS = command_blocks(GUIDE)


@pytest.fixture(scope="module")
def run(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DocumentRun:
    shell = Shell(repository_in(tmp_path_factory.mktemp("guide")), commands)
    return run_document(BLOCKS, shell, timeout=240)


@pytest.mark.exhaustive  # what it shows, test_scripts.py shows by the scripts that it names
@pytest.mark.parametrize(
    ("number", "block"), list(enumerate(BLOCKS)), ids=[f"block_{n + 1}" for n in range(len(BLOCKS))]
)
def test_a_block_of_commands_prints_what_is_quoted(
    number: int, block: CommandBlock, run: DocumentRun
) -> None:
    check_block(block, run.outputs[number], run.codes[number])


def losses(run: DocumentRun, name: str) -> dict[int, float]:
    entries = map(
        json.loads, (run.directory / "checkpoints" / name / "losses.jsonl").read_text().splitlines()
    )
    return {entry["iteration"]: entry["train"] for entry in entries}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "first"), [("fsdp", 7), ("3d_end", 10)], ids=["with_fsdp", "and_back"]
)
def test_the_loss_curve_continues_as_if_nothing_had_happened(
    name: str, first: int, run: DocumentRun
) -> None:
    whole, continued = losses(run, "3d"), losses(run, name)
    assert list(continued) == list(range(first, 13)) and list(whole) == list(range(1, 13))
    assert whole[12] < whole[7] < whole[1] - 1
    assert continued == pytest.approx(
        {iteration: whole[iteration] for iteration in continued}, rel=1e-5
    )


def test_the_guide_names_only_files_that_exist() -> None:
    named = re.findall(r"`((?:examples|tests|tools|docs)/[\w./]+)`", GUIDE.read_text())
    assert named and all((ROOT / name).is_file() for name in named), named
