# SPDX-License-Identifier: Apache-2.0
"""Setup of Python's logging and warnings, to be run before Megatron-Core is imported.

Megatron-Core warns while it is imported, so this module imports nothing of it.
"""

from __future__ import annotations

import logging
import sys
import warnings


def set_up_logging(level: int | None = None) -> None:
    """Set the log level, and drop messages of libraries that the user cannot act on.

    Dropped are messages about missing GPU packages, whose fallback was chosen on purpose, and
    about names that torch deprecates inside Megatron-Core. Without a level it is that of warnings,
    and the sizes of memory slots are told.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING if level is None else level)
    # How many memory slots --fsdp-double-buffer has, and their bytes: known after one step.
    slots = logging.getLogger("megatron.fsdp.backends.memory_slots")
    slots.setLevel(logging.INFO if level is None else logging.NOTSET)
    warnings.filterwarnings(
        "ignore", message=".*(Apex|Transformer Engine|NVIDIA Resiliency|TransformerEngine).*"
    )
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron\.core|torch)\b.*")
    warnings.filterwarnings(
        "ignore", category=DeprecationWarning, module=r"(megatron\.core|torch)\b.*"
    )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b.*")
    # The first warns that a CPU has only one random generator to fork, the second that mock data
    # has no index files, the third that it is made when gradients are checked. All are expected.
    for name in (
        "megatron.core.tensor_parallel.random",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.rerun_state_machine",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def leave_logging() -> None:
    """Let a program set logging up, whose ``basicConfig`` does nothing where there are handlers."""
    logging.getLogger().handlers.clear()
