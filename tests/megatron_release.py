# SPDX-License-Identifier: Apache-2.0
"""Releases of Megatron-Core with Megatron-LM's loop, unpacked for tests."""

import os
from pathlib import Path

RELEASES = ("0.17.1", "0.18.2", "0.19.0")
ROOT = Path(__file__).parents[1]


def unpacked(release: str) -> Path:
    return Path("/tmp/wk/loop-mc") / release


def environment(release: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{unpacked(release)}:/tmp/wk/extra:{ROOT}"}
