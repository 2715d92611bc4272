# SPDX-License-Identifier: Apache-2.0
"""Ranks with Transformer Engine, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.support.transformer_engine.ranks import RunOnRanks, ranks
from tools.transformer_engine_on_cpu import BLACKWELL, HOPPER


@pytest.fixture(scope="package")
def blackwell() -> RunOnRanks:
    """Call functions on two ranks with Transformer Engine, for an emulated B200."""
    return ranks(2, BLACKWELL)


@pytest.fixture(scope="package")
def four_of_blackwell() -> RunOnRanks:
    """Call functions on four such ranks."""
    return ranks(4, BLACKWELL)


@pytest.fixture(scope="package")
def hopper() -> RunOnRanks:
    """Call functions on two ranks with Transformer Engine, for an emulated H100."""
    return ranks(2, HOPPER)
