# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures for all tests."""

import os

# Read when numpy and torch are loaded, so they come before every other import; ranks inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TORCHDYNAMO_DISABLE", "1"
)  # compiling takes minutes on two cores; tests of it turn it on

from collections.abc import Callable
from typing import Any

import pytest

from tests import rank_pool
from tests.rank_process import OUR_MODULES


def pytest_configure(config: pytest.Config) -> None:
    """No warning of ours may reach the user: here, as in the ranks, it is an error."""
    config.addinivalue_line("filterwarnings", f"error:::{OUR_MODULES}")
    if not config.option.collectonly:
        rank_pool.start_server()


def pytest_unconfigure() -> None:
    rank_pool.shut_down()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(world_size, function, *args, timeout=120, **kwargs)`: see `tests.rank_pool.run_ranks`."""
    return rank_pool.run_ranks
