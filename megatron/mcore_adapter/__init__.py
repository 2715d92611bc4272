# SPDX-License-Identifier: Apache-2.0
"""The engine behind Megatron-Core's interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use, after a check of the release of Megatron-Core."""
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.mcore_adapter.releases import tested

    tested.check()
    from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel

    return FullyShardedDataParallel
