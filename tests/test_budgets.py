# SPDX-License-Identifier: Apache-2.0
"""Budgets of what a reader has to carry, read from the sources with ast.

They count whole rooms, so nothing is won by splitting a file, a class or a function, and `ruff
format` decides how long lines are. Where a budget proves wrong, change it here, with the reason.
"""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.syntax_trees import parse

REPOSITORY = Path(__file__).parents[1]


class Room(NamedTuple):
    """A folder with everything below it, and the lines and files that it may have."""

    folder: str
    lines: int
    files: int


ROOMS = [
    # folder                                lines  files
    Room("megatron_fsdp",                   2_900, 17),  # the second generation
    Room("megatron/fsdp/engine",            5_500, 19),  # 7.5 tokens a line, arguments documented
    Room("megatron/fsdp",                  17_100, 73),  # files by nouns, states with docstrings
    Room("megatron/mcore_adapter",          5_400, 36),  # 7.5 tokens a line, arguments explained
    Room("megatron/checkpoint",            14_400, 65),  # metadata is read in C
    Room("megatron/pretrain",              10_400, 57),  # a row for each flag
]  # fmt: skip

ADDED_ROOMS = [
    Room("megatron/fsdp/quantized",         1_400,  8),
    Room("megatron/fsdp/optimizer/matrix",    950,  5),
    Room("megatron/mcore_adapter/checkpoints", 5_350, 19),  # of both loops; arguments documented
    Room("megatron/mcore_adapter/run",        400, 10),
    Room("megatron/mcore_adapter/watch",    1_300,  5),
]  # fmt: skip
"""Rooms inside of another one that do not count there."""

# The engine: the algorithm, which one reads in an afternoon.
ENGINE = "megatron/fsdp/engine"
ENGINE_CODE_LINES = 3_450
ENGINE_DOCSTRINGS = 0.20  # of all lines, at most: accessors need one line
ENGINE_COMMENTS = 0.05  # of all lines, at least: decisions need reasons
ENGINE_IGNORES = re.compile(
    r"\b(recorder|memory_slots|point_to_point|rendezvous|divergence|nccl_memory|quantized)\b"
)
"""What plugs into the engine's seams: it names none of it."""

# Everything in megatron/fsdp.
PARAMETERS = 12  # of a function
REBOUND_FIELDS = 7  # of a class: those that methods other than __init__ assign
FILES_PER_SETTING = 3
SETTINGS = ("fsdp_double_buffer", "granularity", "average_in_collective")
OVERRIDES_OF_TORCH = 3
FORBIDDEN = {
    # What an object needs comes with its constructor; no other object finishes it later.
    "late wiring": re.compile(
        r"\.connect\(|\.follow\(trainability|group\.edited ="
        r"|\.(on_change|reduces_late|notes_users) ="
    ),
    # No behaviour may depend on who holds a tensor.
    "reference counts": re.compile(r"getrefcount|_storage_Use_Count"),
}

# Everywhere.
MODULE_LINES = 600
FUNCTION_LINES = 60
FILES_OF_A_FOLDER = 19  # the engine has that many
NAMES_OF_SEVERAL_FILES = 4
"""File names below `megatron` that occur more than once."""
PUBLISHED_SIGNATURES = ("fully_shard", "fully_shard_model")
"""Functions whose published arguments, and their explanation, fill more than the budget."""
QUESTION_WORDS = ("What ", "Whether ", "Where ", "How ", "Which ")

# Pages.
DESIGN_LINES = 290
EXAMPLE_FROM_SCRATCH_LINES = 200
UNRELEASED_WORDS = 1_150
VERSION_WORDS = 450

SOURCES = ("megatron", "megatron_fsdp", "tools", "examples", "benchmarks", "pretrain_gpt.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Source:
    """A source file: its path in the repository, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in nodes_of(self.text) if isinstance(node, kinds))


def sources(*folders: str) -> list[Source]:
    """Read all Python files below some folders, but for the data of tests."""
    found = []
    for folder in folders:
        path = REPOSITORY / folder
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = file.relative_to(REPOSITORY)
            if name.parts[:2] != ("tests", "data"):
                found.append(read(name))
    return found


LOOKED_AT = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *COMPREHENSIONS)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the definitions and comprehensions of a module; a walk takes longer than its parse."""
    return [node for node in ast.walk(parse(source)) if isinstance(node, LOOKED_AT)]


@functools.cache
def read(name: Path) -> Source:
    text = (REPOSITORY / name).read_text()
    return Source(name, text, parse(text))


@pytest.fixture(scope="module")
def fsdp() -> list[Source]:
    return sources("megatron/fsdp")


@pytest.fixture(scope="module")
def engine() -> list[Source]:
    return sources(ENGINE)


@pytest.fixture(scope="module")
def everything() -> list[Source]:
    return sources(*SOURCES, "tests")


def refuse(problems: Iterable[str]) -> None:
    problems = list(problems)
    assert not problems, "\n".join(problems)


# ---- rooms


@pytest.mark.parametrize("room", [*ROOMS, *ADDED_ROOMS], ids=lambda room: room.folder)
def test_a_room_keeps_its_budget(room: Room) -> None:
    inside = sources(room.folder)
    if room not in ADDED_ROOMS:
        added = [Path(other.folder) for other in ADDED_ROOMS]
        inside = [file for file in inside if not any(map(file.path.is_relative_to, added))]
    lines, files = sum(len(file.lines) for file in inside), len(inside)
    assert lines <= room.lines and files <= room.files, (lines, files)


def test_a_folder_has_few_files() -> None:
    folders = Counter(file.path.parent for file in sources("megatron"))
    refuse(f"{at}: {count} files" for at, count in folders.items() if count > FILES_OF_A_FOLDER)


def test_file_names_are_unique_below_megatron() -> None:
    stems = Counter(file.path.stem for file in sources("megatron"))
    several = {
        stem for stem, count in stems.items() if count > 1 and stem not in ("__init__", "__main__")
    }
    assert len(several) <= NAMES_OF_SEVERAL_FILES, sorted(several)


# ---- the engine


def docstring_lines(file: Source) -> set[int]:
    """Return the numbers of the lines that docstrings of modules, classes and functions fill."""
    numbers: set[int] = set()
    for node in file.nodes(ast.Module, ast.ClassDef, ast.FunctionDef):
        if ast.get_docstring(node, clean=False) is not None:
            numbers.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return numbers


def test_the_engine_is_code_with_reasons(engine: list[Source]) -> None:
    total = code = docstrings = comments = 0
    for file in engine:
        inside_docstrings = docstring_lines(file)
        docstrings += len(inside_docstrings)
        for number, line in enumerate(file.lines, 1):
            total += 1
            if line.strip().startswith("#"):
                comments += 1
            elif line.strip() and number not in inside_docstrings:
                code += 1
    shares = f"docstrings {docstrings / total:.3f}, comments {comments / total:.3f}"
    assert code <= ENGINE_CODE_LINES, code
    assert docstrings / total <= ENGINE_DOCSTRINGS, shares
    assert comments / total >= ENGINE_COMMENTS, shares


def test_the_engine_names_nothing_that_plugs_into_it(engine: list[Source]) -> None:
    refuse(str(file.path) for file in engine if ENGINE_IGNORES.search(file.text))


# ---- megatron/fsdp


def test_functions_have_few_parameters(fsdp: list[Source]) -> None:
    problems = []
    for file in fsdp:
        for node in file.nodes(ast.FunctionDef):
            count = len(node.args.args) + len(node.args.kwonlyargs)
            if count > PARAMETERS:
                problems.append(f"{file.path}: {node.name} has {count} parameters")
    refuse(problems)


def rebound_fields(cls: ast.ClassDef) -> set[str]:
    """Return the fields to which, or to parts of which, methods beside the constructor assign."""
    fields = set()
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            for node in ast.walk(method):
                if isinstance(node, ast.Assign):
                    fields.update(fields_in(node.targets))
                elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                    fields.update(fields_in([node.target]))
    return fields


def fields_in(targets: list[ast.expr]) -> Iterator[str]:
    """Yield the names of the attributes of `self` in the targets of an assignment."""
    for node in chain.from_iterable(map(ast.walk, targets)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr


def test_classes_rebind_few_fields(fsdp: list[Source]) -> None:
    problems = []
    for file in fsdp:
        for cls in file.nodes(ast.ClassDef):
            fields = rebound_fields(cls)
            if len(fields) > REBOUND_FIELDS:
                problems.append(f"{file.path}: {cls.name} rebinds {', '.join(sorted(fields))}")
    refuse(problems)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_known_to_few_files(fsdp: list[Source], setting: str) -> None:
    files = [str(file.path) for file in fsdp if setting in file.text]
    assert len(files) <= FILES_PER_SETTING, files


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_makes_code_hard_to_follow_is_nowhere(fsdp: list[Source], what: str) -> None:
    problems = []
    for file in fsdp:
        for number, line in enumerate(file.lines, 1):
            if FORBIDDEN[what].search(line):
                problems.append(f"{file.path}:{number}: {line.strip()}")
    refuse(problems)


def test_functions_of_torch_are_overridden_in_few_places(fsdp: list[Source]) -> None:
    overrides = []
    for file in fsdp:
        for node in file.nodes(ast.FunctionDef):
            if node.name in ("__torch_function__", "__torch_dispatch__"):
                overrides.append(f"{file.path}:{node.lineno}")
    assert len(overrides) <= OVERRIDES_OF_TORCH, overrides


# ---- everywhere


def number_of_lines(node: ast.stmt) -> int:
    """Count the lines of a definition, of one with a published signature those of its body."""
    if node.name in PUBLISHED_SIGNATURES and len(node.body) > 1:  # overloads have no docstring
        return node.end_lineno - node.body[1].lineno + 1  # the docstring comes first
    return node.end_lineno - node.lineno + 1


def problems_of_size(source: str) -> Iterator[str]:
    """Name everything in a module that is larger than its budget."""
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        yield f"{lines} lines, more than {MODULE_LINES}"
    for node in nodes_of(source):
        if isinstance(node, Function) and number_of_lines(node) > FUNCTION_LINES:
            yield f"{node.name} has {number_of_lines(node)} lines, more than {FUNCTION_LINES}"
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield f"line {node.lineno}: a comprehension with several `for`s: name the inner one"


def problems_of_language(source: str) -> Iterator[str]:
    """Name every docstring that begins with a question word instead of a verb or a noun."""
    for node in nodes_of(source):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(QUESTION_WORDS):
                yield f"{getattr(node, 'name', 'the module')}: {text.splitlines()[0]!r}"


@pytest.mark.parametrize("find", [problems_of_size, problems_of_language])
def test_modules_and_functions_are_short_and_docstrings_say_what_is_done(
    everything: list[Source], find: Callable[[str], Iterator[str]]
) -> None:
    problems = []
    for file in everything:
        problems += [f"{file.path}: {problem}" for problem in find(file.text)]
    refuse(problems)


def test_class_names_are_unique_in_the_repository(everything: list[Source]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in everything:
        if file.path.parts[0] != "examples":  # they show the same things by the same names
            for node in file.tree.body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(file.path))
    refuse(f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


# ---- pages


def lines_of(file: str) -> int:
    return len((REPOSITORY / file).read_text().splitlines())


def test_the_design_is_a_contract_and_the_example_from_scratch_is_read_in_one_go() -> None:
    assert lines_of("examples/fsdp_from_scratch.py") <= EXAMPLE_FROM_SCRATCH_LINES
    assert lines_of("megatron/fsdp/DESIGN.md") <= DESIGN_LINES


def test_a_version_in_the_changelog_fits_a_screen() -> None:
    _, unreleased, *versions = re.split(
        r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    assert len(unreleased.split()) <= UNRELEASED_WORDS
    counts = {text.splitlines()[0]: len(text.split()) for text in versions}
    refuse(f"{title}: {count} words" for title, count in counts.items() if count > VERSION_WORDS)


# ---- these tests themselves


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("\n" * 601, "601 lines"),
        ("def f():\n" + "    pass\n" * 60, "f has 61 lines"),
        ("x = [a for b in c for a in b]", "several `for`s"),
    ],
)
def test_what_is_too_large_is_found(source: str, problem: str) -> None:
    assert problem in "\n".join(problems_of_size(source))


def test_a_question_word_is_found() -> None:
    source = 'def f():\n    """What it does."""'
    assert list(problems_of_language(source)) == ["f: 'What it does.'"]


def test_fields_that_methods_assign_are_found() -> None:
    source = (
        "class A:\n def __init__(self): self.a = 1\n def f(self): self.b, self.c[0] = self.d, 2"
    )
    assert rebound_fields(ast.parse(source).body[0]) == {"b", "c"}
