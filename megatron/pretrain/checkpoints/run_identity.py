# SPDX-License-Identifier: Apache-2.0
"""The identifier of the run that saves in a directory, which its local checkpoints have too.

They are on disks of nodes, and may be of a run that has been deleted, or overwritten from others.
"""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.store import durable

RUN = "local_run.txt"
"""Name of the file in the directory of persistent checkpoints that identifies the run."""


def name_run(save: str | Path, identifier: str) -> None:
    """Write the identifier of the run that saves in a directory; called on one rank."""
    path = Path(save, RUN)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(path, identifier)


def run_in(save: str | Path) -> str:
    """Return the identifier of the run that saves in a directory; empty without one."""
    path = Path(save, RUN)
    return path.read_text(errors="replace") if path.is_file() else ""
