# SPDX-License-Identifier: Apache-2.0
"""What libraries say that a user can do nothing about.

Imported before Megatron-Core, which warns while it is imported.
"""

from __future__ import annotations

import logging
import sys
import warnings


def quieten(level: int | None = None) -> None:
    """Set the log level and drop what libraries say about machines without their GPU packages.

    Users can do nothing about these: fallbacks that were chosen on purpose, and names that torch is
    renaming inside Megatron-Core.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING if level is None else level)
    warnings.filterwarnings(
        "ignore", message=".*(Apex|Transformer Engine|NVIDIA Resiliency|TransformerEngine).*"
    )
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron\.core|torch)\b.*")
    warnings.filterwarnings(
        "ignore", category=DeprecationWarning, module=r"(megatron\.core|torch)\b.*"
    )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b.*")
    # The random tracker forks the only generator there is on a CPU; mock data needs no index files.
    for name in ("megatron.core.tensor_parallel.random", "megatron.core.datasets.gpt_dataset"):
        logging.getLogger(name).setLevel(logging.ERROR)
