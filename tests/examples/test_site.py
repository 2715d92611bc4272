# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation site: their code runs, and their table is that of the code."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from megatron.pretrain.arguments import build_parser
from megatron.pretrain.arguments.flags import IN_THE_OTHER_LOOP
from megatron.pretrain.arguments.tables import PROGRAM_GROUPS
from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES
from megatron_fsdp import fully_shard_model
from tests.examples.conftest import Shell
from tests.support.examples.blocks import DOCS, Block, blocks_of, python_of
from tests.support.examples.documents import command_blocks
from tests.support.huggingface.tiny_runs import fresh_accelerate
from tests.support.rank_pool import run_ranks
from tests.support.syntax_trees import parse
from tests.support.warm_programs import ROOT, free_port
from tools.argument_table import PAGE, WAYS, with_table

SIDE_BY_SIDE = {"docs/coming_from_fsdp2.md": "FSDP2", "docs/hugging_face.md": "Hugging Face"}
"""Pages with code of another package and of this one, and the title of the other's blocks."""


def losses_of_side(blocks: list[Block], side: str, folder: str) -> list[float]:
    """Job: run the blocks of one side, and those of both, as one program."""
    os.chdir(folder)
    names = {"__name__": "page"}
    with fresh_accelerate():
        for block in blocks:
            if block.title in ("Both", side):
                exec(compile(block.code, f"<block for {block.title}>", "exec"), names)
    return names["losses"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", SIDE_BY_SIDE, ids=lambda page: Path(page).stem)
def test_both_sides_of_a_page_have_the_same_losses(page: str, tmp_path: Path) -> None:
    results = []
    for side in (SIDE_BY_SIDE[page], "Here"):
        (tmp_path / side).mkdir()
        folder = str(tmp_path / side)
        results.append(run_ranks(2, losses_of_side, list(blocks_of(page)), side, folder))
    theirs, ours = results
    assert len(ours[0]) >= 20 and ours[0] != ours[1]
    for expected, got in zip(theirs, ours):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_the_program_of_the_start_page_learns(shell: Shell) -> None:
    (program,) = python_of("docs/index.md")
    (shell.directory / "train.py").write_text(program.code)
    make, start = command_blocks(DOCS / "index.md")
    assert make.commands in {block.commands for block in command_blocks(ROOT / "README.md")}
    done = shell.run("bash", "-c", start.commands, MASTER_PORT=str(free_port()))
    losses = dict(re.findall(r"rank (\d) of 2: (\d\.\d\d)", done.stdout))
    assert set(losses) == {"0", "1"}, done.stdout
    assert all(float(loss) < 4.0 for loss in losses.values())  # 4.6 without training


def test_the_table_of_arguments_is_that_of_the_docstring() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python tools/argument_table.py writes it"


def test_the_docstring_explains_every_argument() -> None:
    section = (inspect.getdoc(fully_shard_model) or "").split("Args:\n")[1].split("\n\n")[0]
    explained = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
    assert explained == list(inspect.signature(fully_shard_model).parameters)


def test_the_other_ways_in_of_an_argument_exist() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from megatron_fsdp import DistributedDataParallelConfig as OwnConfig

    fields = {ways.field for ways in WAYS.values() if ways.field}
    known = set(DistributedDataParallelConfig.__dataclass_fields__)
    assert fields <= known | set(OwnConfig.__dataclass_fields__)


def test_every_flag_beside_an_argument_exists() -> None:
    names = set(chain.from_iterable(each.option_strings for each in build_parser()._actions))
    flags = set(chain.from_iterable(ways.flags for ways in WAYS.values()))
    assert flags <= names, flags - names


def literals_of(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of a module; what an f-string inserts is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value for part in node.values if isinstance(part, ast.Constant))
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.exhaustive
def test_every_message_of_the_troubleshooting_page_is_one_of_the_sources() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = chain.from_iterable(re.findall(r"`([^`]+)`", row) for row in rows)
    parts = [part for part in quoted if part != "nan"]
    sources = (path.read_text() for path in (ROOT / "megatron").rglob("*.py"))
    texts = chain.from_iterable(literals_of(parse(source)) for source in sources)
    literals = "\n".join(texts)
    assert len(parts) >= 15
    missing = [part for part in parts if part not in literals]
    assert not missing, missing


def test_every_test_that_the_table_of_reports_names_exists() -> None:
    _, rest = (ROOT / "CONTRIBUTING.md").read_text().split("## What other implementations met\n")
    rows = re.findall(r"^\| .* \|$", rest.split("\n## ")[0], re.MULTILINE)
    assert len(rows) >= 30  # with the heading
    for file, name in re.findall(r"([\w/]+\.py)::(\w+)", "\n".join(rows)):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_the_pages_are_a_short_way_in() -> None:
    pages = list(DOCS.glob("*.md"))
    assert len(pages) <= 18
    assert sum(len(page.read_text().splitlines()) for page in pages) <= 3000


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("nav:\n")[1])

    def leaves(node: object) -> set[str]:
        if isinstance(node, str):
            return {node}
        children = node.values() if isinstance(node, dict) else node
        return set().union(*map(leaves, children))

    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages <= leaves(navigation), pages - leaves(navigation)


def test_every_link_of_a_page_and_every_file_that_it_names_exists() -> None:
    missing = []
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        missing += [(page, link) for link in links if not (page.parent / link).exists()]
        named = re.findall(r"`((?:examples|tests|tools|docs)/[\w./]+)`", page.read_text())
        missing += [(page, name) for name in named if not (ROOT / name).exists()]
    assert not missing, missing


def test_every_tokenizer_and_every_flag_of_data_is_explained() -> None:
    text = (DOCS / "data_and_tokenizers.md").read_text()
    named = set(re.findall(r"--[\w-]+", text))
    flags = PROGRAM_GROUPS["data and tokenizer"]
    refused = {flag.dest: flag.refusal for flag in flags if flag.refusal}
    not_built = {dest for dest, why in refused.items() if not why.endswith(IN_THE_OTHER_LOOP)}
    assert {dest for dest in not_built if not dest.startswith("fim_")} == {"legacy_tokenizer"}
    taken = [flag for flag in flags if flag.dest not in refused]
    assert not [flag.names for flag in taken if not named & set(flag.names)]
    assert all(f"`{kind}`" in text for kind in TOKENIZER_TYPES)
