# SPDX-License-Identifier: Apache-2.0
"""Objects that Megatron-Core stores through its ``ShardedObject``."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint


def read_sharded_object(stored: StoredCheckpoint, key: str) -> Any:
    """Read an object, without the list of one that some releases have put around it.

    Raises:
        DamagedCheckpointError: if it cannot be read.
        RefusedPickleError: if it names a class that checkpoints do not hold.
    """
    value = stored.read_object(key)
    return value[0] if isinstance(value, list) and len(value) == 1 else value
