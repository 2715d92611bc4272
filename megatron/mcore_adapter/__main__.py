# SPDX-License-Identifier: Apache-2.0
"""Run a program of a Megatron-LM checkout with this project's FullyShardedDataParallel.

    torchrun --nproc-per-node 8 -m megatron.mcore_adapter pretrain_gpt.py --use-megatron-fsdp ...

in the folder of the checkout. The program is not changed: see :mod:`megatron.mcore_adapter.drop_in`
and docs/megatron_lm_loop.md.
"""

import os
import runpy
import sys
from pathlib import Path

import megatron.core

from megatron.mcore_adapter import drop_in

USAGE = "usage: torchrun [...] -m megatron.mcore_adapter PROGRAM.py [ARGUMENTS...]"


def main() -> None:
    """Install the drop-in and run the program, as ``python PROGRAM.py ARGUMENTS`` would.

    Exits with status 2 and one line on the first rank for a command line that cannot run.
    """
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        stop(USAGE)
    sys.argv[:] = sys.argv[1:]
    program = Path(sys.argv[0])
    if not program.is_file():
        stop(f"there is no program {program}; {USAGE}")
    own = program.resolve().parent / "megatron" / "core"
    imported = Path(megatron.core.__path__[0]).resolve()
    if own.is_dir() and own != imported:
        stop(
            f"the program is one of {own.parents[1]}, but Python found Megatron-Core in {imported}:"
            f" start it in its own folder, or set PYTHONPATH={own.parents[1]}"
        )
    sys.path.insert(0, str(program.resolve().parent))
    try:
        drop_in.install()
    except (ValueError, RuntimeError) as error:
        stop(str(error))
    runpy.run_path(str(program), run_name="__main__")


def stop(message: str) -> None:
    """Print one line on the first rank and exit with status 2."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"megatron.mcore_adapter: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
