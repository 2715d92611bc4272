# SPDX-License-Identifier: Apache-2.0
"""Memory of conversions: a few tensors, however large the checkpoint is."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.param_groups import for_any_optimizer
from megatron.checkpoint.core.training_state import MOMENTS, OptimizerParamGroup, TrainingState
from tests.support.checkpoint import small_models

ROOT = Path(__file__).parents[3]
LAYERS, HIDDEN = 5, 768
TENSOR = 4 * HIDDEN * 4 * HIDDEN
"""Bytes of the largest tensor, fp32: 9 MiB. The whole checkpoint has 315 MiB."""

PART_BYTES = 2 * TENSOR
"""Instead of 256 MiB, for which a checkpoint would have to be large."""

CHILD = """
import re, sys
from pathlib import Path
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.commands.command_line import main

def kibibytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

dcp_target.PART_BYTES = int(sys.argv.pop(1))
for command in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the command before
    before = kibibytes("VmRSS")
    try:
        main([*command.split("|"), "--quiet"])
    except SystemExit as end:
        assert not end.code
    print(1024 * (kibibytes("VmHWM") - before))
"""


def zeros(shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(
        shape, torch.float32, lambda start, stop: torch.zeros(stop - start, *shape[1:])
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of one wide and one narrow MLP weight."""
    args = argparse.Namespace(transformer_impl="local", params_dtype=torch.bfloat16, iteration=1)
    shapes = {"linear_fc1": (4 * HIDDEN, HIDDEN), "linear_fc2": (HIDDEN, 4 * HIDDEN)}
    weights = {}
    for i in range(LAYERS):
        for part, shape in shapes.items():
            weights[f"decoder.layers.{i}.mlp.{part}.weight"] = zeros(shape)
    state = TrainingState(
        weights, args=args, iteration=1, compute_dtype=dict.fromkeys(weights, torch.bfloat16)
    )
    state.moments = {name: dict.fromkeys(MOMENTS, tensor) for name, tensor in weights.items()}
    state.groups = [
        OptimizerParamGroup(for_any_optimizer({"wd_mult": 1.0}, step=1.0), list(weights))
    ]
    root = tmp_path_factory.mktemp("large") / "torch_dist"
    small_models.write(state, root)
    return root


def peaks_of(*commands: tuple[str | Path, ...]) -> list[int]:
    """Bytes by which the memory of one process grows in each of the commands."""
    lines = ["|".join(map(str, words)) for words in commands]
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(PART_BYTES), *lines],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.splitlines() if line.isdecimal()]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak")
def test_a_conversion_holds_one_part_and_two_tensors_at_most(
    checkpoint: Path, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    # 64 MiB for zip records, metadata, and pages of libraries that the system has dropped before.
    limit = PART_BYTES + 2 * TENSOR + (64 << 20)
    assert size > 3 * limit
    there, back = tmp_path / "there", tmp_path / "back"
    peaks = peaks_of(
        ("convert-torch-dist-to-fsdp-dtensor", checkpoint, there),
        ("convert-fsdp-dtensor-to-torch-dist", there, back),
        ("diff", checkpoint, back),
        ("verify", back),
    )
    assert len(peaks) == 4 and max(peaks) < limit
