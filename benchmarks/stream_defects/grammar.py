# SPDX-License-Identifier: Apache-2.0
"""Defects in the handling of streams, drawn at random from a grammar.

A place is a statement that names a stream, an event, the work of a collective, a pool or a slot, or
that waits, records, allocates, frees or launches. The statements are found in the syntax trees of
`megatron`. A change is one that a person could make by mistake: a wait that is forgotten, made too
late or by the wrong stream, memory that is allocated elsewhere or freed too early, two launches in
the other order.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property

from benchmarks.broken_lines.broken_line import REPOSITORY
from benchmarks.broken_lines.drawn_lines import position_in_draw

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
    "held": RECORD,
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
    "megatron/pretrain/watch/*": "events are those of threads, works those that a rank is in",
    "megatron/pretrain/report/*": "streams of text",
    "megatron/pretrain/data/*": "loaders of data",
    "megatron/pretrain/checkpoints/background_save.py": "works of other processes",
    "megatron/pretrain/checkpoints/checkpoint_writer.py": "works of other processes",
    "megatron/pretrain/checkpoints/checkpointing.py": "waits for files",
    "megatron/pretrain/checkpoints/*_format.py": "slots are entries of an optimizer's state",
    "megatron/pretrain/checkpoints/*torch_dist*.py": "slots are entries of an optimizer's state",
    "megatron/pretrain/checkpoints/converted_source.py": "the same",
    "megatron/pretrain/checkpoints/saved_state.py": "the same",
    "megatron/pretrain/model/vocabulary_padding.py": "the same",
    "megatron/mcore_adapter/checkpoint_entries.py": "the same",
    "megatron/mcore_adapter/core_optimizers.py": "the same",
    "megatron/mcore_adapter/megatron_lm/loop_optimizer.py": "the same",
    "megatron/fsdp/optimizer/flat_segments.py": "the same",
    "megatron/fsdp/optimizer/optimizer_state.py": "the same",
    "megatron/fsdp/optimizer/sharded_optimizer.py": "the same",
    "megatron/fsdp/quantized/quantized_state.py": "the same",
    "megatron/fsdp/module_access/unit_access.py": "slots are positions in a layout",
    "megatron/fsdp/dtensor/*": "words of torch's own interface",
    "megatron/fsdp/backends/gloo_messages.py": "messages of gloo, between CPUs",
    "megatron/fsdp/backends/messages.py": "messages of gloo, between CPUs",
    "megatron/mcore_adapter/cpu.py": "stand-ins for streams, on CPUs",
    "megatron/mcore_adapter/megatron_lm/loop_on_cpu.py": "stand-ins for streams, on CPUs",
    "megatron/fsdp/trace/*": "reports of what happens",
    "megatron/fsdp/engine/observe.py": "reports of what happens",
    "megatron/mcore_adapter/releases/tested.py": "releases of Megatron-Core",
    "megatron/pretrain/checkpoints/checkpoint_source.py": "names of checkpoints",
    "megatron/pretrain/checkpoints/save_directory.py": "names of checkpoints",
    "megatron/pretrain/dry_run.py": "estimates",
    "megatron/pretrain/memory_estimate.py": "estimates",
}
"""Patterns of files whose words have nothing to do with a device, and why."""
FUNCTIONS_ON_CPU = ("CpuStreams.*",)
"""Functions that run without a device only."""
WITHOUT_DEVICE = {
    *("append", "change_state", "dict", "dist.get_rank", "format", "get", "getattr", "isinstance"),
    *("iter", "len", "list", "map", "next", "partial", "range", "set", "sorted", "sum", "tuple"),
    *("type", "zip", "get_rank", "get_world_size", "is_initialized", "cast", "min", "max"),
    *(
        "streams_for",
        "storage",
        "work",
        "observing",
        "pop",
        "items",
        "keys",
        "values",
        "clear",
        "update",
        "ref",
    ),
}
"""Functions that do nothing on a device: what is moved past them alone is where it was."""

FARTHEST = 3
"""Statements that one may be moved by."""
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)
MOVABLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)
SIMPLE = (*MOVABLE, ast.Return)
CUDA = '__import__("torch").cuda'
SIDE = f"with {CUDA}.stream({CUDA}.Stream()):"
"""Also in files that do not import torch."""
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
class DrawnDefect:
    """A change of one function.

    Args:
        file: path in the repository.
        function: qualified name of the outermost function that the place is in.
        line: number of the first line of the place.
        statement: the first line of the statement that is changed.
        change: what becomes of it.
        kinds: what the statement names.
        source: the changed file.
    """

    file: str
    function: str
    line: int
    statement: str
    change: str
    kinds: tuple[str, ...]
    source: str

    @property
    def name(self) -> str:
        """A name that changes of other statements leave as it is."""
        return f"{self.file}: {self.function}: {self.statement} -> {self.change}"


@dataclass(frozen=True)
class Place:
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
        """What the statement names; of a compound one, its first line."""
        return kinds_of(own_nodes(self.statement))


def draw(count: int, seed: int) -> list[DrawnDefect]:
    """Return so many defects: statements drawn at random, and one change of each.

    A statement is drawn by a hash of its text, so that changes of other lines leave it drawn.
    """

    def position(name: str) -> bytes:
        return position_in_draw(seed, name)

    every: dict[str, list[DrawnDefect]] = {}
    for place in places():
        name = f"{place.file.path} {place.function} {place.first_line}"
        every.setdefault(name, []).extend(changes(place))
    found: list[DrawnDefect] = []
    for name in sorted(every, key=position):
        if len(found) == count:
            break
        own = sorted(every[name], key=lambda each: position(each.name))
        found += itertools.islice(filter(is_valid, own), 1)
    return found


def is_valid(defect: DrawnDefect) -> bool:
    """Return True if the changed file can be compiled, and is another program."""
    try:
        changed = SourceFile(defect.file, defect.source).program
    except SyntaxError:
        return False
    return changed != source_file(defect.file).program


# ---- places


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
def places() -> tuple[Place, ...]:
    """Return every statement of a function that names what belongs to a device."""
    found: list[Place] = []
    for file in files():
        for name, function in outermost_functions(file.tree):
            if any(fnmatch(name, pattern) for pattern in FUNCTIONS_ON_CPU):
                continue
            for block in blocks_of(function):
                every = [Place(file, name, block, index) for index in range(len(block))]
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
    """Return True for `observe.work` and `observe.storage`, which tell observers what happens."""
    match node:
        case ast.Attribute(value=ast.Name(id="observe")):
            return True
    return False


def words_of(name: str) -> list[str]:
    """Return the words of an identifier, in lower case and in the singular."""
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return [word.lower().removesuffix("s") for word in words]


# ---- changes


def changes(place: Place) -> Iterator[DrawnDefect]:
    """Yield every change of a place that the grammar has."""
    yield from removals(place)
    yield from moves(place)
    yield from exchanges(place)
    yield from other_streams(place)
    yield from expressions(place)


def removals(place: Place) -> Iterator[DrawnDefect]:
    """Yield the change that forgets a statement, or what is done on a condition."""
    statement = place.statement
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Delete():
            yield rewritten(place, "removed", statement, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not is_first(place):
            yield rewritten(place, "removed", statement, "pass")
        case ast.If(test=test):
            yield rewritten(place, "the condition is never true", test, "False")


def is_first(place: Place) -> bool:
    """Return True for what gives an object its attributes: any use of it finds that they lack."""
    return place.function.endswith("__init__")


def moves(place: Place) -> Iterator[DrawnDefect]:
    """Yield moves up and down by statements that something happens in."""
    if not is_movable(place.statement):
        return
    for distance in range(1, FARTHEST + 1):
        for is_down in (True, False):
            passed = passed_over(place, distance, is_down)
            if passed and any(map(does_something, passed)) and are_apart(place.statement, passed):
                direction = "down" if is_down else "up"
                order = [*passed, place.statement] if is_down else [place.statement, *passed]
                yield reordered(place, f"moved {direction} by {distance}", order)


def passed_over(place: Place, distance: int, is_down: bool) -> Block:
    """Return the statements that a move passes; none if it cannot go so far."""
    begin = place.index + 1 if is_down else place.index - distance
    passed = place.block[max(begin, 0) : max(begin, 0) + distance]
    ends = (ast.Return, ast.Raise, ast.Continue, ast.Break)
    if begin < 0 or len(passed) < distance or any(isinstance(each, ends) for each in passed):
        return []
    return passed


def exchanges(place: Place) -> Iterator[DrawnDefect]:
    """Yield exchanges with the next statements of the block that wait, launch, free or allocate."""
    if not is_movable(place.statement):
        return
    for other in range(place.index + 2, len(place.block)):
        second, between = place.block[other], place.block[place.index + 1 : other]
        if not is_movable(second):
            continue
        if are_apart(place.statement, [*between, second]) and are_apart(second, between):
            text = place.file.lines[second.lineno - 1].strip()
            yield reordered(place, f"exchanged with `{text}`", [second, *between, place.statement])


def is_movable(statement: ast.stmt) -> bool:
    """Return True if a statement has another meaning at another time."""
    is_of_device = bool(kinds_of(own_nodes(statement)) & ON_DEVICE)
    return isinstance(statement, MOVABLE) and is_of_device and does_something(statement)


def does_something(statement: ast.stmt) -> bool:
    """Return True if a statement may do something on a device."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Delete):
            return True
        if isinstance(node, ast.Call):
            name = identifier(node.func) or ""
            makes_object = name[:1].isupper()
            if name not in WITHOUT_DEVICE and not makes_object:
                return True
    return False


def are_apart(statement: ast.stmt, others: Block) -> bool:
    """Return True if no local name or attribute that one assigns is used by the other."""
    for other in others:
        if assigned(statement) & used(other) or assigned(other) & used(statement):
            return False
    return True


def assigned(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement assigns, deletes or imports."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {each.asname or each.name for each in node.names}
    return found


def used(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement reads or assigns."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute)]
    return {ast.unparse(node) for node in nodes} | assigned(statement)


def other_streams(place: Place) -> Iterator[DrawnDefect]:
    """Yield changes of the stream that is current: another one, or none where one is set."""
    statement = place.statement
    if isinstance(statement, ast.With) and STREAM in place.kinds:
        yield with_taken_off(place, statement)
    # Memory that is freed goes back to the stream that has allocated it, whichever is current.
    kinds = place.kinds & {WAIT, RECORD, ALLOCATION, LAUNCH}
    has_call = any(isinstance(node, ast.Call) for node in own_nodes(statement))
    if isinstance(statement, SIMPLE) and kinds and has_call and does_something(statement):
        lines = place.file.lines[statement.lineno - 1 : statement.end_lineno]
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        text = f"{indent}{SIDE}\n" + "".join(f"    {line}" for line in lines)
        yield replaced(place, "on a stream of its own", statement, text)


def expressions(place: Place) -> Iterator[DrawnDefect]:
    """Yield changes inside of a statement."""
    for node in own_nodes(place.statement):
        match node:
            case ast.Call(func=ast.Attribute(value=own, attr="wait_stream"), args=[other]):
                reverse = f"{place.file.text_of(other)}.wait_stream({place.file.text_of(own)})"
                yield rewritten(place, f"reversed: `{reverse}`", node, reverse)
            case ast.Call(func=ast.Name(id="Pending"), args=[_]):
                yield rewritten(place, "`Pending()`, for which nobody waits", node, "Pending()")
            case ast.Attribute(attr="current_stream"):
                text = place.file.text_of(node).replace("current_stream", "default_stream")
                yield rewritten(place, "the default stream", node, text)
            case ast.keyword(arg="async_op" | "async_ops" | "asynchronous", value=value):
                is_true = isinstance(value, ast.Constant) and value.value is True
                if not is_true:
                    yield rewritten(place, "asynchronous", value, "True")
            case ast.BoolOp(values=values):
                for value in values:
                    if kinds_of(ast.walk(value)):
                        shorter = without(node, value)
                        change = f"without `{place.file.text_of(value)}`"
                        yield rewritten(place, change, node, shorter)


def without(operation: ast.BoolOp, left_out: ast.expr) -> str:
    """Return the text of an operation without one of its operands."""
    changed = copy.copy(operation)
    changed.values = [value for value in operation.values if value is not left_out]
    shorter = changed if len(changed.values) > 1 else changed.values[0]
    return f"({ast.unparse(shorter)})"


# ---- texts


def rewritten(place: Place, change: str, node: ast.AST, text: str) -> DrawnDefect:
    """Return the defect with another text in the place of a node."""
    lines = [line.encode() for line in place.file.lines]
    first, last = node.lineno - 1, node.end_lineno - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    lines[first : last + 1] = [before + text.encode() + after]
    return defect_of(place, change, b"".join(lines).decode())


def replaced(place: Place, change: str, statement: ast.stmt, text: str) -> DrawnDefect:
    """Return the defect with other lines in the place of a statement's."""
    lines = list(place.file.lines)
    lines[statement.lineno - 1 : statement.end_lineno] = [text]
    return defect_of(place, change, "".join(lines))


def reordered(place: Place, change: str, order: Block) -> DrawnDefect:
    """Return the defect whose statements, which follow each other, have another order."""
    lines = place.file.lines
    first = min(each.lineno for each in order)
    last = max(each.end_lineno or each.lineno for each in order)
    texts = ["".join(lines[begin_of(each) - 1 : each.end_lineno]) for each in order]
    changed = [*lines[: first - 1], *texts, *lines[last:]]
    return defect_of(place, change, "".join(changed))


def begin_of(statement: ast.stmt) -> int:
    """Return the number of a statement's first line, that of its first decorator if it has any."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def with_taken_off(place: Place, statement: ast.With) -> DrawnDefect:
    """Return the defect whose block is in no context."""
    lines = place.file.lines
    begin, end = statement.body[0].lineno - 1, statement.end_lineno
    indent = statement.body[0].col_offset - statement.col_offset
    body = [line[indent:] if line.strip() else line for line in lines[begin:end]]
    return replaced(place, "the `with` is taken off", statement, "".join(body))


def defect_of(place: Place, change: str, source: str) -> DrawnDefect:
    """Return the defect of a place with a changed file."""
    return DrawnDefect(
        file=place.file.path,
        function=place.function,
        line=place.statement.lineno,
        statement=place.first_line,
        change=change,
        kinds=tuple(sorted(place.kinds)),
        source=source,
    )
