# SPDX-License-Identifier: Apache-2.0
"""Settings of a sharded model. See `megatron.fsdp.config`."""

from megatron.fsdp.config import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
