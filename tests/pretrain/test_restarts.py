# SPDX-License-Identifier: Apache-2.0
"""A rank killed by SIGKILL under the real torchrun, with ranks that are quick to start.

`python -m benchmarks.soak.restarts` kills more of them, at random moments.
"""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed.run

from benchmarks.soak.loops import MEGATRON_LM, OWN, Loop, loop_of
from benchmarks.soak.restarts import LINE, RestartedJob
from tests.support.pretrain.training_runs import trained

SHORT = f"{LINE} --train-iters 15 --save-interval 7"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rendezvous", "num_agents"), [("c10d", 1), ("static", 2)])
def test_a_killed_rank_is_started_again_and_no_loss_changes(
    rendezvous: str, num_agents: int, commands: dict[str, str], tmp_path: Path
) -> None:
    job = killed_job(tmp_path, rendezvous, num_agents, commands, loop_of(OWN))
    assert job.num_loads() == 1
    assert [each["train"] for each in job.history()] == trained(SHORT)[0].losses


@pytest.mark.exhaustive
def test_ranks_of_megatron_lms_loop_are_started_again_and_no_loss_changes(
    commands_of_newest: dict[str, str], tmp_path: Path
) -> None:
    """Each agent has a rank: the one that has lost no rank kept addresses of dead ones."""
    job = killed_job(tmp_path, "static", 2, commands_of_newest, loop_of(MEGATRON_LM))
    assert job.num_loads() == 1
    steps = job.steps()
    assert len(steps) > len(set(steps)) == 15  # those since the last checkpoint, twice


def killed_job(
    folder: Path, rendezvous: str, num_agents: int, commands: dict[str, str], loop: Loop
) -> RestartedJob:
    """Return a job that has ended well, although a rank of it was killed."""
    job = RestartedJob(
        folder,
        rendezvous,
        num_agents,
        SHORT,
        command=["python", torch.distributed.run.__file__],
        before=["--no-python", "python"],
        environment=commands,
        max_restarts=9,
        loop=loop,
    )
    try:
        assert job.wait(lambda: len(job.steps()) > 8, 0.02)
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert not job.wait(lambda: False, 0.05), "it ends well"
    finally:
        job.stop()
    return job
