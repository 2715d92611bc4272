# SPDX-License-Identifier: Apache-2.0
"""The simulated step of a command line is that of a run of pretrain_gpt.py."""

import csv
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.planning.gpt_simulation import simulate_stage
from megatron.planning.machine import MACHINES
from megatron.planning.search import arguments_on
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, train
from tests.support.rank_pool import run_ranks

TRACKS = ("gather", "reduce", "storage")
Row = tuple[str, ...]


def profiled_rows(folder: Path, line: str) -> list[Row]:
    """Train three steps, and return what the first rank has recorded of the third."""
    os.chdir(folder)
    profile = "--profile --profile-step-start 2 --profile-step-end 3 --exit-interval 3"
    train(f"{line} {profile}")
    if dist.get_rank() > 0:
        return []
    with open("profile/rank0.tsv") as table:
        rows = [row for row in csv.DictReader(table, delimiter="\t") if row["track"] in TRACKS]
    return [tuple(row[key] for key in ("name", "unit", "bytes", "dtype", "phase")) for row in rows]


def simulated_rows(line: str, world_size: int) -> list[Row]:
    """Return the same of a simulation; on a rank of the pool, whose process group it replaces."""
    dist.destroy_process_group()
    args = arguments_on(line.split(), world_size)
    prediction = simulate_stage(args, MACHINES["h100"], max_microbatches=None)
    rows = [each for each in prediction.step.entries if each.track in TRACKS]
    return [(each.name, each.unit, str(each.num_bytes), each.dtype, each.phase) for each in rows]


CASES = {
    "level0": (2, "--data-parallel-sharding-strategy no_shard"),
    "level1": (2, "--data-parallel-sharding-strategy optim"),
    "level2": (2, "--data-parallel-sharding-strategy optim_grads"),
    "level3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "overlap": (2, "--overlap-param-gather --overlap-grad-reduce"),
    "untied": (
        2,
        "--untie-embeddings-and-output-weights --overlap-param-gather --overlap-grad-reduce",
    ),
    "tensor": (4, "--tensor-model-parallel-size 2"),
}


@pytest.mark.always("overlap")
@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_simulated_collectives_and_flat_buffers(case: str, tmp_path: Path) -> None:
    world_size, flags = CASES[case]
    line = f"{SMALL} {FSDP} {flags}"
    runs = run_ranks(world_size, profiled_rows, tmp_path, line)
    (simulated,) = run_ranks(1, simulated_rows, line, world_size)
    assert len(simulated) > 10
    assert simulated == runs[0]
