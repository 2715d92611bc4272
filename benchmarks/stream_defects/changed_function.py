# SPDX-License-Identifier: Apache-2.0
"""Functions whose code is that of a changed source, in this process, for a while.

A function stays the same object, so whoever has it runs the changed code.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from benchmarks.broken_lines.broken_line import REPOSITORY
from benchmarks.stream_defects.grammar import DrawnDefect
from benchmarks.stream_defects.places import SourceFile, blocks_of, places

PROBE = "note_executed_line"


@contextmanager
def changed_function(defect: DrawnDefect | None) -> Iterator[None]:
    """Give the function of a defect the code of the changed file while the context lasts."""
    if defect is None:
        yield
        return
    with codes_replaced(defect.file, {defect.function}, ast.parse(defect.source)):
        yield


@contextmanager
def lines_noted(executed: set[tuple[str, int]]) -> Iterator[None]:
    """Add (file, line) of the places of the grammar that are executed while the context lasts."""
    functions: dict[SourceFile, set[str]] = {}
    lines: dict[SourceFile, set[int]] = {}
    for place in places():
        functions.setdefault(place.file, set()).add(place.function)
        lines.setdefault(place.file, set()).add(place.statement.lineno)

    def note(path: str, line: int) -> None:
        executed.add((path, line))

    setattr(builtins, PROBE, note)
    with ExitStack() as restored:
        restored.callback(delattr, builtins, PROBE)
        for file, own in functions.items():
            tree = with_probes(file, lines[file])
            restored.enter_context(codes_replaced(file.path, own, tree))
        yield


def with_probes(file: SourceFile, lines: set[int]) -> ast.Module:
    """Return the tree of a file with a call before each of some lines, which notes it."""
    tree = ast.parse(file.text)
    for block in list(blocks_of(tree)):
        for statement in list(block):
            if statement.lineno in lines:
                call = ast.parse(f"{PROBE}({file.path!r}, {statement.lineno})").body[0]
                block.insert(block.index(statement), ast.copy_location(call, statement))
    return ast.fix_missing_locations(tree)


@contextmanager
def codes_replaced(file: str, functions: set[str], tree: ast.Module) -> Iterator[None]:
    """Give functions other code while the context lasts.

    Args:
        file: path in the repository.
        functions: their qualified names.
        tree: the changed file; the functions begin where they did.

    Raises:
        ValueError: there is no such function.
    """
    path = str(REPOSITORY / file)
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for code in codes_in(compile(tree, path, "exec")):
            if code.co_qualname in functions:
                function = function_of(module, code)
                before.append((function, function.__code__))
                function.__code__ = code
        missing = functions - {own.co_qualname for _, own in before}
        if missing:
            raise ValueError(f"{file} has no functions {sorted(missing)}")
        yield
    finally:
        for function, own in before:
            function.__code__ = own


def function_of(module: ModuleType, code: CodeType) -> FunctionType:
    """Return the function of a module that has the name and the place of a code.

    Raises:
        ValueError: there is no such function.
    """
    found: Any = module
    for name in code.co_qualname.split("."):
        found = inspect.getattr_static(found, name)
    wrapped = [found]
    if isinstance(found, property):
        wrapped = [found.fget, found.fset, found.fdel]
    elif isinstance(found, functools.cached_property):
        wrapped = [found.func]
    for each in filter(None, wrapped):
        function = inspect.unwrap(getattr(each, "__func__", each))
        if (
            isinstance(function, FunctionType)
            and function.__code__.co_firstlineno == code.co_firstlineno
        ):
            return function
    raise ValueError(f"{module.__name__} has no function {code.co_qualname}")


def codes_in(outer: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions of a module, those of its classes too."""
    for constant in outer.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)
