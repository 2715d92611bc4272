# SPDX-License-Identifier: Apache-2.0
"""Data and runs that the tests of the training program share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import megatron_release
from tests.support.fork_servers import Packages
from tests.support.megatron_release import RELEASES
from tests.support.pretrain.number_corpora import write_numbers
from tests.support.pretrain.saved_runs import LINE
from tests.support.pretrain.training_runs import (
    Record,
    State,
    load_state,
    trained,
    write_counting_corpus,
)
from tests.support.rank_pool import run_ranks
from tests.support.transformer_engine.ranks import RunOnRanks, ranks
from tests.support.warm_programs import warm_commands


@pytest.fixture(scope="session", autouse=True)
def counting_corpus() -> None:
    write_counting_corpus()


@pytest.fixture(scope="session")
def engine_ranks() -> RunOnRanks:
    return ranks(2)


@pytest.fixture(scope="session")
def commands_of_newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return variables as `commands` does, for the newest release, which has Megatron-LM's loop."""
    megatron_release.require(RELEASES[-1])
    folder = tmp_path_factory.mktemp("commands_of_newest")
    with warm_commands(folder, Packages(RELEASES[-1])) as variables:
        yield variables


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Write fifty documents of forty tokens, which are their numbers."""
    return write_numbers(tmp_path / "corpus", [[i] * 40 for i in range(50)])


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a group: a blend asks for it when it has a cache."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Six steps at level 3 on two ranks, saved at three and six, without dropout."""
    folder = tmp_path_factory.mktemp("fp32")
    return folder, trained(f"{LINE} --save {folder} --save-interval 3")[0]


@pytest.fixture(scope="session")
def fp32_state(fp32: tuple[Path, Record]) -> State:
    """Load its sixth step."""
    state: State = run_ranks(2, load_state, f"{LINE} --load {fp32[0]}")[0]
    return state
