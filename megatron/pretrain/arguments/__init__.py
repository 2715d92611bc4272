# SPDX-License-Identifier: Apache-2.0
"""The command line of pretrain_gpt.py.

`config_flags` and `program_flags` list the flags, `not_built` those that are refused and why.
`parser` applies the rules that complete and check their values, which are in one module for each
subject (`model_rules`, `parallel_rules` and so on). `configs` makes Megatron-Core's config objects
from the result, which is read-only during a run (`check.FrozenArguments`).
"""

from megatron.pretrain.arguments.check import CommandLineError, FrozenArguments
from megatron.pretrain.arguments.parser import (
    all_flags,
    build_parser,
    dry_run_ranks,
    parse_arguments,
)

__all__ = [
    "CommandLineError",
    "FrozenArguments",
    "all_flags",
    "build_parser",
    "dry_run_ranks",
    "parse_arguments",
]
