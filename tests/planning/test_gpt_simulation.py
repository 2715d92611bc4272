# SPDX-License-Identifier: Apache-2.0
"""The simulated step of a command line is that of a run of pretrain_gpt.py."""

import argparse
import csv
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.planning.gpt_simulation import simulate_stage
from megatron.planning.machine import MACHINES
from megatron.planning.search import arguments_on
from tests.support.pretrain.parity import ALLTOALL
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
    "experts": (
        4,
        f"{ALLTOALL} --expert-model-parallel-size 2 --expert-data-parallel-sharding-strategy optim"
        " --overlap-param-gather --overlap-grad-reduce --global-batch-size 16",
    ),
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


def gathered_bytes(line: str, low_precision: dict[str, object]) -> tuple[int, int, float]:
    """Return the bytes of a step's gathers, its peak, and its seconds; for a rank of the pool."""
    if dist.is_initialized():
        dist.destroy_process_group()
    args = arguments_on(line.split(), 2)
    args = argparse.Namespace(**vars(args) | low_precision)
    prediction = simulate_stage(args, MACHINES["h100"], max_microbatches=None)
    gathers = [each.num_bytes for each in prediction.step.entries if each.track == "gather"]
    return sum(gathers), prediction.peak_bytes, prediction.seconds


def test_codes_are_simulated_with_their_own_bytes() -> None:
    line = f"{SMALL} {FSDP} --bf16 --data-parallel-sharding-strategy optim_grads_params"
    plain = run_ranks(1, gathered_bytes, line, {"fp8": "hybrid"})[0]
    fp8 = {"fp8": "hybrid", "fp8_param_gather": True}
    settings = {
        "mxfp8": {**fp8, "fp8_recipe": "mxfp8"},
        "delayed": {**fp8, "fp8_recipe": "delayed"},
    }
    settings["nvfp4"] = {"fp4": "e2m1", "fp4_param": True, "fp4_recipe": "nvfp4"}
    found = [run_ranks(1, gathered_bytes, line, each)[0] for each in settings.values()]
    saved = [plain[0] - gathered for gathered, _, _ in found]
    # Of each code one byte less is gathered, 31/32 or 23/16, whatever the model has beside codes.
    assert [part / saved[1] for part in saved] == pytest.approx([31 / 32, 1.0, 23 / 16], rel=1e-3)
    assert plain[0] / 2 < found[1][0] < plain[0]
    assert all(peak <= plain[1] and seconds <= plain[2] for _, peak, seconds in found)


def bytes_of_moments(line: str, pairs: list[tuple[torch.dtype, ...]]) -> list[tuple[int, int]]:
    """Return the bytes of optimizer state, and those that exist during the update alone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    args = arguments_on(line.split(), 2)
    found = []
    for pair in pairs:
        moments = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), pair))
        aware = argparse.Namespace(**vars(args) | moments | {"use_precision_aware_optimizer": True})
        update = simulate_stage(aware, MACHINES["h100"], max_microbatches=None).update
        found.append((update.state_bytes, update.passing_bytes))
    return found


def test_moments_of_few_bits_are_updated_as_copies_in_fp32() -> None:
    bf16, fp8, fp32 = torch.bfloat16, torch.uint8, torch.float32
    pairs = [(bf16, bf16), (fp32, fp8)]
    found = run_ranks(1, bytes_of_moments, f"{SMALL} {FSDP} --bf16", pairs)[0]
    whole = found[0][0] / 4
    assert [(state / whole, passing / whole) for state, passing in found] == [(4, 0), (5, 4)]
