# SPDX-License-Identifier: Apache-2.0
"""The statements of the product that name what belongs to a device, found in its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property

from benchmarks.broken_lines.broken_line import REPOSITORY

STREAM, EVENT, WORK, POOL, SLOT = "stream", "event", "work", "pool", "slot"
WAIT, RECORD, ALLOCATION, FREE, LAUNCH = "wait", "record", "allocation", "free", "launch"
KINDS = (STREAM, EVENT, WORK, POOL, SLOT, WAIT, RECORD, ALLOCATION, FREE, LAUNCH)

KIND_OF_WORD = {
    "stream": STREAM,
    "event": EVENT,
    "work": WORK,
    "pending": WORK,
    "async": WORK,
    "pool": POOL,
    "slot": SLOT,
    "wait": WAIT,
    "synchronize": WAIT,
    "record": RECORD,
    "allocate": ALLOCATION,
    "free": FREE,
    "release": FREE,
    "discard": FREE,
    "deregister": FREE,
    "launch": LAUNCH,
    "unshard": LAUNCH,
    "reshard": FREE,
}
"""By a word of an identifier, in the singular."""
KIND_OF_NAME = {
    "resize_": FREE,
    "empty": ALLOCATION,
    "empty_like": ALLOCATION,
    "new_empty": ALLOCATION,
    "new_zeros": ALLOCATION,
    "zeros_like": ALLOCATION,
    "buffer_for": ALLOCATION,
    "drop": FREE,
    "non_blocking": LAUNCH,
    "all_gather": LAUNCH,
    "all_reduce": LAUNCH,
    "all_reduce_outer": LAUNCH,
    "reduce_scatter": LAUNCH,
    "reduce_scatter_outer": LAUNCH,
    "broadcast": LAUNCH,
}
"""By a whole identifier, of a function that is called or of an argument."""
ON_DEVICE = {STREAM, EVENT, WORK, WAIT, RECORD, ALLOCATION, FREE, LAUNCH}
"""Kinds whose statements have another meaning on another stream or at another time."""

OTHER_MEANINGS = {
    "megatron/planning/*": "simulates streams",
    "megatron/checkpoint/*": "slots are entries of an optimizer's state, pools have processes",
    "megatron/huggingface/*": "reads files",
    "megatron/pretrain/arguments/*": "names of flags",
    "megatron/mcore_adapter/watch/*": "events are those of threads, works those that a rank is in",
    "megatron/pretrain/report/*": "streams of text",
    "megatron/pretrain/data/*": "loaders of data",
    "megatron/mcore_adapter/checkpoints/background_save.py": "works of other processes",
    "megatron/mcore_adapter/checkpoints/checkpoint_writer.py": "works of other processes",
    "megatron/mcore_adapter/checkpoints/checkpointing.py": "waits for files",
    "megatron/mcore_adapter/checkpoints/*_format.py": "slots are entries of an optimizer's state",
    "megatron/mcore_adapter/checkpoints/*torch_dist*.py": "the same",
    "megatron/mcore_adapter/checkpoints/converted_source.py": "the same",
    "megatron/mcore_adapter/checkpoints/saved_state.py": "the same",
    "megatron/mcore_adapter/checkpoints/vocabulary_padding.py": "the same",
    "megatron/mcore_adapter/checkpoint_entries.py": "the same",
    "megatron/mcore_adapter/core_optimizers.py": "the same",
    "megatron/mcore_adapter/precision_aware.py": "the same",
    "megatron/mcore_adapter/megatron_lm/loop_optimizer.py": "the same",
    "megatron/mcore_adapter/megatron_lm/loop_checkpoints.py": "waits for files and processes",
    "megatron/mcore_adapter/megatron_lm/gpt_program.py": "imports a loop that 0.16 does not have",
    "megatron/fsdp/optimizer/flat_segments.py": "the same",
    "megatron/fsdp/optimizer/optimizer_state.py": "the same",
    "megatron/fsdp/optimizer/sharded_optimizer.py": "the same",
    "megatron/fsdp/optimizer/quantized_state.py": "the same",
    "megatron/fsdp/dtensor/*": "words of torch's own interface",
    "megatron/fsdp/backends/gloo_messages.py": "messages of gloo, between CPUs",
    "megatron/fsdp/backends/messages.py": "messages of gloo, between CPUs",
    "megatron/mcore_adapter/cpu.py": "stand-ins for streams, on CPUs",
    "megatron/mcore_adapter/megatron_lm/loop_on_cpu.py": "stand-ins for streams, on CPUs",
    "megatron/fsdp/trace/*": "reports of what happens",
    "megatron/fsdp/engine/observe.py": "reports of what happens",
    "megatron/mcore_adapter/releases/tested.py": "releases of Megatron-Core",
    "megatron/mcore_adapter/checkpoints/checkpoint_source.py": "names of checkpoints",
    "megatron/mcore_adapter/checkpoints/save_directory.py": "names of checkpoints",
    "megatron/pretrain/dry_run.py": "estimates",
    "megatron/pretrain/memory_estimate.py": "estimates",
}
"""Patterns of files whose words have nothing to do with a device, and why."""
FUNCTIONS_ON_CPU = ("CpuStreams.*",)
"""Functions that run without a device only."""
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)
Block = list[ast.stmt]


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file of the product: its path in the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """The lines, with their ends."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def program(self) -> str:
        """The syntax tree as a text, the same for equal programs."""
        return ast.dump(self.tree)

    def text_of(self, node: ast.expr) -> str:
        """Return the text of an expression on one line, or of one that is written anew."""
        line = self.lines[node.lineno - 1]
        if node.lineno != node.end_lineno or not line.isascii():
            return ast.unparse(node)
        return line[node.col_offset : node.end_col_offset]


@dataclass(frozen=True)
class DefectPlace:
    """A statement of a block that names what belongs to a device."""

    file: SourceFile
    function: str
    block: Block
    index: int

    @property
    def statement(self) -> ast.stmt:
        """The statement."""
        return self.block[self.index]

    @property
    def first_line(self) -> str:
        """The first line of the statement."""
        return self.file.lines[self.statement.lineno - 1].strip()

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that the statement names; of a compound one, its first line."""
        return kinds_of(own_nodes(self.statement))


@cache
def source_file(path: str) -> SourceFile:
    """Return a file of the repository."""
    return SourceFile(path, (REPOSITORY / path).read_text())


def files() -> list[SourceFile]:
    """Return the files of the product whose words are those of a device."""
    found = []
    for file in sorted((REPOSITORY / "megatron").rglob("*.py")):
        path = file.relative_to(REPOSITORY).as_posix()
        if not any(fnmatch(path, pattern) for pattern in OTHER_MEANINGS):
            found.append(source_file(path))
    return found


@cache
def places() -> tuple[DefectPlace, ...]:
    """Return every statement of a function that names what belongs to a device."""
    found: list[DefectPlace] = []
    for file in files():
        for name, function in outermost_functions(file.tree):
            if any(fnmatch(name, pattern) for pattern in FUNCTIONS_ON_CPU):
                continue
            for block in blocks_of(function):
                every = [DefectPlace(file, name, block, index) for index in range(len(block))]
                found += [each for each in every if each.kinds]
    return tuple(found)


def outermost_functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (qualified name, function) of functions and methods that are in no other function."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from outermost_functions(child, f"{prefix}{child.name}.")


def blocks_of(function: ast.AST) -> Iterator[Block]:
    """Yield the blocks of statements in a function, those of inner functions too."""
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that are of its first line: not of statements in it."""
    if isinstance(
        statement, (*LEFT_OUT, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    ):
        return
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "annotation", "cases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_within(child)


def nodes_within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it, but for messages and arguments of inner functions."""
    if isinstance(node, LEFT_OUT):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_within(child)


def kinds_of(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the kinds that the identifiers of some nodes name."""
    found: set[str] = set()
    for node in nodes:
        name = identifier(node)
        if name is not None and not is_label(node):
            found |= {KIND_OF_WORD[word] for word in words_of(name) if word in KIND_OF_WORD}
        called = identifier(node.func) if isinstance(node, ast.Call) else name
        if called in KIND_OF_NAME and isinstance(node, ast.Call | ast.keyword):
            found.add(KIND_OF_NAME[called])
    return frozenset(found)


def identifier(node: ast.AST) -> str | None:
    """Return the identifier of a name, an attribute or a keyword."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name):
            return name
    return None


def is_label(node: ast.AST) -> bool:
    """Return True for what tells others what happens, and does nothing on a device.

    `observe.work` and `observe.storage` tell observers, and `memory.release` tells a file that its
    next use is far.
    """
    match node:
        case ast.Attribute(value=ast.Name(id="observe")):
            return True
        case ast.Attribute(value=ast.Attribute(attr="memory") | ast.Name(id="memory"), attr=name):
            return name == "release"
    return False


def words_of(name: str) -> list[str]:
    """Return the words of an identifier, in lower case and in the singular."""
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return [word.lower().removesuffix("s") for word in words]
