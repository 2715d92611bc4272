# SPDX-License-Identifier: Apache-2.0
"""Inductor's code changes no loss, layers share it, and it has no more breaks than with FSDP2."""

import shutil

import pytest

from tests.support.fsdp.inductor_training import WAYS, compare
from tests.support.fsdp.reference import Ranks

GRAPHS_OF_A_STACK = 3
"""The embedding, a block, whose code all blocks share, and the head."""

LEVELS = {"blocks": (2, 3), "model": (1, 3), "blocks_dynamic": (0, 3)}
"""The levels of a way to compile; the others run at level 3."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for compiled code, which ranks, levels and ways share."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor calls a C++ compiler")
@pytest.mark.parametrize("way", WAYS)
def test_inductor_trains_as_eager_code_does_with_no_more_breaks_than_fsdp2(
    ranks: Ranks, cache: str, way: str
) -> None:
    for graphs in ranks(2, compare, way, LEVELS.get(way, (3,)), cache, timeout=300):
        of_fsdp2 = graphs.pop("fsdp2")
        for level, own in graphs.items():
            at_most = 1 if way.startswith("blocks") else GRAPHS_OF_A_STACK
            assert 0 < own.compiled <= at_most, (level, own)
            assert own.breaks <= of_fsdp2.breaks, (level, own)
