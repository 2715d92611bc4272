# SPDX-License-Identifier: Apache-2.0
"""The command line of pretrain_gpt.py.

`config_flags` and `program_flags` say which flags there are, `not_built` which are refused and why.
`rules` is what follows from what, with `parallel_rules`, `model_rules` and `machine_rules`;
`configs` turns the result into Megatron-Core's config objects.
"""

from megatron.pretrain.arguments.check import ArgumentErrors
from megatron.pretrain.arguments.parser import all_flags, build_parser, parse_arguments

__all__ = ["ArgumentErrors", "all_flags", "build_parser", "parse_arguments"]
