# SPDX-License-Identifier: Apache-2.0
"""Run a program that imports Transformer Engine on a machine without CUDA.

    python -m tools.transformer_engine_on_cpu program.py [arguments]
    python -m tools.transformer_engine_on_cpu --device hopper -m package.module [arguments]
    torchrun --nproc-per-node 2 -m tools.transformer_engine_on_cpu program.py [arguments]

The program runs as `python program.py` would run it, with Transformer Engine imported before its
first line and the kernels emulated. Its tensors and its modules belong on the CPU.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from tools.transformer_engine_on_cpu.loading import BLACKWELL, HOPPER, use
from tools.transformer_engine_on_cpu.wheel import obstacle

CAPABILITIES = {"blackwell": BLACKWELL, "hopper": HOPPER}


def main() -> None:
    """Read the command line and run the program that it names.

    Raises:
        SystemExit: with the reason, where Transformer Engine cannot run or the program is not
            there, or as the program itself ends.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.transformer_engine_on_cpu",
        description="Run a program that imports Transformer Engine on a machine without CUDA.",
    )
    parser.add_argument(
        "--device",
        choices=CAPABILITIES,
        default="blackwell",
        help="the device that the kernels are those of (default: %(default)s)",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the program is a module, by its name"
    )
    parser.add_argument("program", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")
    settings = parser.parse_args()
    if not settings.is_module and not Path(settings.program).is_file():
        parser.error(f"there is no file {settings.program}")
    reason = obstacle()
    if reason is not None:
        sys.exit(reason)
    use(CAPABILITIES[settings.device])
    sys.argv = [settings.program, *settings.arguments]
    if settings.is_module:
        runpy.run_module(settings.program, run_name="__main__", alter_sys=True)
    else:
        # First, as Python does. The folder that has this package stays behind it.
        sys.path.insert(0, str(Path(settings.program).resolve().parent))
        runpy.run_path(settings.program, run_name="__main__")


if __name__ == "__main__":
    main()
