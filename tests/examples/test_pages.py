# SPDX-License-Identifier: Apache-2.0
"""Every block and every command of the pages is run, or named here with the reason why not."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from errno import errorcode
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from fsspec.registry import known_implementations
from torch.distributed.checkpoint import FileSystemReader

from megatron.planning.machine import find_machine
from tests.examples import test_hugging_face, test_readme, test_site
from tests.examples.conftest import Shell, with_inspector
from tests.support.examples.blocks import (
    DOCS,
    FENCE,
    Block,
    blocks_of,
    inline_commands,
    python_of,
)
from tests.support.examples.documents import check_block, command_blocks, run_document
from tests.support.examples.operations_table import rows_of, wrong_rows
from tests.support.examples.page_programs import PROGRAMS, run_page
from tests.support.rank_pool import run_ranks
from tests.support.syntax_trees import parse
from tests.support.warm_programs import ROOT

PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md")))]


@pytest.mark.always("optimizer_state", "coming_from_megatron_fsdp")
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: Path(page).stem)
def test_the_python_blocks_of_a_page_run_as_one_program(page: str, tmp_path: Path) -> None:
    blocks = [block.code for block in python_of(page) if block.name not in PYTHON_ELSEWHERE]
    assert len(blocks) == len(PROGRAMS[page].checks), "give every block a check"
    run_ranks(2, run_page, page, blocks, str(tmp_path))


def test_operations_on_parameters_do_what_the_table_says() -> None:
    rows = rows_of((DOCS / "working_with_a_sharded_model.md").read_text())
    assert len(rows) == 8 and all(operations for operations, _, _ in rows)
    for found in run_ranks(2, wrong_rows, rows):
        assert not found, "\n".join(found)


OWN = r"(?:megatron_fsdp|megatron\.(?:fsdp|checkpoint|pretrain|mcore_adapter|planning|huggingface))"
DOTTED = re.compile(rf"(?<![\w/.]){OWN}(?:\.[A-Za-z_]\w*)*(?![\w/]|\.\w)")
CALLABLE = r"`\w+(?:\([^`]*\))?`"
IN_ITS_MODULE = re.compile(rf"((?:{CALLABLE}(?:,|\s+and)?\s+)+)(?:of|from|in)\s+`({OWN}[\w.]*)`")
"""`Name` of `module`, and several of them."""


def names_in(text: str) -> set[str]:
    """Return the names of our own that a page mentions, with their modules."""
    names = set(DOTTED.findall(text))
    for listed, module in IN_ITS_MODULE.findall(text):
        names |= {f"{module}.{name}" for name in re.findall(r"`(\w+)[`(]", listed)}
    for _, words, code in FENCE.findall(text):
        if words.startswith("python"):
            names |= imported_in(code)
    return names


def imported_in(code: str) -> set[str]:
    """Return the names of our own that a program imports, with their modules."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and re.match(rf"{OWN}\b", node.module or ""):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def absent(names: Iterable[str]) -> list[str]:
    """Return those of the names that cannot be imported, with the reason."""
    found = []
    for name in sorted(names):
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            found.append(f"{name}: {error}")
    return found


def test_every_name_that_a_page_mentions_can_be_imported() -> None:
    names = set().union(*(names_in((ROOT / page).read_text()) for page in PAGES))
    assert {"megatron_fsdp.fully_shard", "megatron_fsdp.clip_grad_norm_"} <= names
    assert {"megatron_fsdp.experimental.microbatch", "megatron.fsdp.Offload"} <= names
    assert absent(names) == []


@pytest.mark.parametrize(
    "text",
    [
        "Clip with `clip_grad_norm` of `megatron_fsdp`, which",
        "Clip with `fully_shard`, `clip_grad_norm`\nof `megatron_fsdp`",
        "Clip with `clip_grad_norm(max_norm=, norm_type=)` of `megatron_fsdp`",
        "call `megatron_fsdp.clip_grad_norm` once",
        "```python\nfrom megatron_fsdp import (\n    clip_grad_norm,\n)\n```\n",
    ],
    ids=["of", "several", "call", "dotted", "imported"],
)
def test_a_name_that_cannot_be_imported_is_found(text: str) -> None:
    (problem,) = absent(names_in(text))
    assert problem.startswith("megatron_fsdp.clip_grad_norm: ")


# ---- commands


@dataclass(frozen=True)
class CommandPage:
    """A page whose commands run as one shell script, in the order of the page.

    Attributes:
        tolerance: relative, of quoted numbers with a decimal point.
        replaced: parts of commands, and what stands there in the test: `{folder}` is its folder.
        agreeing: blocks of two commands, and the number of steps whose losses both print alike.
        pasted_losses: number of lines with the losses of two runs, which are the same.
        check: looks at the folder afterwards.
    """

    tolerance: float = 0.0
    replaced: tuple[tuple[str, str], ...] = ()
    agreeing: tuple[tuple[int, int], ...] = ()
    pasted_losses: int = 0
    check: Callable[[Path], None] | None = None


def the_recipe_of_bridge_has_saved(folder: Path) -> None:
    metadata = FileSystemReader(folder / "checkpoints" / "bridge").read_metadata()
    weight = "module.decoder.layers.1.mlp.linear_fc1.weight"
    for key in (f"model.{weight}", f"optimizer.state.module.{weight}.exp_avg"):
        assert metadata.state_dict_metadata[key].size == torch.Size((256, 64))


SMALL_MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 4 --mock-data --vocab-size 64 --eval-iters 0"
)
LLAMA = (
    f"--use-megatron-fsdp {SMALL_MODEL} --lr 1e-3 --train-iters 2 --position-embedding-type rope"
    " --normalization RMSNorm --swiglu --disable-bias-linear"
)
COMMAND_PAGES = {
    "docs/arguments.md": CommandPage(),
    # Other processors round bfloat16 in other places.
    "docs/examples.md": CommandPage(
        tolerance=0.15,
        agreeing=((2, 1), (3, 1), (4, 2)),
        check=the_recipe_of_bridge_has_saved,
    ),
    "docs/checkpoints_at_urls.md": CommandPage(
        replaced=(("s3://", "local://{folder}/"), ("node 8", "node 2"), (" ... ", f" {LLAMA} "))
    ),
    "docs/planning.md": CommandPage(
        replaced=(("tests/planning/", f"{ROOT}/tests/planning/"),),
    ),
    "docs/data_and_tokenizers.md": CommandPage(),
    "docs/coming_from_megatron_lm.md": CommandPage(pasted_losses=12),
}
ELSEWHERE = {
    "docs/index.md: make pretrain": "is in README.md too, as tests/examples/test_site.py compares",
    "docs/index.md: torchrun --nproc_per_node 2 train.py": "tests/examples/test_site.py",
    "docs/coming_from_megatron_lm.md: torchrun --nproc-per-node 8 pretrain_gpt.py"
    " --loop megatron-lm --use-megatron-fsdp ARGUMENTS...": "needs a newer release;"
    " tests/pretrain/test_megatron_lm_loop.py starts it",
    "docs/coming_from_megatron_lm.md: cd Megatron-LM": "needs a checkout of Megatron-LM;"
    " benchmarks/parity/real_loop.py starts the loops of three releases in this way",
    "docs/observing_runs.md: python tools/launch.py --nproc_per_node 8 --log-dir logs --tee 3"
    " --local-ranks-filter 0 \\": "shows a defect; tests/tools/test_launch.py causes one",
    "docs/quantized_weights.md: torchrun --nproc_per_node 8 pretrain_gpt.py --use-megatron-fsdp"
    " --bf16 --num-layers 24 --hidden-size 2048 \\": "needs Transformer Engine on 8 GPUs;"
    " tests/pretrain/test_low_precision.py trains with its flags",
}
"""Blocks of commands that do not run as a part of their page: page and first line, and why not."""
PYTHON_ELSEWHERE = {
    "docs/optimizer_state.md: import torch": "needs torchao; tests/fsdp/quantized/test_page.py",
}
"""Python blocks that are no part of the program of their page, and what runs them."""


def is_elsewhere(page: str, commands: str) -> bool:
    return f"{page}: {commands.splitlines()[0]}" in ELSEWHERE


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: Path(page).stem)
def test_the_commands_of_a_page_print_what_is_quoted(page: str, shell: Shell) -> None:
    settings = COMMAND_PAGES[page]
    blocks = [each for each in command_blocks(ROOT / page) if not is_elsewhere(page, each.commands)]
    for old, new in settings.replaced:
        assert any(old in block.commands for block in blocks), f"{page} has no {old}"
        new = new.replace("{folder}", str(shell.directory))
        blocks = [replace(each, commands=each.commands.replace(old, new)) for each in blocks]
    run = run_document(blocks, with_inspector(shell), timeout=300)
    for block, output, code in zip(blocks, run.outputs, run.codes):
        check_block(block, output, code, settings.tolerance)
    steps = [re.findall("^step .*", output, re.MULTILINE) for output in run.outputs]
    for number, shared in settings.agreeing:
        twice = {line for line in steps[number] if steps[number].count(line) == 2}
        assert len(twice) == shared, steps[number]
    pairs = re.findall(r"^(\{.*\})\t(\{.*\})$", "\n".join(run.outputs), re.MULTILINE)
    assert len(pairs) == settings.pasted_losses
    for first, second in pairs:
        assert json.loads(second) == pytest.approx(json.loads(first), rel=1e-5)
    if settings.check is not None:
        settings.check(shell.directory)


MACHINES_PAGE = "docs/planning.md"


def test_the_file_of_a_machine_is_taken(tmp_path: Path) -> None:
    (block,) = (each for each in blocks_of(MACHINES_PAGE) if each.language == "json")
    (tmp_path / "mine.json").write_text(block.code)
    assert find_machine(str(tmp_path / "mine.json")).name == "mine"


# ---- nothing escapes


def runners_of(block: Block) -> list[str]:
    """Return what runs a block or compares it with something that runs."""
    page = block.page
    if block.title:
        sides = ("Both", "Here", test_site.SIDE_BY_SIDE.get(page))
        return ["side by side"] * (page in test_site.SIDE_BY_SIDE and block.title in sides)
    if block.name in PYTHON_ELSEWHERE:
        return ["elsewhere"]
    if block.language == "python":
        return [
            name
            for name, pages in (
                ("program", PROGRAMS),
                ("start page", ("docs/index.md",)),
                ("readme", ("README.md",)),
                # tests/fsdp/quantized/test_page.py
                ("weights", ("docs/quantized_weights.md",)),
                # tests/cuda_model/test_graphed_training.py
                ("graphs", ("docs/gpus.md",)),
            )
            if page in pages
        ]
    with_commands = {
        "page": COMMAND_PAGES,
        "readme": [test_readme.README],
        "hugging face": [test_hugging_face.PAGE],
    }
    commands = [
        name for name, pages in with_commands.items() if page in pages or ROOT / page in pages
    ]
    if block.language in ("bash", "bash fails"):
        return ["elsewhere"] if block.name in ELSEWHERE else commands
    if block.language == "text":  # the output of the commands before it
        return commands if commands and is_output(block) else []
    if block.language == "json":
        return ["machine"] if page == MACHINES_PAGE else []
    return ["log"] if block.language == "log" else []


def is_output(block: Block) -> bool:
    """Return whether the block before it has commands that are run."""
    blocks = blocks_of(block.page)
    before = blocks[blocks.index(block) - 1]
    return before.language.startswith("bash") and before.name not in ELSEWHERE


def test_every_block_of_a_page_is_taken_by_one_runner() -> None:
    wrong: dict[str, list[str]] = {}
    for page in PAGES:
        taken = {block.name: runners_of(block) for block in blocks_of(page)}
        wrong |= {name: runners for name, runners in taken.items() if len(runners) != 1}
        fences = len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE))
        if fences != 2 * len(blocks_of(page)):
            wrong[page] = ["a block that is not closed, or not understood"]
    assert not wrong, wrong


@pytest.mark.parametrize("language", ["python", "bash", "text", "console", ""])
def test_a_block_of_a_new_page_has_no_runner(language: str) -> None:
    assert not runners_of(Block("docs/new.md", language, "", "a line\n"))
    assert not runners_of(Block("docs/coming_from_fsdp2.md", "python", "Theirs", "a line\n"))


def test_blocks_that_run_elsewhere_exist_and_name_files_that_do() -> None:
    names = {block.name for block in chain.from_iterable(map(blocks_of, PAGES))}
    elsewhere = ELSEWHERE | PYTHON_ELSEWHERE
    assert names >= elsewhere.keys(), elsewhere.keys() - names
    files = re.findall(r"tests/[\w/]+\.py", " ".join(elsewhere.values()))
    assert all((ROOT / file).is_file() for file in files)


VALUES = re.compile(r"__\w+__|[^A-Za-z -]+|\b[A-Z]+\b|\b(?:NaN|Inf|vm|cpu|all-gather)\b")
"""What programs insert into messages: numbers, names, paths; the rest are phrases."""
ERRORS_OF_OTHERS = (
    "Connection closed by peer",
    "Timed out",
    "[Errno 28]",
    *map(os.strerror, errorcode),
)
"""What messages quote: gloo's compiled code, Python and the operating system."""


@cache
def messages() -> str:
    """Return all string literals of the sources, and of what Megatron-Core says in runs."""
    (core,) = find_spec("megatron.core").submodule_search_locations
    sources = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    sources.append(Path(core, "timers.py"))
    sources += Path(core, "pipeline_parallel").glob("*.py")
    sources += chain(*(Path(core, name).glob("*.py") for name in ("optimizer", "distributed")))
    texts = chain.from_iterable(
        test_site.literals_of(parse(source.read_text())) for source in sources
    )
    return "\n".join(" ".join(text.split()) for text in [*texts, *ERRORS_OF_OTHERS])


def is_said(phrase: str) -> bool:
    """Return whether a phrase, or each of two parts of it, is in a message."""
    words = phrase.split()
    parts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(len(words))]
    return any(all(part in messages() for part in pair) for pair in parts)


@pytest.mark.exhaustive
def test_every_phrase_of_a_log_is_one_of_the_sources() -> None:
    pages = [page for page in PAGES if "```log" in (ROOT / page).read_text()]
    missing = []
    for page in pages:
        code = "\n".join(block.code for block in blocks_of(page) if block.language == "log")
        phrases = [phrase.strip(" -") for phrase in VALUES.split(code)]
        long = [phrase for phrase in phrases if len(phrase) >= 5]
        assert len(long) >= 3, page
        missing += [(page, phrase) for phrase in long if not is_said(phrase)]
    assert pages and not missing, missing


def test_packages_to_install_are_known() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    extras = set(re.findall(r"open-megatron-fsdp\[(\w+)\]", text))
    declared = set(
        re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)
    )
    assert extras and extras <= declared, extras - declared
    for package, scheme in (("s3fs", "s3"), ("gcsfs", "gs"), ("adlfs", "abfs")):
        assert package in text and known_implementations[scheme]["class"].startswith(package)


# ---- commands in sentences


def problems_of(command: str) -> list[str]:
    """Return what a command names that does not exist: files, modules, targets, flags."""
    words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
    program, rest = words[0], words[1:]
    if program == "make":
        rules = (ROOT / "Makefile").read_text()
        return [word for word in rest if not re.search(rf"^{word}:", rules, re.MULTILINE)]
    if program not in ("python", "torchrun"):
        return []
    if "-m" in rest:
        module = rest[rest.index("-m") + 1]
        if module == "pytest":
            return [word for word in rest[2:] if not (ROOT / word).exists()]
        path = ROOT / module.replace(".", "/")
        files = [file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()]
    else:
        files = [ROOT / word for word in rest if word.endswith(".py")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        return missing if "--max-restarts" not in rest else []
    source = files[0].read_text()
    flags = [word.split("=")[0] for word in rest if word.startswith("--")]
    own = [flag for flag in flags if not (program == "torchrun" and flag == "--nproc_per_node")]
    return [flag for flag in own if f'"{flag}"' not in source]


def test_commands_in_sentences_name_what_exists() -> None:
    commands = list(chain.from_iterable(map(inline_commands, PAGES)))
    wrong = {command: problems_of(command) for command in commands}
    assert len(commands) >= 20 and not any(wrong.values()), wrong


# ---- examples


def test_every_example_is_short_and_on_the_page_of_examples() -> None:
    text = (DOCS / "examples.md").read_text()
    commands = text + (DOCS / "hugging_face.md").read_text()
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert len(examples) >= 6
    for path in examples:
        longest = 200 if path.stem == "fsdp_from_scratch" else 120
        assert len(path.read_text().splitlines()) <= longest, path.name
        assert f"](../examples/{path.name}) |" in text, path.name
        assert re.search(rf"^(torchrun| {{4}}).*\bexamples/{path.name}", commands, re.MULTILINE)
