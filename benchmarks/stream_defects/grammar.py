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
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.broken_lines.drawn_lines import position_in_draw
from benchmarks.stream_defects.places import (
    ALLOCATION,
    FREE,
    LAUNCH,
    ON_DEVICE,
    RECORD,
    STREAM,
    WAIT,
    Block,
    DefectPlace,
    SourceFile,
    identifier,
    kinds_of,
    own_nodes,
    places,
    source_file,
)

WITHOUT_DEVICE = {
    *("info", "replace"),
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
MOVABLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)
SIMPLE = (*MOVABLE, ast.Return)
CUDA = '__import__("torch").cuda'
SIDE = f"with {CUDA}.stream({CUDA}.Stream()):"
"""Also in files that do not import torch."""


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


# ---- changes


def changes(place: DefectPlace) -> Iterator[DrawnDefect]:
    """Yield every change of a place that the grammar has; none of what only logs."""
    if only_logs(place.statement):
        return
    yield from removals(place)
    yield from moves(place)
    yield from exchanges(place)
    yield from other_streams(place)
    yield from expressions(place)


def removals(place: DefectPlace) -> Iterator[DrawnDefect]:
    """Yield the change that forgets a statement, or what is done on a condition."""
    statement = place.statement
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Delete():
            yield rewritten(place, "removed", statement, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not is_first(place):
            yield rewritten(place, "removed", statement, "pass")
        case ast.If(test=test) if not only_tells(statement):
            yield rewritten(place, "the condition is never true", test, "False")


def only_logs(statement: ast.stmt) -> bool:
    """Return True for a call of a logger, and a condition on which nothing else happens."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_logger")))):
            return True
        case ast.If(body=body, orelse=others):
            return all(map(only_logs, [*body, *others]))
    return False


def only_tells(condition: ast.If) -> bool:
    """Return True where an error is raised, or something logged, and nothing else happens."""
    for statement in condition.body:
        is_told = isinstance(statement, ast.Expr) and not does_something(statement)
        if not is_told and not isinstance(statement, ast.Raise):
            return False
    return True


def is_first(place: DefectPlace) -> bool:
    """Return True for what gives an object its attributes: any use of it finds that they lack."""
    return place.function.endswith("__init__")


def moves(place: DefectPlace) -> Iterator[DrawnDefect]:
    """Yield moves up and down by statements that something happens in."""
    if not is_movable(place.statement):
        return
    for distance in range(1, FARTHEST + 1):
        for is_down in (True, False):
            if not is_down and is_wait_for_work(place.statement):
                continue  # it takes time only
            passed = passed_over(place, distance, is_down)
            if only_frees([place.statement, *passed]):
                continue  # in which order they do makes no difference
            if passed and any(map(does_something, passed)) and are_apart(place.statement, passed):
                direction = "down" if is_down else "up"
                order = [*passed, place.statement] if is_down else [place.statement, *passed]
                yield reordered(place, f"moved {direction} by {distance}", order)


def only_frees(statements: Block) -> bool:
    """Return True if each of some statements frees memory, and does nothing else on a device."""
    kinds = [kinds_of(own_nodes(each)) & ON_DEVICE for each in statements]
    return all(each == {FREE} for each in kinds)


def passed_over(place: DefectPlace, distance: int, is_down: bool) -> Block:
    """Return the statements that a move passes; none if it cannot go so far."""
    begin = place.index + 1 if is_down else place.index - distance
    passed = place.block[max(begin, 0) : max(begin, 0) + distance]
    ends = (ast.Return, ast.Raise, ast.Continue, ast.Break)
    if begin < 0 or len(passed) < distance or any(isinstance(each, ends) for each in passed):
        return []
    return passed


def exchanges(place: DefectPlace) -> Iterator[DrawnDefect]:
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
    """Return True if a statement may do something on a device, now and not when it is called."""
    for node in nodes_run_by(statement):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Delete):
            return True
        if isinstance(node, ast.Call):
            name = identifier(node.func) or ""
            makes_object = name[:1].isupper()
            if name not in WITHOUT_DEVICE and not makes_object:
                return True
    return False


def nodes_run_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it, but for those of functions that it defines."""
    if isinstance(node, ast.Lambda | ast.FunctionDef):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_run_by(child)


def is_wait_for_work(statement: ast.stmt) -> bool:
    """Return True for a wait for one work, which does no harm where it comes too early."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="wait"), args=[])):
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


def other_streams(place: DefectPlace) -> Iterator[DrawnDefect]:
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


def expressions(place: DefectPlace) -> Iterator[DrawnDefect]:
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
            case ast.keyword(arg="async_op" | "async_ops", value=value):
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


def rewritten(place: DefectPlace, change: str, node: ast.AST, text: str) -> DrawnDefect:
    """Return the defect with another text in the place of a node."""
    lines = [line.encode() for line in place.file.lines]
    first, last = node.lineno - 1, node.end_lineno - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    lines[first : last + 1] = [before + text.encode() + after]
    return defect_of(place, change, b"".join(lines).decode())


def replaced(place: DefectPlace, change: str, statement: ast.stmt, text: str) -> DrawnDefect:
    """Return the defect with other lines in the place of a statement's."""
    lines = list(place.file.lines)
    lines[statement.lineno - 1 : statement.end_lineno] = [text]
    return defect_of(place, change, "".join(lines))


def reordered(place: DefectPlace, change: str, order: Block) -> DrawnDefect:
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


def with_taken_off(place: DefectPlace, statement: ast.With) -> DrawnDefect:
    """Return the defect whose block is in no context."""
    lines = place.file.lines
    begin, end = statement.body[0].lineno - 1, statement.end_lineno
    indent = statement.body[0].col_offset - statement.col_offset
    body = [line[indent:] if line.strip() else line for line in lines[begin:end]]
    return replaced(place, "the `with` is taken off", statement, "".join(body))


def defect_of(place: DefectPlace, change: str, source: str) -> DrawnDefect:
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
