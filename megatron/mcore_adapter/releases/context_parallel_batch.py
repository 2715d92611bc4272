# SPDX-License-Identifier: Apache-2.0
"""The part of a batch that a context-parallel rank trains on."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megatron.mcore_adapter.releases.signatures import accepts


def batch_on_this_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's two chunks of every sequence in a batch without packed sequences.

    Args:
        batch: tensors ``[batch, sequence]``, masks ``[batch, 1, sequence, sequence]``.
    """
    group = parallel_state.get_context_parallel_group()
    settings: dict[str, Any] = {}
    if accepts(get_batch_on_this_cp_rank, "is_hybrid_cp"):
        settings["is_hybrid_cp"] = False  # 0.18: sequences of different lengths may have own groups
    return get_batch_on_this_cp_rank(batch, cp_group=group, **settings)
