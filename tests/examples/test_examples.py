# SPDX-License-Identifier: Apache-2.0
"""Every example is run, or its command line parsed by the program it starts."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.pretrain.arguments import parse_arguments
from tests.examples.conftest import Shell
from tests.support.pretrain.training_runs import DATA, assert_close, train
from tests.support.rank_pool import run_ranks

ROOT = Path(__file__).parents[2]


def environment(path: str) -> dict[str, str]:
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command_line(script: str, tmp_path: Path, *more: str) -> tuple[list[str], list[str]]:
    """Return the words that a script gives to torchrun, and those that it gives to the program."""
    fake = tmp_path / "torchrun"
    fake.write_text("#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    path = ROOT / "examples" / "megatron_fsdp" / script
    output = subprocess.run(
        ["bash", str(path), *more],
        env=environment(f"{tmp_path}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    words = json.loads(output)
    program = words.index("pretrain_gpt.py")
    return words[:program], words[program + 1 :]


def test_the_laptop_script_starts_a_run_that_the_program_accepts(tmp_path: Path) -> None:
    launch, words = command_line("pretrain_gpt_laptop.sh", tmp_path, "--seed", "5")
    assert launch == ["--nproc_per_node", "2"]
    args, _ = parse_arguments(words, world_size=2, cuda=False, transformer_engine=False)
    assert args.use_megatron_fsdp and args.seed == 5 and args.save
    parse_arguments(
        [*words, "--train-iters", "20"], world_size=2, cuda=False, transformer_engine=False
    )  # as README has it


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama3", "qwen3", "mixtral", "deepseek_v3"])
def test_small_models_named_after_real_ones_train_as_with_ddp(model: str, tmp_path: Path) -> None:
    launch, words = command_line(f"pretrain_{model}_small.sh", tmp_path)
    ranks = int(launch[launch.index("--nproc_per_node") + 1])
    line = (
        f"{shlex.join(words)} {DATA} --train-iters 3 --seq-length 64 --global-batch-size 8"
        " --micro-batch-size 1"
    )
    if model != "deepseek_v3":  # whose layers are of several kinds
        line += " --num-layers 2"
    fsdp, ddp = run_ranks(ranks, train, line, line.replace("--use-megatron-fsdp", ""), timeout=300)[
        0
    ]
    assert_close(fsdp.losses, ddp.losses, 1e-5)
    assert_close(fsdp.column("grad-norm"), ddp.column("grad-norm"), 1e-5)
    assert fsdp.losses[-1] < fsdp.losses[0]


@pytest.mark.exhaustive
def test_the_plain_loop_continues_as_if_nothing_had_happened(shell: Shell) -> None:
    start = ("torchrun", "--standalone", "--nproc_per_node", "2")
    program = (*start, "examples/fully_shard_training_loop.py", "--steps")
    whole = shell.run(*program, "8", "--checkpoints", "whole")
    parts = [shell.run(*program, steps, "--checkpoints", "parts") for steps in ("3", "8")]
    assert "Warning" not in whole.stdout and parts[0].stdout != whole.stdout, whole.stdout
    assert parts[1].stdout == f"continuing after step 3\n{whole.stdout}"
    assert whole.stdout.count("loss") == 2  # evaluations, with and without averaged weights
