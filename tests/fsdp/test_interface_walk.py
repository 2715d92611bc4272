# SPDX-License-Identifier: Apache-2.0
"""A walk through the published interface.

Every argument, field and member does what its page says, which is seen from outside, or is refused
by name: by an entry of the table, or by a test of its own. A new one without either fails.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from megatron_fsdp import DistributedDataParallelConfig, MegatronFSDP
from tests.support.fsdp.interface import members, mesh_arguments, model_arguments, wrapper
from tests.support.fsdp.interface.elsewhere import TESTS
from tests.support.fsdp.interface.walk import OWNERS, WALK
from tests.support.fsdp.reference import Ranks

ENTRIES = (mesh_arguments, model_arguments, members, wrapper)
"""The modules whose functions enter themselves in the table when they are imported."""


def run_entries(world_size: int, module: str) -> None:
    """Run the functions of a module of entries that are for so many ranks."""
    found: dict[str, Callable[[], None]] = {}
    for names in WALK.values():
        for size, function in names.values():
            if size == world_size and function.__module__ == module:
                found.setdefault(function.__name__, function)
    for name, function in found.items():
        try:
            function()
        except BaseException as error:
            error.add_note(f"in {name}")
            raise


RUNS = [
    *((2, module.__name__) for module in ENTRIES),
    (4, mesh_arguments.__name__),
]
"""Numbers of ranks, and the modules with entries for them."""


@pytest.mark.always("*.wrapper")
@pytest.mark.parametrize(("world_size", "module"), RUNS)
def test_every_entry_has_its_documented_effect(ranks: Ranks, world_size: int, module: str) -> None:
    ranks(world_size, run_entries, world_size, module)


def test_every_entry_is_run() -> None:
    for names in WALK.values():
        for size, function in names.values():
            assert (size, function.__module__) in RUNS


def test_the_tests_that_show_other_names_use_them() -> None:
    for test, owners in TESTS.items():
        file, _, function = test.partition("::")
        text = (Path(__file__).parent / file).read_text()
        assert f"def {function}(" in text, test
        for name in chain.from_iterable(owners.values()):
            assert re.search(rf"\b{name}\b", text), f"{test}: {name}"


def shown(owner: str) -> list[str]:
    """Return the names of an owner with an entry, or a test of their own."""
    return [*WALK[owner], *chain.from_iterable(each.get(owner, ()) for each in TESTS.values())]


def names_of(owner: str) -> list[str]:
    if owner == "DistributedDataParallelConfig":
        return [field.name for field in fields(DistributedDataParallelConfig)]
    return list(inspect.signature(OWNERS[owner]).parameters)


@pytest.mark.parametrize("owner", OWNERS)
def test_the_walk_leaves_no_argument_out(owner: str) -> None:
    assert sorted(shown(owner)) == sorted(names_of(owner))


def test_the_walk_leaves_no_member_out() -> None:
    own: set[str] = set()
    for owner in MegatronFSDP.__mro__:
        if owner.__module__.startswith(("megatron.fsdp", "megatron_fsdp")):
            own |= {name for name in vars(owner) if not name.startswith("_")}
    assert sorted(shown("members")) == sorted(own | {"module", "ddp_config"})
