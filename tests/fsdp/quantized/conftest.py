# SPDX-License-Identifier: Apache-2.0
"""Ranks with Transformer Engine, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.support import transformer_engine_on_cpu
from tests.support.transformer_engine_on_cpu import BLACKWELL, HOPPER
from tests.support.transformer_engine_on_cpu.ranks import RunOnRanks, ranks


@pytest.fixture(scope="package")
def blackwell() -> RunOnRanks:
    """Call functions on two ranks with Transformer Engine, for an emulated B200."""
    transformer_engine_on_cpu.require()
    return ranks(2, BLACKWELL)


@pytest.fixture(scope="package")
def four_of_blackwell() -> RunOnRanks:
    """Call functions on four such ranks."""
    transformer_engine_on_cpu.require()
    return ranks(4, BLACKWELL)


@pytest.fixture(scope="package")
def hopper() -> RunOnRanks:
    """Call functions on two ranks with Transformer Engine, for an emulated H100."""
    transformer_engine_on_cpu.require()
    return ranks(2, HOPPER)
