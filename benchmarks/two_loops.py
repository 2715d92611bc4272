# SPDX-License-Identifier: Apache-2.0
"""The same checks of this program's training loop and of Megatron-LM's, in one table.

    OMP_NUM_THREADS=1 python -m benchmarks.two_loops [--columns own 0.19.2] [--rows kills flips ...]

Rows, columns and checks are in `benchmarks/soak/loop_table.py`.
"""

from benchmarks.soak.loop_table import main

if __name__ == "__main__":
    main()
