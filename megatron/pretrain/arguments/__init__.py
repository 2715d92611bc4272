# SPDX-License-Identifier: Apache-2.0
"""The command line of pretrain_gpt.py.

A flag is one row of a table, which declares everything about it. Rules that concern several flags
are functions. A file imports only files above it in this list:

- `values`: words of the command line and the values that they stand for
- `flags`: what a row can declare
- `tables.training_fields`, `tables.model_fields`: rows of the fields of Megatron-Core's configs
- `tables.run_flags`, `tables.file_flags`, `tables.logging_flags`: rows of the program's own flags
- `tables`: all rows
- `config_flags`: the flags that follow from the rows and from the installed Megatron-Core
- `help_text`: the text of --help
- `configs`: Megatron-Core's config objects, made from completed arguments
- `check`: arguments under check, and as they are during a run, read-only
- `flag_rules`: applies the rules that rows declare
- `checkpoint_rules`, `data_rules`, `low_precision_rules`, `machine_rules`, `model_rules`,
  `parallel_rules`, `training_rules`: rules of several flags, by subject
- `parser`: reads a command line, and applies all rules in order
"""

from megatron.pretrain.arguments.check import CommandLineError, FrozenArguments
from megatron.pretrain.arguments.config_flags import all_flags
from megatron.pretrain.arguments.parser import (
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
