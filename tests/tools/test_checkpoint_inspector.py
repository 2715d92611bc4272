# SPDX-License-Identifier: Apache-2.0
"""tools/checkpoint/checkpoint_inspector.py as a process, without Megatron-Core and on ranks."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, run_json

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tools" / "checkpoint" / "checkpoint_inspector.py"

NO_MEGATRON_CORE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core" or name.startswith("megatron.core."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def start(*words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    return subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.exhaustive
def test_it_runs_anywhere_without_megatron_core_and_without_arguments_of_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_MEGATRON_CORE)
    sample = samples.torch_dist(samples.EXPERTS)
    result = start(
        sys.executable,
        SCRIPT,
        TO_FSDP,
        sample,
        tmp_path / "out",
        "--json",
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parameters"] == 29
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
    args = torch.load(_args_payload(tmp_path / "out" / "iter_0000003"), weights_only=False)
    assert args.attention_backend.name  # Megatron-Core's own enum again


def _args_payload(path: Path) -> Any:
    info = StoredCheckpoint(path)._storage["args", ()]
    with open(path / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


@pytest.mark.exhaustive
def test_ranks_of_torchrun_share_the_work_and_say_it_once(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    sample = samples.torch_dist(samples.DENSE)
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", 2]
    result = start(*torchrun, SCRIPT, TO_FSDP, sample, tmp_path / "out", "--json", **commands)
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    if "[Gloo]" in result.stdout:  # torch 2.10: both ranks print lines, parts of which mix
        printed = [line for line in printed if line.startswith("{")]
    assert len(printed) == 1 and json.loads(printed[0])["parameters"] == 21
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
