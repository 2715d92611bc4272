# SPDX-License-Identifier: Apache-2.0
"""Runs with Transformer Engine's layers on another release of Megatron-Core, in its own process.

    python -m tests.support.transformer_engine.release_run RANKS RESULT LINE...

writes the first rank's losses.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from tests.support import megatron_release
from tests.support.transformer_engine.ranks import ranks, require

TIMEOUT = 600.0


def losses_on(release: str, folder: Path, num_ranks: int, *command_lines: str) -> list[list[float]]:
    """Train on a release and return the losses of each run; skips where it cannot run here."""
    require()
    megatron_release.require(release)
    result = folder / "losses"
    words = [__spec__.name, str(num_ranks), str(result), *command_lines]
    run = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, **megatron_release.environment(release)},
        cwd=megatron_release.ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stderr
    found, losses = pickle.loads(result.read_bytes())
    assert Path(found).is_relative_to(megatron_release.UNPACKED / release)
    return losses


def main(num_ranks: str, result: str, *command_lines: str) -> None:
    """Run the command lines and write what they bring."""
    import megatron.core

    from tests.support.pretrain.training_runs import write_counting_corpus
    from tests.support.transformer_engine.training import LAYERS, train

    write_counting_corpus()
    records = ranks(int(num_ranks))(train, *(f"{LAYERS} {line}" for line in command_lines))[0]
    found = [record.losses for record in records]
    Path(result).write_bytes(pickle.dumps((megatron.core.__file__, found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
