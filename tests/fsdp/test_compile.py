# SPDX-License-Identifier: Apache-2.0
"""torch.compile of units and models changes no number and does not compile at every step.

The compiler that generates code is left out here: `test_inductor.py` has it.
"""

import pytest

from tests.support.fsdp.compiled_training import train
from tests.support.fsdp.reference import Ranks

RUNS = [
    ("aot_eager", 3, "block.compile"),
    ("aot_eager", 3, "torch.compile(block)"),
    ("aot_eager", 3, "block_in_unit"),
    ("aot_eager", 2, "model"),
    ("aot_eager", 3, "model.compile"),
    ("eager", 2, "block.compile"),
]
"""Backend, level and way; "aot_eager" also traces the backward pass."""


@pytest.mark.always("aot_eager-3-block.compile")
@pytest.mark.parametrize(("backend", "level", "way"), RUNS)
def test_compiled_models_match_plain_ones_and_are_compiled_once(
    ranks: Ranks, backend: str, level: int, way: str
) -> None:
    ranks(2, train, backend, level, way, timeout=300)
