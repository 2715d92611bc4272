# SPDX-License-Identifier: Apache-2.0
"""Inductor's code changes no loss, layers share it, and it has no more breaks than with FSDP2."""

import shutil
from pathlib import Path

import pytest

from tests.support.fsdp.inductor_training import compare_all
from tests.support.fsdp.reference import Ranks

GRAPHS_OF_A_STACK = 3
"""The embedding, a block, whose code all blocks share, and the head."""

LEVELS = {"model": (3,), "blocks_recomputed": (3,), "blocks_dynamic": (0, 2)}
"""The levels of each way to compile."""


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor calls a C++ compiler")
def test_inductor_trains_as_eager_code_does_with_no_more_breaks_than_fsdp2(
    ranks: Ranks, tmp_path: Path
) -> None:
    for ways in ranks(2, compare_all, LEVELS, str(tmp_path), timeout=300):
        for way, graphs in ways.items():
            of_fsdp2 = graphs.pop("fsdp2")
            at_most = 1 if way.startswith("blocks") else GRAPHS_OF_A_STACK
            for level, own in graphs.items():
                assert 0 < own.compiled <= at_most, (way, level, own)
                assert own.breaks <= of_fsdp2.breaks, (way, level, own)
