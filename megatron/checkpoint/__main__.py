# SPDX-License-Identifier: Apache-2.0
"""Run the command line: ``python -m megatron.checkpoint`` or ``torchrun ... -m megatron.checkpoint``."""

from megatron.checkpoint.commands.command_line import main

if __name__ == "__main__":
    main()
