# SPDX-License-Identifier: Apache-2.0
"""Command line as a module: ``python -m megatron.checkpoint``, or the same with torchrun."""

from megatron.checkpoint.commands.command_line import main

if __name__ == "__main__":
    main()
