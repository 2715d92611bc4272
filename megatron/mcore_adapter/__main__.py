# SPDX-License-Identifier: Apache-2.0
"""Run a program of a Megatron-LM checkout with this project's FullyShardedDataParallel.

    torchrun --nproc-per-node 8 -m megatron.mcore_adapter pretrain_gpt.py --use-megatron-fsdp ...

The program is not changed: see :mod:`megatron.mcore_adapter.drop_in`, and
docs/coming_from_megatron_lm.md.
"""

import runpy
import sys
from pathlib import Path

from megatron.mcore_adapter.releases import tested

NAME = "megatron.mcore_adapter"
USAGE = "usage: torchrun [...] -m megatron.mcore_adapter PROGRAM.py [ARGUMENTS...]"


def main() -> None:
    """Install the drop-in and run the program, as ``python PROGRAM.py ARGUMENTS`` would.

    Exits with status 2 and one line on the first rank where it cannot start.
    """
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        tested.end_program(f"{NAME}: {USAGE}", 2)
    program = Path(sys.argv[1])
    if not program.is_file():
        tested.end_program(f"{NAME}: there is no program {program}; {USAGE}", 2)
    sys.argv[:] = sys.argv[1:]
    tested.use_checkout_of(program)
    try:
        # It checks the release, and imports Megatron-Core, after the path is set.
        from megatron.mcore_adapter import drop_in

        drop_in.install()
    except (ValueError, RuntimeError, tested.ReleaseError) as error:
        tested.end_program(f"{NAME}: {error}", 2)
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
