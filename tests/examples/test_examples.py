# SPDX-License-Identifier: Apache-2.0
"""Every example is run, or its command line parsed by the program it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron.training.arguments import parse_arguments

ROOT = Path(__file__).parents[2]


def environment(path: str) -> dict[str, str]:
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_the_laptop_script_starts_a_run_that_the_program_accepts(tmp_path: Path) -> None:
    fake = tmp_path / "torchrun"
    fake.write_text('#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n')
    fake.chmod(0o755)
    script = ROOT / "examples" / "megatron_fsdp" / "pretrain_gpt_laptop.sh"
    path = f"{tmp_path}:{os.environ['PATH']}"
    output = subprocess.run(
        ["bash", str(script), "--seed", "5"], env=environment(path), capture_output=True, text=True, check=True
    ).stdout
    words = json.loads(output)
    assert words[:3] == ["--nproc_per_node", "2", "pretrain_gpt.py"]
    args, _ = parse_arguments(words[3:], world_size=2, cuda=False, transformer_engine=False)
    assert args.use_megatron_fsdp and args.seed == 5 and args.save


def test_the_plain_loop_learns_and_continues_from_its_checkpoint() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(ROOT / "examples" / "fully_shard_training_loop.py"), "--steps", "40",
    ]  # fmt: skip
    run = subprocess.run(command, env=environment(os.environ["PATH"]), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
    before, after = run.stdout.split("continuing from")
    first, last, resumed = (float(line.split()[-1]) for line in (*before.splitlines()[:1], *before.splitlines()[-1:], after.splitlines()[1]))
    assert last < first / 2 and resumed < first / 2, run.stdout
