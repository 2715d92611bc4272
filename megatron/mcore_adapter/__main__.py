# SPDX-License-Identifier: Apache-2.0
"""Run a program of a Megatron-LM checkout with this project's FullyShardedDataParallel.

    torchrun --nproc-per-node 8 -m megatron.mcore_adapter pretrain_gpt.py --use-megatron-fsdp ...

The program is not changed: see :mod:`megatron.mcore_adapter.drop_in` and docs/megatron_lm_loop.md.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from megatron.mcore_adapter.releases import tested

USAGE = "usage: torchrun [...] -m megatron.mcore_adapter PROGRAM.py [ARGUMENTS...]"


def main() -> None:
    """Install the drop-in and run the program, as ``python PROGRAM.py ARGUMENTS`` would.

    Exits with status 2 and one line on the first rank where it cannot start.
    """
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        stop(USAGE)
    program = Path(sys.argv[1])
    if not program.is_file():
        stop(f"there is no program {program}; {USAGE}")
    sys.argv[:] = sys.argv[1:]
    tested.use_checkout_of(program)
    try:
        tested.check()
        # Importing it imports Megatron-Core, whose own messages would come first.
        from megatron.mcore_adapter import drop_in

        drop_in.install()
    except (ValueError, RuntimeError, tested.ReleaseError) as error:
        stop(str(error))
    runpy.run_path(str(program), run_name="__main__")


def stop(message: str) -> None:
    """Print one line on the first rank and exit with status 2.

    Other ranks are later: torchrun stops all ranks when one has failed.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron.mcore_adapter: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(tested.GRACE_SECONDS)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
