# SPDX-License-Identifier: Apache-2.0
"""torch.compile of units and models changes no number and does not compile at every step.

The compiler that generates code is left out here: `test_inductor.py` has it.
"""

import pytest

from tests.support.fsdp.compiled_training import train_all
from tests.support.fsdp.reference import Ranks

RUNS = {
    "blocks in place": [(3, "block.compile")],
    "others": [
        (3, "torch.compile(block)"),
        (3, "block_in_unit"),
        (2, "model"),
        (3, "model.compile"),
    ],
}
"""Levels and ways, which one call of the ranks trains."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", RUNS)
def test_compiled_models_match_plain_ones_and_are_compiled_once(ranks: Ranks, runs: str) -> None:
    ranks(2, train_all, RUNS[runs], timeout=300)
