# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures for all tests."""

import gc
import os
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers and ranks inherit it
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="megatron_fsdp_caches_")
# Read when numpy and torch are loaded, so they come before every other import; ranks inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TORCHDYNAMO_DISABLE", "1"
)  # compiling takes minutes on two cores; tests of it turn it on

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.support import costs, end_of_run, rank_pool
from tests.support.process_state import ProcessState
from tests.support.rank_process import OUR_MODULES
from tests.support.selection import (
    leave_out_other_turns,
    long_files_first,
    mark_cases,
    shuffle,
    what_selects_nothing,
)
from tests.support.warm_programs import warm_commands

STATE = pytest.StashKey[ProcessState]()
"""What the process of the tests was like before the first of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order",
        type=int,
        metavar="SEED",
        help="run files, and the tests of each, in an order that this number draws",
    )
    parser.addoption(
        "--turn",
        type=int,
        metavar="NUMBER",
        help="of the exhaustive cases of long files, run the quarter whose turn it is",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    options = {"--random-order": config.option.random_order, "--turn": config.option.turn}
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    return f"tests: {' '.join(given)}" if given else None


def pytest_configure(config: pytest.Config) -> None:
    """No warning of ours may reach the user: here, as in the ranks, it is an error."""
    config.addinivalue_line("filterwarnings", f"error:::{OUR_MODULES}")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        end_of_run.watch(os.environ[end_of_run.VARIABLE])
    if not config.option.collectonly:
        rank_pool.start_server()
        costs.count_processes_and_steps()
        config.pluginmanager.register(costs.CostPlugin(costs.read_table()), "costs")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, which all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of long tables to `make test-all`, as marks and turns say; order files."""
    unknown = mark_cases(items)
    if unknown and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"marks name no cases: {', '.join(unknown)}")
    table = costs.read_table()
    if config.option.turn is not None:
        left_out = leave_out_other_turns(items, table, config.option.turn)
        config.hook.pytest_deselected(items=left_out)
    long_files_first(items, table)
    if config.option.random_order is not None:
        shuffle(items, config.option.random_order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Put the settings of this process back after each file."""
    if STATE not in item.config.stash:
        item.config.stash[STATE] = ProcessState()
    result = yield
    if nextitem is None or nextitem.path != item.path:
        item.config.stash[STATE].put_back()
    return result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Say what selected nothing."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(what_selects_nothing(config), red=True)


def pytest_unconfigure() -> None:
    rank_pool.shut_down()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Return `tests.support.rank_pool.run_ranks`."""
    return rank_pool.run_ranks


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which a shell finds `stand_ins`, and these find warm programs."""
    with warm_commands(tmp_path_factory.mktemp("commands")) as variables:
        yield variables
