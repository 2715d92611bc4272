# SPDX-License-Identifier: Apache-2.0
"""Lines drawn at random from the parts of the library, each with one operator, value or call wrong.

A change is one that a person could make by mistake: a comparison or an addition of the wrong kind,
a number that is off by one, a condition that is turned around, a call that is forgotten.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.broken_lines.broken_line import REPOSITORY, BrokenLine


@dataclass(frozen=True)
class LibraryPart:
    """A part of the library.

    Args:
        places: its folders and files.
        tests: its tests, the likeliest to notice first, as arguments of pytest.
    """

    places: tuple[str, ...]
    tests: str


FRONT = (
    "megatron/fsdp/*.py",
    "megatron/fsdp/config",
    "megatron/fsdp/module",
    "megatron/fsdp/backends",
)
PARTS = {
    "engine": LibraryPart(
        ("megatron/fsdp/engine",), "tests/fsdp/engine tests/fsdp/test_gradients.py tests/fsdp"
    ),
    "front": LibraryPart(FRONT, "tests/fsdp"),
    "optimizer": LibraryPart(("megatron/fsdp/optimizer",), "tests/fsdp/optimizer tests/fsdp"),
    "quantized": LibraryPart(("megatron/fsdp/quantized",), "tests/fsdp/quantized tests/fsdp"),
    "dtensor": LibraryPart(("megatron/fsdp/dtensor",), "tests/fsdp/dtensor tests/fsdp"),
    "adapter": LibraryPart(("megatron/mcore_adapter",), "tests/mcore_adapter tests/pretrain"),
    "checkpoint": LibraryPart(
        ("megatron/checkpoint",), "tests/checkpoint tests/pretrain/checkpoints"
    ),
}

LEFT_OUT = (ast.arguments, ast.Raise, ast.AnnAssign, ast.Assert, ast.JoinedStr)
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
OPERATIONS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}


Change = Callable[[str], str]
"""What is written in the place of a text."""


def drawn_lines(number: int, seed: int) -> list[BrokenLine]:
    """Return so many broken lines, as many of each part.

    A line is drawn by a hash of its text, so that changes of other lines of the sources leave it
    drawn.
    """

    def position(line: BrokenLine) -> bytes:
        return position_in_draw(seed, f"{line.file} {line.line} {line.broken}")

    lines: list[BrokenLine] = []
    for index, part in enumerate(PARTS):
        wanted = number * (index + 1) // len(PARTS) - number * index // len(PARTS)
        candidates: list[BrokenLine] = []
        for file in files_of(part):
            candidates += changes(part, file)
        valid = filter(is_valid, sorted(candidates, key=position))
        lines += itertools.islice(valid, wanted)
    return lines


def position_in_draw(seed: int, text: str) -> bytes:
    """Return a key by which texts are sorted at random, the same each time."""
    return hashlib.sha256(f"{seed} {text}".encode()).digest()


def files_of(part: str) -> list[str]:
    """Return the source files of a part, as paths in the repository."""
    found: list[Path] = []
    for place in PARTS[part].places:
        path = REPOSITORY / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else sorted(REPOSITORY.glob(place))
    return [file.relative_to(REPOSITORY).as_posix() for file in found]


def changes(part: str, file: str) -> Iterator[BrokenLine]:
    """Yield every change of one line of a file whose line is unique."""
    text = (REPOSITORY / file).read_text()
    lines = text.splitlines()
    for number, begin, end, replacement in places(ast.parse(text)):
        line = lines[number - 1]
        if not line.isascii() or text.count(line + "\n") != 1 or ("\n" + line) not in text:
            continue
        broken = line[:begin] + replacement(line[begin:end]) + line[end:]
        if broken == line:
            continue
        yield BrokenLine(
            name=f"{part}: {Path(file).stem}: {line.strip()} -> {broken.strip()}",
            file=file,
            line="\n" + line + "\n",
            broken="\n" + broken + "\n",
            tests=PARTS[part].tests,
        )


def is_valid(line: BrokenLine) -> bool:
    """Return True if the file can still be compiled with the broken line."""
    text = (REPOSITORY / line.file).read_text()
    try:
        compile(text.replace(line.line, line.broken), line.file, "exec")
    except SyntaxError:
        return False
    return True


def places(tree: ast.AST) -> Iterator[tuple[int, int, int, Change]]:
    """Yield (line, first column, end column, change of the text) of what can be made wrong."""
    for node in nodes_of_code(tree):
        if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
            continue
        at = (node.lineno, node.col_offset, node.end_col_offset)
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
                yield (*at, swapped(*COMPARISONS[type(operator)]))
            case ast.BinOp(op=operator) if type(operator) in OPERATIONS:
                yield (*at, swapped(*OPERATIONS[type(operator)]))
            case ast.BoolOp(op=ast.And()):
                yield (*at, swapped(" and ", " or "))
            case ast.BoolOp(op=ast.Or()):
                yield (*at, swapped(" or ", " and "))
            case ast.UnaryOp(op=ast.Not()):
                yield (*at, swapped("not ", ""))
            case ast.Constant(value=bool(value)):
                yield (*at, swapped(str(value), str(not value)))
            case ast.Constant(value=int(value)):
                yield (*at, swapped(str(value), str(value + 1)))
            case ast.Expr(value=ast.Call()):
                yield (*at, lambda text: "pass")
            case ast.Return(value=ast.expr()):
                yield (*at, lambda text: "return None")


def nodes_of_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of what runs: not annotations, messages, assertions and decorators."""
    decorators = getattr(tree, "decorator_list", [])
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, LEFT_OUT) and child not in decorators:
            yield child
            yield from nodes_of_code(child)


def swapped(old: str, new: str) -> Change:
    """Return the change that puts one text in the place of the first occurrence of another."""
    return lambda text: text.replace(old, new, 1)
