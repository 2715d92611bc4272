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
    and the sizes of memory slots are logged too.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # It logs how many memory slots --fsdp-double-buffer has, and their bytes, after one step.
    memory_slots = logging.getLogger("megatron.fsdp.backends.memory_slots")
    if level is None:
        logging.getLogger().setLevel(logging.WARNING)
        memory_slots.setLevel(logging.INFO)
    else:
        logging.getLogger().setLevel(level)
        memory_slots.setLevel(logging.NOTSET)
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
    """Remove the handlers, with which the ``basicConfig`` of a program would do nothing."""
    logging.getLogger().handlers.clear()
