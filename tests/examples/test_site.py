# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation site: their code runs, and their table is that of the code."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.examples.conftest import Shell, repository_in
from tests.examples.documents import check_block, command_blocks, run_document
from tests.rank_pool import run_ranks
from tests.warm_programs import ROOT
from tools.argument_table import PAGE, WAYS, with_table

DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```python title="(Both|FSDP2|Here)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SIDE_BY_SIDE = ["coming_from_fsdp2.md"]


def losses_of_side(blocks: list[tuple[str, str]], side: str) -> list[float]:
    """Run the blocks of one side, and those of both, as one program."""
    names = {"__name__": "page"}
    for title, code in blocks:
        if title in ("Both", side):
            exec(compile(code, f"<block for {title}>", "exec"), names)
    return names["losses"]


@pytest.mark.parametrize("page", SIDE_BY_SIDE)
def test_both_sides_of_a_page_have_the_same_losses(page: str) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    theirs, ours = (run_ranks(2, losses_of_side, blocks, side) for side in ("FSDP2", "Here"))
    assert len(ours[0]) >= 10 and ours[0] != ours[1]
    for expected, got in zip(theirs, ours):
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_program_of_the_start_page_learns(shell: Shell) -> None:
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (shell.directory / "train.py").write_text(program)
    done = shell.run("torchrun", "--standalone", "--nproc_per_node", "2", "train.py")
    losses = dict(re.findall(r"rank (\d) of 2: (\d\.\d\d)", done.stdout))
    assert set(losses) == {"0", "1"}, done.stdout
    assert all(float(loss) < 4.0 for loss in losses.values())  # 4.6 without training


def test_the_commands_for_megatron_lm_print_what_is_quoted(
    commands: dict[str, str], tmp_path: Path
) -> None:
    blocks = command_blocks(DOCS / "coming_from_megatron_lm.md")
    run = run_document(blocks, Shell(repository_in(tmp_path), commands), timeout=120)
    for block, output, code in zip(blocks, run.outputs, run.codes):
        check_block(block, output, code)


def test_the_page_of_plans_prints_what_it_quotes(commands: dict[str, str], tmp_path: Path) -> None:
    blocks = command_blocks(DOCS / "planning.md")
    assert len(blocks) == 3
    run = run_document(blocks, Shell(repository_in(tmp_path), commands), timeout=600)
    for block, output, code in zip(blocks, run.outputs, run.codes):
        check_block(block, output, code)


def test_the_table_of_arguments_is_that_of_the_docstring() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python tools/argument_table.py writes it"


def test_the_other_ways_in_of_an_argument_exist() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from megatron.fsdp.config import DistributedDataParallelConfig as OwnConfig

    fields = {ways.field for ways in WAYS.values() if ways.field}
    known = set(DistributedDataParallelConfig.__dataclass_fields__)
    assert fields <= known | set(OwnConfig.__dataclass_fields__)


def test_every_flag_beside_an_argument_exists(shell: Shell) -> None:
    text = shell.run("python", "pretrain_gpt.py", "--help-all").stdout
    flags = set(chain.from_iterable(ways.flags for ways in WAYS.values()))
    missing = [flag for flag in flags if not re.search(rf"^  {flag}\b", text, re.MULTILINE)]
    assert not missing, missing


def literals_of(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of a module; what an f-string inserts is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value for part in node.values if isinstance(part, ast.Constant))
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_of_the_troubleshooting_page_is_one_of_the_sources() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = chain.from_iterable(re.findall(r"`([^`]+)`", row) for row in rows)
    parts = [part for part in quoted if part != "nan"]
    sources = (path.read_text() for path in (ROOT / "megatron").rglob("*.py"))
    texts = chain.from_iterable(literals_of(ast.parse(source)) for source in sources)
    literals = "\n".join(texts)
    assert len(parts) >= 15
    missing = [part for part in parts if part not in literals]
    assert not missing, missing


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("nav:\n")[1])

    def leaves(node: object) -> set[str]:
        if isinstance(node, str):
            return {node}
        children = node.values() if isinstance(node, dict) else node
        return set().union(*map(leaves, children))

    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages <= leaves(navigation), pages - leaves(navigation)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing
