# SPDX-License-Identifier: Apache-2.0
"""Inspect, verify, compare and convert checkpoints.

Start it with python, or with torchrun to share the work:

    python tools/checkpoint/checkpoint_inspector.py inspect checkpoints/run
    torchrun --nproc_per_node 8 tools/checkpoint/checkpoint_inspector.py COMMAND IN OUT
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file of a checkout, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint.commands.command_line import main

if __name__ == "__main__":
    main()
