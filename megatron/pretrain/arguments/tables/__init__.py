# SPDX-License-Identifier: Apache-2.0
"""Tables of flags: one row a flag, which declares everything about it.

`*_fields` are about the fields of Megatron-Core's configs, `*_flags` have the flags of the program
itself. A refused flag has no sentence for --help, which shows the reason.

A new flag is a row here, a reader of its value, and a row in
tests/support/pretrain/arguments/flag_tables.py that shows what it changes. The mark `ENGINE` sends
its value to the config of the fully sharded wrapper.
"""

from megatron.pretrain.arguments.tables.file_flags import FILE_FLAGS
from megatron.pretrain.arguments.tables.logging_flags import LOGGING_FLAGS
from megatron.pretrain.arguments.tables.model_fields import LATER_MODEL_FIELDS, MODEL_FIELDS
from megatron.pretrain.arguments.tables.run_flags import RUN_FLAGS
from megatron.pretrain.arguments.tables.training_fields import (
    LATER_TRAINING_FIELDS,
    TRAINING_FIELDS,
)

FIELD_GROUPS = TRAINING_FIELDS | MODEL_FIELDS
"""Title of a group in --help -> field of Megatron-Core -> row."""
LATER_FIELDS = LATER_TRAINING_FIELDS | LATER_MODEL_FIELDS
"""Beginning of the names of fields -> the rule of those that have no row."""
PROGRAM_GROUPS = RUN_FLAGS | FILE_FLAGS | LOGGING_FLAGS
"""Title of a group in --help -> flags of the program itself."""
