# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures for all tests."""

import os
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers and ranks inherit it
    CACHES = tempfile.TemporaryDirectory(prefix="megatron_fsdp_caches_")
    os.environ["XDG_CACHE_HOME"] = CACHES.name
# Read when numpy and torch are loaded, so they come before every other import; ranks inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TORCHDYNAMO_DISABLE", "1"
)  # compiling takes minutes on two cores; tests of it turn it on

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import costs, rank_pool, stand_ins
from tests.support.rank_process import OUR_MODULES
from tests.support.selection import long_files_first, mark_cases
from tests.support.warm_programs import ROOT, free_port, warm_programs


def pytest_configure(config: pytest.Config) -> None:
    """No warning of ours may reach the user: here, as in the ranks, it is an error."""
    config.addinivalue_line("filterwarnings", f"error:::{OUR_MODULES}")
    if not config.option.collectonly:
        rank_pool.start_server()
        costs.count_processes_and_steps()
        config.pluginmanager.register(costs.CostPlugin(costs.read_table()), "costs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of long tables to `make test-all`, as their marks say; order files."""
    long_files_first(items)
    unknown = mark_cases(items)
    if unknown and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"marks name no cases: {', '.join(unknown)}")


def pytest_unconfigure() -> None:
    rank_pool.shut_down()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Return `tests.support.rank_pool.run_ranks`."""
    return rank_pool.run_ranks


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which a shell finds `stand_ins`, and these find warm programs."""
    folder = tmp_path_factory.mktemp("commands")
    stand_ins.install(folder)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    with warm_programs(folder / "socket"):
        yield {
            **kept,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "WARM_PROGRAMS": str(folder / "socket"),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
