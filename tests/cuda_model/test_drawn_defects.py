# SPDX-License-Identifier: Apache-2.0
"""The draw of defects in the handling of streams: what is drawn, and that two of them are found.

`python -m benchmarks.stream_defects.drawn` makes all of them.
"""

import ast
from collections.abc import Iterator
from textwrap import dedent

import pytest

from benchmarks.stream_defects.changed_function import changed_function
from benchmarks.stream_defects.drawn import LEAK, MEMORY, OVERLAP, RACE, REGISTERED, show, unbroken
from benchmarks.stream_defects.grammar import DrawnDefect, changes, draw, is_valid
from benchmarks.stream_defects.places import (
    KINDS,
    DefectPlace,
    SourceFile,
    blocks_of,
    outermost_functions,
    places,
)
from megatron.fsdp.engine.device import Pending

SEED = 41


def of_source(text: str) -> dict[str, list[str]]:
    """Return the changes of each place of a function, by its first line."""
    file = SourceFile("file.py", dedent(text))
    found: dict[str, list[str]] = {}
    for name, function in outermost_functions(file.tree):
        for block in blocks_of(function):
            for index in range(len(block)):
                place = DefectPlace(file, name, block, index)
                if place.kinds:
                    found[place.first_line] = [each.change for each in changes(place)]
    return found


def all_changes() -> Iterator[DrawnDefect]:
    for place in places():
        yield from changes(place)


def test_every_kind_of_statement_is_among_the_places() -> None:
    found = set().union(*(place.kinds for place in places()))
    assert found == set(KINDS)
    files = {place.file.path for place in places()}
    assert {
        "megatron/fsdp/engine/device.py",
        "megatron/fsdp/backends/memory_slots.py",
        "megatron/fsdp/optimizer/block_update.py",
        "megatron/mcore_adapter/checkpoints/staging.py",
    } <= files
    assert not any(path.startswith("megatron/planning/") for path in files)


def test_changes_are_other_programs_but_for_few() -> None:
    every = list(all_changes())
    some = every[::25]
    assert len(every) > 400 and sum(map(is_valid, some)) > 0.9 * len(some)


def test_a_draw_has_one_change_of_each_place_and_is_the_same_each_time() -> None:
    drawn = draw(40, SEED)
    assert drawn == draw(40, SEED) != draw(40, SEED + 1)
    assert len({(each.file, each.line) for each in drawn}) == 40
    assert draw(10, SEED) == drawn[:10]


def test_changes_are_those_of_the_grammar() -> None:
    found = of_source("""
    def launch(self, tensor, size):
        self._tensor = tensor
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work = dist.all_reduce(tensor, async_op=self.asynchronous)
            kernel(tensor)
        buffer = torch.empty(size)
        done = self.record_event()
        kernel(buffer)
        if slot in taken and size:
            buffer.free()
    """)
    assert "self._tensor = tensor" not in found
    wait = found["stream.wait_stream(torch.cuda.current_stream())"]
    assert {"removed", "reversed: `torch.cuda.current_stream().wait_stream(stream)`"} <= set(wait)
    assert {"moved down by 1", "the default stream", "on a stream of its own"} <= set(wait)
    assert "the `with` is taken off" in found["with torch.cuda.stream(stream):"]
    (work,) = (every for line, every in found.items() if line.startswith("work ="))
    assert {"asynchronous", "moved down by 1"} <= set(work)
    assert "on a stream of its own" in found["buffer = torch.empty(size)"]
    assert {"the condition is never true", "without `slot in taken`"} <= set(
        found["if slot in taken and size:"]
    )
    assert found["buffer.free()"] == ["removed"]


def test_nothing_is_moved_past_what_it_uses_or_what_does_nothing() -> None:
    found = of_source("""
    def f(self, tensor):
        work = dist.all_reduce(tensor)
        work.wait()
        self.number = len(tensor)
        kernel(tensor)
    """)
    moves = [each for each in found["work.wait()"] if each.startswith("moved")]
    assert moves == ["moved down by 2"]


def test_what_only_logs_is_not_changed() -> None:
    found = of_source("""
    def f(slots):
        if slots and not told:
            _logger.info("slots: %s", sizes_of(slots))
        if slots:
            _logger.info("slots: %s", sizes_of(slots))
            slots.free()
    """)
    assert found["if slots and not told:"] == []
    assert "the condition is never true" in found["if slots:"]


def test_a_changed_function_is_changed_for_those_who_have_it_and_restored() -> None:
    (defect,) = (
        each
        for each in all_changes()
        if each.function == "Pending.wait" and each.statement == "self._wait()"
        if each.change == "removed"
    )
    pending, calls = Pending(lambda: calls.append("waited")), []
    wait = pending.wait  # bound before
    with changed_function(defect):
        wait()
    assert calls == [] and "self._wait()" in ast.unparse(ast.parse(defect.statement))
    again = Pending(lambda: calls.append("waited"))
    again.wait()
    assert calls == ["waited"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("function", "statement", "change", "training", "by"),
    [
        ("Pending.wait", "self._wait()", "removed", "level3", RACE),
        (
            *("ParamGroup.wait_for_unshard", "self._all_gather.wait()", "on a stream of its own"),
            *("level3", RACE),
        ),
        ("ParamGroup.reshard", "self.form.release()", "removed", "codes level3", MEMORY),
        (
            *("MemorySlots.discard", "others.discard(buffer)", "removed"),
            *("reduced in two dtypes level3", LEAK),
        ),
        (
            *("NcclMemory.allocate", "self._pools.append(pool)", "removed"),
            *("registered level3", REGISTERED),
        ),
        ("Schedule.begin_forward", "self.unshard_stale()", "removed", "level1", OVERLAP),
    ],
    ids=["removed", "on_another_stream", "held", "leak", "not_registered", "late"],
)
def test_a_drawn_defect_is_found(
    function: str, statement: str, change: str, training: str, by: str
) -> None:
    (defect,) = (
        each
        for each in all_changes()
        if (each.function, each.statement, each.change) == (function, statement, change)
    )
    assert unbroken(training)
    shown = show(defect, training)
    assert shown is not None and shown[0] == by
