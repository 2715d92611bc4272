# SPDX-License-Identifier: Apache-2.0
"""The simulated step of a command line is that of a run of pretrain_gpt.py."""

import argparse
import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.planning.gpt_simulation import StagePrediction, simulate_stage
from megatron.planning.layer_costs import GptCosts, software_of_arguments
from megatron.planning.machine import MACHINES
from megatron.planning.search import arguments_on
from tests.support.pretrain.parity import ALLTOALL
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, train
from tests.support.rank_pool import run_ranks

TRACKS = ("gather", "reduce", "storage")
Row = tuple[str, ...]


def profiled_rows(folder: Path, lines: dict[str, str]) -> dict[str, list[Row]]:
    """Train three steps of each line, and return what the first rank has recorded of the third."""
    found = {}
    for case, line in lines.items():
        (folder / case).mkdir(exist_ok=True)
        os.chdir(folder / case)
        train(f"{line} --profile --profile-step-start 2 --profile-step-end 3 --exit-interval 3")
        if dist.get_rank() == 0:
            with open("profile/rank0.tsv") as table:
                rows = list(csv.DictReader(table, delimiter="\t"))
            columns = ("name", "unit", "bytes", "dtype", "phase")
            found[case] = [
                tuple(row[key] for key in columns) for row in rows if row["track"] in TRACKS
            ]
    return found


def simulated(line: str, world_size: int, **changes: Any) -> StagePrediction:
    args = arguments_on(line.split(), world_size)
    args = argparse.Namespace(**vars(args) | changes)
    return simulate_stage(args, MACHINES["h100"], max_microbatches=None)


def simulated_rows(lines: dict[str, str], world_size: int) -> dict[str, list[Row]]:
    """Return the same of simulations; on a rank of the pool, whose process group they replace."""
    dist.destroy_process_group()
    found = {}
    for case, line in lines.items():
        entries = simulated(line, world_size).step.entries
        rows = [each for each in entries if each.track in TRACKS]
        found[case] = [
            (each.name, each.unit, str(each.num_bytes), each.dtype, each.phase) for each in rows
        ]
    return found


CASES = {
    2: {
        "level0": "--data-parallel-sharding-strategy no_shard",
        "level1": "--data-parallel-sharding-strategy optim",
        "level2": "--data-parallel-sharding-strategy optim_grads",
        "level3": "--data-parallel-sharding-strategy optim_grads_params",
        "slots": "--fsdp-double-buffer --overlap-param-gather --overlap-grad-reduce",
        "untied": "--untie-embeddings-and-output-weights --overlap-param-gather"
        " --overlap-grad-reduce",
    },
    4: {
        "tensor": "--tensor-model-parallel-size 2",
        "experts": f"{ALLTOALL} --expert-model-parallel-size 2"
        " --expert-data-parallel-sharding-strategy optim"
        " --overlap-param-gather --overlap-grad-reduce --global-batch-size 16",
    },
}
OVERLAP = {"overlap": "--overlap-param-gather --overlap-grad-reduce"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, OVERLAP), *CASES.items()], ids=["overlap", "two", "four"]
)
def test_runs_have_the_simulated_collectives_and_flat_buffers(
    world_size: int, cases: dict[str, str], tmp_path: Path
) -> None:
    lines = {case: f"{SMALL} {FSDP} {flags}" for case, flags in cases.items()}
    runs = run_ranks(world_size, profiled_rows, tmp_path, lines)[0]
    (found,) = run_ranks(1, simulated_rows, lines, world_size)
    assert min(map(len, found.values())) > 10
    assert found == runs


def gathered_bytes(line: str, settings: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Return the bytes of a step's gathers, its peak, and its seconds; for a rank of the pool."""
    dist.destroy_process_group()
    found = []
    for low_precision in settings:
        prediction = simulated(line, 2, **low_precision)
        gathers = [each.num_bytes for each in prediction.step.entries if each.track == "gather"]
        found.append((sum(gathers), prediction.peak_bytes, prediction.seconds))
    return found


@pytest.mark.exhaustive
def test_codes_are_simulated_with_their_own_bytes() -> None:
    line = f"{SMALL} {FSDP} --bf16 --data-parallel-sharding-strategy optim_grads_params"
    fp8 = {"fp8": "hybrid", "fp8_param_gather": True}
    settings = [{"fp8": "hybrid"}, {**fp8, "fp8_recipe": "mxfp8"}, {**fp8, "fp8_recipe": "delayed"}]
    settings.append({"fp4": "e2m1", "fp4_param": True, "fp4_recipe": "nvfp4"})
    plain, *found = run_ranks(1, gathered_bytes, line, settings)[0]
    saved = [plain[0] - gathered for gathered, _, _ in found]
    # Of each code one byte less is gathered, 31/32 or 23/16, whatever the model has beside codes.
    assert [part / saved[1] for part in saved] == pytest.approx([31 / 32, 1.0, 23 / 16], rel=1e-3)
    assert plain[0] / 2 < found[1][0] < plain[0]
    assert all(peak <= plain[1] and seconds <= plain[2] for _, peak, seconds in found)


def bytes_of_gathers(line: str, gather_bytes: list[float]) -> list[int]:
    """Return the bytes that a step gathers, by software that gathers so many of a weight."""
    dist.destroy_process_group()
    args = arguments_on(line.split(), 2)
    found = []
    for of_weight in gather_bytes:
        software = replace(software_of_arguments(args), gather_bytes=of_weight)
        costs = GptCosts(args, MACHINES["h100"], software)
        step = simulate_stage(args, MACHINES["h100"], costs=costs).step
        gathers = [each.num_bytes for each in step.entries if each.track == "gather"]
        found.append(sum(gathers))
    return found


def test_a_simulation_gathers_the_bytes_of_the_software() -> None:
    line = f"{SMALL} {FSDP} --bf16 --data-parallel-sharding-strategy optim_grads_params"
    two, one = run_ranks(1, bytes_of_gathers, line, [2, 1])[0]
    assert 0 < one == two / 2


def bytes_of_moments(line: str, pairs: list[tuple[torch.dtype, ...]]) -> list[tuple[int, int]]:
    """Return the bytes of optimizer state, and those that exist during the update alone."""
    dist.destroy_process_group()
    found = []
    for pair in pairs:
        moments = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), pair))
        update = simulated(line, 2, **moments, use_precision_aware_optimizer=True).update
        found.append((update.state_bytes, update.passing_bytes))
    return found


def test_moments_of_few_bits_are_updated_as_copies_in_fp32() -> None:
    bf16, fp8, fp32 = torch.bfloat16, torch.uint8, torch.float32
    pairs = [(bf16, bf16), (fp32, fp8)]
    found = run_ranks(1, bytes_of_moments, f"{SMALL} {FSDP} --bf16", pairs)[0]
    whole = found[0][0] / 4
    assert [(state / whole, passing / whole) for state, passing in found] == [(4, 0), (5, 4)]
