# SPDX-License-Identifier: Apache-2.0
"""Budgets of size that keep every part readable in one sitting. Read from the sources with ast."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("megatron", "megatron_fsdp", "tools", "examples", "benchmarks", "pretrain_gpt.py")
"""What is shipped; tests keep the same budgets."""

MODULE_LINES = 450
FUNCTION_LINES = 60
CLASS_LINES = 300
CLASS_METHODS = 20

PUBLISHED_SIGNATURES = ("fully_shard", "fully_shard_model")
"""Functions whose 34 published arguments, and their explanation, fill more than the budget."""

QUESTION_WORDS = ("What ", "Whether ", "Where ", "How ", "Which ")

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def files(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        path = REPOSITORY / folder
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def number_of_lines(node: ast.stmt) -> int:
    """Count the lines of a definition, of one with a published signature those of its body."""
    if node.name in PUBLISHED_SIGNATURES:
        return node.end_lineno - node.body[1].lineno + 1  # the docstring comes first
    return node.end_lineno - node.lineno + 1


def number_of_methods(node: ast.ClassDef) -> int:
    """Count the methods of a class by name: a property and its setter are one."""
    return len({each.name for each in node.body if isinstance(each, Function)})


def problems_of_size(source: str) -> Iterator[str]:
    """Name everything in a module that is larger than its budget."""
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        yield f"{lines} lines, more than {MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and number_of_lines(node) > FUNCTION_LINES:
            yield f"{node.name} has {number_of_lines(node)} lines, more than {FUNCTION_LINES}"
        if isinstance(node, ast.ClassDef) and number_of_lines(node) > CLASS_LINES:
            yield f"class {node.name} has {number_of_lines(node)} lines, more than {CLASS_LINES}"
        if isinstance(node, ast.ClassDef) and number_of_methods(node) > CLASS_METHODS:
            count = number_of_methods(node)
            yield f"class {node.name} has {count} methods, more than {CLASS_METHODS}"
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield f"line {node.lineno}: a comprehension with several `for`s: name the inner one"


def problems_of_language(source: str) -> Iterator[str]:
    """Name every docstring that begins with a question word instead of a verb or a noun."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(QUESTION_WORDS):
                yield f"{getattr(node, 'name', 'the module')}: {text.splitlines()[0]!r}"


def names_of_classes(folders: tuple[str, ...]) -> dict[str, list[str]]:
    """Map the name of each class at module level to the files that define it."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files(folders):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(REPOSITORY)))
    return places


def test_modules_functions_and_classes_keep_their_budgets() -> None:
    problems = []
    for path in files((*SOURCES, "tests")):
        if "data" not in path.relative_to(REPOSITORY).parts:
            found = problems_of_size(path.read_text())
            problems += [f"{path.relative_to(REPOSITORY)}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    problems = []
    for path in files((*SOURCES, "tests")):
        found = problems_of_language(path.read_text())
        problems += [f"{path.relative_to(REPOSITORY)}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def test_class_names_are_unique_in_the_repository() -> None:
    places = names_of_classes((*SOURCES, "tests"))
    twice = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(twice)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("\n" * 451, "451 lines"),
        ("def f():\n" + "    pass\n" * 60, "f has 61 lines"),
        ("class A:\n" + "    x = 1\n" * 300, "class A has 301 lines"),
        ("class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(21)), "21 methods"),
        ("x = [a for b in c for a in b]", "several `for`s"),
    ],
)
def test_what_is_too_large_is_found(source: str, problem: str) -> None:
    assert problem in "\n".join(problems_of_size(source))


def test_a_question_word_is_found() -> None:
    source = 'def f():\n    """What it does."""'
    assert list(problems_of_language(source)) == ["f: 'What it does.'"]
