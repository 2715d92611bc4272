# SPDX-License-Identifier: Apache-2.0
"""A dry run says what follows from a command line, and agrees with a run about parameters."""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.pretrain import dry_run
from tests.support.pretrain.arguments.command_lines import parse
from tests.support.rank_pool import run_ranks

ROOT = Path(__file__).parents[2]
LINE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --global-batch-size 64 --lr 0.005 --train-iters 20 --mock-data
    --vocab-size 100 --use-megatron-fsdp --untie-embeddings-and-output-weights"""


def lines_of(flags: str, world_size: int) -> list[str]:
    """Return the lines of a dry run; for one rank of the pool, whose process group it replaces."""
    import torch.distributed as dist

    dist.destroy_process_group()
    args, _ = parse(f"{LINE} {flags} --dry-run", world_size=world_size)
    printed: list[str] = []
    args = argparse.Namespace(**vars(args))
    dry_run.print_dry_run(args, printed.append)
    return printed


def test_a_dry_run_prints_ranks_batches_parameters_and_memory() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    (lines,) = run_ranks(1, lines_of, flags, 16)
    text = "\n".join(lines)
    assert "ranks: 16 = 2 tensor x 2 pipeline x 1 context x 4 data" in text
    assert "a step: 2,048 tokens, 64 sequences" in text
    assert "microbatches of a rank and step: 8 of 2 sequences" in text
    assert "steps: 20" in text
    assert sum("memory of a rank of stage" in line for line in lines) == 2


def test_experts_and_outer_ranks_are_divided_as_the_run_does() -> None:
    flags = (
        "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"
        " --num-distributed-optimizer-instances 2"
    )
    (lines,) = run_ranks(1, lines_of, flags, 8)
    assert "ranks: 8 = 1 tensor x 1 pipeline x 1 context x 8 data (2 outer)" in lines
    assert "ranks of experts: 1 tensor x 2 expert x 1 pipeline x 4 data" in lines


@pytest.mark.exhaustive
def test_the_program_stops_after_a_dry_run_without_torchrun_or_gpu(
    commands: dict[str, str],
) -> None:
    assert "WORLD_SIZE" not in commands
    command = ["python", "pretrain_gpt.py", *LINE.split(), "--dry-run"]
    done = subprocess.run(
        [*command, "--dry-run-ranks", "4"],
        cwd=ROOT,
        env=commands,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks: 4 = 1 tensor x 1 pipeline x 1 context x 4 data" in done.stdout
    assert "iteration" not in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dry-run-ranks", "8"], 8),
        (["--dry-run-ranks=8", "--dry-run"], 8),
        (["--dry-run-ranks", "8", "--dry-run-ranks", "4"], 4),
        (["--dry-run"], None),
        (["--dry-run-ranks", "x"], None),
    ],
    ids=["words", "equals", "twice", "none", "not_a_number"],
)
def test_the_number_of_ranks_is_known_before_the_rules(
    words: list[str], expected: int | None
) -> None:
    from megatron.pretrain.arguments import dry_run_ranks

    assert dry_run_ranks(words) == expected


def memory_of(low_precision: dict[str, Any]) -> tuple[int, int, bool]:
    """Return the bytes of gathered weights and of all weights, and whether a line tells of codes.

    For one rank of the pool. The arguments are those of a machine with Transformer Engine.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    args, _ = parse(f"{LINE} --bf16 --dry-run", world_size=2)
    args = argparse.Namespace(**vars(args) | low_precision)
    estimate = dry_run.estimate_stage(args, 128, 0)
    told = any("bytes an element" in line for line in dry_run.model_lines(args, [estimate]))
    return estimate.memory.gathered, estimate.memory.weights, told


def test_weights_of_fewer_bits_are_gathered_in_their_own_bytes() -> None:
    """Two layers are gathered at once, each with matrices of 12 times 64 x 64 elements."""
    fp8 = {"fp8": "hybrid", "fp8_param_gather": True}
    coded = 2 * 12 * 64 * 64
    ((plain, weights, told),) = run_ranks(1, memory_of, {"fp8": "hybrid"})
    assert not told
    for settings, size in (
        ({**fp8, "fp8_recipe": "delayed"}, 1),
        ({**fp8, "fp8_recipe": "blockwise"}, 1),
        ({**fp8, "fp8_recipe": "mxfp8"}, 33 / 32),
        ({"fp4": "e2m1", "fp4_param": True, "fp4_recipe": "nvfp4"}, 9 / 16),
    ):
        ((gathered, with_codes, told),) = run_ranks(1, memory_of, settings)
        assert plain - gathered == pytest.approx(coded * (2 - size), rel=0.01)
        # The shard of codes is kept beside that of main weights.
        assert with_codes - weights == pytest.approx(2 * coded * size / 2, rel=0.01)
        assert told
    first = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2}
    settings = {**fp8, "fp8_recipe": "delayed", **first, "num_layers_at_end_in_bf16": 2}
    ((gathered, _, _),) = run_ranks(1, memory_of, settings)
    assert gathered == plain
