# SPDX-License-Identifier: Apache-2.0
"""The sample checkpoints: those beside the tests, and larger ones where they are at hand."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

DATA = Path(__file__).parents[2] / "data"
MORE = Path(os.environ.get("MEGATRON_SAMPLES", DATA.parents[2] / "shared" / "data"))

TORCH_DIST = (
    "dense_swiglu_bf16_tp2_dp2",
    "moe4_swiglu_bf16_ep2_dp2",
    "v019_dense_dp2_common_state",
    "dense_swiglu_bf16_tp1_dp2",
    "dense_gelu_tied_fp32_dp2",
    "dense_swiglu_bf16_dp2_dp_reshardable",
)
DENSE, EXPERTS, WITHOUT_COMMON_FILE = TORCH_DIST[:3]
FSDP_DTENSOR = DATA / "fsdp_dtensor" / "dense_swiglu_bf16_dp2"


def torch_dist(name: str) -> Path:
    """Return the directory above the iteration; skip the test if the sample is not here."""
    for root in (DATA, MORE):
        if (root / "torch_dist" / name).is_dir():
            return root / "torch_dist" / name
    pytest.skip(
        f"the sample {name} is not kept in the repository, nor in {MORE}: MEGATRON_SAMPLES names"
        " another folder, tests/data/torch_dist/README.md the run that writes such a file"
    )


def iteration(sample: Path) -> Path:
    return sample / "iter_0000003"


def expected(sample: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return slot -> canonical name -> tensor of the ranks' memory.

    Slots are ``param``, ``exp_avg``, ``exp_avg_sq`` and ``buffers``.
    """
    return torch.load(sample / "expected.pt", weights_only=True)


def writable_copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def differing(mine: dict[str, Any], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal to the bit; of lazy ones too."""
    assert mine.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(_read(mine[name]), _read(theirs[name]))]


def _read(tensor: Any) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor.read()
