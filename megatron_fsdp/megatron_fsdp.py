# SPDX-License-Identifier: Apache-2.0
"""The wrapper. See `megatron.fsdp.model`."""

from megatron.fsdp.model import MegatronFSDP

__all__ = ["MegatronFSDP"]
