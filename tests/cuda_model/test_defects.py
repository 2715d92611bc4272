# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects in the handling of streams are reported, on all ranks.

`python -m benchmarks.stream_defects` makes all of them.
"""

from fnmatch import fnmatch
from itertools import chain

import pytest

from benchmarks.stream_defects.defect import missing_kinds
from benchmarks.stream_defects.table import DEFECTS

NAMES = [
    # the start and the end of a collective, and who waits
    "gathers overtake the step*",
    "the event comes before the second of two collectives",
    "a unit waits for its first group only",
    "nobody waits in backward",
    # memory
    "a unit that is unused is freed*",
    "gradients are allocated on the wrong stream",
    "views become stale*",
    "two buffers that are in use have one slot",
    # gradients and the optimizer
    "a gradient over the outer axis is read*",
    "offloaded blocks are updated before*",
    # memory of the host
    "the host gets gradients without waiting",
    "the host steps while weights are copied",
    "the host goes on before blocks are back",
    # other collectives, and NCCL's rules
    "a gather of several groups is not awaited",
    "the host reads sizes without waiting",
    "a shard lies in another rank's slice",
    # launches of several ranks
    "messages of owners are not one launch",
    # memory pools
    "ranks register windows of other sizes",
    "windows that NCCL refused are registered again",
]
"""Patterns of names: each kind of report, and each part of the library that has defects."""


def test_there_are_at_least_forty_defects_that_change_the_code() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) >= 40 and len(set(names)) == len(names)
    for defect in DEFECTS:
        for edit in defect.edits:
            *_, source = edit.made()
            compile(source, defect.name, "exec")


@pytest.mark.always(
    "gathers overtake the step*", "a unit that is unused is freed*", "views become stale*"
)
@pytest.mark.parametrize("name", NAMES)
def test_a_defect_is_reported(name: str) -> None:
    (defect,) = (each for each in DEFECTS if fnmatch(each.name, name))
    assert not missing_kinds(defect)


def test_each_kind_of_report_is_shown() -> None:
    shown: set[str] = set()
    for defect in DEFECTS:
        if any(fnmatch(defect.name, name) for name in NAMES):
            shown |= set(defect.kinds)
    assert shown == set(chain.from_iterable(defect.kinds for defect in DEFECTS))
