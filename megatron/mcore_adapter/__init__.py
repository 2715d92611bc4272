# SPDX-License-Identifier: Apache-2.0
"""The engine behind Megatron-Core's interfaces."""

from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
